from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import QueueSettings
from gateway.errors import DeadlineError, EngineLostError, QueueFullError
from gateway.queues.online import OnlineQueue
from gateway.types import Tenant
from tests.fakes.street import FakeEngine, hello

NORTH, SOUTH = Tenant("north"), Tenant("south")
FAR = 1e9


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time is a number that jumps to the next timer when nothing else is left to do."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            if events := select(0):
                return events
            if timeout is None:
                raise RuntimeError("everything waits and nothing will ever happen")
            self.now += timeout
            return []

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(work())


def queue_of(places: int = 1, waiting: int = 100, per_tenant: int = 100, max_wait_s: float = 60.0) -> OnlineQueue:
    limits = QueueSettings(
        places_per_engine=places, max_waiting=waiting, max_waiting_per_tenant=per_tenant, max_wait_s=max_wait_s
    )
    return OnlineQueue(limits, clock=lambda: asyncio.get_running_loop().time())


@dataclass
class Guests:
    """Tasks that take a place, say so in `served`, and hold it until told to leave."""

    queue: OnlineQueue
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(hello()))
    served: list[str] = field(default_factory=list)
    leave: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def come(self, name: str, tenant: Tenant = NORTH, deadline_s: float = FAR) -> asyncio.Task[None]:
        self.leave[name] = asyncio.Event()

        async def stay() -> None:
            async with self.queue.place(self.engine, tenant, deadline_s):
                self.served.append(name)
                await self.leave[name].wait()

        self.tasks[name] = asyncio.create_task(stay())
        return self.tasks[name]

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await self.tasks[name]
        await turn()


