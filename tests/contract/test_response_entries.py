"""The promises of remembered answers in Redis. test_byte_store.py has those of what they are in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.config import ResponseCacheSettings
from gateway.responses.entries import OVERHEAD_BYTES, About, Entry
from gateway.responses.entry_stores import MemoryEntries, RedisEntries
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.clock import Clock

LIMIT_S = 30.0
UNIT = OVERHEAD_BYTES + len("tenant:a") + len("m")
"""Bytes of an entry without a body."""


def entry(name: str, body: bytes = b"", owner: str = "tenant:a", ttl_s: float = 100.0) -> Entry:
    return Entry(name.encode().ljust(32), name, owner, "m", 1000.0, 1000.0 + ttl_s, body)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def entries(redis: Redis, clock: Clock) -> RedisEntries:
    limits = ResponseCacheSettings(max_redis_bytes=3 * UNIT, max_redis_bytes_per_tenant=4 * UNIT)
    return RedisEntries(RedisCalls(redis, LIMIT_S), limits, clock)


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


async def test_to_the_byte_what_was_used_longest_ago_goes_first(entries: RedisEntries, clock: Clock) -> None:
    for name in "123":
        assert await entries.put(entry(name))
        clock.now_s += 1
    assert await held(entries) == {"1", "2", "3"}
    await entries.find("tenant:a", "1")
    clock.now_s += 1
    assert await entries.put(entry("4"))
    assert await held(entries) == {"1", "3", "4"}
    clock.now_s += 1
    assert await entries.put(entry("5", b"x"))  # one byte more than there is room for beside two others
    assert await held(entries) == {"4", "5"}
    assert entries.evicted == 3
    assert not await entries.put(entry("6", bytes(3 * UNIT)))
    assert await held(entries) == {"4", "5"}


async def test_a_burst_of_one_owner_evicts_nothing_of_one_with_less(entries: RedisEntries, clock: Clock) -> None:
    await entries.put(entry("b", owner="tenant:b"))
    for number in range(20):
        clock.now_s += 1
        await entries.put(entry(str(number)))
    assert await held(entries, "tenant:b") == {"b"}
    assert await held(entries) == {"18", "19"}


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


steps = st.lists(
    st.tuples(st.sampled_from(["put", "find", "remove"]), st.sampled_from("12345"), st.integers(0, 3)), max_size=30
)


@settings(deadline=None, max_examples=60)
@given(steps)
def test_memory_is_least_recently_used_whatever_happens(steps: list[tuple[str, str, int]]) -> None:
    most = 4 * UNIT
    memory, model = MemoryEntries(most, Clock(1000.0)), OrderedDict[str, int]()
    for do, name, units in steps:
        size = UNIT * max(units, 1)
        if do == "put":
            memory.set(entry(name, bytes(size - UNIT)))
            model.pop(name, None)
            while sum(model.values()) + size > most:
                model.popitem(last=False)
            model[name] = size
        elif do == "find":
            assert (memory.get("tenant:a", name) is not None) == (name in model)
            if name in model:
                model.move_to_end(name)
        else:
            assert memory.delete("tenant:a", name) == (model.pop(name, None) is not None)
        assert [kept.id for kept in memory] == list(model)
        assert memory.figures.bytes == sum(model.values()) <= most
