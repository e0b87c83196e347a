"""What Redis holds and no gateway wrote is passed over, counted and logged once: no route fails, and batches go on."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from engine.protocol import ENGINES_KEY, announcement_key
from gateway.engines.registry import announced
from gateway.storage.redis_calls import close, connect, unreadable, warn_of_eviction
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until
from tests.fakes.whole import LIMIT_S, Whole, whole

HUGE = b"9" * 400
JUNK = {
    "cut": b'{"id": "\xff',
    "no JSON": b"}{",
    "no fields": b"{}",
    "another shape": b"[[[1]]]",
    "null": b"null",
    "huge numbers": b'{"created_s": 1e308, "expires_ms": 1e308, "num_bytes": ' + HUGE + b"}",
    "a huge number": HUGE,
    "a float": b"1e308",
}
BATCH = "0" * 31 + "f"
KEYS = {
    "kvasir:{batches}:job:" + BATCH: "hash",
    "kvasir:{batches}:of:openai:anonymous": "zset",
    "kvasir:{batches}:of:anthropic:anonymous": "zset",
    "kvasir:{batches}:all": "zset",
    "kvasir:{batches}:open": "set",
    "kvasir:{batches}:open:anonymous": "hash",
    "kvasir:{batches}:ended": "zset",
    "kvasir:{batches}:leases": "hash",
    "kvasir:{batches}:models": "set",
    "kvasir:{batches}:claims": "zset",
    "kvasir:{batches}:claimed": "hash",
    "kvasir:{batches}:tries": "hash",
    "kvasir:{batches}:turns:none": "zset",
    "kvasir:{batches}:waiting:anonymous:demo": "zset",
    "kvasir:{batches}:waiting:anonymous:none": "zset",
    "kvasir:{batches}:clock": "hash",
    "kvasir:{batches}:last": "hash",
    "kvasir:{batches}:cursors": "hash",
    "kvasir:{batches}:counts:" + BATCH: "hash",
    "kvasir:{batches}:results:" + BATCH: "hash",
    "kvasir:{batches}:lanes:" + BATCH: "set",
    "kvasir:{batches}:staged:" + BATCH: "list",
    "kvasir:{ledger}.days": "set",
    "kvasir:{ledger}:2026-11-22": "hash",
    "kvasir:{contents:anonymous}.about": "hash",
    "kvasir:{contents:anonymous}.ends": "zset",
    "kvasir:{contents:anonymous}:x": "string",
    "kvasir:{responses:anonymous}:resp_" + "0" * 32: "string",
    "kvasir:answers": "hash",
    "kvasir:{answers:tenant:anonymous}.about": "hash",
    "kvasir:{answers:tenant:anonymous}.ends": "zset",
    "kvasir:removals": "hash",
    "kvasir:engines": "zset",
}
"""Every key that lists, or what they lead to, is read from -> its type."""

ROUTES = (
    "/v1/batches",
    f"/v1/batches/batch_{BATCH}",
    "/v1/messages/batches",
    f"/v1/messages/batches/msgbatch_{BATCH}",
    f"/v1/messages/batches/msgbatch_{BATCH}/results",
    "/v1/responses/resp_" + "0" * 32,
    "/v1beta/cachedContents",
    "/v1beta/cachedContents/x",
    "/v1/models",
    "/v1/files",
    "/admin/stats",
    "/admin/ledger?from=2026-11-01&to=2026-11-30",
    "/admin/cache",
    "/admin/cache/stats",
    "/metrics",
    "/health/readiness",
)


@pytest.fixture(autouse=True)
def counted_from_nothing() -> None:
    unreadable.clear()


@pytest.fixture
async def running(redis_url: str) -> AsyncIterator[Whole]:
    async with whole(redis_url=redis_url) as running:
        yield running


async def write(redis: Redis, key: str, kind: str, junk: bytes) -> None:
    """Beside what is there, and in the place of it."""
    match kind:
        case "hash":
            fields = dict.fromkeys(await redis.hkeys(key), junk)  # type: ignore[misc]
            names = (b"json", b"version", b"planned", b"queued", b"succeeded", BATCH, b"0", b"", junk)
            await redis.hset(key, mapping=dict.fromkeys(names, junk) | fields)  # type: ignore[misc]
        case "zset":
            await redis.zadd(key, {junk: 0, BATCH: 0})
        case "set":
            await redis.sadd(key, junk, BATCH)  # type: ignore[misc]
        case "list":
            await redis.lpush(key, junk)  # type: ignore[misc]
        case _:
            await redis.set(key, junk)


async def walk(running: Whole, most: int = 499) -> None:
    async with aiohttp.ClientSession() as session:
        for route in ROUTES:
            async with session.get(running.url + route) as response:
                assert response.status <= most, f"{route}: {response.status} {(await response.text())[:300]}"


async def batch(running: Whole) -> dict[str, Any]:
    """Two lines, run to their end."""
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": f"{number}"}]},
        }
        for number in range(2)
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    file = await running.client.files.create(file=("rows.jsonl", data), purpose="batch")
    made = await running.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    async def has_ended() -> bool:
        return (await running.client.batches.retrieve(made.id)).status in ("completed", "failed")

    await until(has_ended)
    return (await running.client.batches.retrieve(made.id)).model_dump()


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


async def test_junk_of_any_kind_fails_no_route_and_stops_no_batch(
    running: Whole, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await running.ask({"role": "user", "content": "hello"})
    for junk in JUNK.values():
        for key, kind in KEYS.items():
            await write(redis, key, kind, junk)
        await walk(running)
    done = await batch(running)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 2)
    await walk(running)
    assert failures(caplog) == []
    assert unreadable["batches"] > 0
    passed_over = [record for record in caplog.records if "passed over" in record.getMessage()]
    assert len(passed_over) == len(unreadable), "one line for each store"
    assert not any(junk.decode(errors="replace") in caplog.text for junk in JUNK.values() if len(junk) > 8)
    async with aiohttp.ClientSession() as session, session.get(f"{running.url}/metrics") as response:
        assert 'kvasir_redis_unreadable_total{store="batches"}' in await response.text()


async def test_keys_of_another_type_fail_no_route(
    running: Whole, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    for key, kind in KEYS.items():
        if kind == "string":
            await redis.rpush(key, "x")  # type: ignore[misc]
        else:
            await redis.set(key, "x")
        await walk(running)
    assert failures(caplog) == []


async def test_a_job_of_another_type_stops_no_batch(running: Whole, redis: Redis) -> None:
    for name in ("open", "of:openai:anonymous", "ended"):
        key = f"kvasir:{{batches}}:{name}"
        await write(redis, key, KEYS[key], BATCH.encode())
    for name in ("job", "counts", "results", "lanes", "staged"):
        await redis.sadd(f"kvasir:{{batches}}:{name}:{BATCH}", "x") if name != "lanes" else await redis.set(  # type: ignore[misc]
            f"kvasir:{{batches}}:lanes:{BATCH}", "x"
        )
    await redis.sadd("kvasir:{batches}:models", "strange")  # type: ignore[misc]
    await redis.set("kvasir:{batches}:turns:strange", "x")
    assert (await batch(running))["status"] == "completed"
    page = await running.client.batches.list(limit=1)
    assert len(page.data) == 1, "what cannot be read takes no place of a page"


async def test_engines_are_found_beside_announcements_that_are_none(redis: Redis) -> None:
    members: dict[str | bytes, float] = {b"\xff": 9e9, "list": 9e9, "sound": 1e9}
    await redis.zadd(ENGINES_KEY, members)
    await redis.rpush(announcement_key("list"), "x")  # type: ignore[misc]
    for number, junk in enumerate([*JUNK.values(), b'{"url": 7}', b'{"url": "http://[::"}', b'{"url": "ftp://x"}']):
        await redis.zadd(ENGINES_KEY, {f"junk{number}": 5e9})
        await redis.set(announcement_key(f"junk{number}"), junk)
    await redis.set(announcement_key("sound"), b'{"url": "http://one:8090"}')
    assert await announced(redis) == {"sound": "http://one:8090"}
    assert unreadable["announcements of engines"] > len(JUNK)


@pytest.mark.parametrize(
    ("policy", "most", "warned"),
    [
        ("allkeys-lru", "50mb", True),
        ("allkeys-random", "50mb", True),
        ("volatile-lru", "50mb", False),
        ("noeviction", "50mb", False),
        ("allkeys-lru", "0", False),
    ],
)
async def test_a_policy_that_evicts_jobs_is_named_with_what_to_set(
    own_redis: RedisProcess, policy: str, most: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    try:
        await redis.config_set("maxmemory", most)
        await redis.config_set("maxmemory-policy", policy)
        await warn_of_eviction(redis)
    finally:
        await close(redis)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(said) is warned
    assert not warned or (policy in said[0] and "volatile-lru" in said[0])


async def test_a_redis_that_cannot_be_asked_for_its_policy_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redis = connect(f"unix://{tmp_path}/none.sock", 0.1)
    await warn_of_eviction(redis)
    await close(redis)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
