"""GET /admin/explain/nightly: the list of now, and one of each day, which one of several gateways makes."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp.test_utils import make_mocked_request
from redis.asyncio import Redis

from gateway.admin.nightly import DAY_S, DAYS, Nightly
from gateway.admin.requests import MOST, RequestLog
from gateway.errors import RedisDownError
from gateway.ledger.base import Entry, Figures
from gateway.storage.claims import RedisClaims
from gateway.storage.redis_calls import RedisCalls
from gateway.storage.ring import Ring
from tests.fakes import tokenisers
from tests.fakes.redis_process import RedisProcess
from tests.fakes.whole import whole
from tests.gateway.test_explain import pair
from tests.gateway.test_misses import row

BOOK = " ".join(tokenisers.sentences(60, seed=5))
MIDNIGHT_S = 20_000 * DAY_S


async def _secret() -> str:
    return "s"


def _priced(entry: Entry) -> tuple[str, Figures]:
    return "USD", {"cost_nano": 10 * (entry.prompt_tokens - entry.cached_tokens) + entry.cached_tokens}


class Clock:
    def __init__(self) -> None:
        self.now_s = MIDNIGHT_S + 60.0

    def __call__(self) -> float:
        return self.now_s


def lists(redis: Redis | None, clock: Clock) -> tuple[Nightly, Ring]:
    """Of one gateway, and where its requests are."""
    calls = [None if redis is None else RedisCalls(redis, 2.0) for _ in range(3)]
    requests = Ring("requests", MOST, calls[0])
    log = RequestLog(requests, lambda _, figures: None, _priced, clock, _secret)
    claims = None if calls[1] is None else RedisClaims(calls[1], "warm")
    return Nightly(log, Ring("nightly", DAYS, calls[2]), claims, _priced, clock), requests


def rows(at_s: float) -> list[bytes]:
    """Two requests of a known cause, oldest first."""
    one, other, _, _ = pair("volatile", random.Random(at_s))
    return [orjson.dumps(row(f"{at_s}{n}", prompt) | {"at_s": at_s}) for n, prompt in (("a", one), ("b", other))]


async def shown(nightly: Nightly) -> Any:
    answer = await nightly.show(make_mocked_request("GET", "/"))
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"")


async def test_two_gateways_make_one_list_of_a_day(own_redis: RedisProcess) -> None:
    clock = Clock()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redis.from_url(own_redis.url)) for _ in range(2)]
        (one, requests), (other, _) = [lists(redis, clock) for redis in clients]
        await requests.push([*rows(MIDNIGHT_S - 5), *rows(MIDNIGHT_S + 5)])
        await asyncio.gather(one.make(), other.make())
        first, second = [await shown(gateway) for gateway in (one, other)]
        assert first == second
        (day,) = first["days"]
        (miss,) = day["tenants"]["t"]
        assert (day["day"], day["requests"], miss["cause"], miss["requests"]) == ("2024-10-03", 2, "volatile", 1)
        assert miss["example"] == [f"{MIDNIGHT_S - 5}a", f"{MIDNIGHT_S - 5}b"]
        assert float(miss["money"]["USD"]) == pytest.approx(miss["tokens"] * 9e-9)  # what reading them costs is paid
        assert (first["day"], first["requests"], first["stale"]) == ("2024-10-04", 4, False)
        assert first["tenants"]["t"][0]["requests"] == 2
        # The gateway that claimed the next day died: another makes it when the claim is over, and nobody does twice.
        clock.now_s += DAY_S
        claims = RedisClaims(RedisCalls(clients[0], 2.0), "warm")
        assert await claims.take("nightly-2024-10-04", 600.0)
        await other.make()
        assert len((await shown(other))["days"]) == 1
        await claims.drop("nightly-2024-10-04")
        await other.make()
        await claims.drop("nightly-2024-10-04")
        await one.make()
        days = (await shown(one))["days"]
        assert [one["day"] for one in days] == ["2024-10-04", "2024-10-03"]
        # Redis is away: the last known, and no list of half of the requests.
        own_redis.kill()
        clock.now_s += DAY_S
        with pytest.raises(RedisDownError):
            await one.make()
        away = await shown(one)
        assert (away["stale"], away["days"]) == (True, days)


async def test_without_redis_a_month_of_lists_is_in_memory() -> None:
    clock = Clock()
    nightly, requests = lists(None, clock)
    for _ in range(DAYS + 2):
        await requests.push(rows(clock.now_s - 3600))
        await nightly.make()
        await nightly.make()
        clock.now_s += DAY_S
    await nightly.make()  # a day without requests has no list
    days = [one["day"] for one in (await shown(nightly))["days"]]
    assert len(days) == len({*days}) == DAYS
    assert days[0] == "2024-11-04"


async def test_misses_of_requests_that_were_sent_are_shown() -> None:
    async with aiohttp.ClientSession() as session, whole() as gateway:
        for day in (23, 24):
            system = {"role": "system", "content": f"It is 2026-11-{day}. {BOOK}"}
            await gateway.ask(system, {"role": "user", "content": "hello"})
        async with session.get(gateway.url + "/admin/explain/nightly") as answer:
            assert answer.status == 200
            told = await answer.json()
    (miss,) = told["tenants"]["anonymous"]
    assert (miss["cause"], miss["requests"], told["requests"], told["days"]) == ("volatile", 1, 2, [])
    assert miss["tokens"] > 30
    assert (miss["money"], "last message" in miss["advice"]) == (None, True)
    assert BOOK[:20] not in str(told)
