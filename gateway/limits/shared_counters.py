"""Redis while it answers, this gateway's own memory while it does not: a limiter that is down limits less, and refuses
nobody for it. What memory counted is not told to Redis afterwards.

An outage costs the requests that ask when it begins one time limit each, and one request every retry_s after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gateway import tasks
from gateway.limits.base import Counters, CountersDownError, CountersStrangeError, Take, Taken

log = logging.getLogger(__name__)

MAX_DOUBTFUL: Final = 1024
"""Leases that are ended when Redis is back, of those that it may have given: the last ones. All end by themselves."""


class SharedCounters:
    """Never raises. `outages` are counted since the start."""

    def __init__(
        self, redis: Counters | None, memory: Counters, *, retry_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = redis
        self._memory = memory
        self._retry_s = retry_s
        self._clock = clock
        self._asked_again_s = 0.0
        self._down = False
        self._doubtful: deque[tuple[str, str]] = deque(maxlen=MAX_DOUBTFUL)  # by tenant; we heard of none
        self.outages = 0

    async def take(self, tenant: str, take: Take) -> tuple[Taken, Counters]:
        """Also tells who counted it: what was taken there is given back there."""
        redis, now_s = self._redis, self._clock()
        if redis is None or (self._down and now_s < self._asked_again_s):
            return await self._memory.take(tenant, take), self._memory
        self._asked_again_s = now_s + self._retry_s  # while it is asked, nobody else waits for it
        try:
            taken = await redis.take(tenant, take)
        except CountersStrangeError:  # of this tenant alone; redis_calls.py has counted it
            self._note_up()
            return await self._memory.take(tenant, take), self._memory
        except CountersDownError as error:
            self._doubt(tenant, take)
            self._note_down(error)
            return await self._memory.take(tenant, take), self._memory
        except asyncio.CancelledError:
            self._doubt(tenant, take)
            raise
        self._note_up()
        if self._doubtful:
            doubtful = list(self._doubtful)
            self._doubtful.clear()
            tasks.spawn(_end(redis, doubtful), name="end leases")
        return taken, redis

    def _doubt(self, tenant: str, take: Take) -> None:
        if take.flight is not None:
            self._doubtful.append((tenant, take.flight))

    def _note_down(self, error: CountersDownError) -> None:
        if not self._down:
            self._down = True
            self.outages += 1
            log.warning("Redis does not answer, limits are counted by this gateway alone until it does: %s", error)

    def _note_up(self) -> None:
        if self._down:
            self._down = False
            log.info("Redis answers again, limits are shared")


async def _end(redis: Counters, flights: Sequence[tuple[str, str]]) -> None:
    """Gives up when Redis is away again: leases end by themselves."""
    try:
        for tenant in {tenant for tenant, _ in flights}:
            await redis.give_back(tenant, {}, [flight for owner, flight in flights if owner == tenant])
    except CountersDownError as error:
        log.debug("leases end by themselves: %s", error)
