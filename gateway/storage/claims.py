"""Work that one gateway does for all that share a Redis: keys that the first one sets.

kvasir:<store>:claim:<name>   empty; its time to live is that of the claim
"""

from __future__ import annotations

from gateway.storage.redis_calls import RedisCalls


class RedisClaims:
    """Of one kind of work. Both methods raise RedisDownError."""

    def __init__(self, calls: RedisCalls, store: str) -> None:
        self._calls, self._prefix = calls, f"kvasir:{store}:claim:"

    async def take(self, name: str, ttl_s: float) -> bool:
        """Whether no gateway had it; then it is this one's for so long. Atomic."""
        key, ttl_ms = self._prefix + name, max(1, round(ttl_s * 1e3))
        return bool(await self._calls.ask(self._calls.redis.set(key, b"", nx=True, px=ttl_ms)))

    async def drop(self, name: str) -> None:
        """Of this gateway."""
        await self._calls.ask(self._calls.redis.delete(self._prefix + name))
