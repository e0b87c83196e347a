"""GET /admin/ledger: what was used and saved, by day, tenant, model and lane. Reads the ledger; changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Protocol

import orjson
from aiohttp import web

from gateway.admin.report import GROUPS, as_csv, report
from gateway.api.dialect import JSON, Route
from gateway.api.fields import Parameter, choice, invalid, read_query, takes, text, wrong_value
from gateway.ledger.base import Entry, Figures, Row

CSV: Final = "text/csv"
DAYS: Final = 30
"""That are told of when nothing else is asked for, today among them."""

_WRITTEN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)


class Ledger(Protocol):
    """See ledger/ledger.py."""

    def add(self, entry: Entry) -> None:
        """Counts it, today. Never raises."""
        ...

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        """The rows of these days. Raises RedisDownError."""
        ...


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
            "some of `day`, `tenant`, `model`, `lane`, with commas; default `day`",
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
        asked = read_query(http.query, QUERY)
        first, last = self._days(asked)
        rows = await self._ledger.read(first.isoformat(), last.isoformat())
        rows = {row: figures for row, figures in rows.items() if _wanted(row, asked)}
        by = asked.get("group_by", ("day",))
        if _wants_csv(http, asked):
            return web.Response(text=as_csv(rows, by), content_type=CSV)
        body = {"from": first.isoformat(), "to": last.isoformat(), **report(rows, by)}
        return web.Response(body=orjson.dumps(body), content_type=JSON)

    def _days(self, asked: Mapping[str, Any]) -> tuple[date, date]:
        last = asked.get("to") or datetime.fromtimestamp(self._now(), UTC).date()
        first = asked.get("from") or last - timedelta(days=min(DAYS, last.toordinal()) - 1)
        if first > last:
            raise invalid("from", f"{first} is after {last}, the last day")
        return first, last


def _wanted(row: Row, asked: Mapping[str, Any]) -> bool:
    return all(asked.get(name) in (None, getattr(row, name)) for name in ("tenant", "model"))


def _wants_csv(http: web.Request, asked: Mapping[str, Any]) -> bool:
    if "format" in asked:
        return bool(asked["format"] == "csv")
    return CSV in http.headers.get("Accept", "") and JSON not in http.headers.get("Accept", "")
