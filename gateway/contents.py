"""Cached contents: what clients of the Gemini API have us keep, until a time. Bodies never change.

Without Redis they are in the memory of this gateway. With it, Redis has them for all gateways, and memory has copies of
what this one made or used:

    Redis answers             what it has counts. What it has lost (evicted, restarted empty) is restored from a copy,
                              unless it was deleted
    Redis is unreachable      copies are used, and new contents are this gateway's alone until it is back. Nothing can
                              be changed or deleted: other gateways would not hear of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import orjson

from gateway.config import GeminiSettings
from gateway.errors import QuotaError, RedisDownError
from gateway.storage.byte_store import UNLIMITED, ByteStore, Put, Quota
from gateway.storage.redis_calls import read_or_skip
from gateway.types import CachedContent

STORE: Final = "contents"
_NO_TIME_S: Final = 250e9
"""A second since 1970 that no clock shows: Python's dates end before it."""


def quota_of(limits: GeminiSettings) -> Quota:
    """Of one tenant."""
    return Quota(entries=limits.max_contents, bytes=limits.max_bytes)


class Contents:
    """Every method but `put` raises RedisDownError for what only Redis can know."""

    def __init__(
        self, limits: GeminiSettings, now: Callable[[], float], memory: ByteStore, redis: ByteStore | None = None
    ) -> None:
        """`now` is seconds since 1970. The stores have the quota of `quota_of`."""
        self._limits = limits
        self._now = now
        self._memory = memory
        self._redis = redis

    async def put(self, tenant: str, content: CachedContent) -> None:
        """In place of what has the same name. Raises QuotaError past the limits of the tenant."""
        if self._redis is not None:
            try:
                self._check(await self._write(self._redis, tenant, content, refuse=True))
            except RedisDownError:
                pass
            else:
                await self._write(self._memory, tenant, content)
                return
        self._check(await self._write(self._memory, tenant, content, refuse=True))

    async def find(self, tenant: str, name: str) -> CachedContent | None:
        copy = await self._copy(tenant, name)
        try:
            return await self._find(tenant, name, copy)
        except RedisDownError:
            if copy is None:
                raise
            return copy

    async def all_of(self, tenant: str) -> list[CachedContent]:
        """All that the tenant has, in any order, without bodies."""
        copies = await self._list(self._memory, tenant)
        if self._redis is None:
            return copies
        try:
            listed = await self._list(self._redis, tenant)
        except RedisDownError:
            return copies
        names = {content.name for content in listed}
        lost = [await self.find(tenant, copy.name) for copy in copies if copy.name not in names]
        return [*listed, *(replace(content, body=b"") for content in lost if content is not None)]

    async def extend(self, tenant: str, name: str, expires_s: float) -> CachedContent | None:
        """Sets its end, earlier or later; returns it without its body. None when it is not there."""
        content = await self._find(tenant, name, await self._copy(tenant, name))
        if content is None:
            return None
        extended = replace(content, body=b"", expires_s=expires_s, updated_s=self._now())
        ttl_s, about = expires_s - self._now(), _about(extended)
        if self._redis is not None and not await self._redis.extend(tenant, name, ttl_s, about):
            return None
        await self._memory.extend(tenant, name, ttl_s, about)
        return extended

    async def delete(self, tenant: str, name: str) -> bool:
        """Whether it was there."""
        if await self._find(tenant, name, await self._copy(tenant, name)) is None:
            return False
        if self._redis is None:
            return await self._memory.remove(tenant, name)
        was_there = await self._redis.remove(tenant, name, mark_s=self._limits.longest_s)
        await self._memory.remove(tenant, name)
        return was_there

    async def _find(self, tenant: str, name: str, copy: CachedContent | None) -> CachedContent | None:
        """What counts, if this is the copy in memory."""
        redis = self._redis
        if redis is None:
            return copy
        content = None
        about, was_deleted = await redis.look(tenant, name)
        if about is not None:
            body = copy.body if copy is not None else await redis.find(tenant, name)
            content = None if body is None else _read(about, body)
        elif copy is not None and not was_deleted:  # other gateways may have used up the quota meanwhile
            restored = await self._write(redis, tenant, copy, refuse=True, restore=True)
            content = None if restored == "deleted" else copy
        if content is None:
            await self._memory.remove(tenant, name)
        elif copy is None or copy.expires_s != content.expires_s:
            await self._write(self._memory, tenant, content)
        return content

    async def _copy(self, tenant: str, name: str) -> CachedContent | None:
        about, _ = await self._memory.look(tenant, name)
        body = None if about is None else await self._memory.find(tenant, name)
        return None if about is None or body is None else _read(about, body)

    async def _list(self, store: ByteStore, tenant: str) -> list[CachedContent]:
        """What lost its body is among them."""
        listed = [_read(about, b"") for about in (await store.all_of(tenant)).values()]
        return [content for content in listed if content is not None]

    async def _write(
        self, store: ByteStore, tenant: str, content: CachedContent, *, refuse: bool = False, restore: bool = False
    ) -> Put:
        ttl_s, size, about = content.expires_s - self._now(), content.num_bytes, _about(content)
        return await store.put(
            tenant, content.name, content.body, ttl_s, about=about, num_bytes=size, refuse=refuse, restore=restore
        )

    def _check(self, put: Put) -> None:
        limits = self._limits
        if put == "entries":
            most = limits.max_contents
            raise QuotaError(f"You keep {most} cached contents, which is the limit.")
        if put == "bytes":
            raise QuotaError(
                f"Your cached contents would be larger than {limits.max_bytes} bytes, which is the limit "
                "(gemini.max_bytes)."
            )


def _about(content: CachedContent) -> bytes:
    return orjson.dumps({name: value for name, value in asdict(content).items() if name != "body"})


def _read(about: bytes, body: bytes) -> CachedContent | None:
    """None for what no gateway wrote."""
    return read_or_skip(STORE, partial(_parse, about, body))


def _parse(about: bytes, body: bytes) -> CachedContent:
    read: dict[str, Any] = orjson.loads(about)
    content = CachedContent(**read, body=body)
    times = (content.created_s, content.updated_s, content.expires_s)
    texts = (content.name, content.model, content.display_name)
    if not all(0 <= time_s < _NO_TIME_S for time_s in times) or not all(isinstance(text, str) for text in texts):
        raise ValueError("no content")
    if not (0 <= content.num_bytes < UNLIMITED and 0 <= content.tokens < UNLIMITED):
        raise ValueError("no content")
    return content
