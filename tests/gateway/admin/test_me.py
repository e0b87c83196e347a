"""GET /v1/me."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import orjson

from gateway.config import AuthSettings, LedgerSettings, PriceSettings, TenantSettings
from gateway.ledger.base import Entry
from gateway.ledger.books import MemoryBook
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import Prices
from tests.fakes.clock import Clock
from tests.fakes.gateway import Gateway, running

ADMIN, NORTH, SOUTH = "admin-key-1234", "north-key-1234", "south-key-1234"
KEYS: dict[str, Any] = {
    "auth": AuthSettings(admin_keys=(ADMIN,)),
    "tenants": (
        TenantSettings(name="north", keys=(NORTH,), requests_per_minute=10),
        TenantSettings(name="south", keys=(SOUTH,)),
    ),
}
ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
DAY = 86_400.0
PRICES = (PriceSettings(model="demo", currency="EUR", input=Decimal(10**6), output=Decimal(10**6)),)
"""One for each token."""


async def me(gateway: Gateway, key: str) -> Any:
    status, text, _ = await gateway.get("/v1/me", key)
    assert status == 200, text
    return orjson.loads(text)


async def test_a_key_says_what_it_is_for_what_is_left_and_what_its_tenant_has_used() -> None:
    clock = Clock(1_700_000_000.0)
    ledger = Ledger(LedgerSettings(), Prices((), 1.0), MemoryBook(), clock)
    async with running(**KEYS, now=clock, ledger=ledger) as gateway:
        for tenant in ("north", "south", "south"):
            ledger.add(Entry(tenant, "demo", prompt_tokens=10, completion_tokens=5))
        await ledger.flush()
        clock.now_s += DAY
        ledger.add(Entry("north", "demo", prompt_tokens=1))
        body = {"tenant": "north", "name": "laptop", "expires_s": clock() + 60, "models": ["demo"]}
        _, made, _ = await gateway.post("/admin/keys", body, headers={"Authorization": f"Bearer {ADMIN}"})
        assert (await gateway.post("/v1/chat/completions", ASK, headers={"Authorization": f"Bearer {NORTH}"}))[0] == 200
        mine = await me(gateway, made["key"])
        assert mine["tenant"] == "north"
        named = {name: mine["key"][name] for name in ("id", "name", "expires_s")}
        assert named == {"id": made["id"], "name": "laptop", "expires_s": body["expires_s"]}
        assert (mine["key"]["limits"], mine["key"]["budget"], mine["key"]["month"]["requests"]) == ({}, None, 0)
        assert mine["models"] == [["demo"]]
        assert (mine["limits"]["requests"]["limit"], mine["limits"]["requests"]["remaining"]) == (10, 9)
        assert mine["month"]["requests"] - mine["today"]["requests"] == 1
        assert mine["month"]["used"]["prompt_tokens"] - mine["today"]["used"]["prompt_tokens"] == 10
        theirs = await me(gateway, SOUTH)
        assert (theirs["key"], theirs["models"], theirs["limits"]) == (None, [], {})
        assert (theirs["month"]["requests"], theirs["today"]["requests"]) == (2, 0)
        assert "north" not in str(theirs)
        assert (await gateway.get("/v1/me", ADMIN))[0] == 403
        assert (await gateway.get("/v1/me"))[0] == 401


async def test_a_key_says_what_it_has_used_itself_and_what_is_left_of_its_own_limits() -> None:
    clock = Clock(1_700_000_000.0)
    async with running(**KEYS, now=clock, prices=PRICES) as gateway:
        body = {"tenant": "north", "name": "laptop", "requests_per_minute": 5, "budget": 500, "budget_period": "day"}
        _, made, _ = await gateway.post("/admin/keys", body, headers={"Authorization": f"Bearer {ADMIN}"})
        for key in (NORTH, made["key"], made["key"]):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await gateway.post("/v1/chat/completions", ASK, headers=headers))[0] == 200
        mine = await me(gateway, made["key"])
        assert mine["limits"]["requests"]["remaining"] == 7
        assert (mine["budget"], mine["month"]["requests"]) == (None, 3)
        own = mine["key"]
        assert (own["limits"]["requests"]["limit"], own["limits"]["requests"]["remaining"]) == (5, 3)
        assert (own["today"]["requests"], own["month"]["requests"]) == (2, 2)
        assert own["month"]["used"]["cost"] == {"EUR": own["budget"]["used"]}
        assert int(own["budget"]["used"]) > 0
        assert int(own["budget"]["used"]) + int(own["budget"]["left"]) == 500
        assert (own["budget"]["limit"], own["budget"]["currency"], own["budget"]["period"]) == ("500", "EUR", "day")
        assert (await me(gateway, NORTH))["key"] is None
        _, ledger, _ = await gateway.get("/admin/ledger?group_by=key", ADMIN)
        assert [(row["key"], row["requests"]) for row in orjson.loads(ledger)["rows"]] == [("", 1), (made["id"], 2)]
