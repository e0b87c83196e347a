"""The log of removals, in a real Redis."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.errors import RedisDownError
from gateway.responses.listing import Chosen
from gateway.responses.redis_removals import MAX_BYTES, MAX_REMOVALS, RedisRemovals
from gateway.responses.removals import LOST, Removal
from gateway.storage.redis_calls import connect
from tests.fakes.redis_process import RedisProcess

LIMIT_S = 30.0


@pytest.fixture
def log(redis: Redis) -> RedisRemovals:
    return RedisRemovals(redis, timeout_s=LIMIT_S)


def removal(number: int = 0) -> Removal:
    return Removal(Chosen("tenant:ünï", "m", "0a", 1.5, None if number % 2 else 1e9), 1000.25 + number)


async def test_what_was_told_is_read_once_and_whole_by_everybody(log: RedisRemovals) -> None:
    first = await log.read(None)
    assert (first.removals, first.whole, first.place[1]) == ([], False, 0)
    for number in range(3):
        await log.add(removal(number))
    told = await log.read(first.place)
    assert (told.whole, told.place) == (True, (first.place[0], 3))
    assert sorted(told.removals, key=lambda one: one.at_s) == [removal(number) for number in range(3)]
    await log.add(removal(7))
    again = await log.read(told.place)
    assert (again.whole, again.removals) == (True, [removal(7)])
    assert (await log.read(again.place)).removals == []
    assert (await log.read(again.place)).whole


async def test_the_first_who_tells_begins_the_log(log: RedisRemovals) -> None:
    await log.add(removal())
    told = await log.read(LOST)
    assert (told.removals, told.whole, told.place[1]) == ([removal()], False, 1)
    assert (await log.read(told.place)).whole


async def test_the_last_ones_are_known_and_who_missed_more_is_told_so(log: RedisRemovals, redis: Redis) -> None:
    place = (await log.read(None)).place
    for number in range(MAX_REMOVALS + 1):
        await log.add(removal(number))
        if number == 0:
            later = (await log.read(place)).place
    late, current = await log.read(place), await log.read(later)
    assert (len(late.removals), late.whole) == (MAX_REMOVALS, False)
    assert (len(current.removals), current.whole) == (MAX_REMOVALS, True)
    assert await redis.llen("kvasir:{removals}.last") == MAX_REMOVALS  # type: ignore[misc]


async def test_a_redis_that_lost_its_log_is_noticed_whatever_came_after(log: RedisRemovals, redis: Redis) -> None:
    place = (await log.read(None)).place
    await redis.flushall()
    for number in range(3):
        told = await log.read(place)
        assert not told.whole
        assert told.place[1] == number
        await log.add(removal(number))


async def test_a_choice_with_endless_names_is_told_as_one_of_everything(log: RedisRemovals) -> None:
    place = (await log.read(None)).place
    await log.add(Removal(Chosen(model="m" * MAX_BYTES), 5.0))
    assert (await log.read(place)).removals == [Removal(Chosen(), 5.0)]


@pytest.mark.parametrize("written", [b"[1,2,3,4,5,6,7]", b"[1]x", b'{"at_s":1}', b'["soon"]', b"5"])
async def test_what_a_newer_gateway_tells_in_another_form_was_missed(
    written: bytes, log: RedisRemovals, redis: Redis
) -> None:
    place = (await log.read(None)).place
    await log.add(removal(0))
    await redis.lset("kvasir:{removals}.last", 0, written)  # type: ignore[arg-type, misc]
    await log.add(removal(1))
    told = await log.read(place)
    assert (told.whole, told.removals, told.place[1]) == (False, [removal(1)], 2)
    assert (await log.read(told.place)).whole


async def test_a_redis_that_is_full_is_read_all_the_same(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    log = RedisRemovals(redis, timeout_s=LIMIT_S)
    try:
        place = (await log.read(None)).place
        await redis.config_set("maxmemory", 1)
        assert (await log.read(place)).whole
        with pytest.raises(RedisDownError):
            await log.add(removal())
    finally:
        await redis.aclose()


async def test_a_redis_that_is_gone_says_so(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as process:
        redis = connect(process.url, LIMIT_S)
        log = RedisRemovals(redis, timeout_s=LIMIT_S)
        await log.add(removal())
        process.kill()
        for call in (log.add(removal()), log.read(None)):
            with pytest.raises(RedisDownError):
                await call
        await redis.aclose()
