"""GET /admin/overview: what was saved lately and what is wrong now; GET /admin/live: the same, and new requests, as
they come. All open pages share one look at the figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import orjson
from aiohttp import web

from gateway import tasks
from gateway.admin.ledger import money_of, totals_json
from gateway.admin.metrics import Metrics
from gateway.admin.outcomes import FIRST_TOKEN, HITS, INTER_TOKEN, percentile
from gateway.admin.requests import RequestLog, short
from gateway.admin.sources import EngineStatus, Ledger, Sources
from gateway.api.dialect import SSE, Route
from gateway.api.fields import Parameter, choice, read_query
from gateway.api.record import RECORD, common_headers
from gateway.api.replies import reply_json
from gateway.errors import OverloadedError, RedisDownError
from gateway.ledger.base import Figures, add_up
from gateway.ledger.history import SPANS, History, Steps

EVERY_S: Final = 2.0
"""From one event of /admin/live to the next."""

MAX_PAGES: Final = 32
"""That are open on /admin/live at a time, of one process."""

LIVE_S: Final = 600.0
"""After which /admin/live ends. A page begins it again, if its key or session still holds."""

NEW_ROWS: Final = 200
"""That are looked at for new requests at each event."""

PENDING_ROWS: Final = 50
"""Of the ledger, that are not written: more are worth a word."""

_QUERY: Final = {
    "span": Parameter("span", choice(*SPANS), "`hour`, `day` or `month`; default `hour`", "What is looked back at.")
}
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Overview:
    """Makes the page, and remembers the last one of each span for when Redis is away."""

    def __init__(
        self,
        history: History,
        ledger: Ledger,
        log: RequestLog,
        figures: Callable[[], Awaitable[tuple[Sources, Metrics]]],
        now: Callable[[], float],
    ) -> None:
        """`figures` are of this process, or of all workers that it is one of."""
        self._history = history
        self._ledger = ledger
        self._log = log
        self._figures = figures
        self._now = now
        self._last: dict[str, dict[str, Any]] = {}
        self._gateways = 1

    async def look(self, span: str) -> dict[str, Any]:
        """Never raises: what cannot be read is as it was last known."""
        try:
            sources, _ = await self._figures()
            wrong, self._gateways = [*find_wrong(sources)], sources.gateways()
        except OverloadedError as error:
            sources, wrong = None, [_wrong("worker", "", error.message)]
        try:
            await self._log.flush()
            await self._ledger.flush()
            figures = summary(await self._history.read(span))
            self._last[span] = figures | {"as_of_s": round(self._now(), 3)}
            stale = False
        except RedisDownError:
            stale = True
        redis = "none" if sources is not None and not sources.redis().get("configured", True) else ""
        state = redis or ("down" if stale or sources is None or not sources.redis().get("up") else "up")
        now = {"stale": stale, "redis": state, "gateways": self._gateways, "wrong": wrong}
        return {"span": span, **now, **(self._last.get(span) or _nothing())}


def _nothing() -> dict[str, Any]:
    return {"as_of_s": None, **summary(Steps(0, 1, ()))}


def summary(steps: Steps) -> dict[str, Any]:
    """Sums over all steps, and each of them."""
    total: dict[str, Figures] = {}
    each = list[Figures]()
    for by_currency in steps.figures:
        together: Figures = {}
        for currency, figures in by_currency.items():
            add_up(total.setdefault(currency, {}), figures)
            add_up(together, figures)
        each.append(together)
    everything: Figures = {}
    for figures in total.values():
        add_up(everything, figures)
    ledger = totals_json(total)
    return {
        "step_s": steps.step_s,
        "from_s": steps.first_s,
        "to_s": steps.first_s + steps.step_s * len(steps.figures),
        "totals": {
            "requests": ledger["requests"],
            "ended": everything.get("ended", 0),
            "errors": everything.get("errors", 0),
            **{name: ledger["used"][name] for name in _TOKENS},
            "cost": money_of(total, "cost_nano"),
            "unpriced_requests": ledger["unpriced_requests"],
            "saved": ledger["saved"],
            "hits": {hit: everything.get(hit, 0) for hit in HITS},
            "first_token_ms": {name: percentile(everything, FIRST_TOKEN, share) for name, share in _SHARES.items()},
            "inter_token_ms": {name: percentile(everything, INTER_TOKEN, share) for name, share in _SHARES.items()},
        },
        "series": {
            "t": [steps.first_s + number * steps.step_s for number in range(len(each))],
            **{name: [one.get(name, 0) for one in each] for name in ("requests", "errors", *_TOKENS)},
            "hits": {hit: [one.get(hit, 0) for one in each] for hit in HITS},
            **{
                f"{kind}_{name}_ms": [percentile(one, names, _SHARES[name]) for one in each]
                for kind, names in (("first_token", FIRST_TOKEN), ("inter_token", INTER_TOKEN))
                for name in ("p50", "p99")
            },
        },
    }


_TOKENS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens")


def _wrong(kind: str, name: str, text: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "text": text}


def find_wrong(sources: Sources) -> Iterator[dict[str, str]]:
    """What does not work now, a sentence each."""
    redis, workers, ledger = sources.redis(), sources.workers(), sources.ledger
    if redis.get("outages") and not redis.get("up"):
        yield _wrong("redis", "", "Redis is away: caches are this gateway's own, and limits count in each gateway.")
    yield from chain.from_iterable(map(_wrong_engine, sources.engines()))
    for name, one in sources.upstreams().items():
        if one["breaker"] != "closed":
            yield _wrong("upstream", name, f"Upstream {name} fails, and is tried again.")
    if missing := workers.get("configured", 0) - workers.get("running", 0):
        yield _wrong("worker", "", f"{missing} of {workers['configured']} workers are down.")
    for model, overload in sources.queue("online").overload.items():
        if overload.holds:
            yield _wrong("queue", model, f"Model {model} has more conversations than the caches of its engines hold.")
    if ledger.dropped:
        yield _wrong(
            "ledger",
            "",
            f"{ledger.dropped} requests since the start found no row left in the ledger.",
        )
    if ledger.pending > PENDING_ROWS:
        yield _wrong("ledger", "", f"{ledger.pending} rows of the ledger wait for Redis.")
    for space in sources.response_cache().get("semantic", {}).get("spaces", ()):
        if space["closed"] and space["audits"]:
            name = f"{space['owner']} {space['model']}"
            yield _wrong("semantic", name, f"The semantic cache of {name} is closed: too many hits would be wrong.")
    yield from _wrong_budgets(sources.limits().get("tenants", {}))
    if (cold := sources.cold()) is not None:
        yield _wrong("warm", "", f"The gateway is not ready: {cold}.")


def _wrong_budgets(tenants: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, one in tenants.items():
        if (budget := one.get("budget")) and budget["remaining"] <= budget["limit"] / 10:
            how = "its budget" if budget["remaining"] <= 0 else "90% of its budget"
            yield _wrong("budget", name, f"Tenant {name} has spent {how}.")


def _wrong_engine(engine: EngineStatus) -> Iterator[dict[str, str]]:
    name = engine.name
    if engine.state != "ready":
        yield _wrong("engine", name, f"Engine {name} {_STATES[engine.state]}.")
    trust = engine.replica.get("index", {}).get("trust", "exact")
    if trust != "exact":
        yield _wrong("index", name, f"The index of {name} is {trust}: what its cache holds is estimated.")


_STATES: Final = {
    "connecting": "has not joined yet",
    "lost": "was lost, and is asked again and again",
    "draining": "drains: it gets no new requests",
}


class OverviewPages:
    """Holds what its handlers need, and the pages that are open."""

    def __init__(self, overview: Overview, log: RequestLog) -> None:
        self._overview = overview
        self._log = log
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/admin/overview",
                self.show,
                "What was used and saved lately, times, and what is wrong now.",
                query=_QUERY,
                key="admin",
            ),
            Route(
                "GET",
                "/admin/live",
                self.live,
                "The overview of the last hour every 2 s, and new requests.",
                media=(SSE,),
                key="admin",
            ),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/overview"""
        return reply_json(await self._overview.look(read_query(http.query, _QUERY).get("span", "hour")))

    async def live(self, http: web.Request) -> web.StreamResponse:
        """GET /admin/live: events `overview` and `requests`, for LIVE_S, or until the client or the server leaves."""
        if len(self._pages) >= MAX_PAGES:
            raise OverloadedError(f"{MAX_PAGES} pages are open already.", retry_after_s=EVERY_S)
        answer = web.StreamResponse(
            headers={**common_headers(http[RECORD]), "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        answer.content_type = SSE
        events: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=4)  # a page that is slower misses some
        self._pages.add(events)
        if self._looking is None:
            self._looking = tasks.spawn(self._look(), name="live")
        try:
            await answer.prepare(http)
            end_s = time.monotonic() + LIVE_S
            while (event := await events.get()) is not None and time.monotonic() < end_s:
                await answer.write(event)
            await answer.write_eof()
        finally:
            self._pages.discard(events)
            if not self._pages:
                looking, self._looking = self._looking, None
                await tasks.cancel(looking)
        return answer

    async def close(self, app: web.Application) -> None:
        """Ends all streams, when the server does."""
        for events in self._pages:
            while not events.empty():
                events.get_nowait()
            events.put_nowait(None)

    async def _look(self) -> None:
        last: str | None = None
        while not tasks.was_cancelled():
            began_s = time.monotonic()
            self._send("overview", await self._overview.look("hour"))
            rows, _ = await self._log.read(NEW_ROWS)
            newest = rows[0]["row"] if rows else None
            if last is not None and newest != last:
                place = next((place for place, row in enumerate(rows) if row["row"] == last), len(rows))
                self._send("requests", [short(row) for row in rows[:place]])
            last = newest or last or ""
            await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began_s)))

    def _send(self, event: str, value: Any) -> None:
        text = b"event: " + event.encode() + b"\ndata: " + orjson.dumps(value, default=dict) + b"\n\n"
        for events in self._pages:
            with suppress(asyncio.QueueFull):
                events.put_nowait(text)
