"""Rows of the ledger as JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from decimal import Decimal
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.report import GROUPS, as_csv, report
from gateway.ledger.base import COLUMNS, Figures, Row

ROW = Row("2026-11-22", "north", "demo", "online", "USD")
EVERY_GROUPING = [by for length in range(len(GROUPS) + 1) for by in combinations(GROUPS, length)]

rows = st.dictionaries(
    st.builds(
        Row,
        st.sampled_from(["2026-11-21", "2026-11-22"]),
        st.sampled_from("ab"),
        st.sampled_from("mn"),
        st.sampled_from(["online", "batch"]),
        st.sampled_from(["USD", "EUR", ""]),
    ),
    st.dictionaries(st.sampled_from(COLUMNS), st.integers(0, 2**52), max_size=6),
    max_size=12,
)


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_group_tells_what_was_used_and_what_was_saved() -> None:
    figures = {
        "requests": 2,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "micros": 1500,
        "cost_nano": 1_000_000_001,
        "prefix_requests": 1,
        "prefix_tokens": 64,
        "prefix_micros": 250,
        "prefix_nano": 20,
    }
    free = ROW._replace(model="free", currency="")
    told = report({ROW: figures, free: {"requests": 1, "unpriced_requests": 1}}, ("model",))
    nothing = {"requests": 0, "tokens": 0, "ms": 0, "money": {"USD": "0"}}
    used = {"prompt_tokens": 100, "cached_tokens": 60, "cache_write_tokens": 0, "completion_tokens": 0}
    demo = {
        "model": "demo",
        "requests": 2,
        "unpriced_requests": 0,
        "used": {**used, "embedded_tokens": 0, "ms": 1.5, "cost": {"USD": "1.000000001"}},
        "saved": {
            "prefix": {"requests": 1, "tokens": 64, "ms": 0.25, "money": {"USD": "0.00000002"}},
            "upstream": nothing,
            "exact": nothing,
            "semantic": nothing,
            "batch": nothing,
        },
    }
    assert told["group_by"] == ["model"]
    assert told["rows"][0] == demo
    assert told["rows"][1]["used"]["cost"] is None
    assert told["rows"][1]["saved"]["prefix"]["money"] is None
    assert told["total"]["used"]["cost"] == {"USD": "1.000000001"}
    assert (told["total"]["requests"], told["total"]["unpriced_requests"]) == (3, 1)


def test_currencies_are_never_added_up() -> None:
    both = {ROW: {"cost_nano": 10**9}, ROW._replace(currency="EUR"): {"cost_nano": 2 * 10**9}}
    assert report(both, ())["total"]["used"]["cost"] == {"EUR": "2", "USD": "1"}
    assert [(line["currency"], line["cost"]) for line in lines(as_csv(both, ("tenant",)))] == [
        ("EUR", "2"),
        ("USD", "1"),
    ]


def test_no_name_is_a_formula_of_a_spreadsheet() -> None:
    names = ['=HYPERLINK("x")', "+1", "@a", "a,b", 'say "hi"', "a\nb"]
    text = as_csv({ROW._replace(model=name): {"requests": 1} for name in names}, ("model",))
    assert [line["model"] for line in lines(text)] == ["'+1", '\'=HYPERLINK("x")', "'@a", "a\nb", "a,b", 'say "hi"']


def test_an_empty_ledger_has_a_heading_and_no_line() -> None:
    heading = as_csv({}, GROUPS)
    assert heading.startswith("day,tenant,model,lane,currency,requests,unpriced_requests,prompt_tokens,")
    assert heading.count("\n") == 1
    told = report({}, GROUPS)
    assert (told["rows"], told["total"]["used"]["cost"]) == ([], None)


@given(rows)
def test_sums_by_any_grouping_are_equal(ledger: dict[Row, Figures]) -> None:
    whole = report(ledger, ())["total"]
    money = sum(figures.get("cost_nano", 0) for row, figures in ledger.items() if row.currency == "USD")
    assert Decimal((whole["used"]["cost"] or {}).get("USD", 0)) * 10**9 == money
    for by in EVERY_GROUPING:
        told = report(ledger, by)
        assert told["total"] == whole
        assert _sums(told["rows"]) == _sums([whole])
        total = sum(int(line["saved_exact_tokens"]) for line in lines(as_csv(ledger, by)))
        assert total == whole["saved"]["exact"]["tokens"]
        costs = sum(Decimal(line["cost"]) for line in lines(as_csv(ledger, by)) if line["currency"] == "USD")
        assert costs * 10**9 == money


def _sums(groups: Sequence[dict[str, dict[str, object]]]) -> dict[str, Decimal]:
    """Of everything that is money or a whole number, by its path."""
    found: dict[str, Decimal] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        elif isinstance(value, int) or (isinstance(value, str) and path.endswith(("USD", "EUR"))):
            found[path] = found.get(path, Decimal(0)) + Decimal(value)

    for group in groups:
        walk({key: inner for key, inner in group.items() if key not in GROUPS}, "")
    return {path: value for path, value in found.items() if value}
