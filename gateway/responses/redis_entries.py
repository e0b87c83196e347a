"""Answers in Redis, shared by all gateways. See storage/redis_bytes.py for its keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import orjson
from redis.asyncio import Redis

from gateway.config import ResponseCacheSettings
from gateway.responses.entries import About, Entry
from gateway.storage.breaker import RedisBreaker
from gateway.storage.byte_store import UNLIMITED, Quota
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import read_or_skip

_NAME: Final = "answers"


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
        quota = Quota(bytes=settings.max_redis_bytes_per_tenant, total_bytes=settings.max_redis_bytes, by_use=True)
        self._now = now
        self._bytes = RedisBytes(redis, _NAME, quota, now, timeout_s=timeout_s, breaker=breaker)
        self.owners = self._bytes.owners
        self.remove = self._bytes.remove

    @property
    def up(self) -> bool:
        """See Entries."""
        return self._bytes.up

    @property
    def evicted(self) -> int:
        """See Entries."""
        return self._bytes.evicted

    async def find(self, owner: str, name: str) -> Entry | None:
        """See Entries."""
        data = await self._bytes.find(owner, name)
        entry = None if data is None else read_or_skip(_NAME, partial(Entry.from_bytes, name, data))
        return entry if entry is not None and entry.owner == owner and entry.expires_s > self._now() else None

    async def put(self, entry: Entry) -> bool:
        """See Entries."""
        ttl_s = entry.expires_s - self._now()
        if ttl_s <= 0:
            return False
        about = orjson.dumps([entry.model, entry.created_s, entry.expires_s, entry.num_bytes])
        body, size = entry.to_bytes(), entry.num_bytes
        return await self._bytes.put(entry.owner, entry.id, body, ttl_s, about=about, num_bytes=size) == "stored"

    async def all_of(self, owner: str) -> list[About]:
        """See Entries."""
        listed = await self._bytes.all_of(owner)
        read = (read_or_skip(_NAME, partial(_about, owner, *item)) for item in listed.items())
        return [about for about in read if about is not None]


def _about(owner: str, name: str, written: bytes) -> About:
    model, created_s, expires_s, num_bytes = orjson.loads(written)
    if not (isinstance(model, str) and 0 <= num_bytes < UNLIMITED):
        raise ValueError("nothing of an answer")
    return About(owner, name, model, float(created_s), float(expires_s), int(num_bytes))
