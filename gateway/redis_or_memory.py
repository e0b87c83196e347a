"""What the gateway keeps, and where: in Redis, which all gateways share, or in its own memory where there is none.

One function for each store. Some are both: memory first, or memory for as long as Redis is away. What is None without
Redis is only for other gateways. app.py hands them to their stages.
"""

from __future__ import annotations

import time

from redis.asyncio import Redis

from gateway.config import Settings
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
from gateway.stores.base import Store
from gateway.stores.memory_store import MemoryStore
from gateway.stores.redis_store import RedisStore


def index(settings: Settings, redis: Redis | None, memory: MemoryIndex) -> FallbackIndex:
    """Who holds which blocks. `memory` is fed by the engines themselves."""
    shared = None if redis is None else RedisIndex(redis, timeout_s=settings.redis.timeout_s)
    return FallbackIndex(shared, memory, retry_s=settings.redis.retry_s)


def counters(settings: Settings, redis: Redis | None) -> SharedCounters:
    """What counts tenants' requests and tokens."""
    lease_s, retry_s = settings.limits.lease_s, settings.redis.retry_s
    memory = MemoryCounters(lease_s=lease_s)
    shared = None if redis is None else RedisCounters(redis, lease_s=lease_s, timeout_s=settings.redis.timeout_s)
    return SharedCounters(shared, memory, retry_s=retry_s)


def contents(settings: Settings, redis: Redis | None) -> MemoryContents | SharedContents:
    """What clients of the Gemini API have us keep."""
    memory = MemoryContents(settings.gemini, time.time)
    if redis is None:
        return memory
    shared = RedisContents(redis, settings.gemini, time.time, timeout_s=settings.redis.timeout_s)
    return SharedContents(shared, memory, retry_s=settings.redis.retry_s, clock=time.monotonic)


def book(settings: Settings, redis: Redis | None) -> Book:
    """The rows of the ledger."""
    return MemoryBook() if redis is None else RedisBook(redis, timeout_s=settings.redis.timeout_s)


def stored_responses(settings: Settings, redis: Redis | None) -> Store:
    """Responses that clients may ask for again, or continue."""
    if redis is None:
        return MemoryStore(settings.stored_responses)
    return RedisStore(redis, settings.stored_responses, timeout_s=settings.redis.timeout_s)


def fingerprints(settings: Settings, redis: Redis | None) -> Store:
    """Of prompts, for telling a client of the Anthropic API why one missed the cache."""
    limits = settings.anthropic.fingerprints
    if redis is None:
        return MemoryStore(limits)
    return RedisStore(redis, limits, timeout_s=settings.redis.timeout_s, name="fingerprints")


def shared_answers(settings: Settings, redis: Redis | None) -> RedisEntries | None:
    """Answers that are kept, for all gateways."""
    own = settings.response_cache
    if redis is None or not own.max_redis_bytes:
        return None
    return RedisEntries(redis, own, timeout_s=settings.redis.timeout_s, now=time.time)


def shared_questions(settings: Settings, redis: Redis | None) -> RedisQuestions | None:
    """Questions that were answered, for the semantic caches of all gateways."""
    own = settings.semantic_cache
    if redis is None or not own.max_redis_bytes:
        return None
    return RedisQuestions(redis, own, timeout_s=settings.redis.timeout_s)


def shared_removals(settings: Settings, redis: Redis | None) -> RedisRemovals | None:
    """What operators removed, for all gateways to hear of."""
    return None if redis is None else RedisRemovals(redis, timeout_s=settings.redis.timeout_s)
