"""Rows in this process, for a gateway without a Redis: they end with it, and other gateways do not have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.ledger.base import Figures, Row, add_up, capped

NUMBERS: Final = 1000
"""Of what was added, that are remembered."""


class MemoryBook:
    """See Book in base.py. Never down."""

    def __init__(self) -> None:
        self._rows: dict[Row, Figures] = {}
        self._numbers: OrderedDict[str, None] = OrderedDict()

    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> int:
        if number in self._numbers:
            return 0
        added: dict[Row, Figures] = {}
        for row, figures in rows:
            add_up(added.setdefault(row, dict(self._rows.get(row, {}))), figures)
        kept = {row: {column: capped(value) for column, value in figures.items()} for row, figures in added.items()}
        self._rows.update(kept)  # all rows, and only then the number
        self._numbers[number] = None
        if len(self._numbers) > NUMBERS:
            self._numbers.popitem(last=False)
        return sum(value != added[row][column] for row, figures in kept.items() for column, value in figures.items())

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        return {row: dict(figures) for row, figures in self._rows.items() if first <= row.day <= last}

    async def forget(self, before: str) -> None:
        for row in [row for row in self._rows if row.day < before]:
            del self._rows[row]
