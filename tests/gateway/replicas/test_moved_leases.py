"""Leases of a replica that drains, or is lost, are kept by other replicas."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import split_digests
from gateway.replicas.touching import LOST_S, RETRY_S, LeaseKeeper
from gateway.storage.redis_calls import RedisCalls, close, connect
from tests.fakes.leased_replica import SPACE, TTL_S, LeasedReplica
from tests.fakes.waiting import until

CHANCE = random.Random(11)
LONG = [CHANCE.randrange(60_000) for _ in range(165)]
OTHER = [CHANCE.randrange(60_000) for _ in range(96)]


def noise(count: int) -> list[int]:
    return [CHANCE.randrange(60_000) for _ in range(count)]


async def leave(*keepers: LeaseKeeper) -> None:
    for keeper in keepers:
        await keeper.leave()


async def test_a_draining_replica_is_not_touched_and_another_one_keeps_what_it_kept() -> None:
    old, new = LeasedReplica(64), LeasedReplica(64)
    await old.ask([*LONG, 7], 100, 165)
    await old.ask([*OTHER, 7], 96, tenant="b")
    old.keeper.draining = True
    for _ in range(4):
        await old.ask(noise(300), tenant="b")
    assert not old.bodies
    assert old.cached(LONG) == 0
    new.busy = True
    await old.keeper.hand_over([old.keeper, new.keeper])
    assert (old.keeper.leased_blocks, new.keeper.leased_blocks) == (0, 10 + 6)
    await new.look()
    assert not new.bodies
    new.busy = False
    for _ in range(4):
        await new.look()
    assert (new.cached(LONG), new.cached(OTHER, "b")) == (160, 96)
    for _ in range(20):
        await new.ask(noise(300), tenant="b")
    update = await new.ask([*LONG, 8], 165)
    assert (update.lease_read_tokens, update.lease_write_tokens, update.lease_reads) == (165, 0, [165, 100])
    assert new.keeper.figures()["lost"] == 0
    assert not old.bodies
    await leave(old.keeper, new.keeper)


async def test_what_another_replica_keeps_is_read_where_a_replica_has_it_without_a_lease() -> None:
    one, two = LeasedReplica(64), LeasedReplica(64)
    await one.ask([*LONG, 7], 100, 165)
    await two.keeper.hand_over([one.keeper, two.keeper])
    two.run(LONG[:128], two.salt())  # as warming.py does
    update = await two.ask([*LONG, 8], 165)
    assert (update.lease_read_tokens, update.lease_write_tokens, update.lease_reads) == (100, 65, [100])
    update = await two.ask([*LONG, 9], 165)
    assert (update.lease_read_tokens, update.lease_write_tokens, update.lease_reads) == (165, 0, [165])
    update = await two.ask([*LONG, 9], 165, tenant="b")
    assert (update.lease_read_tokens, update.lease_write_tokens) == (0, 165)
    two.run(OTHER, two.salt())
    update = await two.ask([*OTHER, 8], 96)
    assert (update.lease_read_tokens, update.lease_write_tokens) == (0, 96), "no client asked to keep it before"
    await leave(one.keeper, two.keeper)


async def test_a_moved_lease_ends_when_it_would_have_ended() -> None:
    old, new = LeasedReplica(64), LeasedReplica(64)
    await old.ask([*LONG, 7], 165)
    old.keeper.draining = True
    old.now = new.now = old.now + TTL_S - 1
    await old.keeper.hand_over([new.keeper])
    assert new.keeper.leased_blocks == 10
    new.now += 2
    await new.look()
    assert new.keeper.leased_blocks == 0
    await leave(old.keeper, new.keeper)


@pytest.mark.parametrize(
    "other",
    [
        {"hello": {"namespace": replace(SPACE, weights="x")}},
        {"hello": {"tokenizer": "x"}},
        {"hello": {"model": "x"}},
        {"hello": {"context_tokens": 100}},
        {"draining": True},
        {"lost": True},
        {"itself": True},
    ],
)
async def test_without_another_one_leases_stay_and_are_kept_again_when_the_drain_is_undone(
    other: dict[str, Any],
) -> None:
    old, new = LeasedReplica(64), LeasedReplica(64, hello=other.get("hello", {}))
    new.keeper.draining = "draining" in other
    if "lost" in other:
        await new.keeper.leave()
    await old.ask([*LONG, 7], 165)
    old.keeper.draining = True
    await old.keeper.hand_over([old.keeper] if "itself" in other else [old.keeper, new.keeper])
    for _ in range(4):
        await old.ask(noise(300), tenant="b")
    assert (old.cached(LONG), old.bodies) == (0, [])
    assert (old.keeper.leased_blocks, new.keeper.leased_blocks) == (10, 0)
    old.keeper.draining = False
    for _ in range(2):
        await old.look()
    assert old.cached(LONG) == 160
    await leave(old.keeper, new.keeper)


async def test_what_finds_no_room_stays_until_there_is_some() -> None:
    old, new = LeasedReplica(64), LeasedReplica(64, tenant_share=0.25)
    await new.ask([*OTHER, *LONG, 7], 96 + 144)  # of the same tenant, which has 16 blocks there
    new.now = old.now = new.now - 1  # so that what moves is worth less
    await old.ask([*LONG, 7], 165)
    old.keeper.draining = True
    new.now = old.now = new.now + 1
    await old.keeper.hand_over([new.keeper])
    assert (old.keeper.leased_blocks, new.keeper.leased_blocks) == (10, 15)
    assert new.keeper._leases is not None
    new.keeper.purge("")
    await old.keeper.hand_over([new.keeper])
    assert old.keeper.leased_blocks == 10  # not tried again at once
    new.now = old.now = new.now + RETRY_S
    await old.keeper.hand_over([new.keeper])
    assert (old.keeper.leased_blocks, new.keeper.leased_blocks) == (0, 10)
    await leave(old.keeper, new.keeper)


async def test_a_conversation_goes_to_one_replica_and_others_where_less_is_leased() -> None:
    old, one, two = LeasedReplica(64), LeasedReplica(64), LeasedReplica(64)
    await old.ask([*LONG, 7], 64, 100, 165)
    await old.ask([*OTHER, 7], 96)
    third = noise(64)
    await old.ask([*third, 7], 64)
    await one.ask([*third, 7])  # there already
    old.keeper.draining = True
    await old.keeper.hand_over([one.keeper, two.keeper])
    assert old.keeper.leased_blocks == 0
    kept = {keeper.leased_blocks for keeper in (one.keeper, two.keeper)}
    assert kept in ({10 + 4, 6}, {10, 6 + 4})
    assert one.keeper.leased_blocks in (10 + 4, 6 + 4)
    await leave(old.keeper, one.keeper, two.keeper)


async def test_leases_of_a_lost_replica_move_when_it_does_not_come_back() -> None:
    old, new = LeasedReplica(64), LeasedReplica(64)
    await old.ask([*LONG, 7], 165)
    await old.keeper.leave()
    await old.keeper.hand_over([new.keeper])
    old.now = new.now = old.now + LOST_S - 1
    await old.keeper.hand_over([new.keeper])
    assert new.keeper.leased_blocks == 0
    old.now = new.now = old.now + 1
    await old.keeper.hand_over([new.keeper])
    assert (old.keeper.leased_blocks, new.keeper.leased_blocks) == (0, 10)
    old.keeper.join(old.joined)
    assert old.keeper.leased_blocks == 0
    await leave(old.keeper, new.keeper)


async def test_without_events_the_router_learns_what_was_computed() -> None:
    old, new = LeasedReplica(64, events=False), LeasedReplica(64, events=False)
    await old.ask([*LONG, 7], 165)
    old.keeper.draining = True
    await old.keeper.hand_over([new.keeper])
    await new.look()
    assert new.cached(LONG) == 160
    assert new.keeper._leases is not None
    assert [split_digests(told) for told in new.told] == [split_digests(new.salted(LONG))]
    await leave(old.keeper, new.keeper)


# -- several gateways --------------------------------------------------------------------------------------------------


@pytest.fixture
async def calls(redis_url: str) -> AsyncIterator[RedisCalls]:
    redis = connect(redis_url, 5.0)
    yield RedisCalls(redis, 5.0)
    await close(redis)


async def test_one_gateway_moves_and_the_others_hear_of_it(calls: RedisCalls) -> None:
    old, new = LeasedReplica(64, name="old"), LeasedReplica(64, name="new")
    one, two = [[server.gateway(calls) for server in (old, new)] for _ in range(2)]

    async def leased(*counts: int) -> None:
        """Waits until the gateways know of so many blocks."""

        async def known() -> bool:
            for keeper in (*one, *two):
                await keeper._sync()
            return [keeper.leased_blocks for keeper in (*one, *two)] == list(counts)

        await until(known)

    async def hand_over(gateway: list[LeaseKeeper], *, leads: bool) -> None:
        old.now = new.now = old.now + RETRY_S
        old.leads = leads
        await gateway[0].hand_over([gateway[1]])

    await old.ask([*LONG, 7], 165, keeper=one[0])
    await leased(10, 0, 10, 0)
    one[0].draining = two[0].draining = True
    await hand_over(two, leads=False)
    await hand_over(one, leads=True)
    await leased(0, 10, 10, 10)
    await old.ask([*OTHER, 7], 96, keeper=two[0])  # ran there when the drain began
    await leased(6, 10, 16, 10)
    await hand_over(two, leads=False)
    await leased(6, 10, 6, 10)
    await hand_over(one, leads=True)
    await leased(0, 16, 6, 16)
    await hand_over(two, leads=False)
    await leased(0, 16, 0, 16)
    late = [server.gateway(calls) for server in (old, new)]
    for keeper in late:
        await keeper._sync()
    assert [keeper.leased_blocks for keeper in late] == [0, 16]
    await leave(*one, *two, *late)


async def test_one_gateway_moves_leases_of_a_lost_replica(calls: RedisCalls) -> None:
    old, new = LeasedReplica(64, name="old"), LeasedReplica(64, name="new")
    gateways = [[server.gateway(calls) for server in (old, new)] for _ in range(2)]
    await old.ask([*LONG, 7], 165, keeper=gateways[0][0])

    async def known(counts: list[int]) -> bool:
        for gateway in gateways:
            await gateway[1]._sync()
        return [keeper.leased_blocks for gateway in gateways for keeper in gateway] == counts

    for gateway in gateways:
        await gateway[0]._sync()
        await gateway[0].leave()
    assert await known([10, 0, 10, 0])
    old.now = new.now = old.now + LOST_S
    for gateway in gateways:
        await gateway[0].hand_over([gateway[1]])
    assert sorted(gateway[0].leased_blocks for gateway in gateways) == [0, 10]
    left = [gateway[0].leased_blocks for gateway in gateways]
    await until(lambda: known([left[0], 10, left[1], 10]))
    old.now = new.now = old.now + RETRY_S
    for gateway in gateways:
        await gateway[0].hand_over([gateway[1]])
    assert [gateway[0].leased_blocks for gateway in gateways] == [0, 0]
    await leave(*(keeper for gateway in gateways for keeper in gateway))
