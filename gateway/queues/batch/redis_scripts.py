"""How the batch lane asks Redis: scripts of this folder, and one error for everything that fails.

All keys begin with the same hash tag, so that one script may touch all of them in a cluster, too. None has a time to
live: the embedded Redis, which appends what it is told to a file, never evicts those.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from redis.asyncio import Redis

from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls

_T = TypeVar("_T")

PREFIX: Final = "kvasir:{batches}:"
STORE: Final = "batches"
"""What they are called where Redis holds something that is none of them."""

SCRIPTS: Final = (
    *("stage", "queue", "claim", "take_over", "renew", "put_back", "complete", "drop_staged", "drop_waiting"),
    *("create", "update", "reserve", "close", "forget", "lease", "release"),
)


class RedisScripts:
    """One Redis. `redis` is the caller's: it is not closed here. `timeout_s` bounds every call."""

    def __init__(self, redis: Redis, *, timeout_s: float, breaker: RedisBreaker | None = None) -> None:
        self.redis = redis
        self.calls = RedisCalls(redis, timeout_s, breaker)
        self._scripts = {name: self.calls.script(__package__, f"scripts/{name}.lua") for name in SCRIPTS}

    async def run(self, script: str, *args: bytes | str | int) -> Any:
        """What the script of this name returns. Raises RedisDownError."""
        return await self.ask(self.call(script, *args))

    def call(self, script: str, *args: bytes | str | int) -> Awaitable[Any]:
        """For `ask`, or one of those that `calls` has."""
        return self._scripts[script](keys=[PREFIX], args=args)

    async def ask(self, call: Awaitable[_T]) -> _T:
        """Raises RedisDownError. What was asked for may have been done all the same."""
        return await self.calls.ask(call)
