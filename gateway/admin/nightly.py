"""GET /admin/explain/nightly: misses that one change would have saved, of now and of each of the last days. One gateway
of those that share a Redis makes the list of a day, after midnight UTC, from what is kept of the latest requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from aiohttp import web

from gateway import tasks
from gateway.admin.ledger import money_of
from gateway.admin.requests import RequestLog
from gateway.api.dialect import Route
from gateway.api.replies import reply_json
from gateway.api.warming import Claims
from gateway.errors import RedisDownError
from gateway.explain.misses import Misses, find_misses
from gateway.ledger.base import Entry, Figures, add_up
from gateway.storage.ring import Ring, read_objects

log = logging.getLogger(__name__)

DAYS: Final = 31
"""That are kept."""

DAY_S: Final = 86_400
CHECK_S: Final = 60.0
CLAIM_S: Final = 600.0
"""For which a gateway that makes a list has it for itself; if it dies, another makes it then."""

KEPT_S: Final = 30.0
"""For which the list of now is shown again: it takes some tens of milliseconds."""

MOST_TENANTS: Final = 200
"""In a list: those that missed most."""


class Nightly:
    """Makes and shows lists."""

    def __init__(
        self,
        log: RequestLog,
        ring: Ring,
        claims: Claims | None,
        priced: Callable[[Entry], tuple[str, Figures]],
        now: Callable[[], float],
    ) -> None:
        """`ring` has a list of each day. `priced`: currency and figures of one entry. `now`: seconds since 1970."""
        self._log = log
        self._ring = ring
        self._claims = claims
        self._priced = priced
        self._now = now
        self._done = ""  # the day whose list is made, or has nothing in it
        self._shown: tuple[float, dict[str, Any]] | None = None
        self._lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        summary = "Misses that one change would have saved, of each tenant: now, and on the last 31 days."
        return [Route("GET", "/admin/explain/nightly", self.show, summary, key="admin")]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/explain/nightly"""
        async with self._lock:
            if self._shown is None or not 0 <= self._now() - self._shown[0] < KEPT_S:
                rows, stale = await self._log.read()
                self._shown = self._now(), {**await self._list(rows, _day(self._now())), "stale": stale}
        found = await self._ring.read()
        return reply_json({**self._shown[1], "days": _read(found.entries)})

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """While the application runs."""
        task = tasks.spawn(self._run(), name="nightly list")
        yield
        await tasks.cancel(task)

    async def _run(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(CHECK_S)
            with suppress(RedisDownError):  # at the next check
                await self.make()

    async def make(self) -> None:
        """The list of yesterday, unless it is there. Raises RedisDownError."""
        today_s = self._now() // DAY_S * DAY_S
        day = _day(today_s - DAY_S)
        if day == self._done or not (self._claims is None or await self._claims.take(f"nightly-{day}", CLAIM_S)):
            return
        known = await self._ring.read()
        if known.stale:
            raise RedisDownError("the lists that are there are not known")
        if all(one["day"] != day for one in _read(known.entries)):
            rows, stale = await self._log.read()
            if stale:
                raise RedisDownError("the latest requests are not known")
            if rows := [row for row in rows if today_s - DAY_S <= row["at_s"] < today_s]:
                await self._ring.push([orjson.dumps(await self._list(rows, day))])
        self._done = day

    async def _list(self, rows: Sequence[Mapping[str, Any]], day: str) -> dict[str, Any]:
        """What it rests on, and what it found."""
        found = await asyncio.to_thread(find_misses, rows)
        most = sorted(found, key=lambda tenant: -sum(sum(one.tokens.values()) for one in found[tenant]))[:MOST_TENANTS]
        return {
            "day": day,
            "requests": len(rows),
            "from_s": rows[-1]["at_s"] if rows else None,
            "to_s": rows[0]["at_s"] if rows else None,
            "tenants": {tenant: [self._shown_miss(tenant, one) for one in found[tenant]] for tenant in most},
        }

    def _shown_miss(self, tenant: str, one: Misses) -> dict[str, Any]:
        return {
            "cause": one.cause,
            "requests": one.requests,
            "tokens": sum(one.tokens.values()),
            "money": self._money(tenant, one.tokens),
            "example": list(one.example),
            "text": one.text,
            "advice": one.advice,
        }

    def _money(self, tenant: str, tokens: Mapping[str, int]) -> dict[str, str] | None:
        """What they cost more than tokens that are read from a cache."""
        saved = dict[str, Figures]()
        for model, count in tokens.items():
            currency, all_new = self._priced(Entry(tenant, model, prompt_tokens=count))
            _, all_read = self._priced(Entry(tenant, model, prompt_tokens=count, cached_tokens=count))
            more = all_new.get("cost_nano", 0) - all_read.get("cost_nano", 0)
            add_up(saved.setdefault(currency, {}), {"cost_nano": more})
        return money_of(saved, "cost_nano")


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).date().isoformat()


def _read(entries: Sequence[bytes]) -> list[dict[str, Any]]:
    """Lists of days, the newest first; what no gateway wrote is passed over."""
    return sorted(read_objects(entries, "day"), key=lambda one: str(one["day"]), reverse=True)
