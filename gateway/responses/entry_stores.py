"""Remembered answers in the memory of this gateway, and in Redis, with the epoch of their removals:

kvasir:removals   hash: epoch; last, JSON of a choice and its second
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Final

import orjson

from gateway.config import ResponseCacheSettings
from gateway.errors import RedisDownError
from gateway.responses.entries import About, Chosen, Entry
from gateway.storage.byte_store import UNLIMITED, Quota
from gateway.storage.memory_bytes import Memory
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, read_or_skip

_NAME: Final = "answers"

KEY: Final = "kvasir:removals"

MAX_BYTES: Final = 4096
"""Of a removal in Redis. One with longer names is not written: other gateways empty their memory."""


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


@dataclass(frozen=True, slots=True)
class Removal:
    """The removal of all answers that were chosen at that second, since 1970."""

    chosen: Chosen
    at_s: float

    def takes(self, about: About | Entry) -> bool:
        return self.chosen.takes(about, self.at_s)


class RemovalEpoch:
    """The epoch in Redis. Methods raise RedisDownError."""

    def __init__(self, calls: RedisCalls) -> None:
        self._redis = calls.redis
        self._calls = calls
        self._advance = calls.script(__package__, "removals.lua")

    async def advance(self, removal: Removal) -> int:
        """The epoch that begins with this removal."""
        written = orjson.dumps([removal.at_s, *astuple(removal.chosen)])
        args: list[int | bytes] = [_new_epoch(), written if len(written) <= MAX_BYTES else b"null"]
        return int(await self._calls.ask(self._advance(keys=[KEY], args=args)))

    async def read(self) -> tuple[int, Removal | None]:
        """The epoch, and the removal that it began with; None where that is not known."""
        epoch, last = await self._calls.ask(self._read())
        if epoch is None:
            epoch = await self._calls.ask(self._advance(keys=[KEY], args=[_new_epoch(), ""]))
        number = read_or_skip("removals", partial(int, epoch))
        if number is None:
            raise RedisDownError("what was removed cannot be read")
        return number, None if last is None else read_or_skip("removals", partial(_removal, last))

    def _read(self) -> Awaitable[Any]:
        return self._redis.hmget(KEY, ["epoch", "last"])


def _about(owner: str, name: str, written: bytes) -> About:
    model, created_s, expires_s, num_bytes = orjson.loads(written)
    if not (isinstance(model, str) and 0 <= num_bytes < UNLIMITED):
        raise ValueError("nothing of an answer")
    return About(owner, name, model, float(created_s), float(expires_s), int(num_bytes))


def _new_epoch() -> int:
    """Where counting begins: later than any epoch that a Redis which lost everything has had."""
    return time.time_ns() // 1000


def _removal(written: bytes) -> Removal | None:
    """Raises ValueError and others for what a newer gateway may have written."""
    if (read := orjson.loads(written)) is None:
        return None
    at_s, *chosen = read
    return Removal(Chosen(*chosen), float(at_s))
