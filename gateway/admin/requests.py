"""The latest requests of all gateways, without their texts: GET /admin/requests, and the life of one.

An Observer of the middleware notes each request that was admitted as it ends, in one tuple. Every second these become
rows: JSON in a ring that all gateways share, and figures of the history. Nothing of it is done while a request waits.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from gateway import tasks
from gateway.admin.ledger import money_of
from gateway.admin.outcomes import HITS, add_figures, has_failed, hit_of
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, choice, in_url, integer, read_query, text
from gateway.api.record import Record
from gateway.api.replies import reply_json
from gateway.errors import NotFoundError, RedisDownError
from gateway.explain.parts import Digests, parts_of, rows_of, scope_of
from gateway.ledger.base import Entry, Figures
from gateway.storage.ring import Ring, read_objects
from gateway.types import Prompt, Trace

MOST: Final = 2000
"""Requests that are kept."""

WRITE_S: Final = 1.0
"""From one write to the next."""

MAX_ROWS: Final = 50
"""Of one process at each write. Of more requests some that failed and some of the others become rows: a row costs a
tenth of what a request does, and the ring would be full within seconds. All are counted."""

MAX_FAILED: Final = MAX_ROWS // 2
"""Of these, that failed."""

MAX_PENDING: Final = 20_000
"""Requests of one process that are not written yet; of more, the oldest are left out of the ring and the history."""

MAX_HELD: Final = 1 << 20
"""Bytes of a request whose prompt is held until its row is written, to tell its parts; of a larger one no parts are
known."""

MAX_ALL_HELD: Final = 64 << 20
"""Of all of them."""

MAX_CHARS: Final = 200
"""Of a text of a row; names of models may be a client's own."""

_QUERY: Final = {
    one.name: one
    for one in (
        Parameter("tenant", text(), "string", "Only this tenant."),
        Parameter("model", text(), "string", "Only this model."),
        Parameter("hit", choice(*HITS), "string", "Only requests that were answered in this way."),
        Parameter("error", choice("any", "none"), "`any` or `none`", "Only those that failed, or that did not."),
        Parameter("before", text(), "`row` of a request", "Only those that are older than this one."),
        Parameter("limit", in_url(integer(1, MOST)), "integer 1 to 2000, default 100", "Requests of one page."),
    )
}
DEFAULT_LIMIT: Final = 100
_DETAIL: Final = frozenset(
    (
        *("overhead_ms", "retries", "finish", "lookup", "receipt", "lease", "target", "stream"),
        *("route", "scope", "segments", "uncached", "hosted", "evicted"),
    )
)
"""What only the life of one request has."""


class Noted(NamedTuple):
    """A request that is over, until it is a row."""

    at_s: float
    record: Record
    trace: Trace
    prompt: Prompt | Mapping[str, Any] | None


