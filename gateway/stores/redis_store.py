"""Bytes in Redis, shared by all gateways. A body has a key and a time to live of its own; two more keys of each
tenant say in which order they were kept and how large they are. All keys of a tenant are in one slot of a cluster.

    kvasir:{NAME:TENANT}:ID       the body
    kvasir:{NAME:TENANT}.order    sorted set: id, the Unix millisecond at which it expires
    kvasir:{NAME:TENANT}.sizes    hash: id, bytes; and the sum, under the empty name
"""

from __future__ import annotations

import hashlib
from typing import Any

from redis.asyncio import Redis

from gateway.config import StoredResponseSettings
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls
from gateway.storage.scripts import script


class RedisStore:
    """See Store in base.py."""

    def __init__(
        self,
        redis: Redis,
        settings: StoredResponseSettings,
        *,
        timeout_s: float,
        breaker: RedisBreaker | None = None,
        name: str = "responses",
    ) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call. `name` is that of the keys."""
        self._name = name
        self._redis = redis
        self._settings = settings
        self._calls = RedisCalls(timeout_s, breaker)
        self._put = redis.register_script(script(__package__, "put.lua"))
        self._delete = redis.register_script(script(__package__, "delete.lua"))

    async def put(self, tenant: str, key: str, body: bytes) -> bool:
        return await self._keep(tenant, key, body)

    async def replace(self, tenant: str, key: str, before: bytes, body: bytes) -> bool:
        return await self._keep(tenant, key, body, hashlib.sha1(before, usedforsecurity=False).hexdigest())

    async def _keep(self, tenant: str, key: str, body: bytes, *before: str) -> bool:
        settings = self._settings
        if len(body) > settings.largest_bytes or not settings.max_responses:
            return False
        limits = [round(settings.ttl_s * 1e3), settings.max_responses, settings.max_bytes]
        return bool(
            await self._calls.ask(self._put(keys=_keys(self._name, tenant), args=[key, body, *limits, *before]))
        )

    async def find(self, tenant: str, key: str) -> bytes | None:
        asked = self._redis.get(f"{_prefix(self._name, tenant)}:{key}")
        body: Any = await self._calls.ask_or_skip(self._name, asked, None)
        return None if body is None else bytes(body)

    async def delete(self, tenant: str, key: str) -> bool:
        return bool(await self._calls.ask(self._delete(keys=_keys(self._name, tenant), args=[key])))


def _prefix(name: str, tenant: str) -> str:
    return f"kvasir:{{{name}:{tenant}}}"


def _keys(name: str, tenant: str) -> list[str]:
    """KEYS of the scripts; the third is what the ids of bodies are put behind."""
    prefix = _prefix(name, tenant)
    return [f"{prefix}.order", f"{prefix}.sizes", f"{prefix}:"]
