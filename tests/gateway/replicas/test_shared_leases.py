"""Several gateways know the same leases of a replica by Redis."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from gateway.replicas.touching import LeaseKeeper
from gateway.storage.redis_calls import RedisCalls, close, connect
from gateway.types import Tenant
from tests.fakes.leased_replica import TTL_S, LeasedReplica
from tests.fakes.redis_process import RedisProcess

TOKENS = [random.Random(7).randrange(60_000) for _ in range(200)]


@pytest.fixture
async def calls(redis_url: str) -> AsyncIterator[RedisCalls]:
    redis = connect(redis_url, 5.0)
    yield RedisCalls(redis, 5.0)
    await close(redis)


async def test_what_one_gateway_writes_another_one_reads(calls: RedisCalls) -> None:
    replica = LeasedReplica(64)
    one, two = replica.gateway(calls), replica.gateway(calls)
    wrote = await replica.ask([*TOKENS, 1], 100, 200, keeper=one)
    assert wrote.lease_write_tokens == 200
    await one._sync()
    read = await replica.ask([*TOKENS, 2], 100, 200, keeper=two)
    assert (read.lease_read_tokens, read.lease_write_tokens, read.leases_degraded) == (200, 0, 0)
    assert read.lease_reads == [200, 100]
    late = replica.gateway(calls)
    await late._sync()
    assert late.leased_blocks == 200 // 16
    await leave(one, two, late)


async def test_a_renewal_counts_in_all_gateways_and_an_end_too(calls: RedisCalls) -> None:
    replica = LeasedReplica(64)
    one, two = replica.gateway(calls), replica.gateway(calls)
    await replica.ask([*TOKENS, 1], 200, keeper=one)
    await one._sync()
    await two._sync()
    replica.now += TTL_S / 2
    await replica.ask([*TOKENS, 2], 200, keeper=two)
    await two._sync()
    await one._sync()
    replica.now += TTL_S / 2 + 1
    for keeper in (one, two):
        assert keeper._leases is not None
        assert keeper._leases.leases.expire(replica.now) == 0
    replica.now += TTL_S / 2
    assert one._leases is not None
    assert one._leases.leases.expire(replica.now) == 1
    await leave(one, two)


async def test_a_purge_ends_leases_in_all_gateways(calls: RedisCalls) -> None:
    replica = LeasedReplica(64)
    one, two = replica.gateway(calls), replica.gateway(calls)
    for tenant in "ab":
        await replica.ask([*TOKENS, 1], 200, tenant=tenant, keeper=one)
    await one._sync()
    await two._sync()
    assert two.leased_blocks == 2 * (200 // 16)
    assert one.purge(Tenant("a").salt) == 1
    await one._sync()
    await two._sync()
    late = replica.gateway(calls)
    await late._sync()
    assert [keeper.leased_blocks for keeper in (one, two, late)] == [200 // 16] * 3
    again = await replica.ask([*TOKENS, 1], 200, tenant="a", keeper=two)
    assert again.leases_degraded == 0
    await two._sync()
    await one._sync()
    assert one.leased_blocks == 2 * (200 // 16)
    await leave(one, two, late)


async def test_a_redis_that_lost_everything_gets_the_leases_back(calls: RedisCalls) -> None:
    replica = LeasedReplica(64)
    one = replica.gateway(calls)
    await replica.ask([*TOKENS, 1], 200, keeper=one)
    await one._sync()
    await calls.redis.flushall()
    for _ in range(2):
        await one._sync()
    late = replica.gateway(calls)
    await late._sync()
    assert late.leased_blocks == 200 // 16
    await leave(one, late)


async def test_without_redis_each_gateway_keeps_its_own(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, 0.2)
    own_redis.kill()
    replica = LeasedReplica(64)
    one = replica.gateway(RedisCalls(redis, 0.2))
    await replica.ask([*TOKENS, 1], 200, keeper=one)
    again = await replica.ask([*TOKENS, 2], 200, keeper=one)
    assert (again.lease_read_tokens, again.leases_degraded) == (200, 0)
    await leave(one)
    await close(redis)


async def leave(*keepers: LeaseKeeper) -> None:
    for keeper in keepers:
        await keeper.leave()
