"""Cached contents in this process's memory: all there is without Redis, and copies of what is there with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.config import GeminiSettings
from gateway.contents.base import check_room
from gateway.types import CachedContent


class MemoryContents:
    """A ContentStore. At most gemini.max_contents and max_bytes for each tenant."""

    def __init__(self, limits: GeminiSettings, now: Callable[[], float]) -> None:
        """`now` is seconds since 1970."""
        self._limits = limits
        self._now = now
        self._tenants: dict[str, dict[str, CachedContent]] = {}

    async def put(self, tenant: str, content: CachedContent) -> None:
        """See base.py."""
        self._drop_ended()
        check_room(self._kept(tenant).values(), content, self._limits)
        self._tenants.setdefault(tenant, {})[content.name] = content

    def copy(self, tenant: str, content: CachedContent) -> None:
        """Keeps it in any case: what ends soonest makes way for it."""
        self._drop_ended()
        kept = self._kept(tenant)
        kept.pop(content.name, None)
        num_bytes = sum(one.num_bytes for one in kept.values())
        for name in sorted(kept, key=lambda name: kept[name].expires_s):
            if len(kept) < self._limits.max_contents and num_bytes + content.num_bytes <= self._limits.max_bytes:
                break
            num_bytes -= kept.pop(name).num_bytes
        self._tenants.setdefault(tenant, kept)[content.name] = content

    async def find(self, tenant: str, name: str) -> CachedContent | None:
        """See base.py."""
        return self._kept(tenant).get(name)

    async def all_of(self, tenant: str) -> list[CachedContent]:
        """See base.py."""
        return [replace(content, body=b"") for content in self._kept(tenant).values()]

    async def extend(self, tenant: str, name: str, expires_s: float) -> CachedContent | None:
        """See base.py."""
        kept = self._kept(tenant)
        if name not in kept:
            return None
        kept[name] = replace(kept[name], expires_s=expires_s, updated_s=self._now())
        return replace(kept[name], body=b"")

    async def delete(self, tenant: str, name: str) -> bool:
        """See base.py."""
        return self._kept(tenant).pop(name, None) is not None

    def _kept(self, tenant: str) -> dict[str, CachedContent]:
        """What has not ended; what has is dropped."""
        kept = self._tenants.get(tenant, {})
        now = self._now()
        for name in [name for name, content in kept.items() if content.expires_s <= now]:
            del kept[name]
        if not kept:
            self._tenants.pop(tenant, None)
        return kept

    def _drop_ended(self) -> None:
        """Of all tenants, so that nothing stays that nobody asks for."""
        for tenant in list(self._tenants):
            self._kept(tenant)
