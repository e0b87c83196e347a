"""One generation and those who share it: everybody gets all of it, and it lives as long as one of them is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import EngineLostError, OverloadedError
from gateway.responses.flights import Bill, Flight
from gateway.types import Trace
from tests.fakes.waiting import until

LIMIT_S = 30.0
LEADER: Any = None


@dataclass
class Work:
    """Gives `items`, each when it may."""

    items: int = 6
    fails: Exception | None = None
    may: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    runs: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, flight: Flight[int]) -> None:
        self.runs += 1
        try:
            for number in range(self.items):
                await self.may.acquire()
                await flight.add(number)
            if self.fails is not None:
                raise self.fails
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    def allow(self, items: int) -> None:
        for _ in range(items):
            self.may.release()


@dataclass
class Flights:
    """Those that may be joined."""

    max_bytes: int = 1000
    size: Callable[[int], int] = lambda item: 1
    joinable: dict[Hashable, Flight[int]] = field(default_factory=dict)

    def launch(self, work: Callable[[Flight[int]], Any], key: str | None = "k") -> Flight[int]:
        flight = Flight(self.joinable, key, LEADER, max_bytes=self.max_bytes, size=self.size)
        flight.start(work)
        return flight

    def board(self, work: Work) -> Flight[int]:
        return self.joinable.get("k") or self.launch(work.run)


async def everything(flight: Flight[int]) -> list[int]:
    async with aclosing(flight.read()) as items:
        return [item async for item in items]


async def test_whoever_comes_before_its_end_gets_all_of_it() -> None:
    own, work = Flights(), Work()
    flight = own.board(work)
    first = asyncio.create_task(everything(flight))
    work.allow(3)
    await until(lambda: flight.begun)
    late = asyncio.create_task(everything(own.board(work)))
    work.allow(3)
    assert await first == await late == [0, 1, 2, 3, 4, 5]
    assert work.runs == 1
    assert not own.joinable


async def test_it_goes_on_when_the_first_one_leaves_and_ends_with_the_last() -> None:
    own, work = Flights(), Work()
    flight = own.board(work)
    leader, follower = asyncio.create_task(everything(flight)), asyncio.create_task(everything(flight))
    work.allow(2)
    await until(lambda: flight.begun)
    leader.cancel()
    await asyncio.wait([leader])
    assert not work.aborted.is_set()
    work.allow(1)
    follower.cancel()
    async with asyncio.timeout(LIMIT_S):
        await work.aborted.wait()
    assert "k" not in own.joinable


async def test_an_error_reaches_everybody_after_what_came_before_it() -> None:
    own, work = Flights(), Work(items=2, fails=EngineLostError("lost"))
    work.allow(2)

    async def read() -> list[int]:
        seen: list[int] = []
        with pytest.raises(EngineLostError):
            async with aclosing(own.board(work).read()) as items:
                async for item in items:
                    seen += [item]
        return seen

    assert await asyncio.gather(read(), read()) == [[0, 1], [0, 1]]
    assert "k" not in own.joinable


async def test_who_reads_too_slowly_is_given_up_and_costs_the_others_nothing() -> None:
    own, work = Flights(max_bytes=3), Work(items=20)
    flight = own.board(work)
    slow = flight.read()
    work.allow(1)
    assert await anext(slow) == 0
    fast = asyncio.create_task(everything(flight))
    work.allow(19)
    assert await fast == list(range(20))
    with pytest.raises(OverloadedError):
        async for _ in slow:
            pass
    assert flight.full is None


async def test_one_reader_alone_may_take_its_time_and_the_work_waits_for_it() -> None:
    own, work = Flights(max_bytes=3), Work(items=20)
    flight = own.board(work)
    work.allow(20)
    items = flight.read()
    seen = [await anext(items)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert work.may._value >= 20 - 3 - 3  # no more is made than fits
    async with aclosing(items):
        seen += [item async for item in items]
    assert seen == list(range(20))


async def test_too_large_an_answer_cannot_be_joined_any_more() -> None:
    own, work = Flights(max_bytes=3), Work(items=20)
    flight = own.board(work)
    reader = asyncio.create_task(everything(flight))
    work.allow(5)
    await until(lambda: "k" not in own.joinable)
    work.allow(15)
    assert await reader == list(range(20))


async def test_what_is_to_do_after_its_end_is_done_without_readers() -> None:
    own, may, done = Flights(), asyncio.Event(), asyncio.Event()

    async def work(flight: Flight[int]) -> None:
        flight.land()
        await flight.add(1)
        await may.wait()
        done.set()

    flight = own.launch(work)
    async with aclosing(flight.read()) as items:
        assert await anext(items) == 1
    may.set()
    async with asyncio.timeout(LIMIT_S):
        await done.wait()


async def test_a_reader_that_leaves_behind_a_landed_flight_does_not_keep_it_in_the_air() -> None:
    ended = asyncio.Event()

    async def work(flight: Flight[int]) -> None:
        await flight.add(0)
        flight.land()
        await flight.add(1)  # more than may wait for a reader
        ended.set()

    flight = Flights(max_bytes=1, size=lambda item: 2).launch(work)
    async with aclosing(flight.read()) as items:
        assert await anext(items) == 0
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), LIMIT_S)


# -- the account of a generation that several share: nothing is paid twice, and nothing is left unpaid ----------------


def joined(bill: Bill, count: int) -> list[Trace]:
    traces = [Trace() for _ in range(count)]
    for trace in traces:
        bill.join(trace)
    return traces


def start_work(bill: Bill) -> None:
    bill.work.engine, bill.work.prompt_tokens, bill.work.first_token_ms = "engine-1", 10, 1.0


def paid(trace: Trace) -> tuple[int, int]:
    """Tokens of the prompt and of the completion that are on its account."""
    return trace.prompt_tokens, trace.completion_tokens if trace.engine else trace.paid_tokens


def test_who_is_alone_pays_everything_also_when_it_leaves_before_the_first_token() -> None:
    bill = Bill()
    (alone,) = joined(bill, 1)
    bill.work.engine, bill.work.prompt_tokens = "engine-1", 10
    bill.leave(alone)
    assert (alone.engine, alone.prompt_tokens) == ("engine-1", 10)


def test_what_is_a_requests_own_stays_so() -> None:
    bill = Bill()
    (alone,) = joined(bill, 1)
    alone.fork = True
    start_work(bill)
    bill.leave(alone)
    assert alone.fork
    bill.work.completion_tokens = 7
    bill.leave(alone)
    assert alone.completion_tokens == 0, "it has left"


@given(
    st.lists(st.one_of(st.just("join"), st.just("begin"), st.integers(1, 5), st.integers(-8, -1)), max_size=40),
)
def test_every_token_is_paid_by_one_who_was_there(steps: list[str | int]) -> None:
    """Negative numbers: a reader leaves, and who is there for longest is -1. When nobody is left it is over."""
    bill = Bill()
    here, gone = joined(bill, 1), []
    begun, computed = False, 0
    for step in steps:
        if not here:
            break
        if step == "join":
            here += joined(bill, 1)
        elif step == "begin":
            start_work(bill)
            begun = True
        elif isinstance(step, int) and step > 0 and begun:
            computed += step
            bill.work.completion_tokens = computed
        elif isinstance(step, int) and step < 0:
            gone.append(here.pop(-step % len(here)))
            bill.leave(gone[-1])
    for trace in here:
        bill.leave(trace)
    accounts = [paid(trace) for trace in (*gone, *here)]
    assert sum(prompt for prompt, _ in accounts) == 10 * begun
    assert sum(completion for _, completion in accounts) == computed
