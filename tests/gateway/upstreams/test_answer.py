"""How long an answer of an upstream may be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.upstreams.answer import Watch
from tests.fakes.guests import run


def watched(work: Callable[[Watch], Coroutine[Any, Any, None]]) -> list[float]:
    """Seconds after which a watch gives up, of 10 s for each wait and 100 s for all."""
    gave_up: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        watch = Watch(10.0, start_s + 100.0, lambda: gave_up.append(loop.time() - start_s), clock=loop.time)
        await work(watch)
        watch.close()

    run(main)
    return gave_up


def test_a_wait_that_lasts_too_long_is_given_up_once_and_to_the_second() -> None:
    async def work(watch: Watch) -> None:
        await asyncio.sleep(3)
        with watch:
            await asyncio.sleep(50)
        assert not watch.over

    assert watched(work) == [13.0]


def test_waits_that_end_in_time_are_none_of_its_business() -> None:
    async def work(watch: Watch) -> None:
        for _ in range(10):
            with watch:
                await asyncio.sleep(9)

    assert watched(work) == []


def test_time_in_which_nobody_waits_does_not_count() -> None:
    async def work(watch: Watch) -> None:
        await asyncio.sleep(95)
        with watch:
            await asyncio.sleep(4)

    assert watched(work) == []


def test_no_wait_lasts_beyond_the_end_of_all_time() -> None:
    async def work(watch: Watch) -> None:
        await asyncio.sleep(95)
        with watch:
            await asyncio.sleep(20)
        assert watch.over

    assert watched(work) == [100.0]


def test_a_wait_that_begins_after_the_end_is_given_up_soon() -> None:
    async def work(watch: Watch) -> None:
        await asyncio.sleep(120)
        with watch:
            await asyncio.sleep(10)

    assert len(watched(work)) == 1


def test_once_closed_it_is_quiet() -> None:
    async def work(watch: Watch) -> None:
        watch.close()
        with watch:
            await asyncio.sleep(200)

    assert watched(work) == []
