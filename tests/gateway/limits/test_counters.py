"""Redis that goes away and comes back: nobody is refused for it, and it is said once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.errors import RateLimitError, RedisDownError
from gateway.limits.counters import MemoryCounters, Take, Taken
from gateway.limits.limits import TenantLimits
from gateway.storage.redis_calls import connect
from gateway.types import ANONYMOUS, Need, Usage
from tests.fakes.limits import Clock, tenant_limits
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

LIMIT_S = 30.0


async def admitted(limits: TenantLimits, most: int = 1000) -> int:
    """How many requests are let in, one after the other."""
    for number in range(most):
        try:
            await limits.set_aside([ANONYMOUS], Need())
        except RateLimitError:
            return number
    return most


async def test_gateways_on_one_redis_share_a_limit(redis_url: str) -> None:
    clock = Clock()
    one, other = connect(redis_url, LIMIT_S), connect(redis_url, LIMIT_S)
    try:
        first, second = [tenant_limits(clock, redis=each, requests_per_minute=10) for each in (one, other)]
        assert await admitted(first, 7) == 7
        assert await admitted(second) == 3
        clock.pass_s(12)
        assert await admitted(first) == 2
    finally:
        await one.aclose()
        await other.aclose()


async def test_a_gateway_that_was_killed_gives_its_places_back_after_a_time(redis_url: str) -> None:
    clock, redis = Clock(), connect(redis_url, LIMIT_S)
    try:
        killed, other = [tenant_limits(clock, redis=redis, max_in_flight=2, lease_s=30) for _ in range(2)]
        assert await admitted(killed) == 2
        assert await admitted(other) == 0
        clock.pass_s(20)
        await other.renew()
        assert await admitted(other) == 0
        clock.pass_s(10)
        assert await admitted(other) == 2
    finally:
        await redis.aclose()


async def test_while_redis_is_away_each_gateway_counts_for_itself_and_says_so_once(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    clock, redis = Clock(), connect(own_redis.url, LIMIT_S)
    limits = tenant_limits(clock, redis=redis, requests_per_minute=10)
    try:
        with caplog.at_level(logging.INFO, "gateway.storage"):
            assert await admitted(limits, 8) == 8
            own_redis.kill()
            assert await admitted(limits, 4) == 4, "what Redis counted is not known"
            clock.pass_s(1.5)
            assert await admitted(limits) == 6
            own_redis.start()
            clock.pass_s(1.5)
            assert await admitted(limits) == 10
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    finally:
        await redis.aclose()


async def test_what_was_set_aside_before_an_outage_may_end_during_it(own_redis: RedisProcess) -> None:
    clock, redis = Clock(), connect(own_redis.url, LIMIT_S)
    limits = tenant_limits(clock, redis=redis, max_in_flight=1, tokens_per_minute=100)
    try:
        before = await limits.set_aside([ANONYMOUS], Need(10))
        own_redis.kill()
        during = await limits.set_aside([ANONYMOUS], Need(10))
        assert before is not None
        assert during is not None
        before.settle(Usage(5, 0))
        during.settle(Usage(5, 0))
        await limits.renew()
        await limits.close()
        assert await limits.set_aside([ANONYMOUS], Need(10)) is not None
    finally:
        await redis.aclose()


class Slow(MemoryCounters):
    """Answers when it is let; what it was asked it has done by then, as a Redis that is late."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lease_s=60, now_us=clock)
        self.late = False
        self.let = asyncio.Event()

    async def take(self, owner: str, take: Take, also: tuple[str, Take] | None = None) -> Taken:
        taken = await super().take(owner, take, also)
        if self.late:
            self.late = False
            raise RedisDownError("too late")
        await self.let.wait()
        return taken


async def test_a_lease_that_redis_gave_too_late_is_given_back_if_it_answers() -> None:
    clock = Clock()
    slow = Slow(clock)
    slow.let.set()
    slow.late = True
    limits = tenant_limits(clock, redis=slow, max_in_flight=1)
    assert await limits.set_aside([ANONYMOUS], Need()) is not None, "memory let it in"
    await until(lambda: not slow._counted(ANONYMOUS).ends_us)
    assert await admitted(limits) == 1


async def test_a_client_that_leaves_while_redis_is_asked_leaves_no_place_taken() -> None:
    slow = Slow(Clock())
    limits = tenant_limits(Clock(), redis=slow, max_in_flight=1)
    leaving = asyncio.ensure_future(limits.set_aside([ANONYMOUS], Need()))
    await until(lambda: bool(slow._counted(ANONYMOUS).ends_us))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    slow.let.set()
    await until(lambda: not slow._counted(ANONYMOUS).ends_us)
    assert await admitted(limits) == 1


async def test_closing_waits_until_a_lease_that_no_request_holds_is_given_back() -> None:
    slow = Slow(Clock())
    slow.let.set()
    slow.late = True
    limits = tenant_limits(Clock(), redis=slow, max_in_flight=1)
    await limits.set_aside([ANONYMOUS], Need())
    assert slow._counted(ANONYMOUS).ends_us
    await limits.close()
    assert not slow._counted(ANONYMOUS).ends_us
