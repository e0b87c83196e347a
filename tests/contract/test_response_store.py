"""The promises of stores/base.py over both stores, and of the responses in one when its Redis is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.api.openai.responses.store import Kept, ResponseStore
from gateway.config import StoredResponseSettings
from gateway.errors import OverloadedError, RedisDownError
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import connect
from gateway.stores.base import Store
from gateway.stores.memory_store import MemoryStore
from gateway.stores.redis_store import RedisStore
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0


@dataclass
class Made:
    """A store, and how it is brought to a time at which everything is over."""

    store: Store
    later: Callable[[], Awaitable[None]]


@asynccontextmanager
async def made(kind: str, redis_url: str, limits: StoredResponseSettings) -> AsyncIterator[Made]:
    if kind == "memory":
        clock = [0.0]

        async def later() -> None:
            clock[0] += limits.ttl_s

        yield Made(MemoryStore(limits, now=lambda: clock[0]), later)
        return
    redis: Redis = Redis.from_url(redis_url)

    async def expire() -> None:
        """As Redis does it, whose clock cannot be moved: bodies go, what says in which order they were kept stays."""
        for key in await redis.keys("kvasir:{responses:*}:*"):
            await redis.delete(key)
        for key in await redis.keys("kvasir:{responses:*}.order"):
            for name in await redis.zrange(key, 0, -1):
                await redis.zadd(key, {name: 1})

    try:
        yield Made(RedisStore(redis, limits, timeout_s=LIMIT_S), expire)
    finally:
        await redis.aclose()


@pytest.fixture(params=["memory", "redis"])
async def one(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Made]:
    async with made(request.param, redis_url, StoredResponseSettings(max_responses=3, max_bytes=100)) as built:
        yield built


async def held(store: Store, tenant: str = "a") -> list[str]:
    return [name for name in "123456789" if await store.find(tenant, name) is not None]


async def test_what_was_put_is_found_by_its_tenant_alone(one: Made) -> None:
    body = "{\u00fc}".encode() + b"\x00"
    assert await one.store.put("a", "1", body)
    assert await one.store.find("a", "1") == body
    assert await one.store.find("b", "1") is None
    assert await one.store.find("a", "2") is None
    assert not await one.store.delete("b", "1")
    assert await one.store.find("a", "1") == body


async def test_a_later_body_takes_the_place_of_an_earlier_one(one: Made) -> None:
    for body in (b"x" * 60, b"y" * 90, b"z"):
        assert await one.store.put("a", "1", body)
        assert await one.store.find("a", "1") == body
    assert await one.store.put("a", "2", b"x" * 99)
    assert await held(one.store) == ["1", "2"]


async def test_what_was_deleted_is_gone_and_makes_room(one: Made) -> None:
    await one.store.put("a", "1", b"x" * 90)
    assert await one.store.delete("a", "1")
    assert not await one.store.delete("a", "1")
    for name in "23":
        await one.store.put("a", name, b"x" * 50)
    assert await held(one.store) == ["2", "3"]


async def test_a_body_replaces_what_is_kept_and_nothing_else(one: Made) -> None:
    assert not await one.store.replace("a", "1", b"", b"x")
    await one.store.put("a", "1", b"x")
    assert not await one.store.replace("b", "1", b"x", b"y")
    assert not await one.store.replace("a", "1", b"y", b"y")
    assert not await one.store.replace("a", "1", b"x", b"y" * 101)
    assert await one.store.find("a", "1") == b"x"
    assert await one.store.replace("a", "1", b"x", b"y" * 60)
    assert not await one.store.replace("a", "1", b"x", b"z")
    assert await one.store.find("a", "1") == b"y" * 60
    await one.store.put("a", "2", b"x" * 40)
    assert await held(one.store) == ["1", "2"]
    assert await one.store.delete("a", "1")
    assert not await one.store.replace("a", "1", b"y" * 60, b"z")
    assert await held(one.store) == ["2"]


async def test_of_replacements_that_come_at_once_one_is_made(one: Made) -> None:
    await one.store.put("a", "1", b"x")
    bodies = [str(number).encode() for number in range(20)]
    made = await asyncio.gather(*(one.store.replace("a", "1", b"x", body) for body in bodies))
    assert made.count(True) == 1
    assert await one.store.find("a", "1") == bodies[made.index(True)]


async def test_past_the_count_the_first_goes(one: Made) -> None:
    for name in "12345":
        await one.store.put("a", name, b"x")
        await one.store.put("b", name, b"x")
    assert await held(one.store) == await held(one.store, "b") == ["3", "4", "5"]


async def test_past_the_bytes_the_first_go_until_it_fits(one: Made) -> None:
    for name in "12":
        await one.store.put("a", name, b"x" * 50)
    assert await held(one.store) == ["1", "2"]
    await one.store.put("a", "3", b"x" * 51)
    assert await held(one.store) == ["3"]


async def test_what_is_larger_than_everything_is_not_kept_and_changes_nothing(one: Made) -> None:
    await one.store.put("a", "1", b"x")
    assert not await one.store.put("a", "2", b"x" * 101)
    assert not await one.store.put("a", "1", b"x" * 101)
    assert await held(one.store) == ["1"]


async def test_what_is_over_its_time_is_gone_and_makes_room(one: Made) -> None:
    for name in "12":
        await one.store.put("a", name, b"x" * 50)
    await one.later()
    assert await held(one.store) == []
    assert not await one.store.delete("a", "1")
    for name in "345":
        await one.store.put("a", name, b"x" * 33)
    assert await held(one.store) == ["3", "4", "5"]


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_one_response_has_a_limit_of_its_own(kind: str, redis_url: str) -> None:
    async with made(kind, redis_url, StoredResponseSettings(max_response_bytes=10)) as built:
        assert await built.store.put("a", "1", b"x" * 10)
        assert not await built.store.put("a", "2", b"x" * 11)
        assert await held(built.store) == ["1"]


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_no_responses_may_be_kept_at_all(kind: str, redis_url: str) -> None:
    async with made(kind, redis_url, StoredResponseSettings(max_responses=0)) as built:
        assert not await built.store.put("a", "1", b"x")
        assert await built.store.find("a", "1") is None


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "delete"]), st.sampled_from("ab"), st.sampled_from("12345"), st.integers(0, 60)
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_memory_and_redis_keep_the_same(redis_url: str, history: list[tuple[str, str, str, int]]) -> None:
    async def run() -> None:
        limits = StoredResponseSettings(max_responses=3, max_bytes=100)
        async with made("memory", redis_url, limits) as memory, made("redis", redis_url, limits) as shared:
            redis: Redis = Redis.from_url(redis_url)
            await redis.flushall()
            await redis.aclose()
            for what, tenant, name, size in history:
                answers = [
                    await (
                        built.store.put(tenant, name, b"x" * size)
                        if what == "put"
                        else built.store.delete(tenant, name)
                    )
                    for built in (memory, shared)
                ]
                assert answers[0] == answers[1]
                for whose in "ab":
                    kept = [[await built.store.find(whose, one) for one in "12345"] for built in (memory, shared)]
                    assert kept[0] == kept[1]
                    bodies = [body for body in kept[0] if body is not None]
                    assert len(bodies) <= 3
                    assert sum(map(len, bodies)) <= 100

    asyncio.run(run())


async def test_a_redis_that_forgot_half_of_it_is_kept_in_as_before(redis_url: str) -> None:
    """One that is full gives up what has a time to live; another one may have been flushed in the middle."""
    async with made("redis", redis_url, StoredResponseSettings(max_responses=2, max_bytes=100)) as built:
        redis: Redis = Redis.from_url(redis_url)
        for lost in ("kvasir:{responses:a}:1", "kvasir:{responses:a}.sizes", "kvasir:{responses:a}.order"):
            await built.store.put("a", "1", b"x" * 60)
            await redis.delete(lost)
            for name in "234":
                assert await built.store.put("a", name, b"x" * 50)
            assert (await held(built.store))[-2:] == ["3", "4"]
            await redis.flushall()
        await redis.aclose()


ID = f"resp_{'0a' * 16}"
KEPT = Kept(
    {"id": ID, "object": "response", "status": "completed", "created_at": 1, "output": [{"id": "msg_2"}]},
    [{"id": "msg_1"}],
)


async def test_a_redis_that_is_away_costs_the_keeping_and_is_told_once(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.storage")
    redis, clock = connect(own_redis.url, LIMIT_S), [0.0]
    breaker = RedisBreaker(retry_s=10.0, clock=lambda: clock[0])
    store = RedisStore(redis, StoredResponseSettings(), timeout_s=LIMIT_S, breaker=breaker)
    responses = ResponseStore(store)
    try:
        assert await responses.put("a", KEPT)
        assert await responses.find("a", ID) == KEPT
        own_redis.kill()
        for _ in range(3):
            assert not await responses.put("a", KEPT)
        assert not await responses.replace("a", KEPT.body, KEPT)
        for ask in (responses.find, responses.delete):
            with pytest.raises(OverloadedError) as down:
                await ask("a", ID)
            assert down.value.retry_after_s == 10.0
        own_redis.start()
        assert not await responses.put("a", KEPT)  # not asked again so soon
        clock[0] += 10.0
        assert await responses.put("a", KEPT)
        found = await responses.find("a", ID)
        assert found == KEPT
        assert await responses.replace("a", found.body, KEPT)
    finally:
        await redis.aclose()
    assert responses.outcomes == {"kept": 3, "too_large": 0, "failed": 5}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_redis_that_is_full_is_one_that_is_down(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    store = RedisStore(redis, StoredResponseSettings(), timeout_s=LIMIT_S)
    try:
        await redis.config_set("maxmemory", 1)
        with pytest.raises(RedisDownError):
            await store.put("a", "1", b"x")
    finally:
        await redis.aclose()
