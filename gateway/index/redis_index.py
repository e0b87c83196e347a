"""The index in Redis: one script call finds the longest prefix that each engine holds.

All digests travel packed in one argument, because a Redis command pays for each argument and not for its bytes. Reads
what engine/publish.py writes; keys and values are described there and in engine/protocol/index_keys.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from engine.protocol import blocks_key
from gateway.index.base import IndexDownError
from gateway.redis_calls import MAX_CALLS, RedisCalls

_T = TypeVar("_T")

_SCRIPT: Final = files(__package__).joinpath("find.lua").read_text(encoding="utf-8")


class RedisIndex:
    """Every engine that publishes to this Redis, whether this gateway is connected to it or not."""

    def __init__(self, redis: Redis, *, timeout_s: float) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call, its wait for a turn included:
        a look-up that is given up costs less than one that is waited for."""
        self._redis = redis
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(MAX_CALLS)
        self._pings = RedisCalls(timeout_s, IndexDownError)
        self._sha: str | None = None
        self._given_up: set[asyncio.Task[Any]] = set()

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """See index/base.py."""
        if not digests or not incarnations:
            return {}
        keys = [blocks_key(model, name) for name in incarnations]
        counts = await self._within_limit(self._take_turn(keys, digests))
        return {name: count for name, count in zip(incarnations, counts, strict=True) if count >= 0}

    async def ping(self) -> None:
        """Returns when Redis answers. Raises IndexDownError when it does not within the time limit."""
        await self._pings.ask(self._redis.execute_command("PING"))  # type: ignore[no-untyped-call]

    async def _within_limit(self, asked: Coroutine[Any, Any, _T]) -> _T:
        """Waits no longer even where redis-py drops a cancellation (see tasks.was_cancelled) and goes on until its
        socket's own time limits, twice: such a call ends by itself, and nobody waits for it."""
        call = asyncio.get_running_loop().create_task(asked)
        try:
            if not (await asyncio.wait((call,), timeout=self._timeout_s))[0]:
                raise TimeoutError
            return call.result()
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise IndexDownError(str(error) or type(error).__name__) from error
        finally:
            if not call.done():
                call.cancel()
                self._given_up.add(call)
                call.add_done_callback(self._forget)

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._given_up.discard(call)
        if not call.cancelled():
            call.exception()  # which is no news

    async def _take_turn(self, keys: list[str], digests: bytes) -> list[int]:
        async with self._turns:
            return await self._call(keys, digests)

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
