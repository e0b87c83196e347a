"""List prices of hosted models: which models have one, and what goes before them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from tomllib import loads
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config import PriceSettings, Settings, UpstreamSettings
from gateway.ledger.base import Entry
from gateway.ledger.list_prices import list_prices
from gateway.ledger.prices import Prices
from gateway.types import NANO

OPENAI = UpstreamSettings(name="openai", url="https://api.openai.com/v1", models=("gpt-*", "mini = gpt-4o-mini"))
CLAUDE = UpstreamSettings(
    name="claude", dialect="anthropic", url="https://api.anthropic.com", models=("claude-*", "anthropic/* = *")
)


def prices_of(*upstreams: UpstreamSettings, **sections: Any) -> Prices:
    """As an application has them."""
    settings = Settings.model_validate({"upstreams": upstreams, **sections})
    return Gateway(settings, None, None).prices


def input_of(prices: Prices, model: str, *, by_upstream: bool = True) -> Decimal | None:
    tariff = prices.of(model, by_upstream)
    return None if tariff is None else Decimal(tariff.input) / NANO


@pytest.mark.parametrize(
    ("model", "price"),
    [("gpt-5-mini", "0.25"), ("mini", "0.15"), ("claude-opus-5-5", "4"), ("anthropic/claude-haiku-4-5", "1")],
)
def test_a_model_at_its_providers_own_host_has_its_list_price(model: str, price: str) -> None:
    assert input_of(prices_of(OPENAI, CLAUDE), model) == Decimal(price)


@pytest.mark.parametrize("model", ["gpt-4o-2024-05-13", "gpt-6", "gpt-5-mini-tuned", "claude-2", "demo", ""])
def test_a_model_that_is_not_in_the_table_has_none(model: str) -> None:
    assert input_of(prices_of(OPENAI, CLAUDE), model) is None


def test_what_engines_compute_has_none_whatever_it_is_called() -> None:
    prices = prices_of(OPENAI)
    assert input_of(prices, "gpt-5", by_upstream=False) is None
    assert input_of(prices, "gpt-5") == Decimal("1.25")


def test_a_server_of_ones_own_has_none_nor_has_a_model_that_both_may_answer() -> None:
    local = UpstreamSettings(name="local", url="http://127.0.0.1:8000/v1", models=("gpt-*",))
    assert input_of(prices_of(local), "gpt-5") is None
    assert input_of(prices_of(OPENAI, local), "gpt-5") is None
    assert input_of(prices_of(OPENAI, local), "mini") == Decimal("0.15")


def test_prices_of_the_settings_go_before_it() -> None:
    own = [{"model": "gpt-5", "input": 9}, {"model": "claude-*", "input": 8}]
    prices = prices_of(OPENAI, CLAUDE, prices=own)
    shown = [input_of(prices, model) for model in ("gpt-5", "claude-opus-5", "gpt-5-nano")]
    assert shown == [Decimal(9), Decimal(8), Decimal("0.05")]


def test_none_are_used_beside_another_currency_or_when_they_are_turned_off() -> None:
    euros = prices_of(OPENAI, prices=[{"model": "own", "input": 1, "currency": "EUR"}])
    off = prices_of(OPENAI, ledger={"list_prices": False})
    assert (input_of(euros, "gpt-5"), input_of(off, "gpt-5")) == (None, None)
    assert (euros.estimate("gpt-5", 1, 1), input_of(euros, "own")) == (None, Decimal(1))


def test_replaced_prices_hold_from_then_on() -> None:
    prices = prices_of(OPENAI)
    assert input_of(prices, "gpt-5") == Decimal("1.25")
    prices.replace([PriceSettings(model="gpt-5", input=Decimal(3))], 0.5)
    assert (input_of(prices, "gpt-5"), input_of(prices, "gpt-5-mini")) == (Decimal(3), None)


async def test_the_ledger_counts_money_for_it_only_when_an_upstream_answered() -> None:
    gateway = Gateway(Settings(upstreams=(CLAUDE,)), None, None)
    writes = ((3600.0, 1000), (0.0, 1000))
    used: dict[str, Any] = {"prompt_tokens": 4000, "cached_tokens": 1000, "writes": writes, "completion_tokens": 10}
    gateway.ledger.add(Entry("a", "claude-opus-5", by_upstream=True, **used))
    gateway.ledger.add(Entry("a", "claude-opus-5", **used))
    priced, free = gateway.ledger.totals.items()
    assert (priced[0].currency, free[0].currency, free[1]["unpriced_requests"]) == ("USD", "", 1)
    cost = 1000 * Decimal(5) + 1000 * Decimal("0.5") + 1000 * Decimal(10) + 1000 * Decimal("6.25") + 10 * Decimal(25)
    assert Decimal(priced[1]["cost_nano"]) / NANO == cost / 1_000_000


def test_each_table_has_its_page_and_a_date_and_no_model_twice() -> None:
    text = Path("gateway/ledger/list_prices.toml").read_text(encoding="utf-8")
    for provider in loads(text).values():
        assert provider["page"].startswith("https://")
        assert provider["date"] > date(2026, 1, 1)
        names = [name for row in provider["prices"] for name in row["models"]]
        assert len(names) == len(set(names)) == len(list_prices()[provider["host"]])
