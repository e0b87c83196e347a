"""The limits of tenants over time: never more than promised, nobody kept out for ever, and what ends is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import TenantSettings
from gateway.errors import RateLimitError
from gateway.limits.counters import MemoryCounters
from gateway.limits.holds import Hold
from gateway.limits.limits import TenantLimits
from gateway.types import ANONYMOUS, Need, Room, Usage
from tests.fakes.guests import run
from tests.fakes.limits import Clock, tenant_limits

LIMIT = 1000
NOTHING = Usage(0, 0)


async def ask(limits: TenantLimits, need: Need, tenant: str = ANONYMOUS) -> Hold:
    hold = await limits.set_aside([tenant], need)
    assert isinstance(hold, Hold)
    return hold


async def end(limits: TenantLimits, hold: Hold, usage: Usage | None = NOTHING) -> None:
    """Returns when the counters know."""
    hold.settle(usage)
    await limits.close()


async def waited(limits: TenantLimits, need: Need) -> float | None:
    """Seconds that a request is told to wait for; None, and its hold goes on, when it was let in."""
    try:
        await limits.set_aside([ANONYMOUS], need)
    except RateLimitError as refused:
        return refused.retry_after_s or 0.0
    return None


def tokens(amount: int) -> Need:
    return Need(input_tokens=amount)


async def test_a_tenant_without_limits_asks_nobody() -> None:
    limits = tenant_limits(Clock(), tenants=[TenantSettings(name="north", keys=("a-key-of-north",))])
    assert not limits.has("north")
    assert await limits.set_aside(["north"], tokens(10**9)) is None
    assert limits.rooms("north") == {}


async def test_what_was_set_aside_stays_spent_where_nobody_knows_what_was_used() -> None:
    limits = tenant_limits(Clock(), tokens_per_minute=LIMIT)
    await end(limits, await ask(limits, Need(input_tokens=100, answer_tokens=700, answers=1)), None)
    assert limits.rooms(ANONYMOUS)["tokens"].remaining == LIMIT - 800


async def test_what_was_set_aside_and_not_used_goes_back_and_what_was_used_beyond_is_owed() -> None:
    clock = Clock()
    limits = tenant_limits(clock, tokens_per_minute=LIMIT)
    hold = await ask(limits, Need(input_tokens=100, answer_tokens=700, answers=1))
    assert limits.rooms(ANONYMOUS)["tokens"].remaining == 200
    await end(limits, hold, Usage(prompt_tokens=150, completion_tokens=50))
    hold = await ask(limits, tokens(0))
    assert limits.rooms(ANONYMOUS)["tokens"].remaining == 800
    await end(limits, hold, Usage(prompt_tokens=1800, completion_tokens=0))
    with pytest.raises(RateLimitError) as refused:
        await ask(limits, tokens(1))
    assert refused.value.retry_after_s == 60.06


async def test_a_hold_is_settled_once() -> None:
    limits = tenant_limits(Clock(), tokens_per_minute=LIMIT)
    hold = await ask(limits, tokens(400))
    await end(limits, hold)
    await end(limits, hold)
    await ask(limits, tokens(0))
    assert limits.rooms(ANONYMOUS)["tokens"].remaining == LIMIT


async def test_rooms_fill_as_time_passes_without_anybody_being_asked() -> None:
    clock = Clock()
    limits = tenant_limits(clock, tokens_per_minute=LIMIT, requests_per_minute=6)
    assert limits.rooms(ANONYMOUS)["tokens"].remaining == LIMIT
    await ask(limits, tokens(LIMIT))
    clock.pass_s(15)
    rooms = limits.rooms(ANONYMOUS)
    assert (rooms["tokens"].limit, rooms["tokens"].remaining, rooms["tokens"].reset_s) == (LIMIT, 250, 45.0)
    assert (rooms["requests"].limit, rooms["requests"].remaining, rooms["requests"].reset_s) == (6, 6, 0.0)


async def test_no_minute_has_twice_the_limit_where_less_may_come_at_once() -> None:
    clock = Clock()
    limits, let_in = tenant_limits(clock, requests_per_minute=60, burst_s=6), 0
    assert limits.rooms(ANONYMOUS)["requests"] == Room(60, 6, 0.0)
    for _ in range(600):
        let_in += await waited(limits, tokens(1)) is None
        clock.pass_s(0.1)
    assert let_in == 6 + 59, "66 and not 120 when the minute is full"


async def test_places_in_flight_are_given_back_and_kept_while_they_are_renewed() -> None:
    clock = Clock()
    limits = tenant_limits(clock, max_in_flight=1, lease_s=30)
    hold = await ask(limits, tokens(0))
    for _ in range(4):
        clock.pass_s(20)
        await limits.renew()
        with pytest.raises(RateLimitError, match="concurrent requests"):
            await ask(limits, tokens(0))
    await ask(limits, Need(generates=False))
    await end(limits, hold)
    await end(limits, await ask(limits, tokens(0)))


async def test_who_was_refused_for_what_is_counted() -> None:
    limits = tenant_limits(Clock(), requests_per_minute=2, tokens_per_minute=LIMIT, count_cached_tokens=True)
    for amount in (LIMIT, 1, 1, LIMIT + 1):
        await waited(limits, tokens(amount))
    told = limits.figures()["tenants"][ANONYMOUS]
    assert told["refused"] == {"tokens": 3}
    assert told["requests"] == {"limit": 2, "remaining": 1, "reset_s": 30.0}


class Renewed(MemoryCounters):
    """Says when leases are renewed."""

    def __init__(self) -> None:
        super().__init__(lease_s=1)
        self.renewed = asyncio.Event()

    async def renew(self, tenant: str, flights: Sequence[str]) -> None:
        await super().renew(tenant, flights)
        self.renewed.set()


def test_leases_are_renewed_by_themselves_and_in_time() -> None:
    async def work() -> None:
        counters = Renewed()
        limits = tenant_limits(Clock(), redis=counters, max_in_flight=1, lease_s=60)
        await ask(limits, tokens(0))
        limits.start()
        async with asyncio.timeout(60):
            await counters.renewed.wait()
        await limits.close()

    run(work)


@dataclass
class Ledger:
    """What was let in, and when: everything that a limit promises is said of this."""

    clock: Clock
    used: list[tuple[float, int]] = field(default_factory=list)  # second from the start, tokens

    def note(self, amount: int) -> None:
        self.used.append((self.clock.now_us / 1e6, amount))

    def most_above(self, rate: float) -> float:
        """Tokens in any stretch of time beyond what flows in during it."""
        most = now = 0.0
        for (before, _), (at, amount) in zip([self.used[0], *self.used], self.used, strict=False):
            now = max(0.0, now - (at - before) * rate) + amount
            most = max(most, now)
        return most


_steps = st.lists(
    st.tuples(st.integers(0, 30_000_000), st.integers(0, LIMIT), st.integers(0, 3)), min_size=1, max_size=60
)


@pytest.mark.slow
@given(_steps, st.sampled_from([60, 20, 1, 0.001]))
def test_in_no_stretch_of_time_more_is_let_in_than_a_bursts_worth_and_what_flows_in(
    steps: list[tuple[int, int, int]], burst_s: float
) -> None:
    """Of requests that use what was set aside for them. One that is larger than a burst is one alone."""

    async def run() -> None:
        clock = Clock(0)
        limits, ledger = tenant_limits(clock, tokens_per_minute=LIMIT, burst_s=burst_s), Ledger(clock)
        for pause_us, amount, _ in steps:
            clock.now_us += pause_us
            try:
                hold = await ask(limits, tokens(amount))
            except RateLimitError:
                continue
            ledger.note(amount)
            await end(limits, hold, Usage(amount, 0))
        if ledger.used:
            largest = max(amount for _, amount in ledger.used)
            assert ledger.most_above(LIMIT / 60) <= max(LIMIT * burst_s / 60, largest) + 1e-6

    asyncio.run(run())


@pytest.mark.slow
@given(_steps)
def test_however_much_is_set_aside_no_more_is_used_from_the_start_on_than_may_be(
    steps: list[tuple[int, int, int]],
) -> None:
    """Requests that overlap, take their time and use a part of what was set aside for them."""

    async def run() -> None:
        clock = Clock(0)
        limits, total = tenant_limits(clock, tokens_per_minute=LIMIT), 0
        running: list[tuple[Hold, int]] = []
        for pause_us, amount, part in steps:
            clock.now_us += pause_us
            if part and len(running) > part:
                hold, used = running.pop(0)
                await end(limits, hold, Usage(used, 0))
                total += used
            try:
                running.append((await ask(limits, tokens(amount)), amount * part // 3))
            except RateLimitError:
                continue
            assert total + sum(used for _, used in running) <= LIMIT * (1 + clock.now_us / 60e6)

    asyncio.run(run())


@pytest.mark.slow
@given(_steps, st.sampled_from([60, 7]))
def test_who_waits_as_long_as_it_is_told_is_let_in(steps: list[tuple[int, int, int]], burst_s: float) -> None:
    """And not before: a millisecond is the least that is told."""

    async def run() -> None:
        clock = Clock()
        limits = tenant_limits(clock, tokens_per_minute=LIMIT, requests_per_minute=7, burst_s=burst_s)
        for pause_us, amount, more in steps:
            clock.now_us += pause_us
            if (wait_s := await waited(limits, tokens(amount))) is None:
                continue
            clock.pass_s(max(0.0, wait_s - 0.002))
            if wait_s > 0.002:
                assert await waited(limits, tokens(amount)) is not None
            clock.pass_s(min(wait_s, 0.002))
            hold = await ask(limits, tokens(amount))
            await end(limits, hold, Usage(amount + more, 0))

    asyncio.run(run())
