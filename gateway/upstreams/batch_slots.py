"""Slots for the batch lane at one upstream: what the online lane leaves of a bound that the operator sets. Requests of
the online lane never wait here; they are counted, and lines wait for them. Where those are bounded themselves
(online_slots.py), a line gets what none of them waits for.

An upstream that says it has no room, to whomever, gets no lines for a while, and then half as many at a time; each
round of answers brings one back, so that lines come about as fast as it takes them (AIMD, RFC 5681, section 3.1). Knows
no HTTP; its neighbour is upstream.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gateway.upstreams.online_slots import OnlineSlots

LONGEST_S = 3600.0
"""That an upstream is believed which asks to be left alone."""


class BatchSlots:
    """`take` in an event loop; each place that it gave is released once."""

    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, online: OnlineSlots | None = None
    ) -> None:
        self.taken = 0
        self._online_slots = online
        if online is not None:
            online.tell(self._hand_out)
        self._most = most
        self._clock = clock
        self._online = 0
        self._lines = float(most)  # that it takes at a time, as far as is known; 1 at least
        self._until_s = float("-inf")  # held off
        self._waiting: deque[asyncio.Future[bool]] = deque()  # first come, first served

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def wait_s(self) -> float:
        """Seconds until lines may come again; 0: now, as far as there is a place."""
        return max(0.0, self._until_s - self._clock())

    def entered(self) -> None:
        """One more request of the online lane is in flight."""
        self._online += 1

    def left(self) -> None:
        """One of them has ended."""
        self._online -= 1
        self._hand_out()

    async def take(self, timeout_s: float) -> bool:
        """Waits for a slot. False when none came in time, or when lines are held off."""
        if self.wait_s():
            return False
        if not self._waiting and self._has_room():
            self._count()
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.result():  # handed out while it was given up
                self.release()
            if isinstance(error, TimeoutError):
                return False
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiter)

    def release(self) -> None:
        self.taken -= 1
        if self._online_slots is not None:
            self._online_slots.line_left()
        self._hand_out()

    def answered(self) -> None:
        """A line was, and well."""
        self._lines = min(self._lines + 1 / self._lines, float(self._most))
        self._hand_out()

    def hold_off(self, for_s: float) -> None:
        """No line for so long, LONGEST_S at most; those that wait are told. What was sent together counts once."""
        if not self.wait_s():
            self._lines = max(self._lines / 2, 1.0)
        self._until_s = max(self._until_s, self._clock() + min(for_s, LONGEST_S))
        while self._waiting:
            _tell(self._waiting.popleft(), False)

    def _count(self) -> None:
        self.taken += 1
        if self._online_slots is not None:
            self._online_slots.line_came()

    def _has_room(self) -> bool:
        if self._online_slots is not None and not self._online_slots.has_left_over:
            return False
        return self.taken < int(self._lines) and self._online + self.taken < self._most

    def _hand_out(self) -> None:
        while self._waiting and self._has_room():
            if _tell(self._waiting.popleft(), True):
                self._count()


def _tell(waiter: asyncio.Future[bool], placed: bool) -> bool:
    """Whether it still waits."""
    if waiter.done():
        return False
    waiter.set_result(placed)
    return True
