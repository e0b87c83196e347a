"""GET /admin/ledger: what was used and saved, by day, tenant, model and lane, as JSON and as CSV. Reads the ledger;
changes nothing. Sums are of whole numbers, and money is a decimal number in text, so that no digit is lost on the way.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from aiohttp import web

from gateway.admin.sources import Ledger
from gateway.api.dialect import JSON, Route
from gateway.api.fields import Parameter, choice, invalid, read_query, takes, text, wrong_value
from gateway.api.replies import reply_json
from gateway.ledger.base import SAVERS, Figures, Row, add_up
from gateway.types import NANO

CSV: Final = "text/csv"
DAYS: Final = 30
"""Of a report for which nothing else is requested, today among them."""
GROUPS: Final = ("day", "tenant", "model", "lane", "key")
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "cache_write_tokens", "completion_tokens", "embedded_tokens")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")

_WRITTEN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)


@takes({"type": "string", "format": "date"})
def _day(value: Any, path: str) -> date:
    with suppress(ValueError):
        if _WRITTEN.fullmatch(value):
            return date.fromisoformat(value)
    raise invalid(path, "a day is written like 2026-11-22")


@takes({"type": "string"})
def _groups(value: Any, path: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(value.split(","))) if value else ()
    for name in names:
        if name not in GROUPS:
            raise wrong_value(path, name, GROUPS)
    return names


QUERY: Final = {
    one.name: one
    for one in (
        Parameter("from", _day, "day such as 2026-11-01, default 30 days up to `to`", "The first day, in UTC."),
        Parameter("to", _day, "day, default today", "The last day, in UTC."),
        Parameter("tenant", text(), "string", "Only this tenant."),
        Parameter("model", text(), "string", "Only this model."),
        Parameter(
            "group_by",
            _groups,
            "some of `day`, `tenant`, `model`, `lane`, `key`, with commas; default `day`",
            "A row for each of them; empty for the total alone.",
        ),
        Parameter("format", choice("json", "csv"), "`json` or `csv`", "Goes before the header `Accept`."),
    )
}


class LedgerPage:
    """Holds what its handler needs. `now` is in seconds since 1970."""

    def __init__(self, ledger: Ledger, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._now = now

    def routes(self) -> list[Route]:
        summary = "Used and saved tokens, milliseconds and money."
        return [Route("GET", "/admin/ledger", self.show, summary, query=QUERY, media=(JSON, CSV), key="admin")]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/ledger"""
        query = read_query(http.query, QUERY)
        first, last = self._days(query)
        rows = await self._ledger.read(first.isoformat(), last.isoformat())
        rows = {row: figures for row, figures in rows.items() if _wanted(row, query)}
        by = query.get("group_by", ("day",))
        if _wants_csv(http, query):
            return web.Response(text=as_csv(rows, by), content_type=CSV)
        return reply_json({"from": first.isoformat(), "to": last.isoformat(), **report(rows, by)})

    def _days(self, query: Mapping[str, Any]) -> tuple[date, date]:
        last = query.get("to") or datetime.fromtimestamp(self._now(), UTC).date()
        first = query.get("from") or last - timedelta(days=min(DAYS, last.toordinal()) - 1)
        if first > last:
            raise invalid("from", f"{first} is after {last}, the last day")
        return first, last


def _wanted(row: Row, query: Mapping[str, Any]) -> bool:
    return all(query.get(name) in (None, getattr(row, name)) for name in ("tenant", "model"))


def _wants_csv(http: web.Request, query: Mapping[str, Any]) -> bool:
    if "format" in query:
        return bool(query["format"] == "csv")
    return CSV in http.headers.get("Accept", "") and JSON not in http.headers.get("Accept", "")


def grouped(rows: Mapping[Row, Figures], by: Sequence[str]) -> dict[tuple[str, ...], dict[str, Figures]]:
    """Group -> currency -> figures, in the order of the groups. `by` are fields of a row."""
    groups: dict[tuple[str, ...], dict[str, Figures]] = {}
    for row, figures in rows.items():
        group = tuple(getattr(row, name) for name in by)
        add_up(groups.setdefault(group, {}).setdefault(row.currency, {}), figures)
    return dict(sorted(groups.items()))


def totals_json(by_currency: Mapping[str, Figures]) -> dict[str, Any]:
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
            "cost": money_of(by_currency, "cost_nano"),
        },
        "saved": {
            saver: {
                "requests": total.get(f"{saver}_requests", 0),
                "tokens": total.get(f"{saver}_tokens", 0),
                "ms": total.get(f"{saver}_micros", 0) / 1e3,
                "money": money_of(by_currency, f"{saver}_nano"),
            }
            for saver in SAVERS
        },
        "hints": {
            "storage_token_s": total.get("storage_token_s", 0),
            "storage_money": money_of(by_currency, "storage_nano"),
            "money": money_of(by_currency, "hints_nano"),
        },
    }


def report(rows: Mapping[Row, Figures], by: Sequence[str]) -> dict[str, Any]:
    """Every group, and all of them together."""
    groups = grouped(rows, by)
    everything = grouped(rows, ()).get((), {})
    return {
        "group_by": list(by),
        "rows": [{**dict(zip(by, group, strict=True)), **totals_json(figures)} for group, figures in groups.items()],
        "total": totals_json(everything),
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
    """`totals_json`, as columns."""
    one = totals_json(by_currency)
    columns = {"requests": one["requests"], "unpriced_requests": one["unpriced_requests"], **one["used"]}
    for saver, saved in one["saved"].items():
        columns |= {f"saved_{saver}_{what}": value for what, value in saved.items()}
    columns |= {f"hints_{what}": value for what, value in one["hints"].items()}
    return {name: (value or {}).get(currency, "") if _is_money(name) else value for name, value in columns.items()}


def _is_money(column: str) -> bool:
    return column == "cost" or column.endswith("_money")


def money_of(by_currency: Mapping[str, Figures], column: str) -> dict[str, str] | None:
    """None where no price is known."""
    priced = sorted(currency for currency in by_currency if currency)
    return {one: decimal(by_currency[one].get(column, 0)) for one in priced} or None


def decimal(nano: int) -> str:
    return f"{Decimal(nano) / NANO:f}"


def _cell(text: str) -> str:
    """Names of models may be a client's own: none is a formula when a spreadsheet opens the file."""
    return f"'{text}" if text.startswith(_FORMULA) else text
