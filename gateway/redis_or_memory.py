"""What the gateway keeps, and where: in Redis, which all gateways share, or in its own memory where there is none.

One method for each store. Some are both: memory first, or memory for as long as Redis is unreachable. What is None
without Redis is only for other gateways. app.py hands them to their stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from gateway import contents
from gateway.config import Settings, StoredResponseSettings
from gateway.contents import Contents
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.ledger.books import Book, MemoryBook, RedisBook
from gateway.limits.counters import MemoryCounters, RedisCounters, SharedCounters
from gateway.responses.entry_stores import RedisEntries
from gateway.responses.removals import RemovalEpoch
from gateway.responses.semantic.questions import RedisQuestions
from gateway.storage.breaker import RedisBreaker
from gateway.storage.byte_store import ByteStore, Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_bytes import RedisBytes

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
    def _calls(self) -> dict[str, Any]:
        """How each store asks Redis."""
        return {"timeout_s": self.settings.redis.timeout_s, "breaker": self.breaker}

    def figures(self) -> dict[str, Any]:
        """For /metrics and /admin/stats."""
        return {"up": self.redis is not None and self.breaker.up, "outages": self.breaker.outages}

    def index(self, memory: MemoryIndex) -> PrefixIndex:
        """Which engine holds which blocks. `memory` is fed by the engines themselves."""
        return PrefixIndex(memory, self.redis, retry_s=REDIS_RETRY_S, **self._calls)

    def counters(self) -> SharedCounters:
        """What counts tenants' requests and tokens."""
        lease_s = self.settings.limits.lease_s
        shared = None if self.redis is None else RedisCounters(self.redis, lease_s=lease_s, **self._calls)
        return SharedCounters(shared, MemoryCounters(lease_s=lease_s))

    def contents(self) -> Contents:
        """What clients of the Gemini API have us keep."""
        limits, quota = self.settings.gemini, contents.quota_of(self.settings.gemini)
        shared = None if self.redis is None else RedisBytes(self.redis, contents.STORE, quota, time.time, **self._calls)
        return Contents(limits, time.time, MemoryBytes(quota, time.time), shared)

    def book(self) -> Book:
        """The rows of the ledger."""
        return MemoryBook() if self.redis is None else RedisBook(self.redis, **self._calls)

    def stored_responses(self) -> ByteStore:
        """Responses that clients may ask for again, or continue."""
        return self._bytes("responses", self.settings.stored_responses)

    def fingerprints(self) -> ByteStore:
        """Of prompts, for telling a client of the Anthropic API why one missed the cache."""
        return self._bytes("fingerprints", self.settings.anthropic.fingerprints)

    def answers(self) -> RedisEntries | None:
        """Answers that are kept, for all gateways."""
        own = self.settings.response_cache
        if self.redis is None or not own.max_redis_bytes:
            return None
        return RedisEntries(self.redis, own, now=time.time, **self._calls)

    def questions(self) -> RedisQuestions | None:
        """Questions that were answered, for the semantic caches of all gateways."""
        own = self.settings.semantic_cache
        if self.redis is None or not own.max_redis_bytes:
            return None
        return RedisQuestions(self.redis, own, **self._calls)

    def removals(self) -> RemovalEpoch | None:
        """Counts what operators removed, for all gateways to hear of."""
        return None if self.redis is None else RemovalEpoch(self.redis, **self._calls)

    def _bytes(self, name: str, limits: StoredResponseSettings) -> ByteStore:
        quota = quota_of(limits)
        if self.redis is None:
            return MemoryBytes(quota, time.time)
        return RedisBytes(self.redis, name, quota, time.time, **self._calls)


def quota_of(limits: StoredResponseSettings) -> Quota:
    """Of one tenant."""
    return Quota(limits.max_responses, limits.max_bytes, limits.max_response_bytes, ttl_s=limits.ttl_s)
