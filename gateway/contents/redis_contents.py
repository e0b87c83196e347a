"""Cached contents in Redis, which all gateways share.

    kvasir:contents:{TENANT}             hash: name -> JSON of everything but the body
    kvasir:contents:{TENANT}:body:NAME   the body, with the end of the content as its own
    kvasir:contents:{TENANT}:gone:NAME   it was deleted; copies of it are not to be used

The keys of one tenant have one slot of a Redis Cluster. Redis may evict any of them: a content without its body is
not there. Ends are the gateway's own to judge; those of the keys only clean up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson
from redis.asyncio import Redis

from gateway.config import GeminiSettings
from gateway.contents.base import too_large, too_many
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.storage.scripts import script
from gateway.types import CachedContent

_STORE: Final = "cached contents"
_NO_TIME_S: Final = 250e9
"""A second since 1970 that no clock shows: Python's dates end before it."""


class RedisContents:
    """A ContentStore. Every call raises RedisDownError."""

    def __init__(
        self,
        redis: Redis,
        limits: GeminiSettings,
        now: Callable[[], float],
        *,
        timeout_s: float,
        breaker: RedisBreaker | None = None,
    ) -> None:
        """`redis` is the caller's: it is not closed here. `now` is seconds since 1970."""
        self._redis = redis
        self._limits = limits
        self._now = now
        self._calls = RedisCalls(timeout_s, breaker)
        self._put_script = redis.register_script(script(__package__, "put.lua"))
        self._extend_script = redis.register_script(script(__package__, "extend.lua"))
        self._delete_script = redis.register_script(script(__package__, "delete.lua"))

    async def put(self, tenant: str, content: CachedContent) -> None:
        """See base.py."""
        await self._put(tenant, content, anew=True)

    async def put_back(self, tenant: str, content: CachedContent) -> bool:
        """Keeps what Redis has lost. False when it was deleted."""
        return await self._put(tenant, content, anew=False)

    async def find(self, tenant: str, name: str) -> CachedContent | None:
        """See base.py."""
        found, _ = await self.look(tenant, name)
        if found is None:
            return None
        _, body, _ = _keys(tenant, name)
        written: Any = await self._calls.ask_or_skip(_STORE, self._redis.get(body), None)
        return None if written is None else told(found, bytes(written))

    async def look(self, tenant: str, name: str) -> tuple[dict[str, Any] | None, bool]:
        """What is said of a content that is there, as `told` reads it, and whether it was deleted. Without its body:
        whoever has a copy needs no other."""
        hash_, body, gone = _keys(tenant, name)
        asked = self._redis.pipeline(transaction=False)
        asked.hget(hash_, name)
        asked.exists(body)
        asked.exists(gone)
        entry, has_body, was_deleted = await self._calls.ask_each(_STORE, asked)
        found = _read(entry) if entry is not None and has_body else None
        if found is not None and found["expires_ms"] <= self._now_ms():
            found = None
        return found, bool(was_deleted)

    async def all_of(self, tenant: str) -> list[CachedContent]:
        """See base.py. What lost its body is among them."""
        entries: Any = await self._calls.ask_or_skip(_STORE, self._redis.hvals(_keys(tenant, "")[0]), [])
        parsed = [found for entry in entries if (found := _read(entry)) is not None]
        return [told(one, b"") for one in parsed if one["expires_ms"] > self._now_ms()]

    async def extend(self, tenant: str, name: str, expires_s: float) -> CachedContent | None:
        """See base.py."""
        hash_, body, _ = _keys(tenant, name)
        args: list[str | int] = [self._now_ms(), name, _ms(expires_s)]
        entry = await self._calls.ask(self._extend_script(keys=[hash_, body], args=args))
        found = None if entry is None else _read(entry)
        return None if found is None else told(found, b"")

    async def delete(self, tenant: str, name: str) -> bool:
        """See base.py."""
        now_ms = self._now_ms()
        args: list[str | int] = [now_ms, name, now_ms + _ms(self._limits.longest_s)]
        return bool(await self._calls.ask(self._delete_script(keys=_keys(tenant, name), args=args)))

    async def _put(self, tenant: str, content: CachedContent, *, anew: bool) -> bool:
        limits = self._limits
        args: list[bytes | str | int] = [
            self._now_ms(),
            content.name,
            orjson.dumps(_entry(content)),
            content.body,
            _ms(content.expires_s),
            content.num_bytes,
            limits.max_contents,
            limits.max_bytes,
            int(anew),
        ]
        kept = await self._calls.ask(self._put_script(keys=_keys(tenant, content.name), args=args))
        if kept in (b"many", b"large"):
            raise too_many(limits) if kept == b"many" else too_large(limits)
        return bool(kept == b"kept")

    def _now_ms(self) -> int:
        return _ms(self._now())


def _read(entry: bytes) -> dict[str, Any] | None:
    """What `told` reads; None for what is nothing of ours."""

    def read() -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(entry)
        content = told(found, b"")
        times = (content.created_s, content.updated_s, content.expires_s)
        texts = (content.name, content.model, content.display_name or "")
        if not all(0 <= time_s < _NO_TIME_S for time_s in times) or not all(isinstance(text, str) for text in texts):
            raise ValueError("no content")
        if not (0 <= content.num_bytes < 1 << 53 and 0 <= content.tokens < 1 << 53):
            raise ValueError("no content")
        return found

    return read_or_skip(_STORE, read)


def _keys(tenant: str, name: str) -> tuple[str, str, str]:
    """Of the tenant's hash, and of this content's body and mark."""
    tag = f"kvasir:contents:{{{tenant}}}"
    return tag, f"{tag}:body:{name}", f"{tag}:gone:{name}"


def _entry(content: CachedContent) -> dict[str, Any]:
    return {
        "name": content.name,
        "model": content.model,
        "num_bytes": content.num_bytes,
        "tokens": content.tokens,
        "created_ms": _ms(content.created_s),
        "updated_ms": _ms(content.updated_s),
        "expires_ms": _ms(content.expires_s),
        "display_name": content.display_name,
    }


def told(found: dict[str, Any], body: bytes) -> CachedContent:
    """What `look` found, with a body that somebody has."""
    return CachedContent(
        name=found["name"],
        model=found["model"],
        body=body,
        num_bytes=found["num_bytes"],
        tokens=found["tokens"],
        created_s=found["created_ms"] / 1e3,
        updated_s=found["updated_ms"] / 1e3,
        expires_s=found["expires_ms"] / 1e3,
        display_name=found["display_name"],
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)
