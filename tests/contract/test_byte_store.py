"""The promises of storage/byte_store.py over memory and a real Redis, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.errors import RedisDownError
from gateway.storage.byte_store import ByteStore, Put, Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, close, connect
from tests.fakes.clock import Clock
from tests.fakes.redis_fleet import keys_of
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0
QUOTA = Quota(entries=3, bytes=100, ttl_s=60.0)
Make = Callable[[Quota], ByteStore]


@pytest.fixture
def clock() -> Clock:
    """Starts now: bodies in Redis also end by Redis's own clock."""
    return Clock(float(int(time.time())))


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest, redis: Redis, clock: Clock) -> Make:
    if request.param == "memory":
        return lambda quota: MemoryBytes(quota, clock)
    return lambda quota: RedisBytes(RedisCalls(redis, LIMIT_S), "bytes", quota, clock)


@pytest.fixture
def store(make: Make) -> ByteStore:
    return make(QUOTA)


async def put(store: ByteStore, clock: Clock, *keys: str, size: int = 1, owner: str = "a", **more: Any) -> list[Put]:
    """One after the other."""
    done = []
    for key in keys:
        clock.now_s += 1e-3
        done.append(await store.put(owner, key, b"x" * size, **more))
    return done


async def held(store: ByteStore, owner: str = "a") -> list[str]:
    """Also whether look-ups and the list agree."""
    keys = [key for key in "123456789" if await store.look(owner, key) is not None]
    assert sorted(await store.all_of(owner)) == keys
    return keys


async def test_what_was_put_is_found_by_its_owner_alone(store: ByteStore, clock: Clock) -> None:
    body = "{\u00fc}".encode() + b"\x00"
    assert await store.put("a", "1", body, about=b"\xff") == "stored"
    assert await store.find("a", "1") == body
    assert await store.look("a", "1") == b"\xff"
    assert await store.all_of("a") == {"1": b"\xff"}
    assert await store.find("a", "2") is None
    assert [await store.find("b", "1"), await store.look("b", "1"), await store.all_of("b")] == [
        None,
        None,
        {},
    ]
    assert not await store.remove("b", "1")
    assert not await store.extend("b", "1", 9.0, b"")
    assert await store.find("a", "1") == body


async def test_a_later_body_takes_the_place_of_an_earlier_one(store: ByteStore, clock: Clock) -> None:
    for size in (60, 90, 1):
        assert await put(store, clock, "1", size=size) == ["stored"]
        assert await store.find("a", "1") == b"x" * size
    await put(store, clock, "2", size=99)
    assert await held(store) == ["1", "2"]


async def test_what_was_removed_is_gone_and_makes_room(store: ByteStore, clock: Clock) -> None:
    await put(store, clock, "1", size=90)
    assert await store.remove("a", "1")
    assert not await store.remove("a", "1")
    await put(store, clock, "2", "3", size=50)
    assert await held(store) == ["2", "3"]
    assert await put(store, clock, "4", "4", size=0) == ["stored", "stored"]
    assert await store.remove("a", "4")


async def test_a_body_replaces_the_expected_one_and_no_other(store: ByteStore, clock: Clock) -> None:
    assert await store.put("a", "1", b"x", expected=b"") == "changed"
    await store.put("a", "1", b"x")
    assert await store.put("b", "1", b"y", expected=b"x") == "changed"
    assert await store.put("a", "1", b"y", expected=b"y") == "changed"
    assert await store.put("a", "1", b"y" * 101, expected=b"x") != "stored"
    assert await store.find("a", "1") == b"x"
    assert await store.put("a", "1", b"y" * 60, expected=b"x") == "stored"
    assert await store.put("a", "1", b"z", expected=b"x") == "changed"
    await put(store, clock, "2", size=40)
    assert await held(store) == ["1", "2"]
    assert await store.remove("a", "1")
    assert await store.put("a", "1", b"z", expected=b"y" * 60) == "changed"


async def test_of_replacements_at_the_same_time_one_is_made(store: ByteStore) -> None:
    await store.put("a", "1", b"x")
    bodies = [str(number).encode() for number in range(20)]
    done = await asyncio.gather(*(store.put("a", "1", body, expected=b"x") for body in bodies))
    assert done.count("stored") == 1
    assert await store.find("a", "1") == bodies[done.index("stored")]


async def test_past_the_quota_the_first_go_until_it_fits(store: ByteStore, clock: Clock) -> None:
    for owner in "ab":
        await put(store, clock, *"12345", owner=owner)
        assert await held(store, owner) == ["3", "4", "5"]
    await put(store, clock, "6", "7", size=50)
    assert await held(store) == ["6", "7"]
    await put(store, clock, "8", size=51)
    assert await held(store) == ["8"]


async def test_by_use_what_was_used_longest_ago_goes_first(make: Make, clock: Clock) -> None:
    store = make(Quota(entries=3, ttl_s=60.0, by_use=True))
    await put(store, clock, *"123")
    clock.now_s += 1e-3
    await store.find("a", "1")
    await put(store, clock, "4")
    assert await held(store) == ["1", "3", "4"]


async def test_past_the_quota_of_all_the_owner_with_most_loses(make: Make, clock: Clock) -> None:
    store = make(Quota(total_bytes=60, ttl_s=60.0))
    await put(store, clock, *"1234", size=10)
    await put(store, clock, *"567", size=10, owner="b")
    assert [await held(store), await held(store, "b")] == [["2", "3", "4"], ["5", "6", "7"]]
    await put(store, clock, "8", size=15)
    assert [await held(store), await held(store, "b")] == [["4", "8"], ["5", "6", "7"]]