class RequestLog:
    """Notes requests, and writes them."""

    def __init__(
        self,
        ring: Ring,
        count: Callable[[str, Figures], None],
        priced: Callable[[Entry], tuple[str, Figures]],
        now: Callable[[], float],
        secret: Callable[[], Awaitable[str]],
    ) -> None:
        """
        ring    where rows are
        count   adds figures to the history
        priced  currency and figures of one entry
        now     seconds since 1970
        secret  of all gateways, for digests of prompts. Raises RedisDownError and OSError: then there are none
        """
        self._ring = ring
        self._count = count
        self._priced = priced
        self._now = now
        self._secret = secret
        self._digests: Digests | None = None
        self._held_bytes = 0  # of prompts of what is noted
        self._noted: deque[Noted] = deque(maxlen=MAX_PENDING)
        self._token = secrets.token_hex(6)
        self._number = 0
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None

    def started(self, record: Record) -> None:
        """Nothing has happened yet."""

    def finished(self, record: Record) -> None:
        """Of requests that were admitted, those that want an answer of a model, or failed."""
        if record.tenant is None or not (record.traces or record.embedded_tokens or record.status >= 400):
            return
        trace, held = record.trace, record.body_bytes
        prompt = trace.prompt if trace.body is None else trace.body
        if held > MAX_HELD or self._held_bytes + held > MAX_ALL_HELD:
            prompt, held = None, 0
        self._held_bytes += held
        trace.prompt = trace.body = None  # others hold it for longer
        if len(record.traces) > 1:
            for one in record.traces:
                one.prompt = one.body = None
        self._noted.append(Noted(self._now(), record, trace, prompt))

    def start(self) -> None:
        self._writer = tasks.spawn(self._write(), name="write requests")

    async def close(self) -> None:
        await tasks.cancel(self._writer)
        await self.flush()

    async def _write(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(WRITE_S)
            await self.flush()

    async def flush(self) -> None:
        """Writes what was noted. Never raises."""
        async with self._writing:
            rows, figures = list[bytes](), Figures()
            if self._digests is None:
                with suppress(RedisDownError, OSError):
                    self._digests = Digests((await self._secret()).encode())
            waiting, self._noted = self._noted, deque(maxlen=MAX_PENDING)
            self._held_bytes = 0
            chosen = _chosen(waiting)
            for number, noted in enumerate(waiting):
                record, trace = noted.record, noted.trace
                hit = hit_of(trace, record.status)
                add_figures(figures, trace, record.status, record.total_ms, hit)
                if number in chosen:
                    rows.append(orjson.dumps(self._row(noted, hit)))
                if number % 20 == 19:
                    await asyncio.sleep(0)
            if figures:
                self._count("", figures)
            if rows:
                await self._ring.push(rows)

    async def read(self, most: int | None = None) -> tuple[list[dict[str, Any]], bool]:
        """The newest rows of all gateways, and whether they are only what was last known."""
        await self.flush()
        found = await self._ring.read(most)
        return read_objects(found.entries, "row"), found.stale

    def _row(self, noted: Noted, hit: str) -> dict[str, Any]:
        record, trace = noted.record, noted.trace
        self._number += 1
        currency, figures = ("", Figures()) if record.entry is None else self._priced(record.entry)
        lookup, target, lease, lost = trace.lookup, record.target, trace.lease, trace.lost
        return {
            "row": f"{self._token}-{self._number}",
            "id": record.request_id,
            "shown_id": record.shown_id,
            "at_s": round(noted.at_s, 3),
            "tenant": _short(record.tenant),
            "model": _short(record.model),
            "endpoint": record.endpoint,
            "lane": record.lane,
            "status": record.status,
            "error": _short(record.error),
            "hit": hit,
            "prompt_tokens": trace.prompt_tokens,
            "cached_tokens": trace.cached_tokens,
            "completion_tokens": trace.completion_tokens,
            "queue_ms": round(trace.queue_ms, 1),
            "first_token_ms": None if trace.first_token_ms is None else round(trace.first_token_ms, 1),
            "total_ms": round(record.total_ms, 1),
            "engine": _short(trace.engine),
            "cost": money_of({currency: figures}, "cost_nano"),
            "stream": record.stream,
            "overhead_ms": round(trace.overhead_ms, 2),
            "retries": trace.retries,
            "finish": trace.finish,
            "lookup": lookup
            and {"outcome": lookup.outcome, "reason": lookup.reason, "entry": lookup.entry, "age_s": lookup.age_s},
            "receipt": {"predicted_tokens": trace.predicted_tokens, "cached_tokens": trace.cached_tokens},
            "lease": lease and lease.state,
            "target": target
            and {"alias": target.alias, "policy": target.policy, "model": target.model, "reason": target.reason},
            "route": [
                {
                    "engine": one.engine,
                    "cached_tokens": one.cached_tokens,
                    "wait_ms": round(one.wait_s * 1e3, 1),
                    "score_ms": None if one.score_s is None else round(one.score_s * 1e3, 1),
                    "chosen": one.chosen,
                }
                for one in trace.route
            ],
            "scope": None if self._digests is None else self._digests(scope_of(noted.prompt) or trace.salt),
            "segments": self._segments(noted),
            "uncached": trace.uncached,
            "hosted": trace.by_upstream,
            "evicted": lost and {"at_s": round(lost.at_s, 3), "tenant": _short(lost.tenant), "id": lost.request_id},
        }

    def _segments(self, noted: Noted) -> list[dict[str, Any]]:
        """Digests of the parts of its prompt, where they are known."""
        if noted.prompt is None or self._digests is None:
            return []
        trace = noted.trace
        return rows_of(parts_of(noted.prompt, self._digests), trace.prompt_tokens, trace.cached_tokens)


class RequestPages:
    """Reads them."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/admin/requests",
                self.show,
                "The latest 2,000 requests; of more than 50 a second a sample.",
                query=_QUERY,
                key="admin",
            ),
            Route("GET", "/admin/requests/{id}", self.show_one, "The life of one of them.", key="admin"),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/requests"""
        query = read_query(http.query, _QUERY)
        rows, stale = await self._log.read()
        if (before := query.get("before")) is not None:
            at = next((place for place, row in enumerate(rows) if row["row"] == before), len(rows))
            rows = rows[at + 1 :]
        limit = query.get("limit", DEFAULT_LIMIT)
        found = [short(row) for row in rows if _wanted(row, query)]
        return reply_json({"requests": found[:limit], "more": len(found) > limit, "kept": MOST, "stale": stale})

    async def show_one(self, http: web.Request) -> web.Response:
        """GET /admin/requests/{id}: the newest with this id, the gateway's own or the one that its client got."""
        wanted = http.match_info["id"]
        rows, stale = await self._log.read()
        for row in rows:
            if wanted in (row["row"], row.get("id"), row.get("shown_id")):
                return reply_json({**row, "stale": stale})
        raise NotFoundError("No such request among the latest 2,000.", code="request_not_found")


def short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the list."""
    return {name: value for name, value in row.items() if name not in _DETAIL}


def _chosen(noted: Sequence[Noted]) -> Collection[int]:
    """Numbers of those that become rows."""
    if len(noted) <= MAX_ROWS:
        return range(len(noted))
    failed = [number for number, one in enumerate(noted) if has_failed(one.record.status)][-MAX_FAILED:]
    others = [number for number, one in enumerate(noted) if not has_failed(one.record.status)]
    room = min(len(others), MAX_ROWS - len(failed))
    return {*failed, *random.sample(others, room)}  # every few would miss what comes in turns


def _short(name: str | None) -> str | None:
    return None if name is None else name[:MAX_CHARS]


def _wanted(row: Mapping[str, Any], query: Mapping[str, Any]) -> bool:
    if any(query.get(name) not in (None, row.get(name)) for name in ("tenant", "model", "hit")):
        return False
    failed = has_failed(row.get("status", 0))
    return "error" not in query or failed == (query["error"] == "any")
