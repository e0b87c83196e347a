"""What keeps bytes for those who remember something of earlier requests: stored responses, diagnostics.

A store belongs to tenants: what one has kept does not exist for another. It is bounded by count, bytes and time, and
what was kept first goes first.
"""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Bytes by tenant and key. Every method raises RedisDownError."""

    async def put(self, tenant: str, key: str, body: bytes) -> bool:
        """In place of what was kept under this key. False, and nothing changed, if it is larger than one may be."""
        ...

    async def replace(self, tenant: str, key: str, before: bytes, body: bytes) -> bool:
        """As `put`, if `before` is what is kept. Atomic: nothing comes between. False, and nothing changed, if not."""
        ...

    async def find(self, tenant: str, key: str) -> bytes | None: ...

    async def delete(self, tenant: str, key: str) -> bool:
        """Whether it was there."""
        ...
