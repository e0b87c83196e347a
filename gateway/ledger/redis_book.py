"""Rows in Redis, in which all gateways add up. One hash for each day, without a time to live: a Redis that is full
gives up what has one. Keys are in one slot of a cluster.

    kvasir:{ledger}:2026-11-22    hash: tenant|model|lane|currency|column, each quoted as in a URL -> a whole number
    kvasir:{ledger}.days          set: the days that there are
    kvasir:{ledger}.added:NUMBER  what was added, for a day
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

from redis.asyncio import Redis

from gateway.ledger.base import COLUMNS, Figures, Row, capped
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip, script

REMEMBERED_S: Final = 86_400
"""Seconds for which a number is known to have been added: whoever tries again does so within them."""

READ_AT_ONCE: Final = 2000
"""Fields of a day that are read in one command, so that others have their turn."""

_STORE: Final = "rows of the ledger"
_DAY: Final = "kvasir:{ledger}:"
_DAYS: Final = "kvasir:{ledger}.days"
_ADDED: Final = "kvasir:{ledger}.added:"


class RedisBook:
    """See Book in base.py."""

    def __init__(self, redis: Redis, *, timeout_s: float, breaker: RedisBreaker | None = None) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every command."""
        self._redis = redis
        self._calls = RedisCalls(timeout_s, breaker)
        self._add = redis.register_script(script(__package__, "add.lua"))

    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> int:
        days = sorted({row.day for row, _ in rows})
        places = {day: place for place, day in enumerate(days, start=3)}
        arguments: list[str | int] = [REMEMBERED_S]
        too_large = 0
        for row, figures in rows:
            head = "|".join(quote(part, safe="") for part in row[1:])
            for column, value in figures.items():
                arguments += [places[row.day], f"{head}|{column}", capped(value)]
                too_large += value != capped(value)
        keys = [_ADDED + number, _DAYS, *(_DAY + day for day in days)]
        return too_large + int(await self._calls.ask(self._add(keys=keys, args=arguments)))

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        rows: dict[Row, Figures] = {}
        for day in await self._days():
            if first <= day <= last:
                await self._read(day, rows)
        return rows

    async def forget(self, before: str) -> None:
        for day in await self._days():
            if day < before:
                await self._calls.ask(self._redis.unlink(_DAY + day))
                await self._calls.ask(self._redis.srem(_DAYS, day))

    async def _days(self) -> list[str]:
        found: Any = await self._calls.ask_or_skip(_STORE, self._redis.smembers(_DAYS), set())
        days = (read_or_skip(_STORE, partial(_day, day)) for day in found)
        return sorted(day for day in days if day is not None)

    async def _read(self, day: str, rows: dict[Row, Figures]) -> None:
        cursor: Any = None
        while cursor != 0:
            scan: Awaitable[Any] = self._redis.hscan(_DAY + day, cursor or 0, count=READ_AT_ONCE)
            cursor, fields = await self._calls.ask_or_skip(_STORE, scan, (0, {}))
            for item in fields.items():
                read = read_or_skip(_STORE, partial(_figure, day, *item))
                if read is not None and read[1] in COLUMNS:  # a newer gateway may count more
                    rows.setdefault(read[0], {})[read[1]] = read[2]


def _day(written: bytes) -> str:
    return date.fromisoformat(written.decode()).isoformat()


def _figure(day: str, field: bytes, value: bytes) -> tuple[Row, str, int]:
    *parts, column = map(unquote, field.decode().split("|"))
    return Row(day, *parts), column, capped(int(value))
