"""Cached contents in Redis, with copies in this gateway's memory for what it made or used.

Redis answers             what it has counts. What it has lost (evicted, restarted empty) is put back from a copy,
                          unless it was deleted
Redis is unreachable      copies are used, and new contents are this gateway's alone until it is back. Nothing can be
                          changed or deleted: other gateways would not hear of it
"""

from __future__ import annotations

from gateway.contents.memory_contents import MemoryContents
from gateway.contents.redis_contents import RedisContents, told
from gateway.errors import QuotaError, RedisDownError
from gateway.types import CachedContent


class SharedContents:
    """A ContentStore. `extend` and `delete` raise RedisDownError while Redis is unreachable."""

    def __init__(self, redis: RedisContents, memory: MemoryContents) -> None:
        self._redis = redis
        self._memory = memory

    async def put(self, tenant: str, content: CachedContent) -> None:
        """See base.py."""
        try:
            await self._redis.put(tenant, content)
        except RedisDownError:
            await self._memory.put(tenant, content)
        else:
            self._memory.copy(tenant, content)

    async def find(self, tenant: str, name: str) -> CachedContent | None:
        """See base.py."""
        copy = await self._memory.find(tenant, name)
        try:
            found, was_deleted = await self._redis.look(tenant, name)
            if found is not None and copy is None:
                content = await self._redis.find(tenant, name)
            elif found is not None and copy is not None:
                content = told(found, copy.body)
            elif copy is not None and not was_deleted:
                content = await self._put_back(tenant, copy)
            else:
                content = None
        except RedisDownError:
            return copy
        if content is None:
            await self._memory.delete(tenant, name)
        elif copy is None or copy.expires_s != content.expires_s:
            self._memory.copy(tenant, content)
        return content

    async def all_of(self, tenant: str) -> list[CachedContent]:
        """See base.py."""
        copies = await self._memory.all_of(tenant)
        try:
            listed = await self._redis.all_of(tenant)
        except RedisDownError:
            return copies
        names = {content.name for content in listed}
        lost = [await self.find(tenant, copy.name) for copy in copies if copy.name not in names]
        return [*listed, *(content for content in lost if content is not None)]

    async def extend(self, tenant: str, name: str, expires_s: float) -> CachedContent | None:
        """See base.py."""
        content = await self.find(tenant, name)
        if content is None:
            return None
        extended = await self._redis.extend(tenant, name, expires_s)
        if extended is not None:
            await self._memory.extend(tenant, name, expires_s)
        return extended

    async def delete(self, tenant: str, name: str) -> bool:
        """See base.py."""
        if await self.find(tenant, name) is None:
            return False
        was_there = await self._redis.delete(tenant, name)
        await self._memory.delete(tenant, name)
        return was_there

    async def _put_back(self, tenant: str, copy: CachedContent) -> CachedContent | None:
        try:
            return copy if await self._redis.put_back(tenant, copy) else None
        except QuotaError:
            return copy  # other gateways took the room meanwhile
