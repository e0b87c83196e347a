"""What happened lately, by steps of time: the figures of the ledger over all tenants, and columns of its user's own, in
books of their own that drop what is older than their span. All gateways add up in them, and a restart loses nothing
that was written.

    hour    60 steps of a minute      day    96 of a quarter of an hour      month    31 of a day

A figure is of the step in which it was written, some seconds behind the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.ledger.base import Figures, Row, add_up
from gateway.ledger.books import Book, numbers

log = logging.getLogger(__name__)

FLUSH_S: Final = 2.0
"""From one write to the next."""

LATE_STEPS: Final = 2
"""Steps behind the present one that another gateway may still add to; older ones are read again every REREAD_S."""

REREAD_S: Final = 60.0


class Span(NamedTuple):
    """`steps` of `step_s` seconds, the present one among them."""

    step_s: int
    steps: int


SPANS: Final[Mapping[str, Span]] = {"hour": Span(60, 60), "day": Span(900, 96), "month": Span(86_400, 31)}

ByCurrency = Mapping[str, Figures]


class Steps(NamedTuple):
    """`first_s` is the Unix second at which the first step begins; the present one is the last."""

    first_s: int
    step_s: int
    figures: Sequence[ByCurrency]


class _Lane:
    """One book. `sending` has a number under which it is written once, however often it is tried."""

    def __init__(self, span: Span, book: Book) -> None:
        self.span = span
        self.book, self.numbers = book, numbers()
        self.pending: dict[Row, Figures] = {}
        self.sending: tuple[str, Sequence[tuple[Row, Figures]]] | None = None
        self.forgotten = ""
        self.seen: dict[str, dict[str, Figures]] = {}  # rows by step, as last read
        self.seen_s = float("-inf")

    def first(self, now_s: float) -> int:
        """The Unix second at which the span begins."""
        return self.step(now_s) - (self.span.steps - 1) * self.span.step_s

    def step(self, now_s: float) -> int:
        return int(now_s // self.span.step_s) * self.span.step_s


class History:
    """`add` never waits and never raises."""

    def __init__(self, books: Mapping[str, Book], now: Callable[[], float]) -> None:
        """`books` has one for each of SPANS. `now` is in seconds since 1970."""
        self._lanes = {name: _Lane(span, books[name]) for name, span in SPANS.items()}
        self._now = now
        self._flushing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None

    def add(self, currency: str, figures: Figures) -> None:
        """Counts them now."""
        now_s = self._now()
        for lane in self._lanes.values():
            add_up(lane.pending.setdefault(Row(_name(lane.step(now_s)), "", "", "", currency), {}), figures)

    def add_rows(self, rows: Iterable[tuple[Row, Figures]]) -> None:
        """The ledger's, which may be of any day and tenant."""
        sums: dict[str, Figures] = {}
        for row, figures in rows:
            add_up(sums.setdefault(row.currency, {}), figures)
        for currency, figures in sums.items():
            self.add(currency, figures)

    def start(self) -> None:
        self._writer = tasks.spawn(self._write(), name="history")

    async def close(self) -> None:
        """Writes what is left, if the books take it."""
        await tasks.cancel(self._writer)
        await self.flush()

    async def _write(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> bool:
        """Whether the books have everything now that was added before. Never raises."""
        async with self._flushing:
            try:
                for lane in self._lanes.values():
                    await self._send(lane)
            except RedisDownError:
                return False
        return True

    async def read(self, span: str) -> Steps:
        """Of all gateways, and of this one up to now. Raises RedisDownError."""
        await self.flush()
        lane, now_s = self._lanes[span], self._now()
        first, last = lane.first(now_s), lane.step(now_s)
        if now_s - lane.seen_s >= REREAD_S:
            lane.seen, lane.seen_s, since = {}, now_s, first
        else:
            since = max(first, last - LATE_STEPS * lane.span.step_s)
        rows = await lane.book.read(_name(since), _name(last))
        lane.seen = {name: found for name, found in lane.seen.items() if _name(first) <= name < _name(since)}
        for row, figures in rows.items():
            lane.seen.setdefault(row.day, {})[row.currency] = figures
        steps = range(first, last + 1, lane.span.step_s)
        return Steps(first, lane.span.step_s, [lane.seen.get(_name(step), {}) for step in steps])

    async def _send(self, lane: _Lane) -> None:
        oldest = _name(lane.first(self._now()))
        while lane.sending is not None or lane.pending:
            if lane.sending is None:
                rows = [(row, figures) for row, figures in lane.pending.items() if row.day >= oldest]
                lane.sending, lane.pending = (next(lane.numbers), rows), {}
            if lane.sending[1]:
                await lane.book.add(*lane.sending)
            lane.sending = None
        if lane.forgotten != oldest:
            await lane.book.forget(oldest)
            lane.forgotten = oldest


def _name(step_s: int) -> str:
    """Of a step in a book: ten digits, which are in the order of time."""
    return f"{step_s:010}"
