"""The index that the pipeline asks: memory for what this gateway follows, Redis for the rest while it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import pytest
from redis.asyncio import Redis

from engine.protocol import BlockEvents, blocks_key, split_digests
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.index.recent import SHARED_TTL_S, TTL_S, RecentBlocks
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, connect
from tests.fakes.clock import Clock
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

PROMPT = bytes(range(160))
RETRY_S = 0.05


@dataclass
class Both:
    index: PrefixIndex
    memory: MemoryIndex
    redis: Redis
    breaker: RedisBreaker

    async def hold(self, name: str, in_redis: int, in_memory: int | None = None) -> None:
        """Leading blocks of PROMPT that each side thinks the engine has."""
        mapping = dict.fromkeys(split_digests(PROMPT[: 16 * in_redis]), b"g")
        await self.redis.hset(blocks_key("m", name), mapping=mapping)
        if in_memory is not None:
            self.memory.apply(name, BlockEvents(stored=PROMPT[: 16 * in_memory]))

    async def find(self, *names: str) -> dict[str, int]:
        return dict(await self.index.find("m", PROMPT, names))


@asynccontextmanager
async def both(url: str, timeout_s: float = 5.0) -> AsyncIterator[Both]:
    redis = connect(url, timeout_s)
    memory = MemoryIndex()
    breaker = RedisBreaker(retry_s=RETRY_S)
    index = PrefixIndex(memory, RedisCalls(redis, timeout_s, breaker), retry_s=RETRY_S)
    index.start()
    try:
        yield Both(index, memory, redis, breaker)
    finally:
        await index.close()
        await redis.aclose()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == "gateway.storage.breaker"]


async def test_redis_is_asked_about_engines_whose_events_this_gateway_does_not_follow(redis_url: str) -> None:
    async with both(redis_url) as these:
        await these.hold("a", 7, in_memory=3)
        await these.hold("b", 5)
        assert await these.find("a", "b", "c") == {"a": 3, "b": 5}
        these.index.drop("a")
        assert await these.find("a", "b", "c") == {"a": 7, "b": 5}
        assert these.breaker.up


async def test_redis_is_not_asked_when_memory_knows_all(redis_url: str) -> None:
    async with both(redis_url) as these:
        await these.hold("a", 7, in_memory=3)
        before = (await these.redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"]
        assert await these.find("a") == {"a": 3}
        assert (await these.redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"] == before


async def test_without_a_redis_memory_answers() -> None:
    memory = MemoryIndex()
    index = PrefixIndex(memory, None, retry_s=RETRY_S)
    memory.apply("a", BlockEvents(stored=PROMPT[:32]))
    assert dict(await index.find("m", PROMPT, ["a"])) == {"a": 2}
    await index.close()


async def test_what_was_computed_a_moment_ago_is_known_while_neither_memory_nor_redis_knows_the_engine() -> None:
    """Redis is down, or another gateway begins to follow the engine's events: the next turn must go where it was."""
    index = PrefixIndex(MemoryIndex(), None, retry_s=RETRY_S)
    index.computed("a", PROMPT[:48])
    assert dict(await index.find("m", PROMPT, ["a", "b"])) == {"a": 3}
    index.drop("a")
    assert dict(await index.find("m", PROMPT, ["a", "b"])) == {}


async def test_what_was_computed_is_known_for_longer_where_another_gateway_follows_the_events() -> None:
    memory, clock = MemoryIndex(), Clock()
    index = PrefixIndex(memory, None, retry_s=RETRY_S)
    index._recent = RecentBlocks(clock)
    memory.apply("a", BlockEvents(reset=True))
    for name in ("a", "b"):
        index.computed(name, PROMPT[:48])
    assert dict(await index.find("m", PROMPT, ["a", "b"])) == {"a": 3, "b": 3}
    clock.now_s += TTL_S
    assert dict(await index.find("m", PROMPT, ["a", "b"])) == {"a": 0, "b": 3}
    clock.now_s += SHARED_TTL_S - TTL_S
    assert dict(await index.find("m", PROMPT, ["a", "b"])) == {"a": 0}


