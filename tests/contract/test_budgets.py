"""The promises of gateway/limits/budgets.py with and without a Redis, with a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from redis.asyncio import Redis

from gateway.config import TenantSettings
from gateway.errors import BudgetError
from gateway.limits.budgets import Budgets
from gateway.limits.holds import Hold
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, close, connect
from gateway.types import NANO
from tests.fakes.limits import Clock
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0
NOON_S = 1_800_014_400.0 - 1_800_014_400 % 86_400 + 43_200
Make = Callable[..., Budgets]


def tenant(**more: object) -> TenantSettings:
    return TenantSettings.model_validate(
        {"name": "north", "keys": ("key-of-north",), "budget": 10, "budget_period": "day", **more}
    )


def cost(model: str, inputs: int, outputs: int) -> int | None:
    """One for each token, in rates; `free` has no price."""
    return None if model == "free" else (inputs + outputs) * NANO * 1_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock(round(NOON_S * 1e6))


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, redis: Redis, clock: Clock) -> AsyncIterator[Make]:
    """Gateways that share one Redis, or the one that there is without."""
    calls = None if request.param == "memory" else RedisCalls(redis, LIMIT_S)
    made = list[Budgets]()

    def build(tenants: Sequence[TenantSettings] = (tenant(),)) -> Budgets:
        if calls is not None or not made:
            made.append(Budgets(tenants, calls, clock.seconds, cost))
        return made[-1]

    yield build
    for one in made:
        await one.close()


async def take(budgets: Budgets, tokens: int, model: str = "demo") -> Hold:
    hold = await budgets.set_aside("north", model, tokens, 0)
    assert hold is not None
    return hold


async def pay(budgets: Budgets, hold: Hold, money: float) -> None:
    """As at the end of a request: the ledger first."""
    budgets.spent("north", lambda: round(money * NANO))
    hold.settle(None)
    await budgets.close()


async def used(budgets: Budgets) -> float:
    state = await budgets.look("north")
    assert state is not None
    return state.used / NANO


async def test_of_200_requests_at_once_none_but_the_last_goes_beyond_the_budget(make: Make) -> None:
    gateways = [make(), make()]

    async def one(number: int) -> bool:
        budgets = gateways[number % 2]
        try:
            hold = await take(budgets, 3)
        except BudgetError:
            return False
        await asyncio.sleep(0)
        await pay(budgets, hold, 2.75)  # less than its estimate
        return True

    admitted = sum(await asyncio.gather(*map(one, range(200))))
    assert admitted == 4
    with pytest.raises(BudgetError) as refused:
        await take(gateways[0], 3)
    assert refused.value.retry_after_s == pytest.approx(43_200, abs=1)
    assert [await used(one) for one in gateways] == [11.0, 11.0]


async def test_what_is_set_aside_is_not_there_for_others_and_returns(make: Make) -> None:
    budgets, other = make(), make()
    hold = await take(budgets, 10)
    with pytest.raises(BudgetError, match="in flight") as refused:
        await take(other, 1)
    assert refused.value.retry_after_s == 1
    await pay(budgets, hold, 4)
    await take(other, 1)
    assert await used(other) == 4


async def test_a_new_day_has_a_new_budget_and_a_new_month_another(make: Make, clock: Clock) -> None:
    budgets = make()
    await pay(budgets, await take(budgets, 1), 12)
    with pytest.raises(BudgetError, match="Limit 10, Used 12"):
        await take(budgets, 1)
    clock.pass_s(43_199)
    with pytest.raises(BudgetError):
        await take(budgets, 1)
    clock.pass_s(2)
    assert await used(budgets) == 0
    await pay(budgets, await take(budgets, 1), 10)
    with pytest.raises(BudgetError):
        await take(budgets, 1)
    budgets.replace([tenant(budget_period="month", budget=1)])
    await take(budgets, 1)


async def test_a_soft_budget_refuses_nothing_and_says_what_is_used(make: Make) -> None:
    budgets = make([tenant(budget_hard=False)])
    await pay(budgets, await take(budgets, 1), 12.5)
    await take(budgets, 1)
    assert budgets.header("north") == "used=12.5; limit=10; reset=43200"
    assert budgets.figures() == {"north": {"limit": 10, "remaining": -2.5, "reset_s": 43_200}}


async def test_without_a_price_or_a_budget_nothing_is_asked_or_priced(make: Make) -> None:
    budgets = make()
    await pay(budgets, await take(budgets, 1), 12)
    assert await budgets.set_aside("north", "free", 1, 1) is None
    assert await budgets.set_aside("south", "demo", 1, 1) is None
    budgets.spent("south", lambda: pytest.fail("priced"))


async def test_without_redis_counting_goes_on_and_redis_learns_it_once(own_redis: RedisProcess, clock: Clock) -> None:
    client = connect(own_redis.url, 5.0)
    try:
        calls = RedisCalls(client, 5.0, RedisBreaker(retry_s=1.0, clock=clock.seconds))
        budgets = Budgets([tenant()], calls, clock.seconds, cost)
        begun = await take(budgets, 1)
        await pay(budgets, await take(budgets, 1), 3)
        own_redis.kill()
        await pay(budgets, begun, 2)
        assert await used(budgets) == 5
        await pay(budgets, await take(budgets, 1), 4)
        hold = await take(budgets, 5)  # 9 of 10
        with pytest.raises(BudgetError):
            await take(budgets, 1)
        hold.settle(None)
        own_redis.start()
        clock.pass_s(2)
        await pay(budgets, await take(budgets, 1), 0.5)
        other = Budgets([tenant()], RedisCalls(client, 5.0), clock.seconds, cost)
        assert await used(other) == await used(budgets) >= 6.5
    finally:
        await close(client)