async def turn(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_a_free_place_is_taken_without_waiting() -> None:
    async def work() -> None:
        queue = queue_of(places=2)
        place = queue.place(FakeEngine(hello()), NORTH, FAR)
        entering = place.__aenter__()
        with pytest.raises(StopIteration):
            entering.send(None)  # not one await between asking and having it
        assert queue.status().in_flight == {"engine-1": 1}
        await place.__aexit__(None, None, None)
        assert queue.status().in_flight == {}

    run(work)


def test_places_are_twice_what_the_engine_runs_unless_set() -> None:
    async def work() -> None:
        guests = Guests(queue_of(places=0), FakeEngine(hello(max_sequences=3)))
        for number in range(8):
            guests.come(str(number))
        await turn()
        assert len(guests.served) == 6
        assert guests.queue.status().waiting == 2
        await guests.go(*"01234567")

    run(work)


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    async def work() -> None:
        guests = Guests(queue_of())
        guests.come("first")
        for number in range(4):
            guests.come(f"north-{number}", NORTH)
        for number in range(2):
            guests.come(f"south-{number}", SOUTH)
        await turn()
        for name in list(guests.tasks):
            guests.leave[name].set()
        await asyncio.gather(*guests.tasks.values())
        assert guests.served == ["first", "north-0", "south-0", "north-1", "south-1", "north-2", "north-3"]

    run(work)


def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    async def work() -> None:
        guests = Guests(queue_of())
        holder = guests.queue.place(guests.engine, NORTH, FAR)
        await holder.__aenter__()
        guests.come("second")
        await turn()
        await holder.__aexit__(None, None, None)  # the place is second's now, though second has not run yet
        guests.come("third")
        await turn()
        assert guests.served == ["second"]
        await guests.go("second", "third")

    run(work)


def test_a_full_line_refuses_at_once_and_says_when_to_come_back() -> None:
    async def work() -> None:
        guests = Guests(queue_of(waiting=2))
        for name in ("a", "b", "c"):
            guests.come(name)
        await turn()
        with pytest.raises(QueueFullError) as full:
            await guests.come("d")
        assert full.value.retry_after_s is not None
        assert 1.0 <= full.value.retry_after_s <= 60.0
        assert "queue.max_waiting" in full.value.message
        assert guests.queue.status().refused == 1
        await guests.go("a", "b", "c")

    run(work)


def test_one_tenants_full_line_is_not_anothers() -> None:
    async def work() -> None:
        guests = Guests(queue_of(per_tenant=1))
        guests.come("a")
        guests.come("b")
        await turn()
        with pytest.raises(QueueFullError, match=r"queue\.max_waiting_per_tenant"):
            await guests.come("c")
        guests.come("d", SOUTH)
        await turn()
        assert guests.queue.status().waiting_by_tenant == {"north": 1, "south": 1}
        await guests.go("a", "b", "d")

    run(work)


def test_the_time_to_come_back_follows_the_rate_of_service() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        guests = Guests(queue_of(waiting=20))
        for number in range(21):
            guests.come(str(number))
        await turn()
        for number in range(10):  # one every 2 s
            loop.now += 2.0
            await guests.go(str(number))
        for number in range(21, 31):
            guests.come(str(number))
        await turn()
        with pytest.raises(QueueFullError) as full:
            await guests.come("late")
        # Ten ends within the 18 s since the first of them: 20 waiters take 36 s.
        assert full.value.retry_after_s == pytest.approx(36.0)
        for task in guests.tasks.values():
            task.cancel()
        await asyncio.gather(*guests.tasks.values(), return_exceptions=True)

    run(work)


@pytest.mark.parametrize(("deadline_s", "expected_s"), [(5.0, 5.0), (500.0, 60.0), (-1.0, 0.0)])
def test_nobody_waits_past_the_deadline_or_the_limit(deadline_s: float, expected_s: float) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        guests = Guests(queue_of())
        guests.come("holder")
        await turn()
        start_s = loop.time()
        with pytest.raises(DeadlineError):
            await guests.come("waiter", deadline_s=start_s + deadline_s)
        assert loop.time() - start_s == pytest.approx(expected_s)
        assert guests.queue.status().waiting == 0
        assert guests.queue.status().expired == 1
        await guests.go("holder")

    run(work)


def test_a_client_that_leaves_while_waiting_leaves_the_line() -> None:
    async def work() -> None:
        guests = Guests(queue_of())
        guests.come("a")
        waiter = guests.come("b")
        guests.come("c")
        await turn()
        waiter.cancel()
        await turn()
        assert guests.queue.status().waiting == 1
        assert guests.queue.status().abandoned == 1
        await guests.go("a", "c")
        assert guests.served == ["a", "c"]

    run(work)


def test_a_place_given_to_a_client_that_left_in_the_same_turn_goes_on_to_the_next() -> None:
    async def work() -> None:
        guests = Guests(queue_of())
        holder = guests.queue.place(guests.engine, NORTH, FAR)
        await holder.__aenter__()
        waiter = guests.come("b")
        guests.come("c")
        await turn()
        await holder.__aexit__(None, None, None)  # b has the place and has not run yet
        waiter.cancel()
        await turn()
        assert guests.served == ["c"]
        await guests.go("c")
        assert guests.queue.status().in_flight == {}

    run(work)


def test_an_engine_that_goes_away_sends_its_line_elsewhere_at_once() -> None:
    async def work() -> None:
        guests = Guests(queue_of())
        guests.come("a")
        lost = [guests.come("b"), guests.come("c", SOUTH)]
        await turn()
        guests.queue.forget("demo-1")
        for task in lost:
            with pytest.raises(EngineLostError):
                await task
        with pytest.raises(EngineLostError):
            await guests.come("d")
        await guests.go("a")
        assert guests.queue.status().in_flight == {}
        guests.queue.forget("never heard of")

    run(work)


def test_the_place_is_given_back_when_the_work_fails() -> None:
    async def work() -> None:
        queue = queue_of()
        with pytest.raises(ValueError, match="broken"):
            async with queue.place(FakeEngine(hello()), NORTH, FAR):
                raise ValueError("broken")
        assert queue.status().in_flight == {}

    run(work)


TENANTS = [Tenant(name) for name in "xyz"]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 2), st.integers(0, 1), st.sampled_from([1.0, 30.0, FAR])),
        st.tuples(st.sampled_from(["finish", "cancel", "fail"]), st.integers(0, 30)),
        st.tuples(st.just("lose"), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 5.0, 100.0])),
        st.just(("turn",)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(moves=MOVES, places=st.integers(1, 3), waiting=st.integers(0, 5), per_tenant=st.integers(0, 3))
def test_whatever_happens_places_and_lines_stay_within_their_limits_and_end_empty(
    moves: list[Any], places: int, waiting: int, per_tenant: int
) -> None:
    """Random arrivals, ends, failures, cancellations, losses and jumps in time, with and without a turn in between."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        queue = queue_of(places, waiting, per_tenant)
        engines = [FakeEngine(hello(incarnation=f"e{number}"), name=f"e{number}") for number in range(2)]
        inside = [0, 0]
        guests: list[tuple[asyncio.Task[None], asyncio.Event, list[bool]]] = []

        def come(tenant: Tenant, number: int, patience_s: float) -> None:
            done, fail = asyncio.Event(), [False]

            async def stay() -> None:
                async with queue.place(engines[number], tenant, loop.time() + patience_s):
                    inside[number] += 1
                    assert inside[number] <= places
                    try:
                        await done.wait()
                        if fail[0]:
                            raise ValueError
                    finally:
                        inside[number] -= 1

            guests.append((asyncio.create_task(stay()), done, fail))

        def check() -> None:
            status = queue.status()
            assert status.waiting == sum(status.waiting_by_tenant.values()) <= waiting
            assert all(0 < count <= per_tenant for count in status.waiting_by_tenant.values())
            assert all(taken <= places for taken in status.in_flight.values())
            assert sum(queue.waiting_for(engine.hello.incarnation) for engine in engines) == status.waiting

        for kind, *given_ in moves:
            if kind == "come":
                come(TENANTS[given_[0]], given_[1], given_[2])
            elif kind == "lose":
                queue.forget(engines[given_[0]].hello.incarnation)
            elif kind == "wait":
                await asyncio.sleep(given_[0])
            elif kind == "turn":
                await turn()
            elif guests:
                task, done, fail = guests[given_[0] % len(guests)]
                fail[0] = kind == "fail"
                done.set() if kind in ("finish", "fail") else task.cancel()
            check()
        for _, done, _ in guests:
            done.set()
        results = await asyncio.gather(*(task for task, _, _ in guests), return_exceptions=True)
        allowed = (QueueFullError, DeadlineError, EngineLostError, ValueError, asyncio.CancelledError)
        assert all(result is None or isinstance(result, allowed) for result in results), results
        status = queue.status()
        assert (status.waiting, status.in_flight, status.waiting_by_tenant, inside) == (0, {}, {}, [0, 0])
        assert not queue._engines

    run(work)
