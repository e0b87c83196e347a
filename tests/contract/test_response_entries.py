"""The promises of remembered answers in Redis. test_byte_store.py has those of what they are in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from gateway.config import ResponseCacheSettings
from gateway.responses.entries import About, Entry
from gateway.responses.entry_stores import RedisEntries
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.clock import Clock

LIMIT_S = 30.0


def entry(name: str, body: bytes = b"", owner: str = "tenant:a", ttl_s: float = 100.0) -> Entry:
    return Entry(name.encode().ljust(32), name, owner, "m", 1000.0, 1000.0 + ttl_s, body)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def entries(redis: Redis, clock: Clock) -> RedisEntries:
    return RedisEntries(RedisCalls(redis, LIMIT_S), ResponseCacheSettings(), clock)


async def held(entries: RedisEntries, owner: str = "tenant:a") -> set[str]:
    return {about.id for about in await entries.all_of(owner)}


async def test_what_was_put_is_found_whole_by_its_owner_alone(entries: RedisEntries) -> None:
    kept = entry("x", b"{\x00\xff}")
    wide = replace(kept, owner="namespace:a")
    assert await entries.put(kept)
    assert await entries.find("tenant:a", "x") == kept
    assert await entries.find("namespace:a", "x") is None
    assert await entries.find("tenant:a", "y") is None
    assert await entries.put(wide)
    assert await entries.find("namespace:a", "x") == wide
    assert await entries.owners() == ["namespace:a", "tenant:a"]
    assert await entries.all_of("tenant:a") == [
        About("tenant:a", "x", "m", kept.created_s, kept.expires_s, kept.num_bytes)
    ]


async def test_what_is_removed_is_gone_for_its_owner_alone(entries: RedisEntries) -> None:
    for owner in ("tenant:a", "tenant:b"):
        await entries.put(entry("x", owner=owner))
    assert await entries.remove("tenant:a", "x")
    assert not await entries.remove("tenant:a", "x")
    assert await entries.find("tenant:a", "x") is None
    assert await entries.find("tenant:b", "x") is not None
    assert await held(entries) == set()


async def test_past_its_time_an_answer_is_not_found_however_it_is_asked_for(
    entries: RedisEntries, clock: Clock
) -> None:
    await entries.put(entry("1"))
    clock.now_s += 100
    assert await entries.all_of("tenant:a") == []
    assert await entries.find("tenant:a", "1") is None
    assert not await entries.put(entry("2"))


async def test_what_nobody_of_us_wrote_is_not_an_answer(redis: Redis, clock: Clock) -> None:
    entries = RedisEntries(RedisCalls(redis, LIMIT_S), ResponseCacheSettings(), clock)
    for data in (b"", b"x", bytes(56), replace(entry("x"), owner="tenant:b").to_bytes()):
        await redis.set("kvasir:{answers:tenant:a}:x", data)
        assert await entries.find("tenant:a", "x") is None
