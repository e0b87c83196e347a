"""The index in Redis: one script call finds the longest prefix that each engine holds.

All digests travel packed in one argument, because a Redis command pays for each argument and not for its bytes. Reads
what engine/publish.py writes; keys and values are described there and in engine/protocol/index_keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from engine.protocol import blocks_key
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls
from gateway.storage.scripts import script

_SCRIPT: Final = script(__package__, "find.lua")


class RedisIndex:
    """Every engine that publishes to this Redis, whether this gateway is connected to it or not."""

    def __init__(self, redis: Redis, *, timeout_s: float, breaker: RedisBreaker | None = None) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call."""
        self._redis = redis
        self._breaker = breaker or RedisBreaker()
        self._calls = RedisCalls(timeout_s, self._breaker)
        self._pings = RedisCalls(timeout_s, self._breaker)
        self._sha: str | None = None

    @property
    def up(self) -> bool:
        """Whether Redis is reachable, as far as is known."""
        return self._breaker.up

    @property
    def wait_s(self) -> float:
        """Seconds until `ping` may find that Redis is back; 0: now, or it is not away."""
        return self._breaker.wait_s()

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """See index/base.py."""
        if not digests or not incarnations:
            return {}
        keys = [blocks_key(model, name) for name in incarnations]
        counts = await self._calls.ask(self._call(keys, digests))
        return {name: count for name, count in zip(incarnations, counts, strict=True) if count >= 0}

    async def ping(self) -> None:
        """Returns when Redis answers. Raises RedisDownError when it does not within the time limit."""
        await self._pings.ask(self._redis.execute_command("PING"))  # type: ignore[no-untyped-call]

    async def _call(self, keys: list[str], digests: bytes) -> list[int]:
        if self._sha is not None:
            try:
                return await self._evaluate(self._sha, keys, digests)
            except NoScriptError:  # Redis was restarted, or another one answers now
                pass
        self._sha = str(await self._redis.script_load(_SCRIPT))
        return await self._evaluate(self._sha, keys, digests)

    async def _evaluate(self, sha: str, keys: list[str], digests: bytes) -> list[int]:
        counts: Any = await self._redis.execute_command("EVALSHA", sha, len(keys), *keys, digests)  # type: ignore[no-untyped-call]
        return [int(count) for count in counts]
