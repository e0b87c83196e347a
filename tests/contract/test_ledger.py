"""The promises of a Book over memory and a real Redis, and the ledger of several gateways on one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from decimal import Decimal

import pytest
from redis.asyncio import Redis

from gateway.config import LedgerSettings, PriceSettings
from gateway.errors import RedisDownError
from gateway.ledger.base import COLUMNS, Entry, Row
from gateway.ledger.books import Book, MemoryBook, RedisBook
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import Prices
from gateway.storage.redis_calls import RedisCalls, close, connect
from tests.fakes.redis_fleet import keys_of
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0
LARGEST = 2**63 - 1
ROW = Row("2026-11-22", "north", "gpt|5 % ü\n", "online", "USD")
PRICES = Prices([PriceSettings(model="*", input=Decimal("0.15"))], batch=0.5)


@pytest.fixture(params=["memory", "redis"])
async def book(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Book]:
    if request.param == "memory":
        yield MemoryBook()
        return
    redis = connect(redis_url, LIMIT_S)
    yield RedisBook(RedisCalls(redis, LIMIT_S))
    await close(redis)


async def test_figures_add_up_by_row(book: Book) -> None:
    other = ROW._replace(tenant="south", currency="")
    await book.add("1", [(ROW, {"requests": 1, "cost_nano": 2**60}), (other, {"requests": 5})])
    await book.add("2", [(ROW, {"requests": 2, "cost_nano": -1})])
    rows = await book.read("2026-11-22", "2026-11-22")
    assert rows == {ROW: {"requests": 3, "cost_nano": 2**60 - 1}, other: {"requests": 5}}


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


DAY = "kvasir:{ledger}:2026-11-22"
NEXT = "kvasir:{ledger}:2026-11-23"
DAYS = "kvasir:{ledger}.days"
BREAKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no mark may be set": (("ACL", "SETUSER", "default", "-set"), ("ACL", "SETUSER", "default", "+set")),
    "no day may be noted": (("ACL", "SETUSER", "default", "-sadd"), ("ACL", "SETUSER", "default", "+sadd")),
    "no figure may be added": (("ACL", "SETUSER", "default", "-hincrby"), ("ACL", "SETUSER", "default", "+hincrby")),
    "the days are no set": (("RENAME", DAYS, "kept"), ("RENAME", "kept", DAYS)),
    "the first day is no hash": (("RENAME", DAY, "kept"), ("RENAME", "kept", DAY)),
    "the last day is no hash": (("RENAME", NEXT, "kept"), ("RENAME", "kept", NEXT)),
    "Redis is full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
}


async def test_whichever_write_fails_a_batch_is_added_as_a_whole_or_not_at_all(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    book, tomorrow = RedisBook(RedisCalls(redis, LIMIT_S)), ROW._replace(day="2026-11-23")
    rows = [(ROW, {"requests": 1, "prompt_tokens": 2}), (tomorrow, {"requests": 1})]
    await book.add("0", rows)
    for count, (name, (broken, repaired)) in enumerate(BREAKS.items(), start=1):
        await redis.execute_command(*broken)
        if broken[0] == "RENAME":
            await redis.execute_command("SET", broken[1], "something else")
        with pytest.raises(RedisDownError):
            await book.add(name, rows)
        await redis.execute_command(*repaired)
        assert await book.read("0", "9") == {
            ROW: {"requests": count, "prompt_tokens": 2 * count},
            tomorrow: {"requests": count},
        }, name
        await book.add(name, rows)
        await book.add(name, rows)
        assert (await book.read("0", "9"))[tomorrow] == {"requests": count + 1}, name
    await close(redis)


async def test_a_figure_that_overflows_or_is_no_number_keeps_no_other_from_being_written(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis: Redis = connect(redis_url, LIMIT_S)
    book, other = RedisBook(RedisCalls(redis, LIMIT_S)), ROW._replace(tenant="south")
    await book.add("1", [(ROW, {"requests": 1, "prompt_tokens": LARGEST - 1, "cost_nano": 1 - LARGEST})])
    (field,) = [one for one in await redis.hkeys(DAY) if one.endswith(b"|requests")]  # type: ignore[misc]
    await redis.hset(DAY, field, "junk")  # type: ignore[misc]
    rows = [(ROW, {"requests": 2, "prompt_tokens": 2, "cost_nano": -5}), (other, {"requests": 1})]
    assert [await book.add("2", rows), await book.add("2", rows)] == [3, 0]
    expected = {"requests": 2, "prompt_tokens": LARGEST, "cost_nano": -LARGEST}
    assert await book.read(ROW.day, ROW.day) == {ROW: expected, other: {"requests": 1}}
    ledger = Ledger(LedgerSettings(), PRICES, book, lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ledger.add(Entry("north", "m", prompt_tokens=2**62))
            assert await ledger.flush()
    assert ledger.capped > 1
    assert len(caplog.records) == 1
    await close(redis)


async def test_nothing_of_the_ledger_is_given_up_by_a_redis_that_is_full(redis_url: str) -> None:
    redis: Redis = connect(redis_url, LIMIT_S)
    await RedisBook(RedisCalls(redis, LIMIT_S)).add("1", [(ROW, {"requests": 1})])
    lives = {key.decode(): await redis.ttl(key) for key in await keys_of(redis)}
    await close(redis)
    assert lives.pop("kvasir:{ledger}.added:1") > 0
    assert lives == {"kvasir:{ledger}:2026-11-22": -1, "kvasir:{ledger}.days": -1}


async def test_a_writer_has_one_key_and_what_comes_late_is_not_added_again(redis_url: str) -> None:
    """A write that was given up may still be on its way when the next one is there."""
    redis: Redis = connect(redis_url, LIMIT_S)
    book = RedisBook(RedisCalls(redis, LIMIT_S))
    for number in ("w.8", "w.9", "w.10", "w.9", "w.8", "w.10", "other.1"):
        await book.add(number, [(ROW, {"requests": 1})])
    assert await book.read(ROW.day, ROW.day) == {ROW: {"requests": 4}}
    assert len(await keys_of(redis, "kvasir:{ledger}.added:*")) == 2
    ledger = Ledger(LedgerSettings(), PRICES, book, lambda: 0.0)
    for _ in range(3):
        ledger.add(Entry("north", "m", prompt_tokens=1))
        assert await ledger.flush()
    assert len(await keys_of(redis, "kvasir:{ledger}.added:*")) == 3
    await close(redis)


async def test_what_a_newer_gateway_counts_is_left_alone(redis_url: str) -> None:
    redis: Redis = connect(redis_url, LIMIT_S)
    book = RedisBook(RedisCalls(redis, LIMIT_S))
    await book.add("1", [(ROW, {"requests": 1, "of_tomorrow": 3})])
    await redis.hset("kvasir:{ledger}:2026-11-22", "a|b|c|d|e|f|requests", "1")  # type: ignore[misc]
    assert await book.read(ROW.day, ROW.day) == {ROW: {"requests": 1}}
    await close(redis)


async def test_two_gateways_add_up(redis_url: str) -> None:
    clients = [connect(redis_url, LIMIT_S) for _ in range(2)]
    ledgers = [
        Ledger(LedgerSettings(), PRICES, RedisBook(RedisCalls(client, LIMIT_S)), lambda: 0.0) for client in clients
    ]
    for ledger in ledgers:
        for _ in range(50):
            ledger.add(Entry("north", "m", prompt_tokens=3))
    assert await asyncio.gather(*(ledger.flush() for ledger in ledgers)) == [True, True]
    (figures,) = (await ledgers[0].read("1970-01-01", "1970-01-01")).values()
    assert figures == {"requests": 100, "prompt_tokens": 300, "cost_nano": 45_000}
    for client in clients:
        await close(client)


async def test_what_was_counted_while_redis_was_away_is_there_when_it_is_back(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    ledger = Ledger(LedgerSettings(), PRICES, RedisBook(RedisCalls(redis, LIMIT_S)), lambda: 0.0)
    own_redis.kill()
    for _ in range(3):
        ledger.add(Entry("north", "m", prompt_tokens=1))
        assert not await ledger.flush()
    with pytest.raises(RedisDownError):
        await ledger.read("1970-01-01", "1970-01-01")
    own_redis.start()
    (figures,) = (await ledger.read("1970-01-01", "1970-01-01")).values()
    assert figures["prompt_tokens"] == 3
    await close(redis)


async def test_a_redis_that_is_full_is_one_that_is_away(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    ledger = Ledger(LedgerSettings(), PRICES, RedisBook(RedisCalls(redis, LIMIT_S)), lambda: 0.0)
    ledger.add(Entry("north", "m", prompt_tokens=1))
    await redis.config_set("maxmemory", 1)
    assert not await ledger.flush()
    await redis.config_set("maxmemory", 0)
    assert await ledger.flush()
    assert [row.model for row in await ledger.read("1970-01-01", "1970-01-01")] == ["m"]
    await close(redis)
