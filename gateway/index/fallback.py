"""The index that the street asks: Redis while it answers, the gateway's own memory while it does not.

An outage costs the requests that were waiting when it began one time limit each, and later ones nothing: a task looks
for Redis in the background. Says so once when an outage begins and once when it ends. Its neighbours are
redis_index.py and memory_index.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gateway import tasks
from gateway.index.base import IndexDownError
from gateway.index.memory_index import MemoryIndex
from gateway.index.redis_index import RedisIndex

log = logging.getLogger(__name__)


class FallbackIndex:
    """Never raises. `redis_up` is what the metric shows; without a Redis configured it is False throughout."""

    def __init__(self, redis: RedisIndex | None, memory: MemoryIndex, *, retry_s: float) -> None:
        self._redis = redis
        self._memory = memory
        self._retry_s = retry_s
        self._watching: asyncio.Task[None] | None = None
        self.redis_up = redis is not None
        self.outages = 0

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """See index/base.py. Incarnations that Redis does not know, or not any more, are looked up in memory."""
        if not digests or not incarnations:
            return {}
        if self._redis is None or not self.redis_up:
            return await self._memory.find(model, digests, incarnations)
        try:
            held = await self._redis.find(model, digests, incarnations)
        except IndexDownError as error:
            self._note_down(error)
            return await self._memory.find(model, digests, incarnations)
        if len(held) == len(incarnations):
            return held
        return {**await self._memory.find(model, digests, [name for name in incarnations if name not in held]), **held}

    def start(self) -> None:
        """Begins to look every retry_s whether Redis is there: it comes back, and goes away, without being asked."""
        if self._redis is not None:
            self._watching = tasks.spawn(self._watch(self._redis), name="watch redis")

    async def close(self) -> None:
        """Stops looking."""
        await tasks.cancel(self._watching)

    async def _watch(self, redis: RedisIndex) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(self._retry_s)
            try:
                await redis.ping()
            except IndexDownError as error:
                self._note_down(error)
            else:
                self._note_up()

    def _note_down(self, error: IndexDownError) -> None:
        if self.redis_up:  # otherwise another request has said so
            self.redis_up = False
            self.outages += 1
            log.warning("Redis does not answer, the index is this gateway's own memory until it does: %s", error)

    def _note_up(self) -> None:
        if not self.redis_up:
            self.redis_up = True
            log.info("Redis answers again")
