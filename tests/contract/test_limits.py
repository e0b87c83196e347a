"""The promises of gateway/limits/counters.py over every implementation, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis

from gateway.errors import RedisDownError
from gateway.limits import counters as counters_module
from gateway.limits.counters import (
    WINDOW_US,
    Counters,
    MemoryCounters,
    RedisCounters,
    SharedCounters,
    Take,
    Taken,
    cost_us,
    room,
    wait_us,
)
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, close, connect, unreadable
from gateway.types import LimitKind
from tests.fakes.limits import Clock
from tests.fakes.redis_fleet import keys_of
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

LIMIT_S = 30.0
LEASE_S = 30.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
def counters(request: pytest.FixtureRequest, redis: Redis, clock: Clock) -> Counters:
    if request.param == "memory":
        return MemoryCounters(lease_s=LEASE_S, now_us=clock)
    return RedisCounters(RedisCalls(redis, LIMIT_S), lease_s=LEASE_S, now_us=clock)


def requests(amount: int, limit: int = 60) -> Take:
    return Take({"requests": cost_us(amount, limit)})


def flight(name: str, most: int = 2) -> Take:
    return Take({}, name, most)


async def test_a_minutes_worth_is_there_at_once_and_flows_back_evenly(counters: Counters, clock: Clock) -> None:
    for _ in range(60):
        assert (await counters.take("north", requests(1))).admitted
    refused = await counters.take("north", requests(1))
    assert not refused.admitted
    assert wait_us(refused.full_us["requests"], refused.now_us, cost_us(1, 60)) == 1_000_000
    clock.now_us += 999_999
    assert not (await counters.take("north", requests(1))).admitted
    clock.now_us += 1
    assert (await counters.take("north", requests(1))).admitted
    assert not (await counters.take("north", requests(1))).admitted
    clock.pass_s(3600)
    assert (await counters.take("north", requests(60))).admitted
    assert not (await counters.take("north", requests(1))).admitted, "nothing is saved up beyond a minute's worth"


async def test_what_may_come_at_once_is_less_where_that_was_said(counters: Counters, clock: Clock) -> None:
    def some(amount: int) -> Take:
        return Take({"requests": cost_us(amount, 60)}, burst_us=5_000_000)

    clock.pass_s(3600)
    for _ in range(5):
        taken = await counters.take("north", some(1))
        assert taken.admitted
    assert room(60, taken.full_us["requests"], taken.now_us, 5_000_000).remaining == 0
    refused = await counters.take("north", some(1))
    assert not refused.admitted
    assert wait_us(refused.full_us["requests"], refused.now_us, cost_us(1, 60), 5_000_000) == 1_000_000
    clock.pass_s(4)
    assert not (await counters.take("north", some(30))).admitted
    clock.pass_s(1)
    assert (await counters.take("north", some(30))).admitted, "what is more than that has it when nothing is missing"
    clock.pass_s(25)
    assert not (await counters.take("north", some(1))).admitted
    clock.pass_s(1)
    assert (await counters.take("north", some(1))).admitted


async def test_what_is_not_all_there_is_not_taken_at_all(counters: Counters) -> None:
    tokens = Take({"requests": cost_us(1, 10), "tokens": cost_us(600, 1000)})
    assert (await counters.take("north", tokens)).admitted
    refused = await counters.take("north", tokens)
    assert not refused.admitted
    assert room(10, refused.full_us["requests"], refused.now_us).remaining == 9
    assert room(1000, refused.full_us["tokens"], refused.now_us).remaining == 400


async def test_tenants_do_not_use_each_others(counters: Counters) -> None:
    assert (await counters.take("north", requests(60))).admitted
    assert (await counters.take("north}", requests(60))).admitted
    assert (await counters.take("south", requests(60))).admitted
    assert not (await counters.take("north", requests(1))).admitted


async def test_what_was_not_used_is_there_again(counters: Counters) -> None:
    assert (await counters.take("north", requests(60))).admitted
    await counters.give_back("north", {"requests": cost_us(59, 60)}, [])
    taken = await counters.take("north", requests(59))
    assert taken.admitted
    assert taken.full_us["requests"] == taken.now_us + WINDOW_US


async def test_what_comes_back_late_makes_a_bucket_no_larger(counters: Counters, clock: Clock) -> None:
    assert (await counters.take("north", requests(60))).admitted
    clock.pass_s(50)
    await counters.give_back("north", {"requests": cost_us(60, 60)}, [])
    assert (await counters.take("north", requests(60))).admitted
    assert not (await counters.take("north", requests(1))).admitted


async def test_what_was_used_beyond_is_owed(counters: Counters, clock: Clock) -> None:
    assert (await counters.take("north", requests(60))).admitted
    await counters.give_back("north", {"requests": -cost_us(30, 60)}, [])
    refused = await counters.take("north", requests(1))
    assert wait_us(refused.full_us["requests"], refused.now_us, cost_us(1, 60)) == 31_000_000
    free = await counters.take("north", requests(0))
    assert free.admitted, "what costs nothing is there whatever is owed"
    clock.pass_s(31)
    assert (await counters.take("north", requests(1))).admitted


async def test_so_many_are_in_flight_and_whoever_ends_makes_room(counters: Counters) -> None:
    first, second = await counters.take("north", flight("a")), await counters.take("north", flight("b"))
    assert (first.admitted, second.admitted) == (True, True)
    assert not (await counters.take("north", flight("c"))).admitted
    assert (await counters.take("south", flight("d"))).admitted
    await counters.give_back("north", {}, ["a"])
    await counters.give_back("north", {}, ["a", "never"])
    assert (await counters.take("north", flight("c"))).admitted
    assert not (await counters.take("north", flight("e"))).admitted


async def test_who_has_no_place_takes_nothing_else_either(counters: Counters) -> None:
    asked = Take({"requests": cost_us(1, 60)}, "a", 1)
    assert (await counters.take("north", asked)).admitted
    refused = await counters.take("north", Take({"requests": cost_us(1, 60)}, "b", 1))
    assert not refused.admitted
    assert room(60, refused.full_us["requests"], refused.now_us).remaining == 59


async def test_leases_that_nobody_renews_end(counters: Counters, clock: Clock) -> None:
    for name in "ab":
        assert (await counters.take("north", flight(name))).admitted
    clock.pass_s(LEASE_S - 1)
    await counters.renew("north", ["a"])
    clock.pass_s(1)
    assert (await counters.take("north", flight("c"))).admitted
    assert not (await counters.take("north", flight("d"))).admitted
    clock.pass_s(LEASE_S)
    await counters.renew("north", ["a", "b", "c"])
    assert (await counters.take("north", flight("d", 1))).admitted, "a lease that has ended is not renewed"


async def test_of_many_that_come_at_once_no_more_are_let_in_than_may(counters: Counters) -> None:
    asked = [counters.take("north", Take({"requests": cost_us(1, 7)}, str(number), 5)) for number in range(40)]
    assert sum(taken.admitted for taken in await asyncio.gather(*asked)) == 5


async def test_of_a_tenant_and_its_key_all_is_taken_or_nothing(counters: Counters) -> None:
    async def take(key: str, flight: str | None = None) -> Taken:
        of_tenant, of_key = Take({"requests": cost_us(1, 60)}, flight, 9), Take({"requests": cost_us(1, 2)}, flight, 1)
        return await counters.take("north", of_tenant, (f"north/{key}", of_key))

    assert [(await take("key_1")).admitted for _ in range(2)] == [True, True]
    refused = await take("key_1")
    assert (refused.admitted, refused.refused_by) == (False, 1)
    assert room(60, refused.full_us["requests"], refused.now_us).remaining == 58, "nothing of the tenant's"
    assert room(2, refused.also_us["requests"], refused.now_us).remaining == 0
    assert [(await take("key_2", flight)).admitted for flight in ("a", "b")] == [True, False]
    await counters.give_back("north", {"requests": cost_us(1, 60)}, ["a"], ("north/key_2", {}))
    taken = await take("key_2", "b")
    assert taken.admitted, "the place of its key is free again"
    assert room(60, taken.full_us["requests"], taken.now_us).remaining == 57
    assert (await counters.take("north", requests(57))).admitted
    of_key = await take("key_3")
    assert (of_key.admitted, of_key.refused_by) == (False, 0)
    assert room(2, of_key.also_us["requests"], of_key.now_us).remaining == 2


async def test_memory_forgets_owners_that_nothing_is_missing_of(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(counters_module, "MAX_OWNERS", 3)
    counters = MemoryCounters(lease_s=LEASE_S, now_us=clock)
    for name in "abc":
        await counters.take(name, requests(60 if name == "b" else 1))
    clock.pass_s(2)
    await counters.take("d", requests(1))
    assert list(counters._owners) == ["b", "d"]
    assert not (await counters.take("b", requests(60))).admitted


async def test_redis_and_its_twin_say_the_same(redis: Redis, clock: Clock) -> None:
    """Random requests, ends and pauses, with limits from one per minute to more than the clock can tell apart."""
    twins: tuple[Counters, Counters] = (
        MemoryCounters(lease_s=LEASE_S, now_us=clock),
        RedisCounters(RedisCalls(redis, LIMIT_S), lease_s=LEASE_S, now_us=clock),
    )
    chance = random.Random(7)
    kinds: tuple[LimitKind, ...] = ("requests", "tokens", "input_tokens")
    limits = dict(zip(kinds, (1, 977, 10**9), strict=True))
    for number in range(600):
        clock.now_us += chance.choice((0, 1, 333, 10**5, 10**7)) * chance.randrange(4)
        asked = {
            kind: cost_us(chance.choice((0, 1, limits[kind] // 3, limits[kind])), limits[kind])
            for kind in chance.sample(kinds, chance.randrange(4))
        }
        match chance.randrange(4):
            case 0:
                changes = {kind: cost * chance.choice((-1, 1)) for kind, cost in asked.items()}
                ended = [str(chance.randrange(number + 1)) for _ in range(chance.randrange(3))]
                for twin in twins:
                    await twin.give_back("north", changes, ended, ("north/key", changes) if number % 2 else None)
            case 1:
                names = [str(max(0, number - chance.randrange(20))) for _ in range(3)]
                for twin in twins:
                    await twin.renew("north", names)
            case _:
                lease = str(number) if chance.random() < 0.7 else None
                take = Take(asked, lease, chance.randrange(1, 6), chance.choice((WINDOW_US, 10**6, 1)))
                also = ("north/key", Take(asked, lease, 2, take.burst_us)) if chance.random() < 0.5 else None
                one, other = [await twin.take("north", take, also) for twin in twins]
                assert one == other, number


async def test_keys_in_redis_end_when_nothing_in_them_matters(redis: Redis) -> None:
    counters = RedisCounters(RedisCalls(redis, LIMIT_S), lease_s=LEASE_S)
    assert (await counters.take("north", Take({"requests": cost_us(30, 60)}, "a", 1))).admitted
    assert await keys_of(redis) == [b"kvasir:limits:{north}", b"kvasir:limits:{north}:flights"]
    assert 29_000 < await redis.pttl("kvasir:limits:{north}") <= 31_000
    assert 30_000 < await redis.pttl("kvasir:limits:{north}:flights") <= 31_000
    await counters.give_back("north", {"requests": cost_us(30, 60)}, ["a"])
    assert await keys_of(redis) == []


async def test_redis_that_is_away_or_cannot_do_it_is_down(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, 0.5)
    try:
        counters = RedisCounters(RedisCalls(redis, 0.5), lease_s=LEASE_S)
        await redis.config_set("maxmemory", "1")
        with pytest.raises(RedisDownError) as refused:
            await counters.take("north", requests(1))
        assert "OOM" in refused.value.why or "maxmemory" in refused.value.why
        own_redis.kill()
        for call in (
            counters.take("north", requests(1)),
            counters.give_back("north", {}, ["a"]),
            counters.renew("north", ["a"]),
        ):
            with pytest.raises(RedisDownError):
                await call
    finally:
        await close(redis)


@pytest.mark.parametrize("junk", ["x", "", "-5", "1e308", "nan", "9" * 400])
async def test_a_bucket_that_no_gateway_wrote_is_full(redis: Redis, junk: str) -> None:
    counters = RedisCounters(RedisCalls(redis, LIMIT_S), lease_s=LEASE_S)
    await redis.hset("kvasir:limits:{north}", "requests", junk)  # type: ignore[misc]
    assert (await counters.take("north", requests(60))).admitted
    assert not (await counters.take("north", requests(60))).admitted, "it counts again from then on"
    await redis.hset("kvasir:limits:{north}", "requests", junk)  # type: ignore[misc]
    await counters.give_back("north", {"requests": cost_us(30, 60)}, [])
    assert (await counters.take("north", requests(60))).admitted


@pytest.mark.parametrize("key", ["kvasir:limits:{north}", "kvasir:limits:{north}:flights"])
async def test_keys_of_another_type_are_passed_over_for_their_tenant_alone(redis: Redis, key: str) -> None:
    unreadable.clear()
    breaker = RedisBreaker(retry_s=1000.0)
    counters = RedisCounters(RedisCalls(redis, LIMIT_S, breaker), lease_s=LEASE_S)
    shared = SharedCounters(counters, MemoryCounters(lease_s=LEASE_S))
    await redis.set(key, "something else")
    flight = Take({"requests": cost_us(60, 60)}, "a", 1)
    taken, memory = await shared.take("north", flight)
    assert taken.admitted
    assert memory is not counters
    assert not (await shared.take("north", flight))[0].admitted
    await counters.give_back("north", {"requests": 1}, ["a"])
    await counters.renew("north", ["a"])
    assert (await shared.take("south", flight))[1] is counters
    assert breaker.outages == 0
    assert unreadable["counters of limits"] >= 3
    assert await redis.get(key) == b"something else"
    await until(lambda: not shared.ending)  # else it connects when the client is closed
