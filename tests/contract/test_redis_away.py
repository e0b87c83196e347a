"""Whoever asks Redis ends in time when it hangs, and says so in the stage's own words: every store, in a burst."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.config import (
    BatchSettings,
    GeminiSettings,
    ResponseCacheSettings,
    SemanticCacheSettings,
    StoredResponseSettings,
)
from gateway.contents.base import ContentsDownError
from gateway.contents.redis_contents import RedisContents
from gateway.errors import OverloadedError
from gateway.index.base import IndexDownError
from gateway.index.redis_index import RedisIndex
from gateway.ledger.base import BookDownError
from gateway.ledger.redis_book import RedisBook
from gateway.limits.base import CountersDownError, Take
from gateway.limits.redis_counters import RedisCounters
from gateway.queues.batch.redis_jobs import RedisJobs
from gateway.queues.batch.redis_scripts import RedisScripts
from gateway.redis_calls import MAX_CALLS, connect
from gateway.responses.entries import EntriesDownError
from gateway.responses.redis_entries import RedisEntries
from gateway.responses.semantic.redis_questions import QuestionsDownError, RedisQuestions
from gateway.stores.base import StoreDownError
from gateway.stores.redis_store import RedisStore

TIMEOUT_S = 0.1
BURST = 16 * MAX_CALLS
MOST_S = 200 * TIMEOUT_S
"""On a machine that does other things, too; one after the other they would take more than twice as long."""

KINDS = (
    CountersDownError,
    StoreDownError,
    EntriesDownError,
    QuestionsDownError,
    ContentsDownError,
    BookDownError,
    IndexDownError,
    OverloadedError,
)
"""What each of those who ask Redis says when it is away; the last one is the batch lane's."""


def ask(kind: type[Exception], redis: Redis, timeout_s: float) -> Callable[[], Awaitable[object]]:
    """A call of the store that raises errors of this kind."""
    if kind is CountersDownError:
        counters = RedisCounters(redis, lease_s=60, timeout_s=timeout_s)
        return lambda: counters.take("a", Take({"requests": 1}))
    if kind is StoreDownError:
        store = RedisStore(redis, StoredResponseSettings(), timeout_s=timeout_s)
        return lambda: store.put("a", "1", b"x")
    if kind is EntriesDownError:
        entries = RedisEntries(redis, ResponseCacheSettings(), timeout_s=timeout_s, now=time.time)
        return lambda: entries.find("tenant:a", "1")
    if kind is QuestionsDownError:
        questions = RedisQuestions(redis, SemanticCacheSettings(), timeout_s=timeout_s)
        return lambda: questions.changes("tenant:a/m", 0)
    if kind is ContentsDownError:
        contents = RedisContents(redis, GeminiSettings(), time.time, timeout_s=timeout_s)
        return lambda: contents.find("a", "1")
    if kind is BookDownError:
        book = RedisBook(redis, timeout_s=timeout_s)
        return lambda: book.read("0", "9")
    if kind is IndexDownError:
        index = RedisIndex(redis, timeout_s=timeout_s)
        return lambda: index.find("m", bytes(16), ["one"])
    jobs = RedisJobs(RedisScripts(redis, timeout_s=timeout_s), BatchSettings())
    return jobs.open


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """URL of a server that takes connections, and says nothing."""

    async def nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await closing.wait()
        writer.close()

    closing = asyncio.Event()
    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    closing.set()
    server.close()
    await server.wait_closed()


async def burst(kind: type[Exception], url: str, timeout_s: float = TIMEOUT_S) -> tuple[set[type[object]], float]:
    """What came of it, and after how long."""
    redis = connect(url, timeout_s)
    call, begun_s = ask(kind, redis, timeout_s), time.monotonic()
    try:
        answers = await asyncio.gather(*(call() for _ in range(BURST)), return_exceptions=True)
        return {type(answer) for answer in answers}, time.monotonic() - begun_s
    finally:
        await redis.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_redis_that_hangs_is_left_in_time(silent: str, kind: type[Exception]) -> None:
    kinds, took_s = await burst(kind, silent)
    assert kinds == {kind}
    assert took_s < MOST_S


@pytest.mark.parametrize("kind", KINDS)
async def test_a_redis_that_refuses_is_left_at_once(tmp_path: Path, kind: type[Exception]) -> None:
    kinds, took_s = await burst(kind, f"unix://{tmp_path}/none.sock")
    assert kinds == {kind}
    assert took_s < MOST_S


@pytest.mark.parametrize("kind", KINDS)
async def test_a_redis_that_answers_answers_all_of_a_burst(redis_url: str, kind: type[Exception]) -> None:
    kinds, _ = await burst(kind, redis_url, timeout_s=10.0)
    assert kind not in kinds
