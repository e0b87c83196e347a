"""Leased prefixes stay in the cache of a server that knows no leases, which is simulated here."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.base import Kind
from gateway.replicas.touch_plan import TouchPlan
from gateway.types import Tenant
from tests.fakes.leased_replica import TTL_S, LeasedReplica


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 60_000) for _ in range(count)]


# -- the promise -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    pages=st.integers(32, 120),
    page=st.sampled_from([16, 48, 128]),
    events=st.booleans(),
)
def test_a_leased_prefix_within_its_budget_is_never_evicted(seed: int, pages: int, page: int, events: bool) -> None:
    async def test() -> None:
        chance = random.Random(seed)
        server = LeasedReplica(pages, page, events=events, tenant_share=1.0)
        leased: list[list[int]] = []
        budget = pages // 2
        while budget > 2 and len(leased) < 4:
            size = chance.randint(1, budget - 1)
            tokens = ids(chance, size * page + chance.randrange(page))
            update = await server.ask([*tokens, 7], len(tokens))
            assert update.leases_degraded == 0
            leased.append(tokens)
            budget -= size + 1
        most = pages - pages // 2 - pages // 32 - 2  # pages of one prompt: what is left
        for _ in range(40):
            foreign = ids(chance, chance.randint(1, most * page - 1))
            await server.ask(foreign, tenant=chance.choice("ab"))
            for tokens in leased:
                assert server.cached(tokens) == len(tokens) // page * page
        for tokens in leased:
            update = await server.ask([*tokens, 8], len(tokens))
            assert update.lease_read_tokens == len(tokens)
            assert update.lease_write_tokens == 0
        assert server.keeper.figures()["lost"] == 0
        await server.keeper.leave()

    asyncio.run(test())


async def test_touches_cost_little_and_an_equal_prefix_without_a_lease_is_gone() -> None:
    chance = random.Random(1)
    server = LeasedReplica(64, 128)
    leased, other = ids(chance, 2048), ids(chance, 2048)
    await server.ask([*leased, 7], 2048)
    await server.ask([*other, 7])
    server.prefilled = 0
    for _ in range(24):
        await server.ask(ids(chance, 1024), tenant="b")
    figures = server.keeper.figures()
    assert server.cached(leased) == 2048
    assert server.cached(other) == 0
    assert 3 <= figures["touches"] <= 20
    assert figures["touched_tokens"] == 2048 * figures["touches"]
    assert figures["recomputed_tokens"] == figures["touches"] < 0.001 * server.prefilled
    await server.keeper.leave()


# -- what is lost, and what is not touched -----------------------------------------------------------------------------


async def test_after_a_restart_leased_prefixes_are_computed_again_in_idle_time_alone() -> None:
    chance = random.Random(2)
    server = LeasedReplica(64)
    prefixes = [ids(chance, 160), ids(chance, 96)]
    for tokens in prefixes:
        await server.ask([*tokens, 7], len(tokens))
    await server.restart()
    server.busy = True
    await server.look()
    assert [server.cached(tokens) for tokens in prefixes] == [0, 0]
    server.busy = False
    for _ in prefixes:
        await server.look()
    assert [server.cached(tokens) for tokens in prefixes] == [160, 96]
    figures = server.keeper.figures()
    assert (figures["lost"], figures["recomputed_tokens"], figures["touches"]) == (2, 160 + 96 + 2, 2)
    await server.look()
    assert server.keeper.figures()["touches"] == 2
    await server.keeper.leave()


async def test_past_the_budget_a_lease_is_degraded_and_not_touched() -> None:
    chance = random.Random(3)
    server = LeasedReplica(64, tenant_share=0.25)
    big = ids(chance, 17 * 16)
    update = await server.ask([*big, 7], len(big))
    assert (update.leases_degraded, update.lease_write_tokens, update.lease_read_tokens) == (1, 0, 0)
    for _ in range(20):
        await server.ask(ids(chance, 300), tenant="b")
    assert not server.bodies
    assert server.cached(big) == 0
    await server.keeper.leave()


async def test_figures_are_those_of_the_bundled_engine() -> None:
    chance = random.Random(4)
    server = LeasedReplica(64)
    tokens = ids(chance, 200)
    first = await server.ask([*tokens, 1, 2, 3], 100, 200)
    assert (first.lease_read_tokens, first.lease_write_tokens, first.leases_degraded) == (0, 200, 0)
    again = await server.ask([*tokens, 4, 5], 100, 200)
    assert (again.lease_read_tokens, again.lease_write_tokens) == (200, 0)
    assert again.lease_reads == [200, 100]
    longer = await server.ask([*tokens, *range(60)], 240)
    assert (longer.lease_read_tokens, longer.lease_write_tokens) == (200, 40)
    unmarked = await server.ask([*tokens, 9])
    assert (unmarked.lease_read_tokens, unmarked.lease_write_tokens, unmarked.lease_reads) == (200, 0, None)
    other = await server.ask([*tokens, 9], tenant="b")
    assert other.lease_read_tokens is None
    server.cache.clear()
    gone = await server.ask([*tokens, 4], 200)
    assert (gone.lease_read_tokens, gone.lease_write_tokens) == (0, 200)
    await server.keeper.leave()


async def test_what_was_read_is_counted_once_however_often_a_server_says_it() -> None:
    chance = random.Random(8)
    server = LeasedReplica(64, kind="sglang")
    tokens = ids(chance, 160)
    await server.ask([*tokens, 7], 160)
    await server.ask([*tokens, 8], 160, updates=3)
    assert server.keeper.figures()["read_tokens"] == 160
    await server.keeper.leave()


async def test_a_lease_ends_with_its_time_and_with_a_purge() -> None:
    server = LeasedReplica(64)
    tokens = list(range(160))
    await server.ask([*tokens, 7], 160)
    await server.ask([*tokens, 7], 160, tenant="b")
    assert server.keeper.purge(Tenant("a").salt) == 1
    assert server.keeper.leased_blocks == 10
    server.now += TTL_S + 1
    await server.look()
    assert server.keeper.leased_blocks == 0
    assert server.keeper.figures()["expired"] == 1
    await server.keeper.leave()


async def test_a_touch_that_fails_is_tried_again_later() -> None:
    chance = random.Random(5)
    server = LeasedReplica(64)
    tokens = ids(chance, 160)
    await server.ask([*tokens, 7], 160)
    server.status = 500
    for _ in range(2):
        await server.ask(ids(chance, 400), tenant="b")
    figures = server.keeper.figures()
    assert (figures["touches"], figures["touch_failures"]) == (0, 1)
    server.status, server.now = 200, server.now + 10
    await server.look()
    assert server.keeper.figures()["touches"] == 1
    await server.keeper.leave()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_touch_has_the_lowest_priority_where_the_server_takes_one(kind: Kind) -> None:
    chance = random.Random(6)
    server = LeasedReplica(64, kind=kind)
    tokens = ids(chance, 170)
    await server.ask([*tokens, 7], 170)
    for _ in range(4):
        await server.ask(ids(chance, 400), tenant="b")
    first, *others = server.bodies
    assert others
    assert ("priority" in first) == (kind == "vllm")
    assert not any("priority" in body for body in others)
    sent = others[0].get("prompt") or others[0]["input_ids"]
    assert sent == [*tokens[:160], tokens[0]]
    await server.keeper.leave()


def test_what_others_store_counts_and_what_never_was_stored_hides_nothing() -> None:
    plan = TouchPlan(1600, 16)
    plan.mark(b"x", plan.pushed, 0)
    plan.sent(320)  # a request that fails: no event tells of it
    plan.store(0)
    assert plan.pushed == 336
    plan.mark(b"x", plan.pushed, 0)
    plan.store(320)  # others
    assert plan.pushed == 656
    assert not plan.is_due(b"x")
    plan.sent(160)
    plan.store(480)  # the events of that
    assert plan.pushed == 656 + 176
    plan.store(560)
    assert plan.is_due(b"x")