@pytest.mark.parametrize("quota", [QUOTA, Quota(ttl_s=60.0, entry_bytes=100), Quota(entries=0, ttl_s=60.0)])
async def test_what_never_fits_is_refused_and_changes_nothing(make: Make, clock: Clock, quota: Quota) -> None:
    store = make(quota)
    kept = await put(store, clock, "1", size=100)
    assert await put(store, clock, "2", "1", size=101) == ["bytes", "bytes"]
    assert await held(store) == (["1"] if kept == ["stored"] else [])
    assert kept == ["stored" if quota.entries else "bytes"]


async def test_a_quota_refuses_where_that_is_wanted(store: ByteStore, clock: Clock) -> None:
    assert await put(store, clock, *"1234", refuse=True, ttl_s=10.0) == ["stored"] * 3 + ["entries"]
    assert await put(store, clock, "1", size=98, refuse=True) == ["stored"], "in the place of its own"
    assert await put(store, clock, "2", size=3, refuse=True) == ["bytes"]
    assert await held(store) == ["1", "2", "3"]
    clock.now_s += 10
    assert await put(store, clock, "5", "6", refuse=True) == ["stored", "stored"]
    assert await held(store) == ["1", "5", "6"]


async def test_past_its_end_an_entry_is_gone_at_once_and_makes_room(store: ByteStore, clock: Clock) -> None:
    await store.put("a", "1", b"x" * 50, 20.5)
    await store.put("a", "2", b"x" * 50)
    clock.now_s += 20.499
    assert await store.find("a", "1") is not None
    clock.now_s += 0.001
    assert await held(store) == ["2"]
    assert await store.find("a", "1") is None
    assert not await store.extend("a", "1", 60.0, b"")
    assert not await store.remove("a", "1")
    clock.now_s += 60
    assert await held(store) == []
    await put(store, clock, "3", "4", "5", size=33)
    assert await held(store) == ["3", "4", "5"]


async def test_an_end_can_be_moved_both_ways(store: ByteStore, clock: Clock) -> None:
    await store.put("a", "1", b"x", 20.0, about=b"before")
    clock.now_s += 1
    assert await store.extend("a", "1", 3600.0, b"after")
    clock.now_s += 100
    assert await store.find("a", "1") == b"x"
    assert await store.look("a", "1") == b"after"
    assert await store.extend("a", "1", 5.0, b"")
    clock.now_s += 5
    assert await store.find("a", "1") is None


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "refuse", "remove", "wait", "find"]),
        st.sampled_from("ab"),
        st.sampled_from("12345"),
        st.integers(0, 60),
    ),
    max_size=30,
)


@pytest.mark.parametrize("by_use", [False, True])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=steps)
def test_memory_and_redis_store_the_same(
    redis_url: str, by_use: bool, history: list[tuple[str, str, str, int]]
) -> None:
    async def run() -> None:
        clock, quota = Clock(float(int(time.time()))), Quota(entries=3, bytes=100, ttl_s=600.0, by_use=by_use)
        redis: Redis = connect(redis_url, LIMIT_S)
        await redis.flushall()
        stores = MemoryBytes(quota, clock), RedisBytes(RedisCalls(redis, LIMIT_S), "bytes", quota, clock)
        for what, owner, key, size in history:
            clock.now_s += 100 if what == "wait" else 1
            match what:
                case "remove":
                    one, other = [await store.remove(owner, key) for store in stores]
                    assert one == other
                case "find":
                    assert await stores[0].find(owner, key) == await stores[1].find(owner, key)
                case "put" | "refuse":
                    puts = [await store.put(owner, key, b"x" * size, refuse=what == "refuse") for store in stores]
                    assert puts[0] == puts[1]
            for each in "ab":
                first, second = [await held(store, each) for store in stores]
                assert first == second
                assert len(first) <= 3
        await close(redis)

    asyncio.run(run())


# -- Redis alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [":1", ".used", ".ends", ".sizes", ".about"])
async def test_a_redis_that_lost_half_of_it_is_written_to_as_before(redis: Redis, clock: Clock, lost: str) -> None:
    """One that is full evicts what has a time to live; another one may have been flushed in the middle."""
    store = RedisBytes(RedisCalls(redis, LIMIT_S), "bytes", Quota(entries=2, bytes=100, ttl_s=60.0), clock)
    await put(store, clock, "1", size=60)
    await redis.delete("kvasir:{bytes:a}" + lost)
    assert await put(store, clock, *"234", size=50) == ["stored"] * 3
    assert [key for key in "234" if await store.find("a", key)] == ["3", "4"]


async def test_nothing_of_an_owner_stays_behind(redis: Redis, clock: Clock) -> None:
    store = RedisBytes(RedisCalls(redis, LIMIT_S), "bytes", QUOTA, clock)
    await put(store, clock, "1", "2")
    assert await redis.hget("kvasir:{bytes:a}.sizes", "") == b"2"  # type: ignore[misc]
    assert 59_000 < await redis.pttl("kvasir:{bytes:a}:1") <= 60_000
    for key in "12":
        await store.remove("a", key)
    assert await keys_of(redis) == [b"kvasir:{bytes:a}.sizes"]
    assert await redis.hgetall("kvasir:{bytes:a}.sizes") == {b"": b"0"}  # type: ignore[misc]


async def test_a_redis_that_is_full_is_read_all_the_same(own_redis: RedisProcess, clock: Clock) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    store = RedisBytes(RedisCalls(redis, LIMIT_S), "bytes", Quota(ttl_s=60.0, by_use=True), clock)
    try:
        await store.put("a", "1", b"x")
        await redis.config_set("maxmemory", 1)
        with pytest.raises(RedisDownError):
            await store.put("a", "2", b"x")
        assert await store.find("a", "1") == b"x"
    finally:
        await close(redis)
