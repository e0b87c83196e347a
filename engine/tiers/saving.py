"""Brings blocks down: chains wait in a queue for each lower tier, which saves one at a time and a part of it at a time.

A part is begun in one turn of the loop and taken note of in another; in between the tier's thread copies it, and
references keep both sides as they are. Between the parts of a chain, one reference on each side, on the last block that
was saved, keeps all above it; so each part looks up its own blocks only. A part that is not over in time gives back
what it holds above, and becomes nothing.

Pure bookkeeping on the loop's thread. engine/tiers/tiers.py owns it; the way up is engine/tiers/restoring.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.tiers.copying import BlockKey, Copied, Fence, copy_blocks
from engine.tiers.tier import COPY_LIMIT_S, Account, Chain, Tier, overdue

SAVING_SHARE: Final = 0.25
"""Of its time a tier's thread saves while steps run: a copy takes a core, or a part of one, from the steps."""

CHAINS_AT_ONCE: Final = 16
"""Chains looked at in one turn of the loop: most have been saved already."""


@dataclass(slots=True, eq=False)
class _Save:
    """A chain on its way into one tier.

    index   of the next block that the tier lacks
    slot    of the block before, in the tier, and
    block   in the source: each with a reference; None at the beginning of the prefix, or before there is a source
    resume_s  when the next part may begin, if steps run then; None while a part is being copied
    slots   and
    blocks  of the part that is being copied, each with a reference, and
    keys    their identities
    fence   before the source's blocks, until
    deadline_s, when they are given back
    """

    chain: Chain
    index: int
    slot: int | None
    block: int | None = None
    source: Tier | None = None
    resume_s: float | None = None
    slots: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    fence: Fence | None = None  # None while nothing is copied, and when the part was given up
    deadline_s: float = 0.0


