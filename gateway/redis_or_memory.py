"""What the gateway keeps, and where: in Redis, which all gateways share, or in its own memory where there is none.

One method for each store. Some are both: memory first, or memory for as long as Redis is unreachable. What is None
without Redis is only for other gateways. app.py hands them to their stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from gateway.config import Settings, StoredResponseSettings
from gateway.contents.memory_contents import MemoryContents
from gateway.contents.redis_contents import RedisContents
from gateway.contents.shared_contents import SharedContents
from gateway.index.fallback import FallbackIndex
from gateway.index.memory_index import MemoryIndex
from gateway.index.redis_index import RedisIndex
from gateway.ledger.base import Book
from gateway.ledger.memory_book import MemoryBook
from gateway.ledger.redis_book import RedisBook
from gateway.limits.memory_counters import MemoryCounters
from gateway.limits.redis_counters import RedisCounters
from gateway.limits.shared_counters import SharedCounters
from gateway.responses.redis_entries import RedisEntries
from gateway.responses.redis_removals import RedisRemovals
from gateway.responses.semantic.redis_questions import RedisQuestions
from gateway.storage.breaker import RedisBreaker
from gateway.stores.base import Store
from gateway.stores.memory_store import MemoryStore
from gateway.stores.redis_store import RedisStore

REDIS_RETRY_S: Final = 1.0
"""Without Redis after a failure, before it is asked again: a gateway notices its return within a second."""


@dataclass
class RedisOrMemory:
    """The stores of one gateway. `breaker` is that of all of them but the batches, whose calls may take longer."""

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

    def index(self, memory: MemoryIndex) -> FallbackIndex:
        """Which engine holds which blocks. `memory` is fed by the engines themselves."""
        shared = None if self.redis is None else RedisIndex(self.redis, **self._calls)
        return FallbackIndex(shared, memory, retry_s=REDIS_RETRY_S)

    def counters(self) -> SharedCounters:
        """What counts tenants' requests and tokens."""
        lease_s = self.settings.limits.lease_s
        shared = None if self.redis is None else RedisCounters(self.redis, lease_s=lease_s, **self._calls)
        return SharedCounters(shared, MemoryCounters(lease_s=lease_s))

    def contents(self) -> MemoryContents | SharedContents:
        """What clients of the Gemini API have us keep."""
        memory = MemoryContents(self.settings.gemini, time.time)
        if self.redis is None:
            return memory
        return SharedContents(RedisContents(self.redis, self.settings.gemini, time.time, **self._calls), memory)

    def book(self) -> Book:
        """The rows of the ledger."""
        return MemoryBook() if self.redis is None else RedisBook(self.redis, **self._calls)

    def stored_responses(self) -> Store:
        """Responses that clients may ask for again, or continue."""
        return self._store("responses", self.settings.stored_responses)

    def fingerprints(self) -> Store:
        """Of prompts, for telling a client of the Anthropic API why one missed the cache."""
        return self._store("fingerprints", self.settings.anthropic.fingerprints)

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

    def removals(self) -> RedisRemovals | None:
        """What operators removed, for all gateways to hear of."""
        return None if self.redis is None else RedisRemovals(self.redis, **self._calls)

    def _store(self, name: str, limits: StoredResponseSettings) -> Store:
        if self.redis is None:
            return MemoryStore(limits)
        return RedisStore(self.redis, limits, name=name, **self._calls)
