"""Budgets of tenants and keys as pages, metrics and batches show them; limits/budgets.py itself: tests/contract."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.admin.sums import added
from gateway.api.lines import LineRequest
from gateway.api.routes import RUNNER
from gateway.config import AuthSettings, PriceSettings, Settings, TenantSettings
from gateway.types import Tenant
from tests.fakes.batch_sdk import ENDS, reached, row, settings, submit
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess
from tests.fakes.upstream import upstream, whole_chat
from tests.fakes.whole import whole

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ADMIN, NORTH = "admin-key-1234", "north-key-1234"
PRICE = PriceSettings(model="*", input=Decimal(10**6), output=Decimal(10**6))
"""One for each token."""
COST = 42
"""Of an answer of the fake pipeline."""
AUTH = AuthSettings(admin_keys=(ADMIN,))


def north(**more: Any) -> TenantSettings:
    return TenantSettings(name="north", keys=(NORTH,), **more)


def bearer(key: str = ADMIN) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def page(gateway: Gateway, path: str, key: str = ADMIN) -> Any:
    status, text, _ = await gateway.get(path, key)
    assert status == 200, text
    return orjson.loads(text)


async def send(gateway: Gateway, method: str, path: str, body: object) -> tuple[int, Any]:
    async with gateway.session.request(method, gateway.url + path, json=body, headers=bearer()) as answer:
        return answer.status, await answer.json()


async def ask(gateway: Gateway, key: str = NORTH) -> int:
    return (await gateway.post(CHAT, ASK, headers=bearer(key)))[0]


@pytest.mark.parametrize("hard", [True, False])
async def test_what_is_wrong_and_the_metrics_tell_of_a_budget_at_90_percent_and_at_100(hard: bool) -> None:
    async with running(auth=AUTH, tenants=(north(budget=10 * COST, budget_hard=hard),), prices=(PRICE,)) as gateway:
        texts = list[list[str]]()
        for count in (8, 1, 1):
            for _ in range(count):
                assert await ask(gateway) == 200
            texts.append([one["text"] for one in (await page(gateway, "/admin/overview"))["wrong"]])
        assert texts == [[], ["Tenant north has spent 90% of its budget."], ["Tenant north has spent its budget."]]
        assert await ask(gateway) == (429 if hard else 200)
        _, metrics, _ = await gateway.get("/metrics", ADMIN)
        assert f'kvasir_budget_limit{{tenant="north"}} {10 * COST}.0' in metrics
        assert f'kvasir_budget_remaining{{tenant="north"}} {0 if hard else -COST}.0' in metrics
        assert ('kvasir_limited_requests_total{limit="budget"' in metrics) == hard


async def test_a_budget_changes_at_once() -> None:
    async with running(auth=AUTH, tenants=(north(),), prices=(PRICE,)) as gateway:
        await send(gateway, "POST", "/admin/tenants", {"name": "south", "budget": COST})
        _, made = await send(gateway, "POST", "/admin/keys", {"tenant": "south", "name": "laptop", "budget": 2 * COST})
        key, path = made["key"], f"/admin/keys/{made['id']}"
        assert [await ask(gateway, key) for _ in range(2)] == [200, 429]
        await send(gateway, "PATCH", "/admin/tenants/south", {"budget": 100 * COST})
        assert [await ask(gateway, key) for _ in range(2)] == [200, 429], "now that of the key is spent"
        status, changed = await send(gateway, "PATCH", path, {"budget": 10 * COST})
        assert (status, changed["budget_state"]["left"]) == (200, str(8 * COST))
        assert await ask(gateway, key) == 200
        await send(gateway, "PATCH", "/admin/tenants/south", {"budget": 3 * COST})
        status, answer, headers = await gateway.post(CHAT, ASK, headers=bearer(key))
        assert (status, answer["error"]["code"]) == (429, "budget_exceeded")
        assert headers["x-kvasir-budget"].startswith(f"used={3 * COST}; limit={3 * COST}; ")
        await send(gateway, "PATCH", "/admin/tenants/south", {"budget_hard": False})
        assert await ask(gateway, key) == 200
        await send(gateway, "PATCH", "/admin/tenants/south", {"budget": None})
        await send(gateway, "PATCH", path, {"budget": None})
        assert await ask(gateway, key) == 200


async def test_two_gateways_on_one_redis_show_the_same_money(own_redis: RedisProcess) -> None:
    sections = {"auth": AUTH, "tenants": (north(budget=10_000, budget_period="day"),), "prices": (PRICE,)}
    async with (
        aiohttp.ClientSession() as session,
        whole(redis_url=own_redis.url, sections=sections) as one,
        whole(redis_url=own_redis.url, sections=sections) as other,
    ):

        async def show(url: str, path: str, key: str = ADMIN, body: object = None) -> Any:
            method = "GET" if body is None else "POST"
            async with session.request(method, url + path, json=body, headers=bearer(key)) as answer:
                assert answer.status < 300, await answer.text()
                return await answer.json()

        made = await show(one.url, "/admin/keys", body={"tenant": "north", "name": "laptop", "budget": 9_000})
        await show(other.url, "/admin/keys")  # looks for what others have made
        costs = 0
        for gateway, key in ((one, NORTH), (other, made["key"]), (one, made["key"])):
            answer = await show(gateway.url, CHAT, key, ASK)
            costs += answer["usage"]["total_tokens"]
        await one.gateway.limits.close()  # what is on its way to Redis has arrived
        await other.gateway.limits.close()
        seen = list[Any]()
        for gateway in (one, other):
            assert gateway.gateway.limits.budgets is not None
            await gateway.gateway.limits.budgets.refresh(max_age_s=0.0)
            (tenant,) = (await show(gateway.url, "/admin/tenants"))["tenants"]
            (key,) = (await show(gateway.url, "/admin/keys"))["keys"]
            me = await show(gateway.url, "/v1/me", made["key"])
            assert (me["budget"], me["key"]["budget"]) == (tenant["budget_state"], key["budget_state"])
            stats = await show(gateway.url, "/admin/stats")
            left = stats["limits"]["tenants"]["north"]["budget"]["remaining"]
            assert left == 10_000 - costs
            seen.append((me["budget"], me["key"]["budget"]))
        assert seen[0] == seen[1]
        assert seen[0][0]["used"] == str(costs)
        assert 0 < int(seen[0][1]["used"]) < costs


def test_of_workers_the_one_that_knows_of_most_spent_money_is_shown() -> None:
    def worker(left: float, refused: int) -> dict[str, Any]:
        budget = {"limit": 10.0, "remaining": left, "reset_s": 5.0}
        return {"limits": {"tenants": {"north": {"budget": budget, "refused": {"budget": refused}}}}}

    (north,) = added(worker(3.0, 1), worker(-1.0, 2))["limits"]["tenants"].values()
    assert north == {"budget": {"limit": 10.0, "remaining": -1.0, "reset_s": 5.0}, "refused": {"budget": 3}}


async def test_lines_of_a_batch_count_at_the_batch_price_for_tenant_and_key() -> None:
    async with running(
        FakePipeline(), auth=AUTH, tenants=(north(budget=1_000),), prices=(PRICE,), **settings()
    ) as gateway:
        _, made = await send(
            gateway, "POST", "/admin/keys", {"tenant": "north", "name": "laptop", "budget": 1.6 * COST}
        )
        client = gateway.sdk(made["key"])
        batch = await submit(client, *(row(name, ASK) for name in "abc"))
        gateway.worker.start()
        ended = await reached(client, batch.id, *ENDS)
        assert ended.request_counts is not None
        # Each is half of COST, of which 1.6 may be spent: that is beyond it after the fourth.
        assert ended.request_counts.completed == 3
        batch = await submit(client, row("d", ASK))
        ended = await reached(client, batch.id, *ENDS)
        assert ended.request_counts is not None
        assert ended.request_counts.completed == 1, "1.5 of 1.6 were spent"
        batch = await submit(client, row("e", ASK))
        ended = await reached(client, batch.id, *ENDS)
        assert ended.request_counts is not None
        assert ended.request_counts.failed == 1
        me = await page(gateway, "/v1/me", made["key"])
        assert (me["budget"]["used"], me["key"]["budget"]["used"]) == (str(2 * COST), str(2 * COST))
        assert me["key"]["month"]["used"]["cost"] == {"USD": str(2 * COST)}


async def test_a_line_sets_aside_what_the_batch_lane_costs_and_an_upstreams_what_the_online_lane_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        upstream(whole_chat()) as stub,
        running(
            auth=AUTH, tenants=(north(budget=10_000),), prices=(PRICE,), upstreams=(stub.settings(models=("up-1",)),)
        ) as gateway,
    ):
        assert gateway.limits.budgets is not None
        priced, prices = list[bool](), gateway.limits.budgets._prices
        expected = prices.expected

        def noted(*args: Any, at_batch_price: bool) -> int | None:
            priced.append(at_batch_price)
            return expected(*args, at_batch_price=at_batch_price)

        monkeypatch.setattr(prices, "expected", noted)
        for model in ("demo", "up-1"):
            line = LineRequest(CHAT, Tenant("north"), {**ASK, "model": model})
            assert (await gateway.app[RUNNER].answer(line)).status == 200
        assert priced == [True, False]


async def test_a_budget_beside_prices_in_two_currencies_is_refused() -> None:
    prices = (PRICE, PRICE.model_copy(update={"model": "other", "currency": "EUR"}))
    with pytest.raises(ValueError, match="the budget of 'north' cannot add up prices in EUR, USD"):
        Settings(tenants=(north(budget=1.0),), prices=prices)
    async with running(auth=AUTH, tenants=(north(),), prices=prices) as gateway:
        for path, body in (
            ("/admin/tenants", {"name": "south", "budget": 1}),
            ("/admin/keys", {"tenant": "north", "name": "laptop", "budget": 1}),
        ):
            status, answer = await send(gateway, "POST", path, body)
            assert (status, answer["error"]["param"]) == (400, "budget")
            assert "EUR, USD" in answer["error"]["message"]
        assert (await send(gateway, "POST", "/admin/tenants", {"name": "south"}))[0] == 201
        assert (await send(gateway, "PATCH", "/admin/tenants/south", {"budget": 1}))[0] == 400
