"""Of gateways that share a Redis one does the work."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from gateway.errors import RedisDownError
from gateway.storage.claims import RedisClaims
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until


def claims(redis: Redis, store: str = "warm") -> RedisClaims:
    return RedisClaims(RedisCalls(redis, 5.0), store)


async def test_of_many_one_has_a_claim_until_it_is_dropped_or_ends(redis: Redis) -> None:
    two = [claims(redis), claims(redis)]
    assert sorted(await asyncio.gather(*(one.take("a", 60.0) for one in two * 8))) == [False] * 15 + [True]
    assert await two[0].take("b", 60.0)
    assert await claims(redis, "other").take("a", 60.0)
    await two[1].drop("a")
    assert await two[1].take("a", 0.05)
    await until(lambda: two[0].take("a", 60.0), 10.0)


async def test_without_an_answer_there_is_no_claim(tmp_path_factory: pytest.TempPathFactory) -> None:
    gone = RedisProcess(tmp_path_factory.mktemp("redis"))
    async with Redis(unix_socket_path=str(gone.socket)) as client:
        with pytest.raises(RedisDownError):
            await claims(client).take("a", 60.0)
