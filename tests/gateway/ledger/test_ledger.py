"""Adding up in memory, days, limits, and a book that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal

import pytest

from gateway.config import LedgerSettings, PriceSettings
from gateway.errors import RedisDownError
from gateway.ledger.base import Entry, Figures, Row
from gateway.ledger.books import MemoryBook
from gateway.ledger.ledger import ROWS_AT_ONCE, Ledger
from gateway.ledger.prices import Prices
from tests.fakes.tuned import tuned

DAY_S = 86_400.0
NOON_S = 20_000 * DAY_S + DAY_S / 2
PRICES = Prices([PriceSettings(model="paid", input=Decimal(1))], batch=0.5)


class Flaky(MemoryBook):
    """Takes what it is given, and then may fail to say so."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = ""  # "before" it was added, or "after"
        self.numbers: list[str] = []
        self.has = set[str]()
        self.added = asyncio.Event()

    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> int:
        self.numbers.append(number)
        if self.fails == "before":
            raise RedisDownError("away")
        if number not in self.has:
            self.has.add(number)
            await super().add(number, rows)
        self.added.set()
        if self.fails == "after":
            raise RedisDownError("away")
        return 0


def entry(model: str = "paid", tokens: int = 1, tenant: str = "a") -> Entry:
    return Entry(tenant, model, prompt_tokens=tokens)


def made(book: MemoryBook, clock: list[float] | None = None, **settings: float) -> Ledger:
    clock = clock or [NOON_S]
    return Ledger(tuned(LedgerSettings, **settings), PRICES, book, lambda: clock[0])


async def prompt_tokens(ledger: Ledger) -> dict[tuple[str, str], int]:
    rows = await ledger.read("0000-00-00", "9999-99-99")
    return {(row.day, row.model): figures.get("prompt_tokens", 0) for row, figures in rows.items()}


async def test_entries_of_one_row_add_up() -> None:
    ledger = made(MemoryBook())
    for tokens in (1, 20, 300):
        ledger.add(entry(tokens=tokens))
    ledger.add(entry("free", 4000))
    rows = await ledger.read("2024-10-04", "2024-10-04")
    assert rows == {
        Row("2024-10-04", "a", "paid", "online", "USD"): {"requests": 3, "prompt_tokens": 321, "cost_nano": 321_000},
        Row("2024-10-04", "a", "free", "online", ""): {"requests": 1, "prompt_tokens": 4000, "unpriced_requests": 1},
    }
    assert {row._replace(day="2024-10-04"): figures for row, figures in ledger.totals.items()} == rows
    assert ledger.pending == 0


async def test_a_day_ends_at_midnight_utc_and_old_ones_are_dropped() -> None:
    clock = [20_001 * DAY_S - 0.001]
    ledger = made(MemoryBook(), clock, retention_days=2)
    ledger.add(entry())
    clock[0] += 0.001
    ledger.add(entry(tokens=2))
    assert await prompt_tokens(ledger) == {("2024-10-04", "paid"): 1, ("2024-10-05", "paid"): 2}
    clock[0] += DAY_S
    await ledger.flush()
    assert await prompt_tokens(ledger) == {("2024-10-05", "paid"): 2}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_was_not_confirmed_is_written_again_and_counts_once(when: str) -> None:
    book = Flaky()
    ledger = made(book)
    ledger.add(entry())
    book.fails = when
    assert not await ledger.flush()
    ledger.add(entry(tokens=20))
    assert not await ledger.flush()
    assert ledger.pending == 2
    book.fails = ""
    assert await prompt_tokens(ledger) == {("2024-10-04", "paid"): 21}
    assert book.numbers[0] == book.numbers[1] == book.numbers[2] != book.numbers[3]


async def test_a_book_that_is_away_for_long_costs_no_more_memory() -> None:
    book = Flaky()
    book.fails = "before"
    ledger = made(book)
    for _ in range(100):
        ledger.add(entry())
        await ledger.flush()
    assert ledger.pending == 2
    book.fails = ""
    assert await prompt_tokens(ledger) == {("2024-10-04", "paid"): 100}
    assert ledger.dropped == 0


async def test_models_beyond_the_limit_are_one_row_for_each_tenant() -> None:
    clock = [NOON_S]
    ledger = made(MemoryBook(), clock, max_rows=2)
    for number in range(10):
        ledger.add(entry(f"model-{number}"))
    ledger.add(entry("model-1"))
    expected = {("2024-10-04", "model-0"): 1, ("2024-10-04", "model-1"): 2, ("2024-10-04", "other"): 8}
    assert await prompt_tokens(ledger) == expected
    assert {row.model for row in ledger.totals} == {"model-0", "model-1", "other"}
    clock[0] += DAY_S
    ledger.add(entry("model-9"))
    assert (await prompt_tokens(ledger))["2024-10-05", "model-9"] == 1


async def test_past_every_limit_requests_are_dropped_and_counted() -> None:
    book, clock = Flaky(), [NOON_S]
    book.fails = "before"
    ledger = made(book, clock, max_rows=2)
    for _ in range(5):
        for model in ("one", "two", "three"):
            ledger.add(entry(model))
        await ledger.flush()
        clock[0] += DAY_S
    assert ledger.pending == 4
    assert ledger.dropped == 15 - 4
    book.fails = ""
    assert sum((await prompt_tokens(ledger)).values()) == 4


async def test_many_rows_are_written_in_several_parts() -> None:
    book = Flaky()
    ledger = made(book)
    for number in range(ROWS_AT_ONCE + 1):
        ledger.add(entry(f"model-{number}"))
    assert await ledger.flush()
    assert len(set(book.numbers)) == len(book.numbers) == 2
    assert len(await prompt_tokens(ledger)) == ROWS_AT_ONCE + 1


async def test_it_is_written_every_few_seconds_and_at_the_end() -> None:
    book = Flaky()
    ledger = made(book, flush_s=0.001)
    ledger.add(entry())
    ledger.start()
    async with asyncio.timeout(30):
        await book.added.wait()
    ledger.add(entry(tokens=20))
    await ledger.close()
    rows = await book.read("2024-10-04", "2024-10-04")
    assert [figures["prompt_tokens"] for figures in rows.values()] == [21]