async def test_an_outage_is_said_once_and_so_is_its_end(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with both(own_redis.url) as these:
        await these.hold("a", 7)
        these.memory.apply("b", BlockEvents(stored=PROMPT[:48]))
        assert await these.find("a", "b") == {"a": 7, "b": 3}
        await asyncio.to_thread(own_redis.kill)
        for _ in range(50):
            assert await these.find("a", "b") == {"b": 3}
        assert not these.breaker.up
        assert warnings(caplog) == ["WARNING"]
        await asyncio.to_thread(own_redis.start)
        await until(lambda: these.breaker.up)  # nobody asks for it
        assert warnings(caplog) == ["WARNING", "INFO"]
        assert await these.find("a", "b") == {"b": 3}  # Redis came back empty: the engine has not published yet
        await these.hold("a", 7)
        assert await these.find("a", "b") == {"a": 7, "b": 3}  # the script is loaded again
        assert these.breaker.outages == 1


async def test_an_outage_is_noticed_without_a_request(own_redis: RedisProcess) -> None:
    async with both(own_redis.url) as these:
        await asyncio.to_thread(own_redis.kill)
        await until(lambda: not these.breaker.up)
        assert these.breaker.outages == 1


async def test_a_redis_that_hangs_costs_one_time_limit_and_then_nothing(
    own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(own_redis.url, timeout_s=0.5) as these:
        await these.hold("a", 7)
        these.memory.apply("b", BlockEvents(stored=PROMPT[:48]))
        await these.find("a")
        assert own_redis._process is not None
        own_redis._process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(30):  # one after the other they would wait for 50 seconds
            found = await asyncio.gather(*(these.find("a", "b") for _ in range(100)))
        assert found == [{"b": 3}] * 100
        with monkeypatch.context() as patched:
            patched.setattr(these.index, "_script", None)  # nobody asks Redis any more
            for _ in range(100):
                assert await these.find("a", "b") == {"b": 3}
        own_redis._process.send_signal(signal.SIGCONT)
        await until(lambda: these.breaker.up)
        assert await these.find("a") == {"a": 7}


async def test_a_burst_waits_for_connections_instead_of_running_out_of_them(redis_url: str) -> None:
    async with both(redis_url, timeout_s=5.0) as these:
        these.redis.connection_pool.max_connections = 40
        await these.hold("a", 7)
        found = await asyncio.gather(*(these.find("a") for _ in range(500)))
        assert found == [{"a": 7}] * 500
        assert these.breaker.up


async def test_a_key_of_another_kind_is_an_engine_that_holds_nothing_and_no_outage(redis_url: str) -> None:
    async with both(redis_url) as these:
        await these.redis.set(blocks_key("m", "a"), "not a hash")
        assert await these.find("a") == {"a": 0}
        assert these.breaker.up


async def test_an_empty_question_asks_nobody(own_redis: RedisProcess) -> None:
    own_redis.kill()
    redis: Redis = Redis.from_url(own_redis.url)
    breaker = RedisBreaker(retry_s=RETRY_S)
    index = PrefixIndex(MemoryIndex(), RedisCalls(redis, 5.0, breaker), retry_s=RETRY_S)
    assert dict(await index.find("m", b"", ["a"])) == {}
    assert dict(await index.find("m", PROMPT, [])) == {}
    assert breaker.up
    await redis.aclose()


async def test_closing_ends_a_look_whose_cancellation_redis_py_drops() -> None:
    asked = asyncio.Event()

    class Deaf:
        async def execute_command(self, *words: str) -> None:
            asked.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    deaf = cast("Redis", Deaf())
    index = PrefixIndex(MemoryIndex(), RedisCalls(deaf, 60.0), retry_s=0.01)
    index.start()
    await asyncio.wait_for(asked.wait(), 30)
    await asyncio.wait_for(index.close(), 30)


def test_what_memory_recalls_is_its_own_and_nothing_of_an_engine_that_it_does_not_follow() -> None:
    memory = MemoryIndex()
    index = PrefixIndex(memory, None, retry_s=RETRY_S)
    assert index.recall("a", PROMPT) is None
    memory.apply("a", BlockEvents(reset=True))
    assert index.recall("a", PROMPT) == 0
    memory.apply("a", BlockEvents(stored=PROMPT[:48]))
    assert index.recall("a", PROMPT[16:]) == 2
    assert (index.recall("a", PROMPT), index.recall("a", PROMPT[:32]), index.recall("a", b"")) == (3, 2, 0)
    memory.apply("a", None)
    assert index.recall("a", PROMPT) is None
