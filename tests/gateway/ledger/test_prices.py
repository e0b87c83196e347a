"""What entries come to. Prices are those of hosted APIs, where the sums are known."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import PriceSettings
from gateway.ledger.base import Entry, Figures
from gateway.ledger.prices import Prices, Tariff, count
from gateway.types import NANO, Hit

OPUS = PriceSettings(
    model="opus",
    input=Decimal(5),
    output=Decimal(25),
    cached_read=Decimal("0.5"),
    cache_write=Decimal("6.25"),
    cache_write_of={"1h": Decimal(10)},
)


def counted(price: PriceSettings | None = OPUS, batch: float = 0.5, **entry: Any) -> Figures:
    total: Figures = {}
    count(Entry("a", "opus", **entry), Tariff.of(price, batch) if price else None, total)
    return total


def money(nano: int) -> Decimal:
    return Decimal(nano) / NANO


def test_each_token_of_a_prompt_is_paid_at_one_rate() -> None:
    """2,095 tokens: 1,000 read, 1,000 written for an hour, 50 for five minutes, 45 of neither."""
    writes = ((300.0, 50), (3600.0, 1000))
    row = counted(prompt_tokens=2095, cached_tokens=1000, writes=writes, completion_tokens=503)
    each = [45 * Decimal(5), 1000 * Decimal("0.5"), 50 * Decimal("6.25"), 1000 * Decimal(10), 503 * Decimal(25)]
    assert money(row["cost_nano"]) == sum(each) / 1_000_000
    assert row["cache_write_tokens"] == 1050
    assert money(row["prefix_nano"]) == 1000 * Decimal("4.5") / 1_000_000


def test_what_has_no_price_of_its_own_costs_as_much_as_input() -> None:
    plain = PriceSettings(model="m", input=Decimal(2), output=Decimal(8))
    row = counted(plain, prompt_tokens=100, cached_tokens=60, writes=((0.0, 20),), completion_tokens=1)
    assert money(row["cost_nano"]) == (100 * Decimal(2) + 8) / 1_000_000
    assert "prefix_nano" not in row


def test_a_model_without_a_price_has_tokens_and_no_money() -> None:
    row = counted(None, prompt_tokens=10, completion_tokens=2, reused_tokens=8, reused_ms=1.5, total_ms=20.25)
    assert row == {
        "requests": 1,
        "unpriced_requests": 1,
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "micros": 20250,
        "prefix_requests": 1,
        "prefix_tokens": 8,
        "prefix_micros": 1500,
    }


def test_the_batch_lane_costs_its_part_and_the_rest_is_saved() -> None:
    online = counted(prompt_tokens=1000, cached_tokens=600, completion_tokens=100)
    batch = counted(prompt_tokens=1000, cached_tokens=600, completion_tokens=100, lane="batch")
    assert batch["cost_nano"] * 2 == online["cost_nano"]
    assert batch["cost_nano"] + batch["batch_nano"] == online["cost_nano"]
    assert batch["prefix_nano"] == online["prefix_nano"]
    assert (batch["batch_requests"], batch["batch_tokens"]) == (1, 1100)
    free = counted(batch=0.0, completion_tokens=100, lane="batch")
    assert (free["batch_nano"], "cost_nano" in free) == (2_500_000, False)


def test_a_hosted_api_bills_a_line_of_a_batch_as_any_request() -> None:
    used: dict[str, Any] = {"prompt_tokens": 1000, "cached_tokens": 600, "completion_tokens": 100, "by_upstream": True}
    assert counted(**used, lane="batch") == counted(**used)
    hits = (Hit("exact", prompt_tokens=1000, completion_tokens=200, generation_ms=900.0),)
    assert counted(hits=hits, by_upstream=True, lane="batch") == counted(hits=hits)


def test_an_audit_costs_what_the_batch_lane_costs_and_is_no_request() -> None:
    used: dict[str, Any] = {"prompt_tokens": 1000, "cached_tokens": 600, "completion_tokens": 100, "total_ms": 5.0}
    batch, audit = counted(**used, lane="batch"), counted(**used, lane="audit")
    assert audit == {
        column: batch[column]
        for column in ("prompt_tokens", "cached_tokens", "completion_tokens", "micros", "cost_nano")
    }
    assert counted(**used, lane="audit", by_upstream=True)["cost_nano"] == 2 * audit["cost_nano"]


def test_a_remembered_answer_costs_nothing_and_saves_the_whole_price() -> None:
    hits = (Hit("exact", prompt_tokens=1000, completion_tokens=200, generation_ms=900.0),)
    row = counted(hits=hits, total_ms=4.0)
    assert "cost_nano" not in row
    assert (row["requests"], row["exact_requests"], row["exact_tokens"]) == (1, 1, 1200)
    assert row["exact_micros"] == 896_000
    assert money(row["exact_nano"]) == (1000 * Decimal(5) + 200 * Decimal(25)) / 1_000_000
    assert counted(hits=hits, total_ms=4.0, lane="batch")["exact_nano"] * 2 == row["exact_nano"]
    slow = counted(hits=(Hit("semantic", 10, 1, 3.0),), total_ms=5.0)
    assert (slow["semantic_tokens"], "semantic_micros" in slow) == (11, False)


def test_embedded_texts_are_paid_as_input() -> None:
    row = counted(PriceSettings(model="e", input=Decimal("0.02")), embedded_tokens=500)
    assert money(row["cost_nano"]) == Decimal("0.00001")


def test_what_a_hosted_api_reused_is_told_apart() -> None:
    row = counted(prompt_tokens=100, cached_tokens=64, reused_tokens=64, reused_by="upstream")
    assert (row["upstream_tokens"], row["upstream_nano"]) == (64, 64 * 4500)
    assert not [column for column in row if column.startswith("prefix")]


def test_more_cached_tokens_than_a_prompt_has_cost_no_less_than_nothing() -> None:
    """A hosted API that tells nonsense."""
    assert counted(prompt_tokens=10, cached_tokens=20)["cost_nano"] == 20 * 500


@pytest.mark.parametrize(
    ("model", "input_price"),
    [("gpt-5", 1), ("gpt-5-mini", 3), ("gpt-4", 2), ("o[1]", 4), ("o1", 4), ("GPT-5", None)],
)
def test_a_name_goes_before_patterns_and_those_go_in_their_order(model: str, input_price: int | None) -> None:
    table = [("gpt-5-*", 3), ("gpt-*", 2), ("gpt-5", 1), ("o[1]", 4)]
    prices = Prices([PriceSettings(model=name, input=Decimal(price)) for name, price in table], batch=0.5)
    tariff = prices.of(model)
    assert (tariff.input if tariff else None) == (input_price * 10**9 if input_price else None)


tokens = st.integers(0, 10**7)
rates = st.decimals(0, 1000, places=6)


@given(rates, rates, rates, tokens, tokens, tokens, tokens, st.floats(0, 1))
def test_cost_and_savings_are_what_everything_would_have_cost(
    input_: Decimal, read: Decimal, output: Decimal, plain: int, cached: int, written: int, said: int, batch: float
) -> None:
    """Each of the three is rounded once."""
    price = PriceSettings(model="m", input=input_, cached_read=read, output=output)
    row = counted(
        price,
        batch,
        prompt_tokens=plain + cached + written,
        cached_tokens=cached,
        writes=((300.0, written),),
        completion_tokens=said,
        lane="batch",
    )
    whole = (input_ * (plain + cached + written) + output * said) / 1_000_000 * NANO
    parts = row.get("cost_nano", 0) + row.get("prefix_nano", 0) + row.get("batch_nano", 0)
    assert abs(parts - whole) <= 1


PRO = PriceSettings(
    model="pro", input=Decimal("1.25"), output=Decimal(10), cached_read=Decimal("0.125"), storage=Decimal("4.5")
)


def test_a_hint_wins_what_is_read_and_loses_what_is_written_and_stored() -> None:
    """10,000 tokens kept for an hour, by the request that had them computed and by those that read them."""
    first = counted(
        PRO,
        prompt_tokens=10_100,
        writes=((3600.0, 10_000),),
        created_tokens=10_000,
        storage_token_s=10_000 * 3600,
        by_upstream=True,
    )
    storage, read_once = Decimal("0.045"), Decimal("0.00125")
    assert first["storage_token_s"] == 36_000_000
    assert money(first["storage_nano"]) == storage
    assert money(first["cost_nano"]) == 10_100 * PRO.input / 1_000_000 + read_once + storage
    assert money(first["hints_nano"]) == -read_once - storage
    later = counted(PRO, prompt_tokens=10_100, cached_tokens=10_000, by_upstream=True)
    assert money(later["hints_nano"]) == 10_000 * Decimal("1.125") / 1_000_000
    assert first["hints_nano"] + 5 * later["hints_nano"] > 0 > first["hints_nano"] + 4 * later["hints_nano"]


def test_a_write_that_nothing_reads_is_lost() -> None:
    row = counted(prompt_tokens=1000, writes=((300.0, 1000),), by_upstream=True)
    assert money(row["hints_nano"]) == -1000 * Decimal("1.25") / 1_000_000
    assert "hints_nano" not in counted(prompt_tokens=1000, writes=((300.0, 1000),))  # an engine's costs nothing more
