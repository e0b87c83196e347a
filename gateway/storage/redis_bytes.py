"""Bytes in Redis, which all gateways share. All keys of an owner are in one slot of a cluster.

    kvasir:{NAME:OWNER}:KEY     the body, with a time to live of its own
    kvasir:{NAME:OWNER}.used    sorted set: key, the Unix microsecond at which it was put, or used last
    kvasir:{NAME:OWNER}.ends    sorted set: key, the Unix microsecond at which it ends
    kvasir:{NAME:OWNER}.sizes   hash: key, bytes that count; and their sum, under the empty name
    kvasir:{NAME:OWNER}.about   hash: key, what was put as `about`
    kvasir:NAME                 hash: owner, bytes of all its entries, as its last writer counted them

Redis may evict a body, which then is not there; the rest has no time to live. Times are those of the gateways' clocks.
What an owner may store is exact. The bound over all owners is kept by evicting from the largest after a write, so that
gateways that write at the same time may be over it by an entry each, for a moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gateway.storage.byte_store import UNLIMITED, Put, Quota
from gateway.storage.redis_calls import RedisCalls, read_or_skip


class RedisBytes:
    """See ByteStore."""

    def __init__(self, calls: RedisCalls, name: str, quota: Quota, now: Callable[[], float]) -> None:
        """`name` is that of the keys. `now` is in seconds since 1970."""
        self._redis = calls.redis
        self._name = name
        self._quota = quota
        self._now = now
        self._calls = calls
        self._put, self._find, self._extend, self._remove = (
            calls.script(__package__, "lists.lua", f"{name}.lua") for name in ("put", "find", "extend", "remove")
        )
        self.evicted = 0

    @property
    def up(self) -> bool:
        """Whether Redis is reachable, as far as is known."""
        return self._calls.breaker.up

    async def put(
        self,
        owner: str,
        key: str,
        body: bytes,
        ttl_s: float | None = None,
        *,
        about: bytes = b"",
        num_bytes: int | None = None,
        expected: bytes | None = None,
        refuse: bool = False,
    ) -> Put:
        quota, size = self._quota, len(body) if num_bytes is None else num_bytes
        if size > quota.largest:
            return "bytes"
        ttl_us = max(_us(quota.ttl_s if ttl_s is None else ttl_s), 1)
        args = [key, self._now_us(), body, ttl_us, size, min(quota.bytes, quota.total_bytes), quota.entries]
        sha = "" if expected is None else hashlib.sha1(expected, usedforsecurity=False).hexdigest()
        return await self._calls.ask(self._write(owner, [*args, about, sha, int(refuse)]))

    async def find(self, owner: str, key: str) -> bytes | None:
        call = self._find(keys=self._keys(owner), args=[key, self._now_us(), int(self._quota.by_use)])
        body: Any = await self._calls.ask_or_skip(self._name, call, None)
        return None if body is None else bytes(body)

    async def look(self, owner: str, key: str) -> bytes | None:
        _, ends, _, about, body = self._keys(owner)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hget(about, key)
        pipe.zscore(ends, key)
        pipe.exists(body + key)
        found, end_us, has_body = await self._calls.ask_each(self._name, pipe)
        about_it: bytes | None = found
        return about_it if has_body and end_us is not None and end_us > self._now_us() else None

    async def all_of(self, owner: str) -> Mapping[str, bytes]:
        _, ends, _, about, _ = self._keys(owner)
        pipe = self._redis.pipeline(transaction=False)
        pipe.zrangebyscore(ends, f"({self._now_us()}", "+inf")
        pipe.hgetall(about)
        keys, abouts = await self._calls.ask_each(self._name, pipe)
        names = {key: read_or_skip(self._name, key.decode) for key in keys or () if key in (abouts or {})}
        return {name: abouts[key] for key, name in names.items() if name is not None}

    async def extend(self, owner: str, key: str, ttl_s: float, about: bytes) -> bool:
        args: list[Any] = [key, self._now_us(), max(_us(ttl_s), 1), about]
        return bool(await self._calls.ask(self._extend(keys=self._keys(owner), args=args)))

    async def remove(self, owner: str, key: str) -> bool:
        _, removed = await self._calls.ask(self._take(owner, key, 0))
        return removed > 0

    async def owners(self) -> list[str]:
        """Owners with entries, where the quota has `total_bytes`; some may have none any more."""
        totals: Any = await self._calls.ask_or_skip(self._name, self._redis.hkeys(self._totals), [])
        names = (read_or_skip(self._name, owner.decode) for owner in totals)
        return sorted(name for name in names if name is not None)

    @property
    def _totals(self) -> str:
        return f"kvasir:{self._name}"

    async def _write(self, owner: str, args: list[Any]) -> Put:
        put, total, evicted = await self._put(keys=self._keys(owner), args=args)
        self.evicted += evicted
        if put == b"stored" and self._quota.total_bytes != UNLIMITED:
            await self._bound_total(owner, total)
        done: Put = put.decode()
        return done

    async def _bound_total(self, owner: str, num_bytes: int) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(self._totals, owner, num_bytes)
            pipe.hgetall(self._totals)
            _, totals = await pipe.execute()
        read = [read_or_skip(self._name, partial(_total, *item)) for item in totals.items()]
        bytes_of = dict(item for item in read if item is not None)
        while (over := sum(bytes_of.values()) - self._quota.total_bytes) > 0:
            largest = max(bytes_of, key=lambda name: bytes_of[name])
            bytes_of[largest], evicted = await self._take(largest, "", max(bytes_of[largest] - over, 0))
            self.evicted += evicted

    async def _take(self, owner: str, key: str, max_bytes: int) -> tuple[int, int]:
        """Removes one entry, or without a key those that are evicted first. Bytes that are left of the owner's, and
        entries that were removed."""
        args: list[Any] = [key, self._now_us(), max_bytes]
        left, removed = await self._remove(keys=self._keys(owner), args=args)
        if self._quota.total_bytes != UNLIMITED:
            await (self._redis.hset(self._totals, owner, left) if left else self._redis.hdel(self._totals, owner))
        return left, removed

    def _now_us(self) -> int:
        return _us(self._now())

    def _keys(self, owner: str) -> list[str]:
        """KEYS of the scripts."""
        prefix = f"kvasir:{{{self._name}:{owner}}}"
        return [f"{prefix}{part}" for part in (".used", ".ends", ".sizes", ".about", ":")]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _total(owner: bytes, count: bytes) -> tuple[str, int]:
    if not 0 <= int(count) < UNLIMITED:
        raise ValueError("no number of bytes")
    return owner.decode(), int(count)
