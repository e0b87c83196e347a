"""Cached contents of the Gemini API, stored until a time. Bodies never change.

They are in Redis for all gateways, or without it in memory. Memory also has copies of what this gateway has
written to Redis or read from it: a copy saves reading the body again, and is used while Redis is unreachable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import orjson

from gateway.config import GeminiSettings
from gateway.errors import QuotaError, RedisDownError
from gateway.storage.byte_store import UNLIMITED, ByteStore, Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_calls import read_or_skip
from gateway.types import CachedContent

STORE: Final = "contents"
_NO_TIME_S: Final = 250e9
"""A second since 1970 that no clock shows: Python's dates end before it."""


def quota_of(limits: GeminiSettings) -> Quota:
    """Of one tenant."""
    return Quota(entries=limits.max_contents, bytes=limits.max_bytes)


class ContentStore:
    """Every method raises RedisDownError for what only Redis can know."""

    def __init__(self, limits: GeminiSettings, now: Callable[[], float], redis: ByteStore | None = None) -> None:
        """`now` is seconds since 1970. `redis` has the quota of `quota_of`."""
        self._limits = limits
        self._now = now
        self._copies = MemoryBytes(quota_of(limits), now)
        self._store: ByteStore = redis or self._copies

    async def put(self, tenant: str, content: CachedContent) -> None:
        """In place of what has the same name. Raises QuotaError past the limits of the tenant."""
        put = await self._write(self._store, tenant, content, refuse=True)
        if put == "entries":
            raise QuotaError(f"You keep {self._limits.max_contents} cached contents, which is the limit.")
        if put == "bytes":
            raise QuotaError(
                f"Your cached contents would be larger than {self._limits.max_bytes} bytes, which is the limit "
                "(gemini.max_bytes)."
            )
        if self._store is not self._copies:
            await self._write(self._copies, tenant, content)

    async def find(self, tenant: str, name: str) -> CachedContent | None:
        copy = await self._read(self._copies, tenant, name, await self._copies.look(tenant, name), None)
        try:
            about = await self._store.look(tenant, name)
            content = await self._read(self._store, tenant, name, about, copy)
        except RedisDownError:
            if copy is None:
                raise
            return copy
        if content is None:
            await self._copies.remove(tenant, name)
        elif content != copy:
            await self._write(self._copies, tenant, content)
        return content

    async def all_of(self, tenant: str) -> list[CachedContent]:
        """All that the tenant has, in any order, without bodies. What lost its body is among them."""
        listed = [_parse_about(about, b"") for about in (await self._store.all_of(tenant)).values()]
        return [content for content in listed if content is not None]

    async def extend(self, tenant: str, content: CachedContent, expires_s: float) -> CachedContent | None:
        """Sets its end, earlier or later; returns it without its body. None when it is not there any more."""
        extended = replace(content, body=b"", expires_s=expires_s, updated_s=self._now())
        is_there = await self._store.extend(tenant, content.name, expires_s - self._now(), _about(extended))
        return extended if is_there else None

    async def delete(self, tenant: str, name: str) -> bool:
        """Whether it was there."""
        was_there = await self._store.remove(tenant, name)
        await self._copies.remove(tenant, name)
        return was_there

    async def _read(
        self, store: ByteStore, tenant: str, name: str, about: bytes | None, copy: CachedContent | None
    ) -> CachedContent | None:
        """The content with this `about`, and the copy's body if there is one."""
        if about is None:
            return None
        body = await store.find(tenant, name) if copy is None else copy.body
        return None if body is None else _parse_about(about, body)

    async def _write(self, store: ByteStore, tenant: str, content: CachedContent, *, refuse: bool = False) -> str:
        ttl_s, size, about = content.expires_s - self._now(), content.num_bytes, _about(content)
        return await store.put(tenant, content.name, content.body, ttl_s, about=about, num_bytes=size, refuse=refuse)


def _about(content: CachedContent) -> bytes:
    return orjson.dumps({name: value for name, value in asdict(content).items() if name != "body"})


def _parse_about(about: bytes, body: bytes) -> CachedContent | None:
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
