"""A store of bytes that is away, for tests of what such a failure costs."""

from __future__ import annotations

from gateway.errors import RedisDownError


class DownStore:
    """A Store that never answers."""

    async def put(self, tenant: str, key: str, body: bytes) -> bool:
        raise RedisDownError("away")

    async def replace(self, tenant: str, key: str, before: bytes, body: bytes) -> bool:
        raise RedisDownError("away")

    async def find(self, tenant: str, key: str) -> bytes | None:
        raise RedisDownError("away")

    async def delete(self, tenant: str, key: str) -> bool:
        raise RedisDownError("away")
