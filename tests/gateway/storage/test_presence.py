"""How many gateways are on one Redis."""

from __future__ import annotations

from redis.asyncio import Redis

from gateway.storage.presence import GONE_S, Presence
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.redis_process import RedisProcess


async def test_gateways_are_counted_once_each_and_those_that_are_gone_no_more(own_redis: RedisProcess) -> None:
    now = [1000.0]
    async with Redis.from_url(own_redis.url) as redis:
        calls = RedisCalls(redis, 5.0)
        one, other, worker = [Presence(name, calls, lambda: now[0]) for name in ("a", "b", "a")]
        for presence in (one, other, worker, one):
            await presence.beat()
        assert (one.gateways, other.gateways, worker.gateways) == (2, 2, 2)
        await other.close()
        await one.beat()
        assert one.gateways == 1
        await other.beat()
        now[0] += GONE_S  # it was killed
        await one.beat()
        assert one.gateways == 1
        assert await redis.ttl("kvasir:gateways") > GONE_S
        await redis.set("kvasir:gateways", "not ours")
        await one.beat()
        assert one.gateways == 1


async def test_without_redis_the_last_number_holds(own_redis: RedisProcess) -> None:
    async with Redis.from_url(own_redis.url) as redis:
        calls = RedisCalls(redis, 1.0)
        one, other = Presence("a", calls), Presence("b", calls)
        await one.beat()
        await other.beat()
        own_redis.kill()
        await other.beat()
        assert other.gateways == 2
        await other.close()
    alone = Presence("a", None)
    await alone.beat()
    assert alone.gateways == 1
