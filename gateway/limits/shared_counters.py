"""Redis while it is reachable, this gateway's own memory while it is not: a limiter that is down limits less, and
refuses no request for it. What memory counted is not written to Redis afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.limits.base import Counters, Take, Taken

log = logging.getLogger(__name__)

MAX_DOUBTFUL: Final = 1024
"""Leases that are ended when Redis is back, of those that it may have given: the last ones. All end by themselves."""


class SharedCounters:
    """Never raises."""

    def __init__(self, redis: Counters | None, memory: Counters) -> None:
        self._redis = redis
        self._memory = memory
        self._doubtful: deque[tuple[str, str]] = deque(maxlen=MAX_DOUBTFUL)  # by tenant; Redis may have given them

    async def take(self, tenant: str, take: Take) -> tuple[Taken, Counters]:
        """Also returns who counted it: what was taken there is given back there."""
        redis = self._redis
        if redis is None:
            return await self._memory.take(tenant, take), self._memory
        try:
            taken = await redis.take(tenant, take)
        except RedisDownError as error:
            if error.asked:
                self._doubt(tenant, take)
            return await self._memory.take(tenant, take), self._memory
        except asyncio.CancelledError:
            self._doubt(tenant, take)
            raise
        if self._doubtful:
            doubtful = list(self._doubtful)
            self._doubtful.clear()
            tasks.spawn(_end(redis, doubtful), name="end leases")
        return taken, redis

    def _doubt(self, tenant: str, take: Take) -> None:
        if take.flight is not None:
            self._doubtful.append((tenant, take.flight))


async def _end(redis: Counters, flights: Sequence[tuple[str, str]]) -> None:
    """Gives up when Redis is unreachable again: leases end by themselves."""
    try:
        for tenant in {tenant for tenant, _ in flights}:
            await redis.give_back(tenant, {}, [flight for owner, flight in flights if owner == tenant])
    except RedisDownError as error:
        log.debug("leases end by themselves: %s", error.why)
