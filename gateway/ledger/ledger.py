"""Takes entries as requests end, and writes what they come to into a book every few seconds.

While the book is down rows add up here; they are as few as tenants and models are, however long that lasts. What was
written and not confirmed is written again under the same number, so that nothing counts twice. Knows no request:
entries come from admin/accounting.py. Its neighbours are prices.py and the books.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Final

from gateway import tasks
from gateway.config import LedgerSettings
from gateway.errors import RedisDownError
from gateway.ledger.base import OTHER, Entry, Figures, Row, add_up
from gateway.ledger.books import Book, numbers
from gateway.ledger.prices import Prices, count
from gateway.types import owners_of

log = logging.getLogger(__name__)

DAY_S: Final = 86_400
ROWS_AT_ONCE: Final = 500
"""That are written by one command."""


class Ledger:
    """`add` never waits and never raises."""

    def __init__(
        self,
        settings: LedgerSettings,
        prices: Prices,
        book: Book,
        now: Callable[[], float],
        taken: Callable[[Sequence[tuple[Row, Figures]]], None] = lambda _: None,
        spent: Callable[[Sequence[str], Callable[[], tuple[str, Figures]]], None] = lambda _, __: None,
    ) -> None:
        """`now` is in seconds since 1970. `taken` gets the rows that are written, once; `spent` the owners of each
        entry, and a function for its currency and what it comes to."""
        self._spent = spent
        self._taken = taken
        self._settings = settings
        self._prices = prices
        self._book, self._numbers = book, numbers()
        self._now = now
        self._day = ""
        self._known: set[Row] = set()  # rows of today that have their own model
        self._rows: dict[Row, Figures] = {}
        self._sending: deque[tuple[str, Sequence[tuple[Row, Figures]]]] = deque()  # by the number of what is sent
        self._totals: dict[Row, Figures] = {}  # since the start, under no day
        self._flushing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._forgotten = ""  # the day on which old ones were dropped last
        self.dropped = 0
        """Requests that no row was left for."""
        self.capped = 0
        """Figures of rows that the book does not have in full, as they were too large."""

    @property
    def pending(self) -> int:
        """Rows that the book does not have yet."""
        return len(self._rows) + sum(len(rows) for _, rows in self._sending)

    @property
    def totals(self) -> Mapping[Row, Figures]:
        """Rows of this gateway since its start, without a day. Computed at each access."""
        totals = {row: dict(counted) for row, counted in self._totals.items()}
        for row, counted in self._rows.items():
            self._total(totals, row, counted)
        return totals

    def add(self, entry: Entry) -> None:
        """Counts it, today."""
        if (today := self._today()) != self._day:
            self._day = today
            self._known.clear()
        self._spent(owners_of(entry.tenant, entry.key), lambda: self.priced(entry))
        tariff = self._prices.of(entry.model, entry.by_upstream)
        currency = tariff.currency if tariff else ""
        row = self._bounded(Row(today, entry.tenant, entry.model, entry.lane, currency, entry.key))
        if row not in self._rows and self.pending >= 2 * self._settings.max_rows:
            self.dropped += 1
            return
        count(entry, tariff, self._rows.setdefault(row, {}))

    def priced(self, entry: Entry) -> tuple[str, Figures]:
        """What an entry comes to by itself, and its currency; none where its model has no price."""
        tariff, figures = self._prices.of(entry.model, entry.by_upstream), Figures()
        count(entry, tariff, figures)
        return tariff.currency if tariff else "", figures

    def start(self) -> None:
        """Begins to write every `flush_s`."""
        self._writer = tasks.spawn(self._write(), name="ledger")

    async def close(self) -> None:
        """Writes what is left, if the book takes it."""
        await tasks.cancel(self._writer)
        await self.flush()

    async def flush(self) -> bool:
        """Whether the book has everything now that was added before. Never raises."""
        async with self._flushing:
            try:
                await self._send()  # what was not confirmed goes first, and nothing is cut until then
                self._cut()
                await self._send()
                await self._forget()
            except RedisDownError:
                return False
        return True

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        """The rows of these days of all gateways, and of this one up to now. Raises RedisDownError."""
        await self.flush()
        return await self._book.read(first, last)

    async def _write(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(self._settings.flush_s)
            await self.flush()

    async def _send(self) -> None:
        while self._sending:
            if more := await self._book.add(*self._sending[0]):
                if not self.capped:
                    log.warning("figures of the ledger are too large for 64 bits, or replaced what was no number")
                self.capped += more
            self._sending.popleft()

    def _cut(self) -> None:
        """Makes batches of the rows, which keep their numbers from now on."""
        rows = list(self._rows.items())
        self._rows = {}
        self._taken(rows)
        for row, counted in rows:
            self._total(self._totals, row, counted)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            self._sending.append((next(self._numbers), rows[start : start + ROWS_AT_ONCE]))

    async def _forget(self) -> None:
        """Once a day."""
        today = self._today()
        if self._forgotten != today:
            retained = timedelta(days=self._settings.retention_days - 1)
            await self._book.forget((date.fromisoformat(today) - retained).isoformat())
            self._forgotten = today

    def _today(self) -> str:
        return _day(int(self._now() // DAY_S))

    def _bounded(self, row: Row) -> Row:
        """The row itself, or that of all further models and keys."""
        if row not in self._known:
            if len(self._known) >= self._settings.max_rows:
                return row._replace(model=OTHER, key="")
            self._known.add(row)
        return row

    def _total(self, totals: dict[Row, Figures], row: Row, counted: Figures) -> None:
        row = row._replace(day="", key="")
        if row not in totals and len(totals) >= self._settings.max_rows:
            row = row._replace(model=OTHER)
        add_up(totals.setdefault(row, {}), counted)


@lru_cache(maxsize=2)
def _day(number: int) -> str:
    """2026-11-22, in UTC."""
    return datetime.fromtimestamp(number * DAY_S, UTC).date().isoformat()
