"""Answers in Redis, shared by all gateways. All keys of an owner are in one slot of a cluster.

    kvasir:{answers:OWNER}:ID      the answer (Entry.to_bytes), with a time to live of its own
    kvasir:{answers:OWNER}.used    sorted set: id, the Unix millisecond at which it was used last
    kvasir:{answers:OWNER}.ends    sorted set: id, the Unix millisecond at which it ends
    kvasir:{answers:OWNER}.sizes   hash: id, bytes; and the sum, under the empty name
    kvasir:{answers:OWNER}.about   hash: id, JSON with model, created_s, expires_s, num_bytes
    kvasir:answers                 hash: owner, bytes of all its answers, as its last writer counted them

What an owner may keep is exact. The bound over all owners is kept by taking from the largest after a write, so that
gateways that write at the same time may be over it by an answer each, for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson
from redis.asyncio import Redis

from gateway.config import ResponseCacheSettings
from gateway.responses.entries import About, Entry
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.storage.scripts import script

TOTALS: Final = "kvasir:answers"

_STORE: Final = "answers"


class RedisEntries:
    """See Entries."""

    def __init__(
        self,
        redis: Redis,
        settings: ResponseCacheSettings,
        *,
        timeout_s: float,
        breaker: RedisBreaker | None = None,
        now: Callable[[], float],
    ) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call. `now` is in seconds since
        1970, as in entries."""
        self._redis = redis
        self._max_bytes = settings.max_redis_bytes
        self._owner_bytes = min(settings.max_redis_bytes_per_tenant, settings.max_redis_bytes)
        self._now = now
        self._calls = RedisCalls(timeout_s, breaker)
        self._put = redis.register_script(script(__package__, "answers_listed.lua", "answers_put.lua"))
        self._find = redis.register_script(script(__package__, "answers_find.lua"))
        self._remove = redis.register_script(script(__package__, "answers_listed.lua", "answers_remove.lua"))
        self._evicted = 0

    @property
    def up(self) -> bool:
        """See Entries."""
        return self._calls.up

    @property
    def evicted(self) -> int:
        """See Entries."""
        return self._evicted

    async def find(self, owner: str, name: str) -> Entry | None:
        """See Entries."""
        data: Any = await self._calls.ask_or_skip(_STORE, self._find(keys=_keys(owner), args=[name]), None)
        entry = None if data is None else read_or_skip(_STORE, lambda: Entry.from_bytes(name, data))
        return entry if entry is not None and entry.owner == owner and entry.expires_s > self._now() else None

    async def put(self, entry: Entry) -> bool:
        """See Entries."""
        ttl_ms = round((entry.expires_s - self._now()) * 1e3)
        if entry.num_bytes > self._owner_bytes or ttl_ms <= 0:
            return False
        about = orjson.dumps([entry.model, entry.created_s, entry.expires_s, entry.num_bytes])
        args = [entry.id, entry.to_bytes(), ttl_ms, entry.num_bytes, self._owner_bytes, about]
        await self._calls.ask(self._write(entry.owner, args))
        return True

    async def remove(self, owner: str, name: str) -> bool:
        """See Entries."""
        _, removed = await self._calls.ask(self._take(owner, name, 0))
        return removed > 0

    async def owners(self) -> list[str]:
        """See Entries."""
        totals: Any = await self._calls.ask_or_skip(_STORE, self._redis.hkeys(TOTALS), [])
        names = (read_or_skip(_STORE, owner.decode) for owner in totals)
        return sorted(name for name in names if name is not None)

    async def all_of(self, owner: str) -> list[About]:
        """See Entries."""
        told: Any = await self._calls.ask_or_skip(_STORE, self._redis.hgetall(_keys(owner)[3]), {})
        every = [read_or_skip(_STORE, partial(_about, owner, *item)) for item in told.items()]
        return [about for about in every if about is not None and about.expires_s > self._now()]

    async def _write(self, owner: str, args: list[Any]) -> None:
        total, evicted = await self._put(keys=_keys(owner), args=args)
        self._evicted += evicted
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(TOTALS, owner, total)
            pipe.hgetall(TOTALS)
            _, totals = await pipe.execute()
        read = [read_or_skip(_STORE, partial(_total, *item)) for item in totals.items()]
        bytes_of = dict(item for item in read if item is not None)
        while (over := sum(bytes_of.values()) - self._max_bytes) > 0:
            largest = max(bytes_of, key=lambda name: bytes_of[name])
            bytes_of[largest], removed = await self._take(largest, "", max(bytes_of[largest] - over, 0))
            self._evicted += removed

    async def _take(self, owner: str, name: str, max_bytes: int) -> tuple[int, int]:
        """Bytes that are left of the owner's, and answers that were removed."""
        left, removed = await self._remove(keys=_keys(owner), args=[name, max_bytes])
        await (self._redis.hset(TOTALS, owner, left) if left else self._redis.hdel(TOTALS, owner))
        return left, removed


def _about(owner: str, name: bytes, written: bytes) -> About:
    model, created_s, expires_s, num_bytes = orjson.loads(written)
    if not (isinstance(model, str) and 0 <= num_bytes < 1 << 53):
        raise ValueError("nothing of an answer")
    return About(owner, name.decode(), model, float(created_s), float(expires_s), int(num_bytes))


def _total(owner: bytes, count: bytes) -> tuple[str, int]:
    if not 0 <= int(count) < 1 << 53:
        raise ValueError("no number of bytes")
    return owner.decode(), int(count)


def _keys(owner: str) -> list[str]:
    """KEYS of the scripts."""
    prefix = f"kvasir:{{answers:{owner}}}"
    return [f"{prefix}.used", f"{prefix}.ends", f"{prefix}.sizes", f"{prefix}.about", f"{prefix}:"]
