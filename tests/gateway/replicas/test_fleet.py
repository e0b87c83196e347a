"""Servers that come and go while gateways run: one gateway alone, and two on one Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.errors import BadRequestError, NotFoundError, RedisDownError
from gateway.replicas.fleet import KEPT_S, KEY, WORTH_KEY, WORTH_S
from gateway.storage.redis_calls import RedisCalls, close, connect
from tests.fakes.clock import Clock
from tests.fakes.fleet import FakeGateway, table_of
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until


@asynccontextmanager
async def gateways(
    url: str | None, count: int, *configured: str, clock: Clock | None = None
) -> AsyncIterator[list[FakeGateway]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            calls = None
            if url is not None:
                redis = connect(url, 1.0)
                stack.push_async_callback(close, redis)
                calls = RedisCalls(redis, 1.0)
            one = FakeGateway(calls, configured, clock or (lambda: 1e9))
            one.fleet.attach()
            await one.fleet.start()
            stack.push_async_callback(one.fleet.stop)
            found.append(one)
        yield found


@pytest.fixture(params=["memory", "redis"])
def url(request: Any) -> str | None:
    return None if request.param == "memory" else str(request.getfixturevalue("redis_url"))


async def test_a_server_is_added_drained_and_removed_when_nothing_runs_there(url: str | None) -> None:
    async with gateways(url, 1, "file") as [one]:
        assert await one.fleet.add(table_of("new")) == "new"
        assert list(one.attached) == ["file", "new"]
        await one.fleet.drain("new")
        assert one.draining == ["new"]
        await one.fleet.drain("new", draining=False)
        assert one.draining == []
        one.attached["new"].in_flight = 1
        await one.fleet.remove("new")
        assert one.draining == ["new"]
        one.attached["new"].in_flight = 0
        await until(lambda: list(one.attached) == ["file"])
        with pytest.raises(NotFoundError):
            await one.fleet.remove("new")


async def test_what_is_forced_does_not_wait_for_what_runs(url: str | None) -> None:
    async with gateways(url, 1) as [one]:
        await one.fleet.add(table_of("new"))
        one.attached["new"].in_flight = 1
        await one.fleet.remove("new", force=True)
        assert not one.attached


async def test_a_name_can_be_used_again_with_another_url(url: str | None) -> None:
    async with gateways(url, 1) as [one]:
        await one.fleet.add(table_of("new"))
        await one.fleet.remove("new")
        await one.fleet.add(table_of("new", url="http://elsewhere.test"))
        assert one.attached["new"].url == "http://elsewhere.test"
        assert not one.draining


async def test_a_server_of_the_settings_drains_and_is_not_removed(url: str | None) -> None:
    async with gateways(url, 1, "file") as [one]:
        with pytest.raises(BadRequestError, match="file is one of the settings"):
            await one.fleet.remove("file")
        await one.fleet.drain("file")
        assert one.draining == ["file"]
        with pytest.raises(NotFoundError, match="no replica nothing"):
            await one.fleet.drain("nothing")


@pytest.mark.parametrize(
    ("table", "param", "why"),
    [
        (table_of("new", url="ftp://x"), "url", "http"),
        (table_of("new", kind="ollama"), "kind", "'vllm', 'sglang' or 'tensorrt-llm'"),
        (table_of("new", key="sk-secret-1"), "key", "api_key_env"),
        (table_of("new", kv_events="udp://x:1"), "kv_events", "tcp://host:port"),
        (table_of("new", kv_events="off", kv_replay="tcp://x:1"), "replica", "of no use"),
        (table_of("new", colour="red"), "colour", "[Ee]xtra"),
        (table_of("file"), "name", "already"),
        (table_of("new", url="http://FILE.test/v1"), "url", "server of replica file"),
    ],
)
async def test_bad_input_is_one_clear_line_and_changes_nothing(table: dict[str, Any], param: str, why: str) -> None:
    async with gateways(None, 1, "file") as [one]:
        with pytest.raises(BadRequestError, match=why) as raised:
            await one.fleet.add(table)
        assert raised.value.param == param
        assert "\n" not in raised.value.message
        assert "sk-secret-1" not in raised.value.message
        assert list(one.attached) == ["file"]


# -- several gateways --------------------------------------------------------------------------------------------------


async def test_changes_reach_the_other_gateway_and_those_that_start_later(redis_url: str) -> None:
    async with gateways(redis_url, 2, "file") as [one, other]:
        await one.fleet.add(table_of("new"))
        await one.fleet.drain("file")
        await until(lambda: list(other.attached) == ["file", "new"] and other.draining == ["file"])
        other.attached["new"].in_flight = 1
        async with gateways(redis_url, 1, "file") as [later]:
            assert (list(later.attached), later.draining) == (["file", "new"], ["file"])
        await one.fleet.remove("new")
        await until(lambda: other.draining == ["file", "new"])
        other.attached["new"].in_flight = 0
        await until(lambda: list(other.attached) == ["file"])
        async with gateways(redis_url, 1) as [later]:
            assert not later.attached


async def test_the_settings_of_a_gateway_win_over_an_equal_name(redis_url: str) -> None:
    async with gateways(redis_url, 1) as [one], gateways(redis_url, 1, "same") as [other]:
        await one.fleet.add(table_of("same", url="http://elsewhere.test"))
        await one.fleet.drain("same")
        await until(lambda: other.draining == ["same"])
        assert other.attached["same"].url == "http://same.test"
        await one.fleet.remove("same")
        await until(lambda: not one.attached)
        assert list(other.attached) == ["same"]


async def test_changes_that_redis_lost_are_written_again(redis_url: str) -> None:
    async with gateways(redis_url, 2) as [one, other]:
        await one.fleet.add(table_of("new"))
        await until(lambda: "new" in other.attached)
        assert one.calls is not None
        await one.calls.ask(one.calls.redis.flushall())
        async with gateways(redis_url, 1) as [later]:
            await until(lambda: "new" in later.attached)
        assert "new" in one.attached


async def test_a_removed_name_is_forgotten_in_the_end(redis_url: str) -> None:
    clock = Clock()
    async with gateways(redis_url, 1, clock=clock) as [one]:
        await one.fleet.add(table_of("new"))
        await one.fleet.remove("new")
        assert one.calls is not None
        redis: Any = one.calls.redis
        assert await redis.hlen(KEY) == 1
        clock.now_s += KEPT_S + 1

        async def forgotten() -> bool:
            return bool(await redis.hlen(KEY) == 0)

        await until(forgotten)


async def test_what_a_cache_is_worth_is_summed_over_gateways_that_live(redis_url: str) -> None:
    clock = Clock()
    async with gateways(redis_url, 1, "a", "b", clock=clock) as [one]:
        async with gateways(redis_url, 1, "a", "b", clock=clock) as [other]:
            one.worth, other.worth = {"a": 100.5, "b": 10.0}, {"b": 200.0}
            await other.fleet.worth()
            assert await one.fleet.worth() == {"a": 100.5, "b": 210.0}
            other.worth = {"b": 150.0}

            async def heard() -> bool:
                return await one.fleet.worth() == {"a": 100.5, "b": 160.0}

            await until(heard)
        assert one.calls is not None
        redis: Any = one.calls.redis
        for key in await redis.keys(WORTH_KEY + "*"):
            assert 0 < await redis.ttl(key) <= 2 * WORTH_S
            await redis.hset(key, "x", b"[1]")
        assert (await one.fleet.worth())["a"] == 100.5
        clock.now_s += 2 * WORTH_S
        assert await one.fleet.worth() == {"a": 100.5, "b": 10.0}
    async with gateways(None, 1, "a") as [alone]:
        assert await alone.fleet.worth() == {}


async def test_what_no_gateway_wrote_is_passed_over(redis_url: str) -> None:
    async with gateways(redis_url, 1) as [one]:
        assert one.calls is not None
        redis: Any = one.calls.redis
        await redis.hset(
            KEY, mapping={b"a": b"{", b"\xff": b"[null,1,0,0,1]", b"b": b'[{"name":"c"},0,0,0,1]', b"d": b"7"}
        )
        await one.fleet.add(table_of("new"))
        async with gateways(redis_url, 1) as [other]:
            assert list(other.attached) == ["new"]
        await redis.delete(KEY)
        await redis.set(KEY, "a string")
        async with gateways(redis_url, 1, "file") as [other]:
            assert list(other.attached) == ["file"]


async def test_a_gateway_that_cannot_use_a_server_says_why(redis_url: str) -> None:
    async with gateways(redis_url, 2) as [one, other]:
        other.refuses = "REPLICA_KEY is not set"
        await one.fleet.add(table_of("new"))
        await until(lambda: other.fleet.unusable == {"new": "REPLICA_KEY is not set"})
        assert not other.attached
        await one.fleet.remove("new")
        await until(lambda: not other.fleet.unusable)


async def test_without_redis_nothing_is_decided_for_this_gateway_alone(own_redis: RedisProcess) -> None:
    async with gateways(own_redis.url, 1, "file") as [one]:
        own_redis.kill()
        with pytest.raises(RedisDownError):
            await one.fleet.add(table_of("new"))
        with pytest.raises(RedisDownError):
            await one.fleet.drain("file")
        assert (list(one.attached), one.draining) == (["file"], [])