class Saving:
    """The way down, for all lower tiers.

    queue_bytes  of chains that wait, at most, over all tiers
    part_blocks  that are saved to one tier between two turns of the loop, at most
    on_saved     called with a tier's number, the digests that can be found there from now on, and the time
    on_used      called with a tier and the last of its slots whose blocks a chain has there already
    """

    def __init__(self, tiers: Sequence[Tier], account: Account, *, queue_bytes: int, part_blocks: int) -> None:
        self.on_saved: Callable[[int, list[bytes], float], object] | None = None
        self.on_used: Callable[[Tier, int], object] | None = None
        self._tiers = tiers
        self._account = account
        self._queue_bytes, self._queued_bytes = queue_bytes, 0
        self._part_blocks = part_blocks
        self._queues: list[deque[Chain]] = [deque() for _ in tiers]  # by tier; the first one's stays empty
        self._jobs: dict[Tier, _Save] = {}
        self._steps_run = False

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Chains in all queues."""
        return sum(map(len, self._queues))

    @property
    def pump_wanted(self) -> bool:
        return any(map(self._can_begin, self._tiers[1:]))

    def add(self, chain: Chain, *, urgent: bool) -> None:
        """See engine.tiers.tiers.Tiers.save."""
        if urgent:
            self._queues[1].appendleft(chain)
        else:
            self._queues[1].append(chain)
        self._queued_bytes += chain.num_bytes
        while self._queued_bytes > self._queue_bytes:
            number = max(number for number, queue in enumerate(self._queues) if queue)
            oldest = self._take(self._tiers[number])
            self._tiers[number].counters.dropped += len(oldest.digests)

    def forget(self, prefix: str) -> None:
        """Chains whose salts begin so are not saved any more. Of one that is being copied nothing can be found after
        its blocks were forgotten, so it ends by itself."""
        for number, queue in enumerate(self._queues):
            kept = deque(chain for chain in queue if not chain.salt.startswith(prefix))
            self._queued_bytes += sum(chain.num_bytes for chain in kept) - sum(chain.num_bytes for chain in queue)
            self._queues[number] = kept

    def pump(self, *, steps_run: bool) -> None:
        """Begins what can be saved now; not too much while steps run."""
        self._steps_run = steps_run
        for tier in self._tiers[1:]:
            job = self._jobs.get(tier)
            if job is not None and job.resume_s is not None and (not steps_run or job.resume_s <= self._account.now):
                self._go_on(tier, job)
            elif job is not None and job.fence is not None and job.deadline_s <= self._account.now:
                self._give_up(tier, job, job.fence)
            for _ in range(CHAINS_AT_ONCE):
                if not self._can_begin(tier):
                    break
                chain = self._take(tier)
                if self._account.now < tier.pause_until_s or tier.late:
                    tier.counters.dropped += len(chain.digests)
                    self._forward(tier, chain)
                else:
                    self._begin(tier, chain)

    def check_invariants(self) -> list[str]:
        waiting = sum(chain.num_bytes for queue in self._queues for chain in queue)
        return [] if waiting == self._queued_bytes else [f"{self._queued_bytes} bytes are queued, counted as {waiting}"]

    def _can_begin(self, tier: Tier) -> bool:
        return bool(self._queues[tier.number]) and tier.ready and tier not in self._jobs

    def _take(self, tier: Tier) -> Chain:
        chain = self._queues[tier.number].popleft()
        self._queued_bytes -= chain.num_bytes
        return chain

    def _forward(self, tier: Tier, chain: Chain) -> None:
        """What a tier is done with is the next one's to save."""
        if tier.number + 1 < len(self._tiers):
            self._queues[tier.number + 1].append(chain)
            self._queued_bytes += chain.num_bytes

    # -- a chain ------------------------------------------------------------------------------------------------------

    def _begin(self, tier: Tier, chain: Chain) -> None:
        """What is there already counts as used; the rest is saved part by part."""
        have = tier.pool.prefixes.find(chain.salt, chain.tokens, chain.digests)
        tier.pool.acquire(have)
        tier.pool.release(have[:-1])
        if have and self.on_used is not None:
            self.on_used(tier, have[-1])
        job = _Save(chain, index=len(have), slot=have[-1] if have else None)
        self._jobs[tier] = job
        self._go_on(tier, job)

    def _go_on(self, tier: Tier, job: _Save) -> None:
        """Begins the next part, or ends the chain when there is none: nothing left, nothing above, or no room."""
        job.resume_s = None
        blocks = self._find_part(tier, job)
        slots = tier.pool.allocate(min(len(blocks), tier.pool.available)) if blocks else None
        self._account.note(tier)
        if not slots or job.source is None:
            self._end(tier, job)
            return
        job.slots, job.blocks = slots, blocks[: len(slots)]
        job.source.pool.acquire(job.blocks)
        job.keys = job.chain.keys(job.index, len(slots), tier.pool.block_size)
        job.fence, job.deadline_s = Fence(job.source.get_store()), self._account.now + COPY_LIMIT_S
        copy = partial(copy_blocks, job.fence, job.blocks, tier.get_store(), job.slots, job.keys)
        tier.run(copy, partial(self._copied, tier, job))

    def _find_part(self, tier: Tier, job: _Save) -> list[int]:
        """The next blocks, in the source of the last ones or in the nearest tier above that has them. None whose digest
        stands for something else in the tier, or twice in the part: its file would be written over."""
        chain, start = job.chain, job.index
        new: dict[bytes, None] = {}
        for digest in chain.digests[start : start + self._part_blocks]:
            if digest in new or tier.pool.prefixes.find_block(digest) is not None:
                break
            new[digest] = None
        if not new:
            return []
        digests = chain.digests[: start + len(new)]
        # While the job had a rest, the block before may have ceased to be trusted.
        if job.source is not None and (job.block is None or job.source.pool.is_registered(job.block)):
            pool = job.source.pool
            blocks = pool.prefixes.find(chain.salt, chain.tokens, digests, start=start, behind=job.block)
            if blocks:
                return blocks
        self._release_source(job)
        for source in reversed(self._tiers[: tier.number]):
            blocks = source.pool.prefixes.find(chain.salt, chain.tokens, digests)
            if len(blocks) > start:
                job.source, job.block = source, blocks[start - 1] if start else None
                source.pool.acquire(blocks[start - 1 : start] if start else [])
                return blocks[start:]
        return []

    def _copied(self, tier: Tier, job: _Save, copied: Copied) -> None:
        """Makes findable what was copied, unless it ceased to be trusted meanwhile."""
        if job.fence is None:
            self._end_late(tier, job)
            return
        job.fence = None
        assert job.source is not None, "a part was copied from nowhere"
        pool, above, count = tier.pool, job.source.pool, 0
        parent = job.slot
        for slot, block, key in zip(job.slots[: copied.count], job.blocks, job.keys, strict=False):
            trusted = above.is_registered(block) and (parent is None or pool.is_registered(parent))
            if not trusted or pool.register(slot, parent, key.salt, key.digest, key.tokens) != slot:
                break
            parent = slot
            count += 1
        saved = [key.digest for key in job.keys[:count]]
        whole = count == len(job.slots)
        if whole:  # the last one keeps the others until the next part
            above.release(([] if job.block is None else [job.block]) + job.blocks[:-1])
            pool.release(([] if job.slot is None else [job.slot]) + job.slots[:-1])
            job.block, job.slot = job.blocks[-1], job.slots[-1]
        else:
            above.release(job.blocks)
            pool.release(job.slots)
        job.index += count
        self._account.note(tier)
        self._drop_unsaved(tier, job.keys[count:])
        tier.counters.saved += count
        if copied.error is not None:
            self._account.failed(tier, len(job.slots) - copied.count, copied.error)
        else:
            tier.warned = False
        if saved and self.on_saved is not None:
            self.on_saved(tier.number, saved, self._account.now)
        if not whole:
            self._end(tier, job)
        elif self._steps_run:
            job.resume_s = self._account.now + copied.seconds * (1 / SAVING_SHARE - 1)
        else:
            self._go_on(tier, job)

    def _give_up(self, tier: Tier, job: _Save, fence: Fence) -> None:
        """Of the source; the slots are the copy's until it ends."""
        if job.source is not None and fence.close():
            self._account.failed(tier, len(job.slots), overdue())
            tier.late += 1
            job.source.pool.release(job.blocks)
            job.blocks, job.fence = [], None
            self._release_source(job)

    def _end_late(self, tier: Tier, job: _Save) -> None:
        """A part that was given up has ended."""
        tier.late -= 1
        tier.pool.release(job.slots)
        self._drop_unsaved(tier, job.keys)
        self._end(tier, job)

    def _drop_unsaved(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        if left := [key.digest for key in keys if tier.pool.prefixes.find_block(key.digest) is None]:
            self._account.drop(tier, left)

    def _release_source(self, job: _Save) -> None:
        """Of the source."""
        if job.source is not None and job.block is not None:
            job.source.pool.release([job.block])
        job.source = job.block = None

    def _end(self, tier: Tier, job: _Save) -> None:
        self._release_source(job)
        if job.slot is not None:
            tier.pool.release([job.slot])
        del self._jobs[tier]
        self._forward(tier, job.chain)
