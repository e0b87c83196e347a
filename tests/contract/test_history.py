"""The promises of the history and of a ring over memory and a real Redis, of several gateways and through outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.admin.outcomes import COLUMNS as LATELY
from gateway.errors import RedisDownError
from gateway.ledger.base import COLUMNS, Figures, Row, add_up
from gateway.ledger.books import Book, MemoryBook, RedisBook
from gateway.ledger.history import REREAD_S, SPANS, History
from gateway.storage.redis_calls import RedisCalls, close, connect
from gateway.storage.ring import Ring
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0
NOON_S = 1_764_000_000.0
Made = Callable[[Callable[[], float]], History]


@pytest.fixture(params=["memory", "redis"])
async def made(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Made]:
    """Histories that share their books."""
    if request.param == "memory":
        books: dict[str, Book] = {span: MemoryBook() for span in SPANS}
        yield lambda now: History(books, now)
        return
    redis = connect(redis_url, LIMIT_S)
    yield lambda now: History(redis_books(RedisCalls(redis, LIMIT_S)), now)
    await close(redis)


def redis_books(calls: RedisCalls) -> dict[str, Book]:
    return {span: RedisBook(calls, f"history.{span}", {*COLUMNS, *LATELY}) for span in SPANS}


async def total(history: History, span: str) -> Figures:
    found: Figures = {}
    for by_currency in (await history.read(span)).figures:
        for figures in by_currency.values():
            add_up(found, figures)
    return found


async def test_gateways_add_up_and_a_new_one_finds_what_they_wrote(made: Made) -> None:
    clock = [NOON_S]
    one, other = made(lambda: clock[0]), made(lambda: clock[0])
    one.add("USD", {"requests": 1, "cost_nano": 5})
    other.add("USD", {"requests": 2})
    other.add("", {"errors": 1, "first_token_7": 3})
    assert await other.flush()
    for history in (one, other, made(lambda: clock[0])):
        for span in SPANS:
            assert await total(history, span) == {"requests": 3, "cost_nano": 5, "errors": 1, "first_token_7": 3}


async def test_a_figure_is_of_its_step_until_its_span_is_over(made: Made) -> None:
    clock = [NOON_S]
    history = made(lambda: clock[0])
    history.add("", {"requests": 1})
    clock[0] += 60
    history.add("", {"requests": 2})
    steps = await history.read("hour")
    assert [one.get("", {}).get("requests") for one in steps.figures][-2:] == [1, 2]
    assert (steps.first_s, len(steps.figures)) == (NOON_S + 60 - 59 * 60, 60)
    clock[0] += 59 * 60
    assert await total(history, "hour") == {"requests": 2}
    assert await total(history, "day") == {"requests": 3}
    clock[0] += 31 * 86_400
    assert not any([await total(history, span) for span in SPANS])


async def test_a_step_that_another_gateway_writes_late_is_read_in_the_end(made: Made) -> None:
    clock = [NOON_S]
    one, other = made(lambda: clock[0]), made(lambda: clock[0])
    other.add("", {"requests": 5})
    clock[0] += 600
    assert await total(one, "hour") == {}
    await other.flush()
    clock[0] += REREAD_S
    assert await total(one, "hour") == {"requests": 5}


async def test_books_do_not_keep_more_than_their_spans(redis_url: str) -> None:
    clock, redis = [NOON_S], connect(redis_url, LIMIT_S)
    history = History(redis_books(RedisCalls(redis, LIMIT_S)), lambda: clock[0])
    for _ in range(200):
        history.add("USD", {"requests": 1})
        await history.flush()
        clock[0] += 60
    await history.flush()
    keys = [key async for key in redis.scan_iter("kvasir:{history.hour}:*")]
    assert len(keys) <= 61
    await close(redis)


class Unsure(MemoryBook):
    """Adds, and says that it could not: as a Redis whose answer was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = set[str]()
        self.unsure = 1

    async def add(self, number: str, rows: list[tuple[Row, Figures]]) -> int:  # type: ignore[override]
        if number not in self.numbers:
            self.numbers.add(number)
            await super().add(number, rows)
        if self.unsure:
            self.unsure -= 1
            raise RedisDownError("the answer was lost", asked=True)
        return 0


async def test_what_was_written_and_not_confirmed_counts_once() -> None:
    history = History({span: Unsure() for span in SPANS}, lambda: NOON_S)
    history.add("", {"requests": 1})
    while not await history.flush():
        history.add("", {"requests": 10})
    assert {(await total(history, span))["requests"] for span in SPANS} == {31}


async def test_a_ring_has_the_latest_of_all_gateways(redis_url: str) -> None:
    redis = connect(redis_url, LIMIT_S)
    one, other = (Ring("latest", 5, RedisCalls(redis, LIMIT_S)) for _ in range(2))
    await one.push([b"1", b"2"])
    await other.push([b"3"])
    assert (await one.read()).entries == (await other.read()).entries == [b"3", b"2", b"1"]
    await one.push([str(number).encode() for number in range(4, 1000)])
    assert (await other.read()).entries == [b"999", b"998", b"997", b"996", b"995"]
    assert (await other.read(2)).entries == [b"999", b"998"]
    assert await redis.llen("kvasir:{latest}.ring") == 5
    await close(redis)


async def test_a_ring_shows_what_it_knew_while_redis_is_away_and_writes_it_later(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    one, other = (Ring("latest", 5, RedisCalls(redis, LIMIT_S)) for _ in range(2))
    await other.push([b"theirs"])
    assert not (await one.read()).stale
    own_redis.kill()
    await one.push([b"mine"])
    found = await one.read()
    assert (found.stale, set(found.entries)) == (True, {b"mine", b"theirs"})
    own_redis.start()
    await one.push([b"more"])
    assert (await other.read()).entries[:2] == [b"more", b"mine"]
    await close(redis)


async def test_readers_that_come_together_after_an_outage_lose_nothing(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    ring = Ring("latest", 2000, RedisCalls(redis, LIMIT_S))
    own_redis.kill()
    for number in range(900):
        await ring.push([b"%d" % number])
    own_redis.start()
    await asyncio.gather(ring.push([b"900"]), *(ring.read() for _ in range(20)))
    wanted = [b"%d" % number for number in reversed(range(901))]
    assert (await ring.read()).entries == wanted
    assert await redis.lrange("kvasir:{latest}.ring", 0, -1) == wanted
    await close(redis)


async def test_a_ring_without_redis_keeps_its_own() -> None:
    ring = Ring("latest", 2, None)
    await ring.push([b"1", b"2", b"3"])
    assert await ring.read() == ([b"3", b"2"], False)
