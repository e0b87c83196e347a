"""The promises of answers that are kept, over memory and a real Redis."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.config import ResponseCacheSettings
from gateway.errors import RedisDownError
from gateway.responses.entries import OVERHEAD_BYTES, About, Entries, Entry
from gateway.responses.memory_entries import MemoryEntries
from gateway.responses.redis_entries import TOTALS, RedisEntries
from gateway.storage.redis_calls import MAX_CALLS, connect
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

LIMIT_S = 30.0
UNIT = OVERHEAD_BYTES + len("tenant:a") + len("m")
"""Bytes of an entry without a body."""


def entry(name: str, body: bytes = b"", owner: str = "tenant:a", now: float = 0.0, ttl_s: float = 100.0) -> Entry:
    return Entry(name.encode().ljust(32), name, owner, "m", now, now + ttl_s, body)


@dataclass
class Made:
    entries: Entries
    now: Callable[[], float]


@asynccontextmanager
async def made(kind: str, redis_url: str, max_bytes: int) -> AsyncIterator[Made]:
    clock = [1000.0]
    if kind == "memory":
        yield Made(MemoryEntries(max_bytes, lambda: clock[0]), lambda: clock[0])
        return
    redis: Redis = Redis.from_url(redis_url)
    limits = ResponseCacheSettings(max_redis_bytes=1 << 30, max_redis_bytes_per_tenant=max_bytes)
    try:
        yield Made(RedisEntries(redis, limits, timeout_s=LIMIT_S, now=lambda: clock[0]), lambda: clock[0])
    finally:
        await redis.aclose()


@pytest.fixture(params=["memory", "redis"])
async def one(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Made]:
    async with made(request.param, redis_url, 3 * UNIT) as built:
        yield built


async def held(entries: Entries, owner: str = "tenant:a") -> set[str]:
    return {about.id for about in await entries.all_of(owner)}


async def test_what_was_put_is_found_whole_by_its_owner_alone(one: Made) -> None:
    kept = entry("x", b"{\x00\xff}", now=one.now())
    wide = replace(kept, owner="namespace:a")
    assert await one.entries.put(kept)
    assert await one.entries.find("tenant:a", "x") == kept
    assert await one.entries.find("namespace:a", "x") is None
    assert await one.entries.find("tenant:a", "y") is None
    assert await one.entries.put(wide)
    assert await one.entries.find("namespace:a", "x") == wide
    assert await one.entries.owners() == ["namespace:a", "tenant:a"]
    assert await one.entries.all_of("tenant:a") == [
        About("tenant:a", "x", "m", kept.created_s, kept.expires_s, kept.num_bytes)
    ]


async def test_what_is_removed_is_gone_for_its_owner_alone(one: Made) -> None:
    for owner in ("tenant:a", "tenant:b"):
        await one.entries.put(entry("x", owner=owner, now=one.now()))
    assert await one.entries.remove("tenant:a", "x")
    assert not await one.entries.remove("tenant:a", "x")
    assert await one.entries.find("tenant:a", "x") is None
    assert await one.entries.find("tenant:b", "x") is not None
    assert await held(one.entries) == set()


async def test_to_the_byte_what_was_used_longest_ago_goes_first(one: Made) -> None:
    for name in "123":
        assert await one.entries.put(entry(name, now=one.now()))
        await tick(one)
    assert await held(one.entries) == {"1", "2", "3"}
    await one.entries.find("tenant:a", "1")
    await tick(one)
    assert await one.entries.put(entry("4", now=one.now()))
    assert await held(one.entries) == {"1", "3", "4"}
    await tick(one)
    assert await one.entries.put(entry("5", b"x", now=one.now()))  # one byte more than there is room for two others
    assert await held(one.entries) == {"4", "5"}


async def tick(one: Made) -> None:
    """Redis goes by its own clock, in milliseconds."""
    if isinstance(one.entries, RedisEntries):
        before = await one.entries._redis.time()
        await until(lambda: moved(one.entries, before))


async def moved(entries: Entries, before: tuple[int, int]) -> bool:
    assert isinstance(entries, RedisEntries)
    now = await entries._redis.time()
    return (now[0] - before[0]) * 1000 + now[1] // 1000 - before[1] // 1000 > 0


async def test_what_is_larger_than_all_may_be_is_not_kept_and_removes_nothing(one: Made) -> None:
    await one.entries.put(entry("1", now=one.now()))
    assert not await one.entries.put(entry("2", bytes(3 * UNIT), now=one.now()))
    assert await held(one.entries) == {"1"}


async def test_in_place_of_one_with_the_same_id_it_counts_once(one: Made) -> None:
    for body in (b"a", b"bb", b"c"):
        await one.entries.put(entry("1", body * UNIT, now=one.now()))
    await one.entries.put(entry("2", now=one.now()))
    assert await held(one.entries) == {"1", "2"}


async def test_what_is_over_its_time_is_not_found_however_it_is_asked_for() -> None:
    clock = [1000.0]
    memory = MemoryEntries(10**6, lambda: clock[0])
    await memory.put(entry("1", now=1000.0))
    clock[0] = 1100.0
    assert await memory.all_of("tenant:a") == []
    assert await memory.find("tenant:a", "1") is None
    assert (memory.figures.expired, memory.figures.bytes, memory.figures.entries) == (1, 0, 0)


async def test_redis_forgets_what_is_over_its_time_and_counts_it_no_more(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    limits = ResponseCacheSettings(max_redis_bytes_per_tenant=2 * UNIT)
    entries = RedisEntries(redis, limits, timeout_s=LIMIT_S, now=lambda: 0.0)
    try:
        await entries.put(entry("short", ttl_s=0.05))
        await entries.put(entry("long"))
        await until(lambda: gone(redis))
        await entries.put(entry("next"))
        assert await held(entries) == {"long", "next"}
        assert entries.evicted == 0
        assert int(await redis.hget("kvasir:{answers:tenant:a}.sizes", "")) == 2 * UNIT  # type: ignore[misc]
    finally:
        await redis.aclose()


async def gone(redis: Redis) -> bool:
    return not await redis.exists("kvasir:{answers:tenant:a}:short")


async def _fill(entries: Entries) -> None:
    """With room for six: a burst of one owner pushes out nothing of the other's, and half is everybody's."""
    for name in "1234":
        await entries.put(entry(name))
    for name in "56":
        await entries.put(entry(name, owner="tenant:b"))
    assert len(await held(entries)) == 4
    await entries.put(entry("7", owner="tenant:b"))
    assert len(await held(entries)) == 3
    assert len(await held(entries, "tenant:b")) == 3


async def test_in_memory_the_owner_with_most_gives_way() -> None:
    memory = MemoryEntries(6 * UNIT, lambda: 0.0)
    await _fill(memory)
    for number in range(20):
        await memory.put(entry(f"burst {number}"))
    assert await held(memory, "tenant:b") == {"5", "6", "7"}
    assert await held(memory) == {"burst 17", "burst 18", "burst 19"}
    assert await memory.put(entry("wide", bytes(5 * UNIT), owner="tenant:c"))
    assert [memory.figures.bytes, await memory.owners()] == [6 * UNIT, ["tenant:c"]]


async def test_over_all_owners_the_largest_gives_way(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    limits = ResponseCacheSettings(max_redis_bytes=6 * UNIT, max_redis_bytes_per_tenant=4 * UNIT)
    entries = RedisEntries(redis, limits, timeout_s=LIMIT_S, now=lambda: 0.0)
    try:
        await _fill(entries)
        totals = await redis.hgetall(TOTALS)  # type: ignore[misc]
        assert sum(int(total) for total in totals.values()) == 6 * UNIT
    finally:
        await redis.aclose()


async def test_what_nobody_of_us_wrote_is_not_an_answer(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    entries = RedisEntries(redis, ResponseCacheSettings(), timeout_s=LIMIT_S, now=lambda: 0.0)
    try:
        for data in (b"", b"x", bytes(56), replace(entry("x"), owner="tenant:b").to_bytes()):
            await redis.set("kvasir:{answers:tenant:a}:x", data)
            assert await entries.find("tenant:a", "x") is None
    finally:
        await redis.aclose()


async def test_of_a_burst_that_redis_does_not_answer_every_call_ends_in_time() -> None:
    """Those too that had no place yet: warnings are errors, so no coroutine is left behind."""

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await closing.wait()
        writer.close()

    closing = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    redis: Redis = Redis(port=server.sockets[0].getsockname()[1])
    entries = RedisEntries(redis, ResponseCacheSettings(), timeout_s=0.1, now=lambda: 0.0)
    asked = await asyncio.gather(*[entries.find("tenant:a", "x") for _ in range(2 * MAX_CALLS)], return_exceptions=True)
    assert {type(one) for one in asked} == {RedisDownError}
    closing.set()
    await redis.aclose()
    server.close()
    await server.wait_closed()


async def test_a_redis_that_is_gone_says_so_in_time(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as process:
        redis = connect(process.url, LIMIT_S)
        entries = RedisEntries(redis, ResponseCacheSettings(), timeout_s=LIMIT_S, now=lambda: 0.0)
        await entries.put(entry("1"))
        process.kill()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: entries.find("tenant:a", "1"),
            lambda: entries.put(entry("2")),
            lambda: entries.remove("tenant:a", "1"),
            entries.owners,
            lambda: entries.all_of("tenant:a"),
        ]
        for call in calls:
            async with asyncio.timeout(2 * LIMIT_S):
                with pytest.raises(RedisDownError):
                    await call()
        await redis.aclose()


steps = st.lists(
    st.tuples(st.sampled_from(["put", "find", "remove"]), st.sampled_from("12345"), st.integers(0, 3)), max_size=30
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
async def test_memory_is_least_recently_used_whatever_happens(steps: list[tuple[str, str, int]]) -> None:
    most = 4 * UNIT
    memory, model = MemoryEntries(most, lambda: 0.0), OrderedDict[str, int]()
    for do, name, units in steps:
        size = UNIT * max(units, 1)
        if do == "put":
            assert await memory.put(entry(name, bytes(size - UNIT)))
            model.pop(name, None)
            while sum(model.values()) + size > most:
                model.popitem(last=False)
            model[name] = size
        elif do == "find":
            assert (await memory.find("tenant:a", name) is not None) == (name in model)
            if name in model:
                model.move_to_end(name)
        else:
            assert await memory.remove("tenant:a", name) == (model.pop(name, None) is not None)
        assert [kept.id for kept in memory] == list(model)
        assert memory.figures.bytes == sum(model.values()) <= most
