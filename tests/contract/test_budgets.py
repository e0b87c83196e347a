"""The promises of gateway/limits/budgets.py with and without a Redis, with a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.config import TenantSettings
from gateway.errors import BudgetError
from gateway.limits import budgets as budgets_module
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


class OnePrice:
    """One for each token, and half of it in batches; `free` has no price."""

    currency = "USD"
    several_currencies = ""

    def expected(self, model: str, inputs: int, outputs: int, *, at_batch_price: bool) -> int | None:
        return None if model == "free" else (inputs + outputs) * NANO // (2 if at_batch_price else 1)


PRICES = OnePrice()


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
            made.append(Budgets(tenants, calls, clock.seconds, PRICES))
        return made[-1]

    yield build
    for one in made:
        await one.close()


async def take(budgets: Budgets, tokens: int, model: str = "demo") -> Hold:
    hold = await budgets.set_aside(["north"], model, tokens, 0)
    assert hold is not None
    return hold


async def pay(budgets: Budgets, hold: Hold, money: float) -> None:
    """As at the end of a request: the ledger first."""
    budgets.spent(["north"], lambda: ("USD", {"cost_nano": round(money * NANO)}))
    hold.settle(None)
    await budgets.close()


async def used(budgets: Budgets) -> float:
    (state,) = await budgets.look("north")
    assert state is not None
    return state.used / NANO


@pytest.mark.parametrize("owners", [["north"], ["north", "north/key_1"], ["south", "south/key_1"]])
async def test_of_200_requests_at_once_none_but_the_last_goes_beyond_the_budget(make: Make, owners: list[str]) -> None:
    tenants = [tenant(), tenant(budget=100), tenant(budget=100), tenant()]
    names = ("north", "north/key_1", "south", "south/key_1")
    tenants = [one.model_copy(update={"name": name}) for one, name in zip(tenants, names, strict=True)]
    gateways = [make(tenants), make(tenants)]

    async def one(number: int) -> bool:
        budgets = gateways[number % 2]
        try:
            hold = await budgets.set_aside(owners, "demo", 3, 0)
        except BudgetError:
            return False
        assert hold is not None
        await asyncio.sleep(0)
        budgets.spent(owners, lambda: ("USD", {"cost_nano": 11 * NANO // 4}))  # less than its estimate
        hold.settle(None)
        await budgets.close()
        return True

    admitted = sum(await asyncio.gather(*map(one, range(200))))
    assert admitted == 4
    with pytest.raises(BudgetError) as refused:
        await gateways[0].set_aside(owners, "demo", 3, 0)
    assert refused.value.retry_after_s == pytest.approx(43_200, abs=1)
    states = [state for one in gateways for state in await one.look(*owners)]
    assert [state.used / NANO for state in states if state is not None] == [11.0] * len(states)


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
    assert await budgets.set_aside(["north"], "free", 1, 1) is None
    assert await budgets.set_aside(["south"], "demo", 1, 1) is None
    budgets.spent(["south"], lambda: pytest.fail("priced"))


def key(number: int, budget: float, **more: object) -> TenantSettings:
    return tenant(budget=budget, **more).model_copy(update={"name": f"north/key_{number}"})


def of_key(number: int) -> list[str]:
    return ["north", f"north/key_{number}"]


async def test_a_request_has_to_fit_the_budget_of_its_tenant_and_that_of_its_key(make: Make) -> None:
    tenants = [tenant(), key(1, 4), key(2, 100)]
    budgets, other = make(tenants), make(tenants)
    hold = await budgets.set_aside(of_key(1), "demo", 4, 0)
    assert hold is not None
    with pytest.raises(BudgetError, match="the budget of the key key_1 of north"):
        await other.set_aside(of_key(1), "demo", 1, 0)
    again = await other.set_aside(of_key(2), "demo", 5, 0)
    assert again is not None, "a request that its key refused has set nothing of the tenant's aside"
    for one, number, held in ((budgets, 1, hold), (other, 2, again)):
        one.spent(of_key(number), lambda: ("USD", {"cost_nano": 5 * NANO}))
        held.settle(None)
        await one.close()
    states = await budgets.look("north", "north/key_1", "north/key_2")
    assert [state.used / NANO for state in states if state] == [10, 5, 5]
    with pytest.raises(BudgetError, match=r"The budget of north for this day is spent: Limit 10, Used 10\."):
        await other.set_aside(of_key(2), "demo", 1, 0)
    assert (budgets.header(*of_key(1)), other.header(*of_key(2))) == (
        "used=5; limit=4; reset=43200",
        "used=10; limit=10; reset=43200",
    )
    assert list(budgets.figures()) == ["north"], "keys may be too many for metrics"


async def test_tenant_and_key_are_asked_in_one_call_and_told_in_one(redis: Redis, clock: Clock) -> None:
    calls = Counted(redis, LIMIT_S)
    budgets = Budgets([tenant(), key(1, 4)], calls, clock.seconds, PRICES)
    hold = await budgets.set_aside(of_key(1), "demo", 1, 0)
    assert (hold is not None, calls.count) == (True, 1)
    budgets.spent(of_key(1), lambda: ("USD", {"cost_nano": NANO}))
    assert hold is not None
    hold.settle(None)
    await budgets.close()
    assert calls.count == 2


class Counted(RedisCalls):
    count = 0

    async def ask_or_skip(self, *args: Any) -> Any:
        self.count += 1
        return await super().ask_or_skip(*args)


async def test_what_many_keys_have_spent_is_told_in_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "AT_ONCE", 2)
    keys = [key(number, 100) for number in range(5)]
    one, other = make(keys), make(keys)
    for _ in range(2):
        for each in keys:
            one.spent([each.name], lambda: ("USD", {"cost_nano": NANO}))
        await asyncio.sleep(0)
    await one.close()
    assert [state and state.used for state in await other.look(*(each.name for each in keys))] == [2 * NANO] * 5


async def test_another_limit_holds_at_once_for_what_was_spent_before(make: Make) -> None:
    budgets = make()
    await pay(budgets, await take(budgets, 1), 10)
    with pytest.raises(BudgetError):
        await take(budgets, 1)
    budgets.replace([tenant(budget=11)])
    await pay(budgets, await take(budgets, 1), 0.5)
    budgets.replace([tenant(budget=10.5)])
    with pytest.raises(BudgetError, match=r"Limit 10\.5, Used 10\.5"):
        await take(budgets, 1)
    budgets.replace([tenant(budget=10.5, budget_hard=False)])
    await take(budgets, 1)
    budgets.replace([tenant(budget=None)])
    assert await budgets.set_aside(["north"], "demo", 1, 0) is None


async def test_a_line_of_a_batch_sets_aside_what_the_batch_lane_costs(make: Make) -> None:
    budgets, other = make(), make()
    assert await budgets.set_aside(["north"], "demo", 18, 0, at_batch_price=True) is not None
    await take(other, 2)  # 9 of 10 are set aside, and not 18
    with pytest.raises(BudgetError, match="in flight"):
        await take(budgets, 1)


async def test_pages_learn_what_other_gateways_have_spent(make: Make, clock: Clock) -> None:
    tenants = [tenant(), key(1, 4), tenant(budget_period="month").model_copy(update={"name": "south"})]
    one, other = make(tenants), make(tenants)
    one.spent(of_key(1), lambda: ("USD", {"cost_nano": 3 * NANO}))
    await one.close()
    clock.pass_s(3)
    await other.refresh()
    for budgets in (one, other):
        assert budgets.figures()["north"]["remaining"] == 7
        assert budgets.figures()["south"]["remaining"] == 10
        state = budgets.state("north/key_1")
        assert state is not None
        assert (state.used, state.currency) == (3 * NANO, "USD")


async def test_money_of_another_currency_is_not_added(make: Make) -> None:
    budgets = make()
    budgets.spent(["north"], lambda: ("EUR", {"cost_nano": 10 * NANO}))
    budgets.spent(["north"], lambda: ("", {}))
    await pay(budgets, await take(budgets, 1), 3)
    assert await used(budgets) == 3


async def test_prices_in_another_currency_begin_another_book(redis: Redis, clock: Clock) -> None:
    prices = OnePrice()
    budgets = Budgets([tenant()], RedisCalls(redis, LIMIT_S), clock.seconds, prices)
    await pay(budgets, await take(budgets, 1), 10)
    prices.currency = "EUR"
    budgets.replace([tenant()])
    await take(budgets, 1)
    assert await used(budgets) == 0


async def test_without_redis_counting_goes_on_and_redis_learns_it_once(own_redis: RedisProcess, clock: Clock) -> None:
    client = connect(own_redis.url, 5.0)
    try:
        calls = RedisCalls(client, 5.0, RedisBreaker(retry_s=1.0, clock=clock.seconds))
        budgets = Budgets([tenant()], calls, clock.seconds, PRICES)
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
        other = Budgets([tenant()], RedisCalls(client, 5.0), clock.seconds, PRICES)
        assert await used(other) == await used(budgets) >= 6.5
    finally:
        await close(client)
