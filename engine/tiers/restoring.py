"""Brings blocks up: before a sequence is admitted whose prefix is on disk, its blocks are copied up to the device.

A restore has all its blocks from the start, and is copied part by part. A part can be found as soon as it is there; the
first block that does not come back ends the restore. Other sequences that need the same blocks wait for the same
restore. One that is not over in time gives everything back, as do those behind it: what it reads later is written
nowhere.

Pure bookkeeping on the loop's thread. engine/tiers/tiers.py owns it; the way down is engine/tiers/saving.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from engine.tiers.copying import BlockKey, Copied, Fence, copy_blocks
from engine.tiers.tier import COPY_LIMIT_S, Account, Chain, Tier, overdue


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks on their way up. A reference is held on each of `above` and `blocks`, and on the slots of `parts`.

    index     of the next block that is not there yet
    parent    the device block before it; None at the beginning of the prefix
    above     `parent` as it was at first, and blocks of others that were found on the way
    blocks    private device blocks, one for each that is brought back; the first `done` of them were
    fence     before the device blocks
    parts     slots on disk that are still being copied, in order
    over      nothing more is brought back
    """

    chain: Chain
    index: int
    parent: int | None
    above: list[int]
    blocks: list[int]
    deadline_s: float
    fence: Fence
    done: int = 0
    parts: deque[list[int]] = field(default_factory=deque)
    over: bool = False


class Restoring:
    """The way up.

    part_blocks  that become findable at a time
    """

    def __init__(self, device: Tier, disk: Tier, account: Account, *, part_blocks: int) -> None:
        self.jobs: list[Restore] = []
        self._device, self._disk = device, disk
        self._account = account
        self._part_blocks = part_blocks

    def begin(self, chain: Chain, room: int, now: float) -> list[int]:
        """See engine.tiers.tiers.Tiers.restore."""
        self.end_overdue(now)
        pool, below = self._device.pool, self._disk.pool
        found = pool.prefixes.find(chain.salt, chain.tokens, chain.digests)
        start = len(found)
        if start == len(chain.digests) or pool.prefixes.find_block(chain.digests[start]) is not None:
            return []
        if pool.available_beside(found) < room - start or self._disk.late:
            return []
        slots = below.prefixes.find(chain.salt, chain.tokens, chain.digests)[start:]
        if not slots:
            return []
        below.acquire(slots)
        pool.acquire(found[-1:])
        blocks = pool.allocate(len(slots))
        assert blocks is not None, "the pool gave fewer blocks than it said it has"
        fence = Fence(self._device.get_store())
        parent = found[-1] if found else None
        job = Restore(chain, start, parent, found[-1:], blocks, now + COPY_LIMIT_S, fence)
        self.jobs.append(job)
        for at in range(0, len(slots), self._part_blocks):
            part = slots[at : at + self._part_blocks]
            keys = chain.keys(start + at, len(part), pool.block_size)
            copy = partial(self._copy, job, part, blocks[at : at + len(part)], keys)
            job.parts.append(part)
            self._disk.run(copy, partial(self._read_back, job, part, keys))
        return blocks

    def end_overdue(self, now: float) -> None:
        """Gives back what restores hold that are not over in time. Those that wait for the disk end with them."""
        if any(now >= job.deadline_s for job in self.jobs):
            for job in self.jobs.copy():
                if job.fence.close():  # else its next blocks are being written at this moment
                    self._give_up(job)

    def _copy(self, job: Restore, slots: list[int], blocks: list[int], keys: list[BlockKey]) -> Copied:
        """On the disk's thread."""
        if job.over:
            return Copied(0)
        return copy_blocks(self._disk.get_store(), slots, job.fence, blocks, keys)

    def _read_back(self, job: Restore, slots: list[int], keys: list[BlockKey], copied: Copied) -> None:
        """Makes findable what came back, unless something before it did not."""
        disk = self._disk
        if not job.parts:  # the restore was given up
            disk.late -= 1
            return
        if not job.over:
            count = self._register(job, slots[: copied.count], keys)
            disk.counters.restored += count
            job.over = count < len(slots)
            if copied.error is not None:
                self._account.failed(disk, len(slots) - copied.count, copied.error)
            elif copied.count < len(slots) and disk.pool.is_registered(slots[copied.count]):
                disk.counters.torn += 1
                self._account.forget(disk, [slots[copied.count]])
        disk.pool.release(job.parts.popleft())
        self._account.note(disk)
        if not job.parts:
            self._end(job)

    def _register(self, job: Restore, slots: list[int], keys: list[BlockKey]) -> int:
        pool, count = self._device.pool, 0
        for slot, key in zip(slots, keys, strict=False):
            trusted = self._disk.pool.is_registered(slot) and (job.parent is None or pool.is_registered(job.parent))
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

    def _give_up(self, job: Restore) -> None:
        """The disk's thread may be in the middle of it, or has not begun."""
        job.over = True
        self._disk.late += len(job.parts)
        self._account.failed(self._disk, sum(map(len, job.parts)), overdue())
        for part in job.parts:
            self._disk.pool.release(part)
        job.parts.clear()
        self._end(job)

    def _end(self, job: Restore) -> None:
        self._device.pool.release(job.above + job.blocks)
        self.jobs.remove(job)
