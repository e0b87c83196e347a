"""What the online lane leaves of an upstream for the batch lane."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstreams.batch_slots import LONGEST_S, BatchSlots
from tests.fakes.clock import Clock
from tests.fakes.waiting import until

LIMIT_S = 30.0


async def waiting(places: BatchSlots, count: int = 1) -> list[asyncio.Task[bool]]:
    """So many who wait for a slot, in their order."""
    tasks = [asyncio.ensure_future(places.take(LIMIT_S)) for _ in range(count)]
    await until(lambda: places.waiting == count)
    return tasks


async def test_lines_take_what_online_requests_leave() -> None:
    places = BatchSlots(3)
    places.entered()
    assert [await places.take(LIMIT_S) for _ in range(2)] == [True, True]
    (third,) = await waiting(places)
    places.left()
    assert await third
    assert (places.taken, places.waiting) == (3, 0)


async def test_an_online_request_goes_beyond_the_bound_and_lines_wait_until_it_is_kept_again() -> None:
    places = BatchSlots(1)
    assert await places.take(LIMIT_S)
    places.entered()
    places.entered()
    (waiter,) = await waiting(places)
    places.release()
    places.left()
    await asyncio.sleep(0)
    assert not waiter.done()
    places.left()
    assert await waiter


async def test_who_came_first_has_the_first_place_even_when_one_comes_between() -> None:
    places = BatchSlots(1)
    assert await places.take(LIMIT_S)
    first, second = await waiting(places, 2)
    places.release()
    late = asyncio.ensure_future(places.take(LIMIT_S))
    assert await first
    places.release()
    assert await second
    assert not late.done()
    places.release()
    assert await late


async def test_who_waits_in_vain_has_no_place_and_leaves_none_behind() -> None:
    places = BatchSlots(1)
    assert await places.take(LIMIT_S)
    assert not await places.take(0.0)
    assert (places.taken, places.waiting) == (1, 0)


async def test_a_place_that_was_handed_out_to_somebody_who_left_is_the_next_ones() -> None:
    places = BatchSlots(1)
    assert await places.take(LIMIT_S)
    gone, next_one = await waiting(places, 2)
    places.release()  # the first has it, and does not know it yet
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await next_one
    assert places.taken == 1


async def test_who_is_cancelled_while_it_waits_is_forgotten() -> None:
    places = BatchSlots(1)
    assert await places.take(LIMIT_S)
    (gone,) = await waiting(places)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    places.release()
    assert (places.taken, places.waiting) == (0, 0)


async def test_while_lines_are_held_off_none_gets_a_place_and_none_waits() -> None:
    clock = Clock()
    places = BatchSlots(1, clock)
    assert await places.take(LIMIT_S)
    (waiter,) = await waiting(places)
    places.hold_off(5.0)
    assert not await waiter
    places.release()
    assert not await places.take(LIMIT_S)
    places.hold_off(1.0)  # less than what was asked for before
    assert places.wait_s() == pytest.approx(5.0)
    clock.now_s += 5.0
    assert await places.take(LIMIT_S)


async def room(places: BatchSlots) -> int:
    """Lines that it takes now; all are given back."""
    count = 0
    while await places.take(0.0):
        count += 1
    for _ in range(count):
        places.release()
    return count


async def test_an_upstream_that_had_no_room_gets_half_as_many_lines_and_more_as_it_answers() -> None:
    clock = Clock()
    places = BatchSlots(8, clock)
    for lines in (4, 2, 1, 1):
        places.hold_off(1.0)
        places.hold_off(1.0)  # said to another line of the same time
        clock.now_s += 1.0
        assert await room(places) == lines
    for lines in (2, 3, 4):
        for _ in range(lines):
            places.answered()
        assert await room(places) == lines
    for _ in range(100):
        places.answered()
    assert await room(places) == 8


async def test_online_requests_do_not_keep_an_upstream_that_had_no_room_from_every_line() -> None:
    clock = Clock()
    places = BatchSlots(8, clock)
    for _ in range(6):
        places.entered()
    for _ in range(5):
        places.hold_off(1.0)
        clock.now_s += 1.0
    assert await room(places) == 1


def test_lines_are_not_held_off_for_ever() -> None:
    places = BatchSlots(1, Clock())
    places.hold_off(1e9)
    assert places.wait_s() == pytest.approx(LONGEST_S)
