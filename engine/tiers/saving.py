"""Brings blocks down: chains wait in a queue for the disk, which saves one at a time and a part of it at a time.

A part is begun in one turn of the loop and taken note of in another; in between the disk's thread copies it, and
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
    """A chain on its way to the disk.

    index   of the next block that the disk lacks
    slot    of the block before, on disk, and
    block   where the model runs: each with a reference; None at the beginning of the prefix, or when not looked up
    resume_s  when the next part may begin, if steps run then; None while a part is being copied
    slots   and
    blocks  of the part that is being copied, each with a reference, and
    keys    their identities
    fence   before the device's blocks, until
    deadline_s, when they are given back
    """

    chain: Chain
    index: int
    slot: int | None
    block: int | None = None
    resume_s: float | None = None
    slots: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    fence: Fence | None = None  # None while nothing is copied, and when the part was given up
    deadline_s: float = 0.0


class Saving:
    """The way down.

    queue_bytes  of chains that wait, at most
    part_blocks  that are saved between two turns of the loop, at most
    on_saved     called with the disk's number, the digests that can be found there from now on, and the time
    on_used      called with the last of the disk's slots whose blocks a chain has there already
    """

    def __init__(self, device: Tier, disk: Tier, account: Account, *, queue_bytes: int, part_blocks: int) -> None:
        self.on_saved: Callable[[int, list[bytes], float], object] | None = None
        self.on_used: Callable[[int], object] | None = None
        self._device, self._disk = device, disk
        self._account = account
        self._queue_bytes, self._queued_bytes = queue_bytes, 0
        self._part_blocks = part_blocks
        self._queue: deque[Chain] = deque()
        self._job: _Save | None = None
        self._steps_run = False

    @property
    def busy(self) -> bool:
        return self._job is not None

    @property
    def num_waiting(self) -> int:
        """Chains in the queue."""
        return len(self._queue)

    @property
    def pump_wanted(self) -> bool:
        """Whether a chain can begin."""
        return bool(self._queue) and self._disk.ready and self._job is None

    def add(self, chain: Chain, *, urgent: bool) -> None:
        """See engine.tiers.tiers.Tiers.save."""
        if urgent:
            self._queue.appendleft(chain)
        else:
            self._queue.append(chain)
        self._queued_bytes += chain.num_bytes
        while self._queued_bytes > self._queue_bytes:
            self._disk.counters.dropped += len(self._take().digests)

    def forget(self, prefix: str) -> None:
        """Chains whose salts begin so are not saved any more. Of one that is being copied nothing can be found after
        its blocks were forgotten, so it ends by itself."""
        self._queue = deque(chain for chain in self._queue if not chain.salt.startswith(prefix))
        self._queued_bytes = sum(chain.num_bytes for chain in self._queue)

    def pump(self, *, steps_run: bool) -> None:
        """Begins what can be saved now; not too much while steps run."""
        self._steps_run = steps_run
        job, now = self._job, self._account.now
        if job is not None and job.resume_s is not None and (not steps_run or job.resume_s <= now):
            self._go_on(job)
        elif job is not None and job.fence is not None and job.deadline_s <= now:
            self._give_up(job, job.fence)
        for _ in range(CHAINS_AT_ONCE):
            if not self.pump_wanted:
                break
            chain = self._take()
            if now < self._disk.pause_until_s or self._disk.late:
                self._disk.counters.dropped += len(chain.digests)
            else:
                self._begin(chain)

    def check_invariants(self) -> list[str]:
        waiting = sum(chain.num_bytes for chain in self._queue)
        return [] if waiting == self._queued_bytes else [f"{self._queued_bytes} bytes are queued, counted as {waiting}"]

    def _take(self) -> Chain:
        chain = self._queue.popleft()
        self._queued_bytes -= chain.num_bytes
        return chain

    # -- a chain ------------------------------------------------------------------------------------------------------

    def _begin(self, chain: Chain) -> None:
        """What is there already counts as used; the rest is saved part by part."""
        pool = self._disk.pool
        have = pool.prefixes.find(chain.salt, chain.tokens, chain.digests)
        pool.acquire(have)
        pool.release(have[:-1])
        if have and self.on_used is not None:
            self.on_used(have[-1])
        self._job = _Save(chain, index=len(have), slot=have[-1] if have else None)
        self._go_on(self._job)

    def _go_on(self, job: _Save) -> None:
        """Begins the next part, or ends the chain when there is none: nothing left, nothing above, or no room."""
        job.resume_s = None
        disk, pool = self._disk, self._disk.pool
        blocks = self._find_part(job)
        slots = pool.allocate(min(len(blocks), pool.available)) if blocks else None
        self._account.note(disk)
        if not slots:
            self._end(job)
            return
        job.slots, job.blocks = slots, blocks[: len(slots)]
        self._device.pool.acquire(job.blocks)
        job.keys = job.chain.keys(job.index, len(slots), pool.block_size)
        job.fence, job.deadline_s = Fence(self._device.get_store()), self._account.now + COPY_LIMIT_S
        copy = partial(copy_blocks, job.fence, job.blocks, disk.get_store(), job.slots, job.keys)
        disk.run(copy, partial(self._copied, job))

    def _find_part(self, job: _Save) -> list[int]:
        """The next blocks. None whose digest stands for something else on disk, or twice in the part: its file would
        be written over."""
        chain, start, pool = job.chain, job.index, self._device.pool
        new: dict[bytes, None] = {}
        for digest in chain.digests[start : start + self._part_blocks]:
            if digest in new or self._disk.pool.prefixes.find_block(digest) is not None:
                break
            new[digest] = None
        if not new:
            return []
        digests = chain.digests[: start + len(new)]
        if job.block is not None and pool.is_registered(job.block):
            return pool.prefixes.find(chain.salt, chain.tokens, digests, start=start, behind=job.block)
        # At first; or the block before has ceased to be trusted while the job had a rest.
        self._release_block(job)
        blocks = pool.prefixes.find(chain.salt, chain.tokens, digests)
        if start and len(blocks) > start:
            job.block = blocks[start - 1]
            pool.acquire([job.block])
        return blocks[start:]

    def _copied(self, job: _Save, copied: Copied) -> None:
        """Makes findable what was copied, unless it ceased to be trusted meanwhile."""
        if job.fence is None:
            self._end_late(job)
            return
        job.fence = None
        disk, pool, above, count = self._disk, self._disk.pool, self._device.pool, 0
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
        self._account.note(disk)
        self._drop_unsaved(job.keys[count:])
        disk.counters.saved += count
        if copied.error is not None:
            self._account.failed(disk, len(job.slots) - copied.count, copied.error)
        else:
            disk.warned = False
        if saved and self.on_saved is not None:
            self.on_saved(disk.number, saved, self._account.now)
        if not whole:
            self._end(job)
        elif self._steps_run:
            job.resume_s = self._account.now + copied.seconds * (1 / SAVING_SHARE - 1)
        else:
            self._go_on(job)

    def _give_up(self, job: _Save, fence: Fence) -> None:
        """Of the device's blocks; the slots are the copy's until it ends."""
        if fence.close():
            self._account.failed(self._disk, len(job.slots), overdue())
            self._disk.late += 1
            self._device.pool.release(job.blocks)
            job.blocks, job.fence = [], None
            self._release_block(job)

    def _end_late(self, job: _Save) -> None:
        """A part that was given up has ended."""
        self._disk.late -= 1
        self._disk.pool.release(job.slots)
        self._drop_unsaved(job.keys)
        self._end(job)

    def _drop_unsaved(self, keys: Sequence[BlockKey]) -> None:
        if left := [key.digest for key in keys if self._disk.pool.prefixes.find_block(key.digest) is None]:
            self._account.drop(self._disk, left)

    def _release_block(self, job: _Save) -> None:
        if job.block is not None:
            self._device.pool.release([job.block])
        job.block = None

    def _end(self, job: _Save) -> None:
        self._release_block(job)
        if job.slot is not None:
            self._disk.pool.release([job.slot])
        self._job = None
