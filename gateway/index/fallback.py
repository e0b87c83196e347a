"""The index that the pipeline asks: Redis while it is reachable, the gateway's own memory while it is not.

An outage costs the requests that were waiting when it began one time limit each, and later ones nothing: a task probes
Redis in the background, for all parts of the gateway. Its neighbours are redis_index.py and memory_index.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.index.memory_index import MemoryIndex
from gateway.index.redis_index import RedisIndex


class FallbackIndex:
    """Never raises. It probes Redis every `retry_s`."""

    def __init__(self, redis: RedisIndex | None, memory: MemoryIndex, *, retry_s: float) -> None:
        self._redis = redis
        self._memory = memory
        self._retry_s = retry_s
        self._watching: asyncio.Task[None] | None = None

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """See index/base.py. Incarnations that Redis does not know, or not any more, are looked up in memory."""
        if not digests or not incarnations:
            return {}
        if self._redis is None or not self._redis.up:
            return await self._memory.find(model, digests, incarnations)
        try:
            held = await self._redis.find(model, digests, incarnations)
        except RedisDownError:
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
            await asyncio.sleep(redis.wait_s or self._retry_s)
            with suppress(RedisDownError):
                await redis.ping()
