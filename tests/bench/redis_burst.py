"""Which stores take a Redis that answers for one that is away, when many requests come at once and keep the loop busy.

    python -m tests.bench.redis_burst --requests 500 --work-ms 2

Each request works for so long in turns with others, as reading and rendering it does, then asks a store, with the time
limit that it has by default. Tells, for each store, calls that were given up, and how long the burst took.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from redis.asyncio import Redis

from gateway.api.gemini.content_store import STORE, ContentStore, quota_of
from gateway.config import (
    BatchSettings,
    GeminiSettings,
    RedisSettings,
    ResponseCacheSettings,
    SemanticCacheSettings,
)
from gateway.errors import RedisDownError
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.ledger.books import RedisBook
from gateway.limits.counters import RedisCounters, Take
from gateway.queues.batch.redis_jobs import RedisJobs, RedisScripts
from gateway.responses.entry_stores import RedisEntries
from gateway.responses.semantic.questions import RedisQuestions
from gateway.storage.byte_store import Quota
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, connect
from tests.fakes.redis_process import RedisProcess

TIMEOUT_S = RedisSettings().timeout_s


def stores(redis: Redis) -> dict[str, Callable[[], Awaitable[object]]]:
    """A call of each."""
    counters = RedisCounters(RedisCalls(redis, TIMEOUT_S), lease_s=60)
    store = RedisBytes(RedisCalls(redis, TIMEOUT_S), "bytes", Quota(ttl_s=60.0), time.time)
    entries = RedisEntries(RedisCalls(redis, TIMEOUT_S), ResponseCacheSettings(), time.time)
    questions = RedisQuestions(RedisCalls(redis, TIMEOUT_S), SemanticCacheSettings())
    limits = GeminiSettings()
    shared = RedisBytes(RedisCalls(redis, TIMEOUT_S), STORE, quota_of(limits), time.time)
    contents = ContentStore(limits, time.time, shared)
    book = RedisBook(RedisCalls(redis, TIMEOUT_S))
    index = PrefixIndex(MemoryIndex(), RedisCalls(redis, TIMEOUT_S), retry_s=1.0)
    scripts = RedisScripts(redis, timeout_s=BatchSettings().redis_timeout_s)
    return {
        "limits": lambda: counters.take("a", Take({"requests": 1})),
        "answers": lambda: entries.find("tenant:a", "1"),
        "stored responses": lambda: store.put("a", "1", b"x" * 1000),
        "cached contents": lambda: contents.find("a", "1"),
        "questions": lambda: questions.changes("tenant:a/m", 0),
        "ledger": lambda: book.read("0", "9"),
        "batches": RedisJobs(scripts, BatchSettings()).open,
        "index": lambda: index.find("m", bytes(1600), ["one"]),
    }


async def request(call: Callable[[], Awaitable[object]], work_s: float) -> bool:
    """Whether it was answered."""
    for _ in range(2):
        until = time.perf_counter() + work_s / 2
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)
    try:
        await call()
    except RedisDownError:
        return False
    return True


async def run(requests: int, work_s: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, RedisProcess(Path(folder)) as process:
        print(f"{'store':>18} {'given up':>9} {'of':>6} {'burst':>8}")
        for name in stores(connect(process.url, TIMEOUT_S)):
            lost, took_s = 0, 0.0
            for _ in range(rounds):
                redis = connect(process.url, TIMEOUT_S)
                call, begun = stores(redis)[name], time.perf_counter()
                answered = await asyncio.gather(*(request(call, work_s) for _ in range(requests)))
                took_s += time.perf_counter() - begun
                lost += answered.count(False)
                await redis.aclose()
            print(f"{name:>18} {lost:9} {requests * rounds:6} {took_s / rounds:7.2f}s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--work-ms", type=float, default=2.0, help="of each request, on the event loop")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    asyncio.run(run(options.requests, options.work_ms / 1e3, options.rounds))


if __name__ == "__main__":
    main()
