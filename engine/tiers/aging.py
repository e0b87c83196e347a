"""Ends the blocks of a tier that nobody used for `disk_max_age_s`: those of the running engine, and those that engines
left which are gone.

There is one clock, that of the loop. A file's time becomes an age when the engine starts (engine/tiers/disk_scan.py);
from then on the pool knows when each block was used last. A use that reads no file, because the prefix is still where
the model runs, is noted in the file's time as well, so that the next start knows of it: NOTES times in the longest age.

What a lease promises is not evictable, with all that it hangs from, so it stays until the lease ends and goes then, if
it is too old. A turn of the loop ends AGED_AT_ONCE blocks at most; files are deleted by the tier's thread. Pure
bookkeeping on the loop's thread; engine/tiers/tiers.py owns it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final

from engine.tiers.stores import Part
from engine.tiers.tier import Account, Lasting, Tier, worker_of

AGED_AT_ONCE: Final = 64
"""Blocks that go in one turn of the loop."""

NOTES: Final = 16
"""In the longest age a block's use is noted so often; its file may look that much older than it is."""

LOOK_S: Final = 3600.0
"""Between two looks for what engines left that are gone, or NOTES of them in the longest age."""


class Aging:
    """Of one tier."""

    def __init__(self, tier: Tier, lasting: Lasting, account: Account) -> None:
        self._tier, self._lasting, self._account = tier, lasting, account
        self._note_s = lasting.max_age_s / NOTES
        self._noted_s = [float("-inf")] * tier.pool.num_blocks  # by slot, when its file's time was set last
        self._look_s: float | None = None  # the next look; None before the first pump
        self._parts: deque[Part] | None = None  # left of the present look

    @property
    def next_s(self) -> float | None:
        """When `pump` has something to do; None before the tier is ready."""
        if not self._tier.ready or self._look_s is None:
            return None
        oldest_s = self._lasting.order.oldest_s()
        end_s = None if oldest_s is None else oldest_s + self._lasting.max_age_s
        times = [at_s for at_s in (end_s, self._look_s if self._parts is None else None) if at_s is not None]
        return min(times, default=None)

    def used(self, slot: int) -> None:
        """A block that the tier holds was used, and with it what it hangs from."""
        now, digest = self._account.now, self._tier.pool.prefixes.digest[slot]
        if digest is not None and now - self._noted_s[slot] >= self._note_s:
            self._noted_s[slot] = now
            worker_of(self._tier).run(partial(self._lasting.folder.note_use, digest), _nothing)

    def pump(self) -> None:
        """Begins what is due. Call it in each turn, and at `next_s`."""
        tier, now = self._tier, self._account.now
        if not tier.ready:
            return
        self._end_unused(now)
        if self._look_s is None:  # the start has just looked
            self._look_s = now + min(LOOK_S, self._note_s)
        elif now >= self._look_s and self._parts is None:
            self._parts = deque()
            worker_of(tier).run(self._lasting.folder.find_parts, self._look)

    def _end_unused(self, now: float) -> None:
        pool, count = self._tier.pool, 0
        while count < AGED_AT_ONCE:
            oldest_s = self._lasting.order.oldest_s()
            if oldest_s is None or oldest_s + self._lasting.max_age_s > now:
                break
            pool.evict()
            count += 1
        if count:
            self._tier.counters.collected += count
            self._account.note(self._tier)

    def _look(self, parts: list[Part]) -> None:
        self._parts = deque(parts)
        self._go_on()

    def _go_on(self) -> None:
        if self._parts:
            expire = partial(self._lasting.folder.expire, self._parts.popleft(), self._lasting.max_age_s)
            worker_of(self._tier).run(expire, self._expired)
        else:
            self._parts, self._look_s = None, self._account.now + min(LOOK_S, self._note_s)

    def _expired(self, count: int) -> None:
        self._tier.counters.collected += count
        self._go_on()


def _nothing(done: object) -> None:
    """Nothing waits for it."""
