"""An index that equals what a server's cache holds: through losses, restarts, and the death of gateways and Redis."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from engine.protocol import Hello, blocks_key, chain_digests
from engine.publish import VERSION_FIELD
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.replicas.base import EventSource
from gateway.replicas.follower import Follower, FollowerTimes
from gateway.replicas.stream import StreamTimes
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.fake_engine import make_hello
from tests.fakes.kv_publisher import BLOCK, Index, KvPublisher
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

QUICK = FollowerTimes(StreamTimes(beat_s=0.2, answer_s=0.3), lease_s=0.6, renew_s=0.1, lost_s=2.5)
LIMIT_S = 10.0
"""After a fault the index is right again."""


class Gateway:
    """What a gateway has of one replica."""

    def __init__(self, follower: Follower, memory: Index, calls: RedisCalls | None) -> None:
        self.follower = follower
        self.memory = memory
        self.calls = calls

    @property
    def figures(self) -> dict[str, object]:
        return self.follower.figures()


@asynccontextmanager
async def gateway(
    source: EventSource | None, hello: Hello, redis_url: str | None = None, times: FollowerTimes = QUICK
) -> AsyncIterator[Gateway]:
    memory = Index()
    redis: Redis | None = None if redis_url is None else Redis.from_url(redis_url, retry=Retry(NoBackoff(), 0))
    calls = None if redis is None else RedisCalls(redis, 0.25, RedisBreaker(retry_s=0.1))
    follower = Follower(hello, source, memory.apply, calls, name="r", times=times)
    follower.start()
    try:
        yield Gateway(follower, memory, calls)
    finally:
        await follower.stop()
        if redis is not None:
            await redis.aclose()


async def in_redis(gateway: Gateway, hello: Hello) -> set[bytes]:
    assert gateway.calls is not None
    keys = await gateway.calls.redis.hkeys(blocks_key(hello.model, hello.incarnation))
    return set(keys) - {VERSION_FIELD}


def equals(publisher: KvPublisher, one: Gateway, hello: Hello, trust: str = "exact") -> Callable[[], bool]:
    return lambda: one.follower.trust == trust and one.memory == publisher.digests(hello.namespace)


async def test_the_index_equals_the_cache() -> None:
    hello = make_hello()
    async with KvPublisher() as publisher:
        await publisher.churn(300)
        async with gateway(publisher.source, hello) as one:
            await until(equals(publisher, one, hello))
            await publisher.churn(100)
            await until(equals(publisher, one, hello))
            assert one.figures["blocks"] == len(one.memory)
            assert one.follower.reason == ""


async def test_the_salt_of_the_namespace_is_left_to_the_events() -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello) as one:
        salted = make_hello(namespace=hello.namespace.__class__("w", "", "", 16, salt="secret"))
        async with gateway(publisher.source, salted) as other:
            await publisher.churn(20)
            await until(lambda: len(one.memory) > 0 and len(one.memory) == len(other.memory))


async def test_a_twentieth_of_the_frames_dropped_is_repaired() -> None:
    hello = make_hello()
    patient = FollowerTimes(StreamTimes(beat_s=0.2, answer_s=5))
    async with KvPublisher(seed=1) as publisher, gateway(publisher.source, hello, times=patient) as one:
        await until(lambda: one.follower.trust == "exact" and one.figures["connections"] == 1)
        publisher.drop = 0.05
        for _ in range(40):
            await publisher.churn(25)
            await asyncio.sleep(0)
        begun_s = time.monotonic()
        await until(equals(publisher, one, hello), LIMIT_S)
        assert time.monotonic() - begun_s < 5
        assert one.figures["replays"] > 1
        assert one.figures["lost"] == 0


async def test_a_truncated_replay_is_degraded_until_the_cache_was_filled_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    hello = make_hello(num_blocks=50)
    async with KvPublisher(buffer=5) as publisher:
        old = await publisher.store(list(range(BLOCK * 4)))
        for _ in range(10):
            await publisher.store([7] * BLOCK)
        async with gateway(publisher.source, hello) as one:
            await until(lambda: one.follower.trust == "degraded")
            await until(lambda: one.figures["blocks"] == 1)
            assert one.follower.reason == "KV events 0 to 5 are lost: the server does not have them any more"
            known = publisher.digests(hello.namespace)
            assert one.memory < known
            tail = await publisher.store([9] * BLOCK, old[-1])
            await until(lambda: one.figures["orphans"] == 1)
            for number in range(50):
                await publisher.store([number + 100] * BLOCK)
            await until(lambda: one.figures["blocks"] == 51)
            assert one.follower.trust == "degraded"  # a block hangs behind one that was never announced
            await publisher.remove(*tail, *old[::-1])
            await publisher.store([8] * BLOCK)
            await until(equals(publisher, one, hello))
    assert caplog.text.count("the index of replica r is degraded now: KV events 0 to 5 are lost") == 1
    assert caplog.text.count("the index of replica r is exact now") == 1


async def test_a_cache_that_was_cleared_is_known_again() -> None:
    hello = make_hello()
    async with KvPublisher(buffer=5) as publisher:
        await publisher.churn(20)
        async with gateway(publisher.source, hello) as one:
            await until(lambda: one.follower.trust == "degraded")
            await publisher.clear()
            await publisher.churn(3)
            await until(equals(publisher, one, hello))


@pytest.mark.parametrize("batches", [0, 3, 500])
async def test_a_restart_in_place_empties_the_index(batches: int) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello) as one:
        await publisher.churn(100)
        await until(equals(publisher, one, hello))
        await publisher.restart(batches)
        await until(equals(publisher, one, hello), LIMIT_S)
        assert one.figures["restarts"] == 1


async def test_an_index_that_was_wrong_is_read_anew_and_the_next_time_only_goes_on() -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello) as one:
        await publisher.churn(100)
        await until(equals(publisher, one, hello))
        one.follower.resync()
        assert (one.follower.trust, len(one.memory)) == ("degraded", 0)
        await until(equals(publisher, one, hello))
        one.follower.resync()
        await publisher.store([5] * BLOCK)
        await until(lambda: len(one.memory) == 1)
        assert one.follower.trust == "degraded"
        assert one.follower.reason == "the index predicted blocks that the cache did not hold"
        assert one.figures["resyncs"] == 2


async def test_a_history_that_was_wrong_begins_anew() -> None:
    hello = make_hello()
    digests = chain_digests(hello.namespace.root(), bytes(4 * 16 * 3), 16)
    async with gateway(None, hello) as one:
        await until(lambda: one.figures["trust"] == "fallback")
        for _ in range(2):
            await until(lambda: one.follower.sent(digests) or len(one.memory) == 3)  # type: ignore[func-returns-value]
            one.follower.resync()
            assert len(one.memory) == 0


async def test_a_stream_that_is_silent_for_long_is_given_up_and_taken_up_again() -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello) as one:
        await publisher.churn(50)
        await until(equals(publisher, one, hello))
        publisher.answers = False
        await until(lambda: one.follower.trust == "degraded")
        assert one.memory == publisher.digests(hello.namespace)
        await until(lambda: one.follower.trust == "fallback")
        assert one.memory == set()
        one.follower.sent(b"0123456789abcdef")
        assert one.memory == {b"0123456789abcdef"}
        publisher.answers = True
        await until(equals(publisher, one, hello))


async def test_a_payload_that_cannot_be_read_costs_what_was_known() -> None:
    hello = make_hello(num_blocks=10)
    async with KvPublisher() as publisher, gateway(publisher.source, hello) as one:
        await publisher.churn(5)
        await until(equals(publisher, one, hello))
        await publisher.send(b"\xc1")
        await until(lambda: one.follower.trust == "fallback")
        assert one.memory == set()
        for number in range(10):
            await publisher.store([number] * BLOCK)
        publisher.held = dict(list(publisher.held.items())[-10:])
        await until(equals(publisher, one, hello))
        assert one.figures["unreadable"] == 1


async def test_a_server_without_events_is_indexed_by_what_was_sent() -> None:
    hello = make_hello()
    times = FollowerTimes(renew_s=0.05, history_ttl_s=0.3)
    async with gateway(None, hello, times=times) as one:
        await until(lambda: one.figures["trust"] == "fallback")
        await until(lambda: one.follower._content == "history")
        one.follower.sent(b"0123456789abcdef")
        assert one.memory == {b"0123456789abcdef"}
        await until(lambda: one.memory == set())
        assert one.follower.reason == "the server publishes no KV events"


@pytest.mark.slow
async def test_a_server_that_is_stopped_for_longer_than_connections_last_goes_on_where_it_was() -> None:
    """ZeroMQ cuts its connections meanwhile (PING_MS), and what was asked is never answered."""
    hello = make_hello()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.kv_publisher"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"100\n")
    found = json.loads(await process.stdout.readline())
    events, replay = (f"tcp://127.0.0.1:{port}" for port in found["ports"])
    try:
        async with gateway(EventSource(events, replay, "kv"), hello, times=FollowerTimes()) as one:

            def equal() -> bool:
                return one.follower.trust == "exact" and one.memory == {
                    bytes.fromhex(name) for name in found["digests"]
                }

            await until(equal)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: one.follower.trust == "degraded", 6)
            process.stdin.write(b"100\n")
            await until(lambda: one.figures["disconnections"] == 1)
            process.send_signal(signal.SIGCONT)
            found = json.loads(await process.stdout.readline())
            await until(equal, LIMIT_S)
            assert one.figures["restarts"] == one.figures["lost"] == 0
    finally:
        process.kill()
        await process.wait()


# -- several gateways --------------------------------------------------------------------------------------------------


async def roles(gateways: list[Gateway]) -> tuple[Gateway, Gateway]:
    """The one that holds the lease, and the other."""
    await until(lambda: sum(bool(one.figures["holder"]) for one in gateways) == 1)
    first, second = gateways
    return (first, second) if first.figures["holder"] else (second, first)


async def test_one_gateway_follows_and_publishes_and_the_other_reads_redis(redis_url: str) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, AsyncExitStack() as stack:
        both = [await stack.enter_async_context(gateway(publisher.source, hello, redis_url)) for _ in range(2)]
        holder, reader = await roles(both)
        await publisher.churn(100)
        known = publisher.digests(hello.namespace)

        async def published() -> bool:
            return await in_redis(holder, hello) == known == holder.memory

        await until(published)
        await until(lambda: reader.follower.trust == "exact")
        assert reader.memory == set()
        assert not reader.figures["following"]
        memory = MemoryIndex()
        assert reader.calls is not None
        index = PrefixIndex(memory, reader.calls, retry_s=1)
        some = max(publisher.held.values(), key=len)
        chain = chain_digests(hello.namespace.root(), b"".join(t.to_bytes(4, "little") for t in some), BLOCK)
        assert await index.find(hello.model, chain, [hello.incarnation]) == {hello.incarnation: len(some) // BLOCK}


async def test_another_gateway_takes_over_from_one_that_dies(redis_url: str) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, AsyncExitStack() as stack:
        both = [await stack.enter_async_context(gateway(publisher.source, hello, redis_url)) for _ in range(2)]
        holder, other = await roles(both)
        await publisher.churn(50)
        await until(lambda: other.follower.trust == "exact")
        follower = holder.follower
        for task in (follower._task, follower._stream and follower._stream._task, follower._publisher._task):
            assert task is not None
            task.cancel()  # as a process that was killed: nothing is released
        follower._publisher, follower._lease = None, None
        await publisher.churn(50)

        async def taken_over() -> bool:
            known = publisher.digests(hello.namespace)
            return bool(other.figures["holder"]) and other.memory == await in_redis(other, hello) == known

        begun_s = time.monotonic()
        await until(taken_over, LIMIT_S)
        assert time.monotonic() - begun_s < 5


IMPATIENT = FollowerTimes(StreamTimes(beat_s=0.2, answer_s=0.1), lease_s=0.6, renew_s=0.05, lost_s=1.0)


async def test_a_gateway_that_cannot_reach_the_stream_leaves_it_to_one_that_can(redis_url: str) -> None:
    hello, nowhere = make_hello(), EventSource("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "kv")
    async with KvPublisher() as publisher, gateway(nowhere, hello, redis_url, IMPATIENT) as deaf:
        await until(lambda: bool(deaf.figures["holder"]))
        async with gateway(publisher.source, hello, redis_url, IMPATIENT) as other:
            await publisher.churn(50)
            await until(lambda: bool(other.figures["holder"]) and equals(publisher, other, hello)())
            await until(lambda: deaf.follower.trust == "exact" and not deaf.figures["following"])
            assert (deaf.memory, deaf.figures["holder"]) == (set(), False)
            assert await in_redis(deaf, hello) <= publisher.digests(hello.namespace)
        await until(lambda: bool(deaf.figures["holder"]))  # it has a turn again
        await until(lambda: not deaf.figures["holder"])


async def test_a_lease_that_was_released_in_silence_is_taken_again_when_events_come(redis_url: str) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello, redis_url, IMPATIENT) as one:
        await publisher.churn(50)

        async def published() -> bool:
            known = publisher.digests(hello.namespace)
            return equals(publisher, one, hello)() and await in_redis(one, hello) == known

        await until(published)
        await publisher.close()
        await until(lambda: not one.figures["holder"])
        assert one.follower.trust == "fallback"
        assert await in_redis(one, hello) == set()
        publisher.held = {}
        await publisher._rebind()
        await publisher.churn(20)
        await until(published, LIMIT_S)
        assert one.figures["holder"]


async def test_a_gateway_that_stops_leaves_the_index_and_releases_the_lease(redis_url: str) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher:
        async with gateway(publisher.source, hello, redis_url) as second_to_none:
            await publisher.churn(50)
            known = publisher.digests(hello.namespace)

            async def published() -> bool:
                return await in_redis(second_to_none, hello) == known

            await until(published)
        slow = FollowerTimes(QUICK.stream, lease_s=60, renew_s=0.05)
        async with gateway(publisher.source, hello, redis_url, slow) as next_one:
            assert await in_redis(next_one, hello) == known
            await until(lambda: bool(next_one.figures["holder"]))


async def test_without_redis_each_follows_by_itself_and_gives_back(own_redis: RedisProcess) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, AsyncExitStack() as stack:
        both = [await stack.enter_async_context(gateway(publisher.source, hello, own_redis.url)) for _ in range(2)]
        _, reader = await roles(both)
        await publisher.churn(50)
        await until(lambda: reader.follower.trust == "exact")
        own_redis.kill()
        await publisher.churn(50)
        await until(lambda: all(equals(publisher, one, hello)() for one in both), LIMIT_S)
        own_redis.start()
        await publisher.churn(50)
        holder, reader = await roles(both)

        async def given_back() -> bool:
            known = publisher.digests(hello.namespace)
            return await in_redis(holder, hello) == known == holder.memory and not reader.figures["following"]

        await until(given_back, LIMIT_S)
        assert reader.memory == set()
        assert reader.follower.trust == "exact"


async def test_a_fallback_takes_the_index_out_of_redis(redis_url: str) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello, redis_url) as one:
        await publisher.churn(20)

        async def published() -> bool:
            return await in_redis(one, hello) == publisher.digests(hello.namespace)

        await until(published)
        publisher.answers = False

        async def withdrawn() -> bool:
            return one.follower.trust == "fallback" and not await in_redis(one, hello)

        await until(withdrawn)
        publisher.answers = True
        await until(published)


async def test_leases_that_no_gateway_wrote_harm_nothing(redis_url: str) -> None:
    hello = make_hello()
    async with KvPublisher() as publisher, gateway(publisher.source, hello, redis_url) as one:
        await until(lambda: one.follower.trust == "exact")
        lease = one.follower._lease
        assert lease is not None
        assert one.calls is not None
        await one.calls.redis.hset(lease._key, mapping={"owner": "somebody", "state": b"\xff"})
        await until(lambda: not one.figures["holder"])
        await publisher.churn(5)
        await until(equals(publisher, one, hello))  # nobody says that the index is in Redis
