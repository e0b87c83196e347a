"""Several gateways know the same leases of a replica by Redis."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from gateway.replicas.touching import LeaseKeeper
from gateway.storage.redis_calls import RedisCalls, close, connect
from gateway.types import Tenant
from tests.fakes.leased_replica import TTL_S, LeasedReplica
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

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


async def test_without_events_one_gateway_touches_and_knows_what_all_of_them_store(calls: RedisCalls) -> None:
    replica = LeasedReplica(64, events=False)
    one, two = replica.keeper, replica.gateway(calls)
    await one.leave()
    one = replica.keeper = replica.gateway(calls)
    await replica.ask([*TOKENS[:160], 1], 160, keeper=one)
    for keeper in (one, two):
        await keeper._sync()
    leader, other = (one, two) if one.leads else (two, one)
    assert (leader.leads, other.leads) == (True, False)
    replica.keeper = leader
    await replica.look()
    replica.bodies.clear()
    assert leader._shared is not None
    assert other._shared is not None
    for keeper in (leader, other):
        await keeper._sync()
    before = other._shared.others_tokens - leader._plan.own
    for number in range(40):
        await replica.ask([number] * 160, tenant="b", keeper=other)
        await asyncio.gather(*(other._sync() for _ in range(3)))
        await leader._sync()
        await replica.look()
        assert replica.cached(TOKENS[:160]) == 160
    assert 40 * 160 / 1024 * 2 < len(replica.bodies) < 40 * 160 / 1024 * 5
    for keeper in (leader, other):
        await keeper._sync()
    stored = other._plan.own
    assert leader._shared.others_tokens == stored
    assert other._shared.others_tokens - leader._plan.own == before
    await calls.redis.flushall()
    for keeper in (leader, other):
        await keeper._sync()
    await replica.ask([77] * 160, tenant="b", keeper=other)
    for keeper in (other, leader):
        await keeper._sync()
    assert leader._shared.others_tokens == other._plan.own > stored
    await leave(leader)
    await until(lambda: takes_over(other))
    await leave(other)


async def takes_over(keeper: LeaseKeeper) -> bool:
    await keeper._sync()
    return keeper.leads


async def leave(*keepers: LeaseKeeper) -> None:
    for keeper in keepers:
        await keeper.leave()
