"""Remembered answers in the memory of this gateway, and in Redis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import orjson

from gateway.config import ResponseCacheSettings
from gateway.responses.entries import About, Entry
from gateway.storage.byte_store import UNLIMITED, Quota
from gateway.storage.memory_bytes import Memory
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, read_or_skip

_NAME: Final = "answers"


class MemoryEntries(Memory[Entry]):
    """Those in the memory of this gateway. A time to live counts from the answer, and no use makes it longer."""

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        """`now` is the clock of entries, in seconds since 1970."""
        super().__init__(Quota(total_bytes=max_bytes, by_use=True), now)

    def set(self, entry: Entry) -> None:
        """In place of the one with this id. One that is larger than all may be together is not stored."""
        self.store(entry.owner, entry.id, entry, entry.num_bytes, entry.expires_s)


class RedisEntries:
    """Those in Redis by owner and id, within bytes; the least recently used is evicted first, and none is found past
    its time. Methods raise RedisDownError.

    owners  () -> list[str]  some of them may have none any more
    remove  (owner, id) -> bool  whether it was there
    """

    def __init__(self, calls: RedisCalls, settings: ResponseCacheSettings, now: Callable[[], float]) -> None:
        """`now` is the clock of entries."""
        quota = Quota(bytes=settings.max_redis_bytes_per_tenant, total_bytes=settings.max_redis_bytes, by_use=True)
        self._now = now
        self._bytes = RedisBytes(calls, _NAME, quota, now)
        self.owners = self._bytes.owners
        self.remove = self._bytes.remove

    @property
    def up(self) -> bool:
        """False while Redis is unreachable."""
        return self._bytes.up

    @property
    def evicted(self) -> int:
        """By this gateway, to make room, since the start."""
        return self._bytes.evicted

    async def find(self, owner: str, name: str) -> Entry | None:
        """Counts as a use."""
        data = await self._bytes.find(owner, name)
        entry = None if data is None else read_or_skip(_NAME, partial(Entry.from_bytes, name, data))
        return entry if entry is not None and entry.owner == owner and entry.expires_s > self._now() else None

    async def put(self, entry: Entry) -> bool:
        """In place of the one with this id. False for one that is too large, or expired."""
        ttl_s = entry.expires_s - self._now()
        if ttl_s <= 0:
            return False
        about = orjson.dumps([entry.model, entry.created_s, entry.expires_s, entry.num_bytes])
        body, size = entry.to_bytes(), entry.num_bytes
        return await self._bytes.put(entry.owner, entry.id, body, ttl_s, about=about, num_bytes=size) == "stored"

    async def all_of(self, owner: str) -> list[About]:
        """In no order."""
        listed = await self._bytes.all_of(owner)
        read = (read_or_skip(_NAME, partial(_about, owner, *item)) for item in listed.items())
        return [about for about in read if about is not None]


def _about(owner: str, name: str, written: bytes) -> About:
    model, created_s, expires_s, num_bytes = orjson.loads(written)
    if not (isinstance(model, str) and 0 <= num_bytes < UNLIMITED):
        raise ValueError("nothing of an answer")
    return About(owner, name, model, float(created_s), float(expires_s), int(num_bytes))
