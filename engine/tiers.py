"""Tiers below the model's own blocks: what is saved to host memory and disk, and what is brought back.

                 save, in the background                       save
    gpu  ------------------------------->  host  ------------------------------->  disk
         <-------------------------------        (gpu <- disk without stopping there)
                 restore, before a sequence that needs it is admitted

Tiers are inclusive: a saved block stays where it was. Each lower tier is a BlockPool that keeps the account of its
slots (what each holds, what is evicted next, verified when it is found) and a store that has the bytes. Whoever copies
holds references on both sides meanwhile, so neither side can change, and a block becomes findable when it is whole.

    save     chain queued -> slots allocated, blocks referenced -> copied by the tier's thread -> registered, released
    restore  blocks allocated, slots referenced -> copied -> registered -> released, cached: admission finds them

Pure bookkeeping on the loop's thread: no torch, no I/O, no threads of its own; engine/copy_thread.py does the copies.
Neighbours: engine/tables.py asks for restores, engine/scheduler.py hands over chains, engine/residency.py tells what is
where, engine/stores.py is where the bytes are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from engine.blocks import BlockPool
from engine.copy_thread import Worker
from engine.disk_store import Scan
from engine.protocol import TOKEN_BYTES, BlockEvents
from engine.protocol import Tier as TierName
from engine.residency import Residency
from engine.stores import BlockKey, Copied, Store, copy_blocks

log = logging.getLogger(__name__)

RESTORE_LIMIT_S: Final = 30.0
"""A sequence whose blocks are not there after so long is computed; a disk may hang."""

PAUSE_S: Final = 30.0
"""Nothing is saved to a tier for so long after its store failed."""

CHAINS_AT_ONCE: Final = 16
"""Chains looked at in one turn of the loop: most have been saved already."""

ADOPT_AT_ONCE: Final = 512
"""Blocks found at the start that become findable in one turn of the loop."""

_DIGEST_COST: Final = 64  # bytes that a digest takes in a queue


@dataclass(frozen=True, slots=True)
class Chain:
    """The leading full blocks of a prefix.

    tokens   token ids of all of them
    digests  one for each
    """

    salt: str
    tokens: bytes
    digests: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + _DIGEST_COST * len(self.digests)

    def keys(self, start: int, count: int, block_size: int) -> list[BlockKey]:
        width, digests = block_size * TOKEN_BYTES, self.digests
        return [
            BlockKey(digests[i], digests[i - 1] if i else None, i, self.salt, self.tokens[i * width : (i + 1) * width])
            for i in range(start, start + count)
        ]


@dataclass(slots=True)
class Counters:
    """Blocks, since the start."""

    saved: int = 0
    restored: int = 0
    dropped: int = 0  # not saved, because the queue was full or the store had just failed
    failed: int = 0  # not copied, because the store failed
    torn: int = 0  # lost, because they were not there or not sound any more
    collected: int = 0  # deleted at the start, for their age or the budget


@dataclass(slots=True, eq=False)
class Tier:
    """One tier; the first is where the model runs.

    scan    what the store holds at the start, called on the tier's thread
    ready   nothing is saved before the start's blocks are accounted for
    """

    name: TierName
    pool: BlockPool
    store: Store | None = None  # needed as soon as there are two tiers
    block_bytes: int = 0
    scan: Callable[[], Scan] | None = None
    number: int = 0
    worker: Worker | None = None
    ready: bool = True
    saving: bool = False
    pause_until_s: float = 0.0
    warned: bool = False
    queue: deque[Chain] = field(default_factory=deque)
    counters: Counters = field(default_factory=Counters)

    @property
    def pump_wanted(self) -> bool:
        return bool(self.queue) and self.ready and not self.saving


@dataclass(slots=True, eq=False)
class _Save:
    """Blocks on their way down. A reference is held on each of `blocks`, `have` and `slots`."""

    chain: Chain
    source: Tier
    blocks: list[int]  # of the source
    have: list[int]  # slots of the prefix that was there already
    slots: list[int]
    keys: list[BlockKey]


@dataclass(slots=True, eq=False)
class _Restore:
    """Blocks on their way up. A reference is held on each of `above`, `blocks` and the slots of `segments`."""

    chain: Chain
    index: int  # of the first block that is not there yet
    above: list[int]  # the gpu block before the first one, if there is any; then those of others found on the way
    blocks: list[int]  # private gpu blocks, one for each that is brought back
    segments: deque[tuple[Tier, list[int]]]  # where they come from, in order
    deadline_s: float
    parent: int | None = None
    done: int = 0  # of `blocks`


class Tiers:
    """All tiers of one engine, the fastest first.

    pools     of the tiers, in their order
    on_saved  called with a tier's number, the digests that can be found there from now on, and the time
    on_lost   called with the number of a lower tier that was made to forget blocks
    """

    def __init__(
        self, tiers: Sequence[Tier], *, queue_bytes: int = 0, save_blocks: int = 64, copy_blocks: int = 64
    ) -> None:
        """
        queue_bytes  of chains that wait to be saved, at most
        save_blocks  that are saved to one tier between two turns of the loop, at most
        copy_blocks  that a copy has in memory at a time
        """
        for number, tier in enumerate(tiers):
            tier.number = number
            tier.ready = tier.scan is None
        assert len(tiers) == 1 or all(tier.store is not None for tier in tiers), "a tier has no store"
        self.tiers = list(tiers)
        self.lower = self.tiers[1:]
        self.pools = [tier.pool for tier in tiers]
        self.on_saved: Callable[[int, list[bytes], float], object] | None = None
        self.on_lost: Callable[[int], object] | None = None
        self._gpu = self.tiers[0]
        self._queue_bytes, self._queued_bytes = queue_bytes, 0
        self._save_blocks, self._copy_blocks = save_blocks, copy_blocks
        self._restores: list[_Restore] = []
        self._residency = Residency(self.pools, [tier.name for tier in tiers])
        self._now = 0.0

    # -- for the loop -------------------------------------------------------------------------------------------------

    def start(self, make_worker: Callable[[str], Worker]) -> None:
        """Gives each lower tier its thread, by name, and looks for what the last run left."""
        for tier in self.lower:
            tier.worker = make_worker(f"copy-{tier.name}")
            if tier.scan is not None:
                tier.worker.run(partial(_scan, tier.scan), partial(self._scanned, tier))

    def close(self) -> None:
        """Ends the threads after what they are doing."""
        for tier in self.lower:
            if tier.worker is not None:
                tier.worker.close()

    @property
    def busy(self) -> bool:
        """Whether copies hold references, which come back without anybody's doing."""
        return bool(self._restores) or any(tier.saving for tier in self.lower)

    @property
    def idle(self) -> bool:
        """Whether nothing is being copied or waits for that."""
        return not self.busy and all(tier.ready and not tier.queue for tier in self.lower)

    @property
    def ready(self) -> bool:
        """Whether everything that the last run left can be found."""
        return all(tier.ready for tier in self.lower)

    @property
    def pump_wanted(self) -> bool:
        return any(tier.pump_wanted for tier in self.lower)

    def pump(self, now: float) -> None:
        """Starts what can be saved now. Call it in each turn, and while `pump_wanted`."""
        self._now = now
        for tier in self.lower:
            for _ in range(CHAINS_AT_ONCE):
                if not tier.pump_wanted:
                    break
                chain = tier.queue.popleft()
                self._queued_bytes -= chain.num_bytes
                if now < tier.pause_until_s:
                    tier.counters.dropped += len(chain.digests)
                    self._forward(tier, chain)
                elif not self._start_save(tier, chain):
                    self._forward(tier, chain)

    def count_findable(self, digests: Sequence[bytes]) -> int:
        """Leading blocks that some tier has a digest of. A guess: nothing is compared."""
        return max(pool.count_findable(digests) for pool in self.pools)

    def take_events(self) -> list[BlockEvents]:
        """See engine.residency.Residency.take."""
        return self._residency.take()

    def snapshot(self) -> list[BlockEvents]:
        return self._residency.snapshot()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Blocks, bytes and counters of each tier; values for JSON."""
        found: dict[str, dict[str, Any]] = {}
        for tier in self.tiers:
            blocks = tier.pool.num_registered
            found[tier.name] = {
                "blocks": blocks,
                "bytes": blocks * tier.block_bytes,
                "capacity_bytes": tier.pool.num_blocks * tier.block_bytes,
                "evictions": tier.pool.evictions,
                **(asdict(tier.counters) if tier.number else {}),
            }
        return found

    def check_invariants(self) -> list[str]:
        """What is wrong with the lower tiers while nothing is copied, in words."""
        wrong: list[str] = []
        for tier in self.lower:
            wrong += [f"{tier.name}: {line}" for line in tier.pool.check_invariants()]
            if tier.pool.num_live:
                wrong.append(f"{tier.name}: {tier.pool.num_live} slots are live and nothing is copied")
        if self._queued_bytes:
            wrong.append(f"{self._queued_bytes} bytes of chains are queued and nothing waits")
        return wrong

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, chain: Chain, *, urgent: bool = False) -> None:
        """Queues a prefix to be saved as far as it can be found then, or to count as used where it is saved already.

        urgent  before everything that waits
        When too much waits, what has waited longest is left out.
        """
        if not self.lower or not chain.digests:
            return
        queue = self.lower[0].queue
        if urgent:
            queue.appendleft(chain)
        else:
            queue.append(chain)
        self._queued_bytes += chain.num_bytes
        while self._queued_bytes > self._queue_bytes:
            tier = next(tier for tier in reversed(self.lower) if tier.queue)
            oldest = tier.queue.popleft()
            self._queued_bytes -= oldest.num_bytes
            tier.counters.dropped += len(oldest.digests)

    def _forward(self, tier: Tier, chain: Chain) -> None:
        """What a tier is done with is the next one's to save."""
        if tier.number < len(self.lower):
            self.tiers[tier.number + 1].queue.append(chain)
            self._queued_bytes += chain.num_bytes

    def _start_save(self, tier: Tier, chain: Chain) -> bool:
        """Begins to copy the next blocks that a tier lacks. False when there are none, or no room."""
        have = tier.pool.find_prefix(chain.salt, chain.tokens, chain.digests)
        source, blocks = self._find_source(tier, chain, len(have))
        tier.pool.acquire(have)
        slots: list[int] | None = None
        if blocks:
            count = min(len(blocks), tier.pool.available)
            slots = tier.pool.allocate(count, after=have[-1] if have else None)
            self._note(tier)
        if not slots:
            tier.pool.release(have)  # which counts as its use
            return False
        blocks = blocks[: len(slots)]
        source.pool.acquire(blocks)
        keys = chain.keys(len(have), len(slots), self._gpu.pool.block_size)
        job = _Save(chain, source, blocks, have, slots, keys)
        copy = partial(copy_blocks, _store(source), blocks, _store(tier), slots, keys, self._copy_blocks)
        tier.saving = True
        _worker(tier).run(copy, partial(self._saved, tier, job))
        return True

    def _find_source(self, tier: Tier, chain: Chain, start: int) -> tuple[Tier, list[int]]:
        """The nearest tier above that holds block `start` of a chain, and the blocks from there on that can be saved
        next: none whose digest stands for something else in the tier, or stands there twice."""
        new: set[bytes] = set()
        for digest in chain.digests[start : start + self._save_blocks]:
            if digest in new or tier.pool.find_block(digest) is not None:
                break
            new.add(digest)
        for source in reversed(self.tiers[: tier.number]) if new else ():
            blocks = source.pool.find_prefix(chain.salt, chain.tokens, chain.digests)
            if len(blocks) > start:
                return source, blocks[start : start + len(new)]
        return self._gpu, []

    def _saved(self, tier: Tier, job: _Save, copied: Copied) -> None:
        """Makes findable what was copied, unless it ceased to be trusted meanwhile."""
        tier.saving = False
        parent = job.have[-1] if job.have else None
        count = 0
        for slot, block, key in zip(job.slots[: copied.count], job.blocks, job.keys, strict=False):
            trusted = job.source.pool.is_registered(block) and (parent is None or tier.pool.is_registered(parent))
            if not trusted or tier.pool.register(slot, parent, key.salt, key.digest, key.tokens) != slot:
                break
            parent = slot
            count += 1
        job.source.pool.release(job.blocks)
        tier.pool.release(job.have + job.slots)
        self._note(tier)
        left = [key.digest for key in job.keys[count:] if tier.pool.find_block(key.digest) is None]
        if left:
            self._drop(tier, left)
        tier.counters.saved += count
        if copied.error is not None:
            self._failed(tier, len(job.slots) - copied.count, copied.error)
        else:
            tier.warned = False
        if count and self.on_saved is not None:
            self.on_saved(tier.number, [key.digest for key in job.keys[:count]], self._now)
        if count == len(job.slots):
            tier.queue.appendleft(job.chain)  # for the rest, or to see that there is none
            self._queued_bytes += job.chain.num_bytes
        else:
            self._forward(tier, job.chain)

    # -- restoring ----------------------------------------------------------------------------------------------------

    @property
    def num_restoring(self) -> int:
        return len(self._restores)

    def count_restoring(self, now: float) -> int:
        """Restores that somebody waits for: not those that take longer than anybody does."""
        return sum(now < job.deadline_s for job in self._restores)

    def is_restoring(self, digests: Sequence[bytes], now: float) -> bool:
        """Whether the next blocks of a prefix are on their way, for whomever."""
        for job in self._restores:
            if job.index < len(digests) and digests[job.index] == job.chain.digests[job.index]:
                return now < job.deadline_s
        return False

    def restore(self, chain: Chain, room: int, now: float) -> list[int]:
        """Begins to bring back what lower tiers hold of a prefix beyond what can be found above.

        room  blocks that the sequence needs in all and those that must be left for others: with less than that
              nothing is begun, because the sequence could not be admitted either
        Returns the gpu blocks that are being written; empty when nothing was begun.
        """
        pool = self._gpu.pool
        found = pool.find_prefix(chain.salt, chain.tokens, chain.digests)
        start = len(found)
        if start == len(chain.digests) or pool.find_block(chain.digests[start]) is not None:
            return []
        segments = self._find_below(chain, start)
        if not segments or pool.available_beside(found) < room - start:
            return []
        for tier, slots in segments:
            tier.pool.acquire(slots)
        pool.acquire(found[-1:])
        count = sum(len(slots) for _, slots in segments)
        blocks = pool.allocate(count, after=found[-1] if found else None)
        assert blocks is not None, "the pool gave fewer blocks than it said it has"
        parent = found[-1] if found else None
        job = _Restore(chain, start, found[-1:], blocks, segments, now + RESTORE_LIMIT_S, parent)
        self._restores.append(job)
        self._read(job)
        return blocks

    def _find_below(self, chain: Chain, start: int) -> deque[tuple[Tier, list[int]]]:
        """Runs of slots that hold blocks from `start` on, each from the fastest tier that has it."""
        segments: deque[tuple[Tier, list[int]]] = deque()
        for tier in self.lower:
            slots = tier.pool.find_prefix(chain.salt, chain.tokens, chain.digests)
            if len(slots) > start:
                segments.append((tier, slots[start:]))
                start = len(slots)
        return segments

    def _read(self, job: _Restore) -> None:
        tier, slots = job.segments[0]
        keys = job.chain.keys(job.index, len(slots), self._gpu.pool.block_size)
        blocks = job.blocks[job.done : job.done + len(slots)]
        copy = partial(copy_blocks, _store(tier), slots, _store(self._gpu), blocks, keys, self._copy_blocks)
        _worker(tier).run(copy, partial(self._read_back, job, keys))

    def _read_back(self, job: _Restore, keys: list[BlockKey], copied: Copied) -> None:
        """Makes findable what came back. The first block that did not ends the restore."""
        tier, slots = job.segments.popleft()
        pool, count = self._gpu.pool, 0
        for slot, key in zip(slots[: copied.count], keys, strict=False):
            trusted = tier.pool.is_registered(slot) and (job.parent is None or pool.is_registered(job.parent))
            block = job.blocks[job.done + count]
            holder = pool.register(block, job.parent, key.salt, key.digest, key.tokens) if trusted else None
            if holder is None:
                break
            if holder != block:  # somebody computed it meanwhile
                pool.acquire([holder])
                job.above.append(holder)
            job.parent = holder
            count += 1
        tier.counters.restored += count
        if copied.error is not None:
            self._failed(tier, len(slots) - copied.count, copied.error)
        elif copied.count < len(slots) and tier.pool.is_registered(slots[copied.count]):
            tier.counters.torn += 1
            self._forget(tier, [slots[copied.count]])
        tier.pool.release(slots)
        self._note(tier)
        job.done += count
        job.index += count
        if count == len(slots) and job.segments:
            self._read(job)
        else:
            self._end_restore(job)

    def _end_restore(self, job: _Restore) -> None:
        for tier, slots in job.segments:
            tier.pool.release(slots)
        self._gpu.pool.release(job.above + job.blocks)
        self._restores.remove(job)

    # -- what is lost -------------------------------------------------------------------------------------------------

    def forget(self, chain: Chain) -> None:
        """Makes a prefix unfindable in the lower tiers, with everything that hangs from it: it is not trusted."""
        for tier in self.lower:
            self._forget(tier, tier.pool.find_prefix(chain.salt, chain.tokens, chain.digests))

    def _forget(self, tier: Tier, slots: list[int]) -> None:
        if tier.pool.forget(slots) and self.on_lost is not None:
            self.on_lost(tier.number)
        self._note(tier)

    def _note(self, tier: Tier) -> None:
        """After each change of a lower pool: what it gave up is dropped before anything else can be written there."""
        gone = self._residency.note(tier.number)
        if gone:
            self._drop(tier, gone)

    def _drop(self, tier: Tier, digests: list[bytes]) -> None:
        _worker(tier).run(partial(_store(tier).drop, digests), _ignore)

    def _failed(self, tier: Tier, num_blocks: int, error: Exception) -> None:
        tier.counters.failed += num_blocks
        tier.pause_until_s = self._now + PAUSE_S
        if not tier.warned:
            log.warning("the %s tier failed, the engine goes on without it: %s", tier.name, error)
        tier.warned = True

    # -- the start ----------------------------------------------------------------------------------------------------

    def _scanned(self, tier: Tier, scan: Scan) -> None:
        tier.counters.torn += scan.torn
        tier.counters.collected += scan.collected
        self._adopt(tier, scan, {}, 0)

    def _adopt(self, tier: Tier, scan: Scan, slots: dict[bytes, int], start: int, _: object = None) -> None:
        """Makes findable what was found, a part of it in each turn. References are held until the end, to be given
        back in the order of last use: that is the order in which the pool evicts."""
        end = min(start + ADOPT_AT_ONCE, len(scan.found))
        for key in scan.found[start:end]:
            parent = None if key.parent is None else slots.get(key.parent)
            taken = tier.pool.allocate(1) if key.parent is None or parent is not None else None
            if taken is None:
                self._drop(tier, [key.digest])
                continue
            slots[key.digest] = taken[0]
            registered = tier.pool.register(taken[0], parent, key.salt, key.digest, key.tokens)
            assert registered == taken[0], "the start found a block twice"
        if end < len(scan.found):
            _worker(tier).run(_nothing, partial(self._adopt, tier, scan, slots, end))
            return
        for key, _used in sorted(zip(scan.found, scan.used_s, strict=True), key=lambda entry: entry[1]):
            if key.digest in slots:
                tier.pool.release([slots[key.digest]])
        self._note(tier)
        tier.ready = True
        if scan.found:
            log.info("the %s tier holds %d blocks of an earlier run", tier.name, len(slots))


def _scan(scan: Callable[[], Scan]) -> Scan:
    try:
        return scan()
    except Exception:
        log.exception("the disk tier could not be read at the start; it begins empty")
        return Scan([], [], 0, 0)


def _worker(tier: Tier) -> Worker:
    assert tier.worker is not None, f"the {tier.name} tier was not started"
    return tier.worker


def _store(tier: Tier) -> Store:
    assert tier.store is not None, f"the {tier.name} tier has no store"
    return tier.store


def _nothing() -> None:
    """A job that only takes its turn."""


def _ignore(done: object) -> None:
    """Nothing waits for it."""
