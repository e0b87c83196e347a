"""Where rows of the ledger and of the history are: in Redis, in which all gateways add up, or in the memory of one. In
Redis a day, or a step of the history, is one hash without a time to live: a Redis that is full evicts what has one.
Keys of a book are in one slot of a cluster.

    kvasir:{ledger}:2026-11-22    hash: tenant|model|lane|currency|column, each quoted as in a URL -> a whole number; a
                                  key, if there is one, stands before the column
    kvasir:{ledger}.days          set: the days that there are
    kvasir:{ledger}.added:WRITER  the latest number that a writer added, for a day
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Container, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import count
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

from gateway.ledger.base import COLUMNS, Figures, Row, add_up
from gateway.storage.redis_calls import RedisCalls, read_or_skip

REMEMBERED_S: Final = 86_400
"""Seconds for which the latest number of a writer is known: a retry comes within them."""

READ_AT_ONCE: Final = 2000
"""Fields of a day that are read in one command, so that others have their turn."""

_STORE: Final = "rows of the ledger"
_STEP_DIGITS: Final = 10


def numbers() -> Iterator[str]:
    """Those of a new writer, in their order; see Book.add."""
    writer = secrets.token_hex(8)
    return (f"{writer}.{at}" for at in count(1))


class Book(Protocol):
    """Rows by day. Every method raises RedisDownError, and has then changed nothing, or all that it was to change."""

    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> int:
        """Adds to what is there. `number` is WRITER.COUNT: a writer counts up, and adds under one number until that is
        confirmed. What was added under this number or a later one of the writer is not added again, however late it
        comes. Returns how many figures were too large for 64 bits, or replaced what was no number."""
        ...

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        """The rows of these days, both among them."""
        ...

    async def forget(self, before: str) -> None:
        """Drops all days before this one."""
        ...


class MemoryBook:
    """See Book. Of a gateway without a Redis: its rows end with it. Never down, so that no number comes again."""

    def __init__(self) -> None:
        self._rows: dict[Row, Figures] = {}

    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> int:
        for row, figures in rows:
            add_up(self._rows.setdefault(row, {}), figures)
        return 0

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        return {row: dict(figures) for row, figures in self._rows.items() if first <= row.day <= last}

    async def forget(self, before: str) -> None:
        for row in [row for row in self._rows if row.day < before]:
            del self._rows[row]


class RedisBook:
    """See Book."""

    def __init__(self, calls: RedisCalls, name: str = "ledger", columns: Container[str] = COLUMNS) -> None:
        """`name` is that of the keys. A newer gateway may count more than `columns`."""
        self._redis = calls.redis
        self._calls = calls
        self._columns = columns
        self._day, self._names, self._added = (f"kvasir:{{{name}}}{end}" for end in (":", ".days", ".added:"))
        self._add = calls.script(__package__, "add.lua")

    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> int:
        days = sorted({row.day for row, _ in rows})
        places = {day: place for place, day in enumerate(days, start=3)}
        writer, _, at = number.partition(".")
        arguments: list[str | int] = [REMEMBERED_S, at or 1]
        for row, figures in rows:
            head = "|".join(quote(part, safe="") for part in (row[1:] if row.key else row[1:-1]))
            for column, value in figures.items():
                arguments += [places[row.day], f"{head}|{column}", value]
        keys = [self._added + writer, self._names, *(self._day + day for day in days)]
        return int(await self._calls.ask(self._add(keys=keys, args=arguments)))

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        rows: dict[Row, Figures] = {}
        for day in await self._days():
            if first <= day <= last:
                await self._read(day, rows)
        return rows

    async def forget(self, before: str) -> None:
        for day in await self._days():
            if day < before:
                await self._calls.ask(self._redis.unlink(self._day + day))
                await self._calls.ask(self._redis.srem(self._names, day))

    async def _days(self) -> list[str]:
        found: Any = await self._calls.ask_or_skip(_STORE, self._redis.smembers(self._names), set())
        days = (read_or_skip(_STORE, partial(_day, day)) for day in found)
        return sorted(day for day in days if day is not None)

    async def _read(self, day: str, rows: dict[Row, Figures]) -> None:
        cursor: Any = None
        while cursor != 0:
            scan: Awaitable[Any] = self._redis.hscan(self._day + day, cursor or 0, count=READ_AT_ONCE)
            cursor, fields = await self._calls.ask_or_skip(_STORE, scan, (0, {}))
            for item in fields.items():
                read = read_or_skip(_STORE, partial(_figure, day, *item))
                if read is not None and read[1] in self._columns:
                    rows.setdefault(read[0], {})[read[1]] = read[2]


def _day(written: bytes) -> str:
    text = written.decode()
    if len(text) == _STEP_DIGITS and text.isascii() and text.isdigit():
        return text
    return date.fromisoformat(text).isoformat()


def _figure(day: str, field: bytes, value: bytes) -> tuple[Row, str, int]:
    *parts, column = map(unquote, field.decode().split("|"))
    return Row(day, *parts), column, int(value)
