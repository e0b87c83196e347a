"""The promises of a Book over memory and a real Redis, and the ledger of several gateways on one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal

import pytest
from redis.asyncio import Redis

from gateway.config import LedgerSettings, PriceSettings
from gateway.ledger.base import COLUMNS, Book, BookDownError, Entry, Row
from gateway.ledger.ledger import Ledger
from gateway.ledger.memory_book import MemoryBook
from gateway.ledger.prices import Prices
from gateway.ledger.redis_book import RedisBook
from gateway.redis_calls import connect
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0
ROW = Row("2026-11-22", "north", "gpt|5 % ü\n", "online", "USD")
PRICES = Prices([PriceSettings(model="*", input=Decimal("0.15"))], batch=0.5)


@pytest.fixture(params=["memory", "redis"])
async def book(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Book]:
    if request.param == "memory":
        yield MemoryBook()
        return
    redis = connect(redis_url, LIMIT_S)
    yield RedisBook(redis, timeout_s=LIMIT_S)
    await redis.aclose()


async def test_figures_add_up_by_row(book: Book) -> None:
    other = ROW._replace(tenant="south", currency="")
    await book.add("1", [(ROW, {"requests": 1, "cost_nano": 2**60}), (other, {"requests": 5})])
    await book.add("2", [(ROW, {"requests": 2, "cost_nano": -1})])
    rows = await book.read("2026-11-22", "2026-11-22")
    assert rows == {ROW: {"requests": 3, "cost_nano": 2**60 - 1}, other: {"requests": 5}}


async def test_a_number_counts_once(book: Book) -> None:
    for number in ("1", "1", "2", "1"):
        await book.add(number, [(ROW, {"requests": 1})])
    assert await book.read("0", "9") == {ROW: {"requests": 2}}


async def test_days_are_read_and_dropped_by_their_order(book: Book) -> None:
    days = [f"2026-11-{day}" for day in (19, 20, 21, 22)]
    await book.add("1", [(ROW._replace(day=day), {"requests": 1}) for day in days])
    assert [row.day for row in sorted(await book.read("2026-11-20", "2026-11-21"))] == days[1:3]
    await book.forget("2026-11-21")
    assert [row.day for row in sorted(await book.read("2026-11-01", "2026-11-30"))] == days[2:]
    await book.add("2", [(ROW._replace(day=days[0]), {"requests": 7})])
    assert (await book.read(days[0], days[0]))[ROW._replace(day=days[0])] == {"requests": 7}


async def test_every_column_is_kept(book: Book) -> None:
    figures = {column: number for number, column in enumerate(COLUMNS, start=1)}
    await book.add("1", [(ROW, figures)])
    assert await book.read(ROW.day, ROW.day) == {ROW: figures}


async def test_nothing_of_the_ledger_is_given_up_by_a_redis_that_is_full(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    await RedisBook(redis, timeout_s=LIMIT_S).add("1", [(ROW, {"requests": 1})])
    lives = {key.decode(): await redis.ttl(key) for key in await redis.keys("*")}
    await redis.aclose()
    assert lives.pop("kvasir:{ledger}.added:1") > 0
    assert lives == {"kvasir:{ledger}:2026-11-22": -1, "kvasir:{ledger}.days": -1}


async def test_what_a_newer_gateway_counts_is_left_alone(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    book = RedisBook(redis, timeout_s=LIMIT_S)
    await book.add("1", [(ROW, {"requests": 1, "of_tomorrow": 3})])
    await redis.hset("kvasir:{ledger}:2026-11-22", "a|b|c|d|e|requests", "1")  # type: ignore[misc]
    assert await book.read(ROW.day, ROW.day) == {ROW: {"requests": 1}}
    await redis.aclose()


async def test_two_gateways_add_up(redis_url: str) -> None:
    clients = [connect(redis_url, LIMIT_S) for _ in range(2)]
    ledgers = [
        Ledger(LedgerSettings(), PRICES, RedisBook(client, timeout_s=LIMIT_S), lambda: 0.0) for client in clients
    ]
    for ledger in ledgers:
        for _ in range(50):
            ledger.add(Entry("north", "m", prompt_tokens=3))
    assert await asyncio.gather(*(ledger.flush() for ledger in ledgers)) == [True, True]
    (figures,) = (await ledgers[0].read("1970-01-01", "1970-01-01")).values()
    assert figures == {"requests": 100, "prompt_tokens": 300, "cost_nano": 45_000}
    for client in clients:
        await client.aclose()


async def test_what_was_counted_while_redis_was_away_is_there_when_it_is_back(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    ledger = Ledger(LedgerSettings(), PRICES, RedisBook(redis, timeout_s=LIMIT_S), lambda: 0.0)
    own_redis.kill()
    for _ in range(3):
        ledger.add(Entry("north", "m", prompt_tokens=1))
        assert not await ledger.flush()
    with pytest.raises(BookDownError):
        await ledger.read("1970-01-01", "1970-01-01")
    own_redis.start()
    (figures,) = (await ledger.read("1970-01-01", "1970-01-01")).values()
    assert figures["prompt_tokens"] == 3
    await redis.aclose()


async def test_a_redis_that_is_full_is_one_that_is_away(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    ledger = Ledger(LedgerSettings(), PRICES, RedisBook(redis, timeout_s=LIMIT_S), lambda: 0.0)
    ledger.add(Entry("north", "m", prompt_tokens=1))
    await redis.config_set("maxmemory", 1)
    assert not await ledger.flush()
    await redis.config_set("maxmemory", 0)
    assert await ledger.flush()
    assert [row.model for row in await ledger.read("1970-01-01", "1970-01-01")] == ["m"]
    await redis.aclose()
