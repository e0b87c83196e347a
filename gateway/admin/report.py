"""Rows of the ledger, grouped, as JSON and as CSV. Pure: sums of whole numbers, and money as decimal numbers in text,
so that no digit is lost on the way.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from gateway.ledger.base import NANO, SAVERS, Figures, Row, add_up

GROUPS: Final = ("day", "tenant", "model", "lane")
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "cache_write_tokens", "completion_tokens", "embedded_tokens")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def grouped(rows: Mapping[Row, Figures], by: Sequence[str]) -> dict[tuple[str, ...], dict[str, Figures]]:
    """Group -> currency -> figures, in the order of the groups. `by` are fields of a row."""
    groups: dict[tuple[str, ...], dict[str, Figures]] = {}
    for row, figures in rows.items():
        group = tuple(getattr(row, name) for name in by)
        add_up(groups.setdefault(group, {}).setdefault(row.currency, {}), figures)
    return dict(sorted(groups.items()))


def told(by_currency: Mapping[str, Figures]) -> dict[str, Any]:
    """One group as JSON."""
    total: Figures = {}
    for figures in by_currency.values():
        add_up(total, figures)
    return {
        "requests": total.get("requests", 0),
        "unpriced_requests": total.get("unpriced_requests", 0),
        "used": {
            **{name: total.get(name, 0) for name in _TOKENS},
            "ms": total.get("micros", 0) / 1e3,
            "cost": _money(by_currency, "cost_nano"),
        },
        "saved": {
            saver: {
                "requests": total.get(f"{saver}_requests", 0),
                "tokens": total.get(f"{saver}_tokens", 0),
                "ms": total.get(f"{saver}_micros", 0) / 1e3,
                "money": _money(by_currency, f"{saver}_nano"),
            }
            for saver in SAVERS
        },
    }


def report(rows: Mapping[Row, Figures], by: Sequence[str]) -> dict[str, Any]:
    """Every group, and all of them together."""
    groups = grouped(rows, by)
    everything = grouped(rows, ()).get((), {})
    return {
        "group_by": list(by),
        "rows": [{**dict(zip(by, group, strict=True)), **told(figures)} for group, figures in groups.items()],
        "total": told(everything),
    }


def as_csv(rows: Mapping[Row, Figures], by: Sequence[str]) -> str:
    """A line for each group and currency, so that no line adds up two of them. Money is empty where it is not known."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*by, "currency", *_flat({}, "")])
    for (*group, currency), by_currency in grouped(rows, (*by, "currency")).items():
        writer.writerow([*map(_cell, group), currency, *_flat(by_currency, currency).values()])
    return written.getvalue()


def _flat(by_currency: Mapping[str, Figures], currency: str) -> dict[str, Any]:
    """`told`, as columns."""
    one = told(by_currency)
    columns = {"requests": one["requests"], "unpriced_requests": one["unpriced_requests"], **one["used"]}
    for saver, saved in one["saved"].items():
        columns |= {f"saved_{saver}_{what}": value for what, value in saved.items()}
    return {name: (value or {}).get(currency, "") if _is_money(name) else value for name, value in columns.items()}


def _is_money(column: str) -> bool:
    return column == "cost" or column.endswith("_money")


def _money(by_currency: Mapping[str, Figures], column: str) -> dict[str, str] | None:
    """None where no price is known."""
    priced = sorted(currency for currency in by_currency if currency)
    return {one: _decimal(by_currency[one].get(column, 0)) for one in priced} or None


def _decimal(nano: int) -> str:
    return f"{Decimal(nano) / NANO:f}"


def _cell(text: str) -> str:
    """Names of models may be a client's own: none is a formula when a spreadsheet opens the file."""
    return f"'{text}" if text.startswith(_FORMULA) else text
