"""Where the gateway stores what outlives a request: in Redis, which all gateways share, or in memory without one.

One method for each store. Some are both: memory first, or memory for as long as Redis is unreachable. What is None
without Redis is only for other gateways. app.py hands them to their stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from gateway.api.gemini import content_store
from gateway.api.gemini.content_store import ContentStore
from gateway.config import Settings, StoredResponseSettings
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.ledger.books import Book, MemoryBook, RedisBook
from gateway.limits.counters import MemoryCounters, RedisCounters, SharedCounters
from gateway.responses.entry_stores import RedisEntries
from gateway.responses.semantic.questions import RedisQuestions
from gateway.responses.stored_answers import RemovalEpoch
from gateway.storage.breaker import RedisBreaker
from gateway.storage.byte_store import ByteStore, Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls

REDIS_RETRY_S: Final = 1.0
"""Without Redis after a failure, before it is asked again: a gateway notices its return within a second."""


@dataclass
class RedisOrMemory:
    """The stores of one gateway. `breaker` is that of all of them, and of the batches."""

    settings: Settings
    redis: Redis | None
    breaker: RedisBreaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = RedisBreaker(retry_s=REDIS_RETRY_S)

    @property
    def _calls(self) -> RedisCalls | None:
        """Of one store: none waits for a turn behind another. None without Redis."""
        return None if self.redis is None else RedisCalls(self.redis, self.settings.redis.timeout_s, self.breaker)

    def figures(self) -> dict[str, Any]:
        """For /metrics and /admin/stats."""
        return {"up": self.redis is not None and self.breaker.up, "outages": self.breaker.outages}

    def index(self, memory: MemoryIndex) -> PrefixIndex:
        """Which engine holds which blocks. `memory` is fed by the engines themselves."""
        return PrefixIndex(memory, self._calls, retry_s=REDIS_RETRY_S)

    def counters(self) -> SharedCounters:
        """What counts tenants' requests and tokens."""
        lease_s, calls = self.settings.limits.lease_s, self._calls
        shared = None if calls is None else RedisCounters(calls, lease_s=lease_s)
        return SharedCounters(shared, MemoryCounters(lease_s=lease_s))

    def contents(self) -> ContentStore:
        """Cached contents of the Gemini API."""
        limits, calls = self.settings.gemini, self._calls
        shared = (
            None if calls is None else RedisBytes(calls, content_store.STORE, content_store.quota_of(limits), time.time)
        )
        return ContentStore(limits, time.time, shared)

    def book(self) -> Book:
        """The rows of the ledger."""
        return MemoryBook() if (calls := self._calls) is None else RedisBook(calls)

    def stored_responses(self) -> ByteStore:
        """Responses that clients may ask for again, or continue."""
        return self._bytes("responses", self.settings.stored_responses)

    def fingerprints(self) -> ByteStore:
        """Of prompts, for telling a client of the Anthropic API why one missed the cache."""
        return self._bytes("fingerprints", self.settings.anthropic.fingerprints)

    def answers(self) -> RedisEntries | None:
        """Remembered answers, for all gateways."""
        own, calls = self.settings.response_cache, self._calls
        return None if calls is None or not own.max_redis_bytes else RedisEntries(calls, own, time.time)

    def questions(self) -> RedisQuestions | None:
        """Questions that were answered, for the semantic caches of all gateways."""
        own, calls = self.settings.semantic_cache, self._calls
        return None if calls is None or not own.max_redis_bytes else RedisQuestions(calls, own)

    def removals(self) -> RemovalEpoch | None:
        """Counts what operators removed, for all gateways to hear of."""
        return None if (calls := self._calls) is None else RemovalEpoch(calls)

    def _bytes(self, name: str, limits: StoredResponseSettings) -> ByteStore:
        calls, quota = self._calls, quota_of(limits)
        return MemoryBytes(quota, time.time) if calls is None else RedisBytes(calls, name, quota, time.time)


def quota_of(limits: StoredResponseSettings) -> Quota:
    """Of one tenant."""
    return Quota(limits.max_responses, limits.max_bytes, limits.max_response_bytes, ttl_s=limits.ttl_s)
