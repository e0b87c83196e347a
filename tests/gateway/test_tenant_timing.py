"""What a clock could tell one tenant of what another has asked: nothing.

First by counting: whatever North has asked, the same is done for South, call by call and step by step. Then with a
clock, over several hundred questions of which North has asked half. Each test is also held to find the leak where there
is one: tenants who share a namespace.
"""

from __future__ import annotations

import asyncio
import gc
import random
import string
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest

from tests.fakes.two_tenants import House, Way, rank_sum
from tests.fakes.waiting import until

WAYS: tuple[Way, ...] = get_args(Way)
PAIRS = 150
CHANCE = 5.0
"""Standard deviations: by chance once in some millions of runs."""
LEAK = 6.0
"""What a leak shows at least, on a machine that does much else, too; it is 15 when every question that was asked is
quicker than all others."""


@asynccontextmanager
async def opened(namespace: str = "") -> AsyncIterator[House]:
    house = House(namespace)
    await house.open()
    try:
        yield house
    finally:
        await house.close()


class Texts:
    """System prompts of words that nobody has used before, and a question, in one wording or another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _word(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=8))

    def new(self) -> tuple[str, str]:
        """The same question twice: they mean the same, and only the second is what South will ask."""
        system, things = (" ".join(self._word() for _ in range(count)) for count in (40, 60))
        return f"{system}\nhow can i clean my {things}", f"{system}\nhow do i clean my {things}"


def wording(texts: tuple[str, str], way: Way) -> str:
    """As North asks it."""
    return texts[0] if way == "semantic" else texts[1]


async def _seen(house: House, way: Way, case: str, *, the_same: bool) -> list[Any]:
    """What is done for South, after North has asked as often, whatever it was. Both are new tenants in each case."""
    texts, north, south = Texts(7), f"north {case}", f"south {case}"
    probe = texts.new()
    for _ in range(3):
        await house.ask(north, texts.new()[1], way)
        await house.ask(south, texts.new()[1], way)
    await house.ask(north, wording(probe if the_same else texts.new(), way), way)
    return await house.seen(south, probe[1], way)


@pytest.mark.parametrize("way", WAYS)
async def test_the_same_is_done_for_a_tenant_whatever_another_one_has_asked(way: Way) -> None:
    async with opened() as house:
        other, same = [await _seen(house, way, str(case), the_same=case) for case in (False, True)]
        assert same == other
        house.namespace = "other"
        shared_other = await _seen(house, way, "shared", the_same=False)
        house.namespace = "same"
        assert await _seen(house, way, "shared", the_same=True) != shared_other, "what is shared on purpose is found"


@pytest.mark.parametrize("way", ["exact", "semantic"])
async def test_the_same_is_done_for_a_tenant_whatever_another_one_has_in_flight(way: Way) -> None:
    seen = []
    async with opened() as house:
        for the_same in (False, True):
            texts, north, south = Texts(7), f"north {the_same}", f"south {the_same}"
            probe = texts.new()
            for engine in house.engines:
                engine.gates[north] = asyncio.Event()
            asked = wording(probe if the_same else texts.new(), way)
            asking = asyncio.create_task(house.ask(north, asked, way))
            await until(lambda: house.responses.stats()["waiting"] == 1)
            await house.ask(south, texts.new()[1], way)
            seen.append(await house.seen(south, probe[1], way))
            asking.cancel()
            await asyncio.wait([asking])
    assert seen[0] == seen[1]


async def _times(house: House, way: Way) -> tuple[list[float], list[float]]:
    """Milliseconds of South's questions: those that North has asked, and others. In pairs, in an order by chance."""
    texts, order = Texts(11), random.Random(13)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(PAIRS):
        probes = [texts.new(), texts.new()]
        for asked in (probes[1], texts.new()):
            await house.ask("north", wording(asked, way), way)
        for which in order.sample((0, 1), 2):
            text = "".join(list(probes[which][1]))  # no object that North's request has touched
            started = time.perf_counter()
            await house.ask("south", text, way)
            times[which].append((time.perf_counter() - started) * 1e3)
    return times[1], times[0]


@pytest.mark.slow
@pytest.mark.parametrize("namespace", ["", "both"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_clock_tells_a_tenant_nothing_of_what_another_one_has_asked(way: Way, namespace: str) -> None:
    async with opened(namespace) as house:
        gc.collect()
        gc.disable()
        try:
            found = rank_sum(*await _times(house, way))
        finally:
            gc.enable()
    if namespace:
        assert found < -LEAK, "a leak would be seen"
    else:
        assert abs(found) < CHANCE


def test_ranks_that_are_all_smaller_are_far_from_chance_and_equal_ones_are_not() -> None:
    assert rank_sum(range(250), range(250, 500)) == pytest.approx(-19.3, abs=0.1)
    assert rank_sum([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert rank_sum([5, 1, 1], [1, 1, 2]) == pytest.approx(0.258, abs=0.001)
