"""Bytes in this process, for a gateway without a Redis: they end with it, and other gateways do not have them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from gateway.config import StoredResponseSettings


class _Body(NamedTuple):
    body: bytes
    expires_s: float


class MemoryStore:
    """See Store in base.py. Never down."""

    def __init__(self, settings: StoredResponseSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._tenants: dict[str, OrderedDict[str, _Body]] = {}  # kept first, first
        self._bytes: dict[str, int] = {}

    async def put(self, tenant: str, key: str, body: bytes) -> bool:
        settings = self._settings
        if len(body) > settings.largest_bytes or not settings.max_responses:
            return False
        held = self._held(tenant)
        self._remove(tenant, key)
        room = settings.max_bytes - len(body)
        while held and (len(held) >= settings.max_responses or self._bytes.get(tenant, 0) > room or self._over(held)):
            self._remove(tenant, next(iter(held)))
        held[key] = _Body(body, self._now() + settings.ttl_s)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + len(body)
        return True

    async def replace(self, tenant: str, key: str, before: bytes, body: bytes) -> bool:
        return await self.find(tenant, key) == before and await self.put(tenant, key, body)  # neither waits

    async def find(self, tenant: str, key: str) -> bytes | None:
        found = self._held(tenant).get(key)
        return found.body if found is not None and self._now() < found.expires_s else None

    async def delete(self, tenant: str, key: str) -> bool:
        there = await self.find(tenant, key) is not None
        self._remove(tenant, key)
        return there

    def _held(self, tenant: str) -> OrderedDict[str, _Body]:
        return self._tenants.setdefault(tenant, OrderedDict())

    def _over(self, held: OrderedDict[str, _Body]) -> bool:
        """The time of the first."""
        return next(iter(held.values())).expires_s <= self._now()

    def _remove(self, tenant: str, key: str) -> None:
        removed = self._held(tenant).pop(key, None)
        if removed is not None:
            self._bytes[tenant] -= len(removed.body)
