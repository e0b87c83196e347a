"""How many gateways are on this Redis: each says every few seconds that it is there. All workers of one have its name.

kvasir:gateways   sorted set: name of a gateway, Unix second from which on it counts as gone; ends with the last one
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.storage.redis_calls import RedisCalls

BEAT_S: Final = 5.0
GONE_S: Final = 3 * BEAT_S
"""After its last beat; a gateway that was killed says nothing more."""

_KEY: Final = "kvasir:gateways"


class Presence:
    """Belongs to one event loop."""

    def __init__(self, name: str, calls: RedisCalls | None, now: Callable[[], float] = time.time) -> None:
        """Without `calls` it is alone."""
        self._name, self._calls, self._now = name, calls, now
        self._beating: asyncio.Task[None] | None = None
        self.gateways = 1
        """Of this Redis, this one among them, as last known."""

    def start(self) -> None:
        if self._calls is not None:
            self._beating = tasks.spawn(self._beat_on(), name="say that this gateway is there")

    async def close(self) -> None:
        """It is not there any more; other workers of it, if there are, say soon that it is."""
        await tasks.cancel(self._beating)
        if self._calls is not None:
            with suppress(RedisDownError):
                await self._calls.ask(self._calls.redis.zrem(_KEY, self._name))

    async def beat(self) -> None:
        """Says that it is there, and counts all. Never raises: while Redis is away the last number holds."""
        if self._calls is None:
            return
        now_s = self._now()
        pipe = self._calls.redis.pipeline(transaction=False)
        pipe.zremrangebyscore(_KEY, "-inf", now_s)
        pipe.zadd(_KEY, {self._name: now_s + GONE_S})
        pipe.expire(_KEY, round(2 * GONE_S))
        pipe.zcard(_KEY)
        with suppress(RedisDownError):
            *_, count = await self._calls.ask_each(_KEY, pipe)
            self.gateways = max(1, int(count or 0))

    async def _beat_on(self) -> None:
        while not tasks.was_cancelled():
            await self.beat()
            await asyncio.sleep(BEAT_S)
