"""Turns among tenants, and requests that wait: however a request's waiting ends, it ends once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import DeadlineError, QueueFullError
from gateway.gate import MAX_RETRY_S, MIN_RETRY_S, RATE_SAMPLES, FairQueue, Gate, Pace, Waiting
from gateway.types import Ask
from tests.fakes.guests import JumpingLoop, run, turn


def took(queue: FairQueue[Waiting], tenant: str, cost_s: float = 1.0) -> float:
    """Where the tenant stood whose request came now, and was sent."""
    waiter = Waiting(Ask(tenant, 1, 1e9), 0.0, cost_s=cost_s)
    queue.arrived(waiter)
    start_s = queue._start_s(waiter)
    queue.took(waiter)
    return start_s


def test_what_was_not_used_is_not_saved_up() -> None:
    queue = FairQueue[Waiting]()
    took(queue, "early")
    for _ in range(100):
        took(queue, "busy")
    assert took(queue, "early") >= took(queue, "busy") - 1.0


def test_turns_of_tenants_that_went_away_are_forgotten() -> None:
    queue = FairQueue[Waiting]()
    for number in range(5000):
        took(queue, f"t{number}", 0.001)
        took(queue, "busy")
    assert len(queue._next_s) <= 1026


def test_a_wait_is_told_by_the_rate_of_the_last_ends_within_limits() -> None:
    pace = Pace()
    assert pace.wait_s(100, 0.0) == MIN_RETRY_S
    pace.ends.extend(number / 10 for number in range(3 * RATE_SAMPLES))
    now = pace.ends[-1]
    assert pace.wait_s(200, now) == pytest.approx(20.0, rel=0.05)
    assert (pace.wait_s(1, now), pace.wait_s(10_000, now)) == (MIN_RETRY_S, MAX_RETRY_S)


# -- the gate ---------------------------------------------------------------------------------------------------------


class BrokenError(Exception):
    """What the test fails a request with."""


@dataclass
class Pool:
    """The simplest user of a gate: so many slots, each a number."""

    most: int
    gate: Gate[int]
    queue: FairQueue[Waiting] = field(default_factory=FairQueue)
    free: list[int] = field(default_factory=list)
    served: list[Waiting] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.most))

    async def take(self, tenant: str, timeout_s: float, size: int = 1) -> int:
        waiter = Waiting(Ask(tenant, 0, 0.0), 0.0, cost_s=1.0, size=size)
        self.queue.arrived(waiter)
        if self.free and not self.queue:
            self.queue.took(waiter)
            self.served.append(waiter)
            return self.free.pop()
        if full := self.gate.find_full(tenant, size):
            raise QueueFullError(str(full))
        self.number += 1
        waiter.order = (0, 0.0, self.number)
        self.queue.enter(waiter)
        self.gate.enter(waiter)
        late = DeadlineError("late")
        return await self.gate.wait(waiter, self.queue, timeout_s, late=lambda: late, leave=self.give_back)

    def give_back(self, slot: int | None) -> None:
        if slot is not None:
            assert slot not in self.free
            self.free.append(slot)
        while self.queue and self.free:
            waiter = self.queue.first()
            self.queue.remove(waiter)
            if self.gate.grant(waiter, self.free[-1]):
                self.free.pop()
                self.queue.took(waiter)
                self.served.append(waiter)

    def fail_first(self) -> None:
        if self.queue:
            self.gate.fail(self.queue.first(), self.queue, BrokenError())


TENANTS = ("north", "south", "west")
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(TENANTS), st.sampled_from([0.0, 1.0, 3.0, 1e6]), st.integers(1, 3)),
        st.tuples(st.sampled_from(["end", "cancel", "end and cancel"]), st.integers(0, 40), st.integers(0, 40)),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 2.0])),
        st.just(("turn",)),
        st.just(("fail",)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(moves=MOVES, most=st.integers(1, 3), waiting=st.integers(0, 8), per_tenant=st.integers(0, 5))
def test_whatever_happens_each_slot_is_given_once_and_each_wait_ends_once(
    moves: list[Any], most: int, waiting: int, per_tenant: int
) -> None:
    """Arrivals, ends, cancels (also of a request that is granted a slot in that turn), failures and jumps in time,
    with and without a turn of the loop between them."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        pool, inside = Pool(most, Gate(waiting, per_tenant)), set[int]()
        tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []

        def come(tenant: str, timeout_s: float, size: int) -> None:
            done = asyncio.Event()

            async def stay() -> None:
                slot = await pool.take(tenant, timeout_s, size)
                assert slot not in inside
                inside.add(slot)
                try:
                    await done.wait()
                finally:
                    inside.remove(slot)
                    pool.give_back(slot)

            tasks.append((asyncio.create_task(stay()), done))

        def check() -> None:
            gate = pool.gate
            assert gate.waiting == sum(gate.by_tenant.values()) <= waiting
            assert all(0 < count <= per_tenant for count in gate.by_tenant.values())
            assert len(pool.queue) <= gate.waiting
            assert len(inside) + len(pool.free) <= most

        for kind, *with_ in moves:
            if kind == "come":
                come(*with_)
            elif kind == "pass":
                await asyncio.sleep(with_[0])
            elif kind == "turn":
                await turn()
                assert not (pool.free and pool.queue), "none waits in front of a free slot"
                assert len(inside) + len(pool.free) == most
            elif kind == "fail":
                pool.fail_first()
            elif tasks:
                one, other = (tasks[number % len(tasks)] for number in with_)
                if kind != "cancel":
                    one[1].set()
                if kind == "end and cancel":
                    await asyncio.sleep(0)
                if kind != "end":
                    other[0].cancel()
            check()
        for _, done in tasks:
            done.set()
        results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        ends = (DeadlineError, QueueFullError, BrokenError, asyncio.CancelledError)
        assert all(result is None or isinstance(result, ends) for result in results), results
        assert sum(isinstance(result, DeadlineError) for result in results) == pool.gate.expired
        assert sum(isinstance(result, QueueFullError) for result in results) == pool.gate.refused
        assert sorted(pool.free) == list(range(most))
        assert (pool.gate.waiting, pool.gate.by_tenant, len(pool.queue)) == (0, {}, 0)

    run(work)


def test_a_tenant_that_sends_one_request_is_next_however_many_another_sent() -> None:
    async def work() -> None:
        pool = Pool(1, Gate())
        slot = await pool.take("north", 1.0)
        many = [asyncio.create_task(pool.take("north", 1e6)) for _ in range(50)]
        one = asyncio.create_task(pool.take("south", 1e6))
        await turn()
        pool.give_back(slot)
        await turn()
        assert [waiter.ask.tenant for waiter in pool.served] == ["north", "south"]
        for task in (*many, one):
            task.cancel()
        await asyncio.gather(*many, one, return_exceptions=True)

    run(work)
