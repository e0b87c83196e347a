"""Whoever asks Redis ends in time when it hangs, and says so in the stage's own words: every store, in a burst."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway import app
from gateway.api.gemini.content_store import STORE, ContentStore, quota_of
from gateway.config import (
    BatchSettings,
    GeminiSettings,
    RedisSettings,
    ResponseCacheSettings,
    SemanticCacheSettings,
    ServerSettings,
    Settings,
)
from gateway.errors import RedisDownError
from gateway.ledger.books import RedisBook
from gateway.limits.counters import RedisCounters, Take
from gateway.queues.batch.redis_jobs import RedisJobs, RedisScripts
from gateway.responses.entry_stores import RedisEntries
from gateway.responses.semantic.questions import RedisQuestions
from gateway.serving import close_with
from gateway.storage.byte_store import Quota
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import MAX_CALLS, RedisCalls, close, connect

TIMEOUT_S = 0.1
BURST = 16 * MAX_CALLS
MOST_S = 200 * TIMEOUT_S
"""On a machine that does other things, too; one after the other they would take more than twice as long."""

STORES = ("limits", "bytes", "answers", "questions", "contents", "ledger", "batches")


def ask(store: str, redis: Redis, timeout_s: float) -> Callable[[], Awaitable[object]]:
    """A call of this store."""
    match store:
        case "limits":
            counters = RedisCounters(RedisCalls(redis, timeout_s), lease_s=60)
            return lambda: counters.take("a", Take({"requests": 1}))
        case "bytes":
            bytes_ = RedisBytes(RedisCalls(redis, timeout_s), "bytes", Quota(ttl_s=60.0), time.time)
            return lambda: bytes_.put("a", "1", b"x")
        case "answers":
            entries = RedisEntries(RedisCalls(redis, timeout_s), ResponseCacheSettings(), time.time)
            return lambda: entries.find("tenant:a", "1")
        case "questions":
            questions = RedisQuestions(RedisCalls(redis, timeout_s), SemanticCacheSettings())
            return lambda: questions.changes("tenant:a/m", 0)
        case "contents":
            limits = GeminiSettings()
            shared = RedisBytes(RedisCalls(redis, timeout_s), STORE, quota_of(limits), time.time)
            contents = ContentStore(limits, time.time, shared)
            return lambda: contents.find("a", "1")
        case "ledger":
            book = RedisBook(RedisCalls(redis, timeout_s))
            return lambda: book.read("0", "9")
    return RedisJobs(RedisScripts(redis, timeout_s=timeout_s), BatchSettings()).open


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


async def burst(store: str, url: str, timeout_s: float = TIMEOUT_S) -> tuple[set[type[object]], float]:
    """What came of it, and after how long."""
    redis = connect(url, timeout_s)
    call, begun_s = ask(store, redis, timeout_s), time.monotonic()
    try:
        answers = await asyncio.gather(*(call() for _ in range(BURST)), return_exceptions=True)
        return {type(answer) for answer in answers}, time.monotonic() - begun_s
    finally:
        await close(redis)


@pytest.mark.parametrize("store", STORES)
async def test_a_redis_that_hangs_is_left_in_time(silent: str, store: str) -> None:
    kinds, took_s = await burst(store, silent)
    assert kinds == {RedisDownError}
    assert took_s < MOST_S


@pytest.mark.parametrize("store", STORES)
async def test_a_redis_that_refuses_is_left_at_once(tmp_path: Path, store: str) -> None:
    kinds, took_s = await burst(store, f"unix://{tmp_path}/none.sock")
    assert kinds == {RedisDownError}
    assert took_s < MOST_S


@pytest.mark.parametrize("store", STORES)
async def test_a_redis_that_answers_answers_all_of_a_burst(redis_url: str, store: str) -> None:
    kinds, _ = await burst(store, redis_url, timeout_s=10.0)
    assert RedisDownError not in kinds


async def test_what_one_store_found_out_costs_the_others_nothing(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gateway: they share a breaker."""
    monkeypatch.setattr(app, "REDIS_RETRY_S", 600.0)
    redis = connect(silent, TIMEOUT_S)
    settings = Settings(redis=RedisSettings(timeout_s=TIMEOUT_S), server=ServerSettings(data_dir=tmp_path))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(close, redis)
        gateway = app.Gateway(settings, redis, None)
        close_with(stack, gateway)
        assert await gateway.index.find("m", bytes(16), ["one"]) == {}
        assert (gateway.breaker.up, gateway.breaker.outages) == (False, 1)
        for call in (
            gateway.responses.find_upstream("a", "1"),
            gateway.contents.find("a", "1"),
            gateway.ledger.read("0", "9"),
        ):
            with pytest.raises(RedisDownError) as down:
                await call
            assert not down.value.asked
