"""Brings blocks up: before a sequence is admitted whose prefix is below, its blocks are copied to where the model runs.

A restore has all its blocks from the start, and is copied part by part, each from the fastest tier that has it. A part
can be found as soon as it is there; the first block that does not come back ends the restore. Other sequences that need
the same blocks wait for the same restore. One that is not over in time gives everything back, as do those behind it in
the same tier: what it reads later is written nowhere.

Pure bookkeeping on the loop's thread. engine/tiers/tiers.py owns it; the way down is engine/tiers/saving.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.tiers.copying import BlockKey, Copied, Fence, copy_blocks
from engine.tiers.tier import COPY_LIMIT_S, Account, Chain, Tier, overdue


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks on their way up. A reference is held on each of `above`, `blocks` and the slots of `segments`.

    index     of the next block that is not there yet
    parent    the device block before it; None at the beginning of the prefix
    above     `parent` as it was at first, and blocks of others that were found on the way
    blocks    private device blocks, one for each that is brought back; the first `done` of them were
    segments  where they come from, in order
    fence     before the device blocks
    parts     slots of the first segment that are still being copied, in order
    over      nothing more is brought back
    """

    chain: Chain
    index: int
    parent: int | None
    above: list[int]
    blocks: list[int]
    segments: deque[tuple[Tier, list[int]]]
    deadline_s: float
    fence: Fence
    done: int = 0
    parts: deque[list[int]] = field(default_factory=deque)
    over: bool = False


class Restoring:
    """The way up, from all lower tiers to the first.

    part_blocks  that become findable at a time
    """

    def __init__(self, tiers: Sequence[Tier], account: Account, *, part_blocks: int) -> None:
        self.jobs: list[Restore] = []
        self._device, self._lower = tiers[0], tiers[1:]
        self._account = account
        self._part_blocks = part_blocks

    def begin(self, chain: Chain, room: int, now: float) -> list[int]:
        """See engine.tiers.tiers.Tiers.restore."""
        self.end_overdue(now)
        pool = self._device.pool
        found = pool.prefixes.find(chain.salt, chain.tokens, chain.digests)
        start = len(found)
        if start == len(chain.digests) or pool.prefixes.find_block(chain.digests[start]) is not None:
            return []
        if pool.available_beside(found) < room - start:
            return []
        segments = self._find_below(chain, start)
        if not segments:
            return []
        for tier, slots in segments:
            tier.pool.acquire(slots)
        pool.acquire(found[-1:])
        parent = found[-1] if found else None
        blocks = pool.allocate(sum(len(slots) for _, slots in segments))
        assert blocks is not None, "the pool gave fewer blocks than it said it has"
        fence = Fence(self._device.get_store())
        job = Restore(chain, start, parent, found[-1:], blocks, segments, now + COPY_LIMIT_S, fence)
        self.jobs.append(job)
        self._read(job)
        return blocks

    def end_overdue(self, now: float) -> None:
        """Gives back what restores hold that are not over in time. Those that wait for the same tier end with them."""
        for tier in {job.segments[0][0] for job in self.jobs if now >= job.deadline_s}:
            for job in [job for job in self.jobs if job.segments[0][0] is tier]:
                if job.fence.close():  # else its next blocks are being written at this moment
                    self._give_up(tier, job)

    def _find_below(self, chain: Chain, start: int) -> deque[tuple[Tier, list[int]]]:
        """Runs of slots that hold blocks from `start` on, each from the fastest tier that has it."""
        segments: deque[tuple[Tier, list[int]]] = deque()
        for tier in self._lower:
            if tier.late:
                continue
            slots = tier.pool.prefixes.find(chain.salt, chain.tokens, chain.digests)
            if len(slots) > start:
                segments.append((tier, slots[start:]))
                start = len(slots)
        return segments

    def _read(self, job: Restore) -> None:
        """Hands the first segment to its tier's thread, in parts."""
        tier, slots = job.segments[0]
        index, block = job.index, job.done
        for start in range(0, len(slots), self._part_blocks):
            part = slots[start : start + self._part_blocks]
            keys = job.chain.keys(index, len(part), self._device.pool.block_size)
            copy = partial(self._copy, job, tier, part, job.blocks[block : block + len(part)], keys)
            job.parts.append(part)
            tier.run(copy, partial(self._read_back, job, tier, part, keys))
            index, block = index + len(part), block + len(part)

    def _copy(self, job: Restore, tier: Tier, slots: list[int], blocks: list[int], keys: list[BlockKey]) -> Copied:
        """On the tier's thread."""
        if job.over:
            return Copied(0)
        return copy_blocks(tier.get_store(), slots, job.fence, blocks, keys)

    def _read_back(self, job: Restore, tier: Tier, slots: list[int], keys: list[BlockKey], copied: Copied) -> None:
        """Makes findable what came back, unless something before it did not."""
        if not job.parts:  # the restore was given up
            tier.late -= 1
            return
        if not job.over:
            count = self._register(job, tier, slots[: copied.count], keys)
            tier.counters.restored += count
            job.over = count < len(slots)
            if copied.error is not None:
                self._account.failed(tier, len(slots) - copied.count, copied.error)
            elif copied.count < len(slots) and tier.pool.is_registered(slots[copied.count]):
                tier.counters.torn += 1
                self._account.forget(tier, [slots[copied.count]])
        tier.pool.release(job.parts.popleft())
        self._account.note(tier)
        if not job.parts:
            job.segments.popleft()
            if job.segments and not job.over and not job.segments[0][0].late:
                self._read(job)
            else:
                self._end(job)

    def _register(self, job: Restore, tier: Tier, slots: list[int], keys: list[BlockKey]) -> int:
        pool, count = self._device.pool, 0
        for slot, key in zip(slots, keys, strict=False):
            trusted = tier.pool.is_registered(slot) and (job.parent is None or pool.is_registered(job.parent))
            block = job.blocks[job.done]
            holder = pool.register(block, job.parent, key.salt, key.digest, key.tokens) if trusted else None
            if holder is None:
                break
            if holder != block:  # another sequence computed it meanwhile
                pool.acquire([holder])
                job.above.append(holder)
            job.parent = holder
            job.done += 1
            job.index += 1
            count += 1
        return count

    def _give_up(self, tier: Tier, job: Restore) -> None:
        """The tier's thread may be in the middle of it, or has not begun."""
        job.over = True
        tier.late += len(job.parts)
        self._account.failed(tier, sum(map(len, job.parts)), overdue())
        for part in job.parts:
            tier.pool.release(part)
        job.parts.clear()
        job.segments.popleft()
        self._end(job)

    def _end(self, job: Restore) -> None:
        for tier, slots in job.segments:
            tier.pool.release(slots)
        self._device.pool.release(job.above + job.blocks)
        self.jobs.remove(job)
