"""Who gets the next of an upstream's bounded places. Time is a number; nobody waits in real time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import QueueSettings
from gateway.errors import DeadlineError, QueueFullError
from gateway.types import Ask
from gateway.upstreams.batch_slots import BatchSlots
from gateway.upstreams.online_slots import OnlineSlots
from tests.fakes.guests import FAR, NORTH, SOUTH, run, turn
from tests.fakes.tuned import tuned


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Guests:
    """Tasks that take a place, say so in `served`, and hold it until they are told to go."""

    most: int = 1
    lines: int = 2  # batch_slots
    limits: QueueSettings = field(default_factory=QueueSettings)
    served: list[str] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = OnlineSlots(self.most, self.limits, now)
        self.batch = BatchSlots(self.lines, now, self.places)

    def come(self, name: str, tenant: str = NORTH, deadline_s: float = FAR, **fields: Any) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()

        async def stay() -> None:
            await self.places.take(Ask(tenant, 0, deadline_s, **fields))
            try:
                self.served.append(name)
                await self.ends[name].wait()
            finally:
                self.places.release(tenant)

        self.tasks[name] = asyncio.create_task(stay())
        return self.tasks[name]

    def line(self, name: str) -> asyncio.Task[None]:
        """One of the batch lane."""
        self.ends[name] = asyncio.Event()

        async def stay() -> None:
            assert await self.batch.take(1e6)
            try:
                self.served.append(name)
                await self.ends[name].wait()
            finally:
                self.batch.release()

        self.tasks[name] = asyncio.create_task(stay())
        return self.tasks[name]

    async def go(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await self.tasks[name]
        await turn()

    async def all_go(self) -> list[str]:
        """Each as soon as it is served. The order in which they were."""
        at = 0
        while not all(task.done() for task in self.tasks.values()):
            for name in self.served[at:]:
                at += 1
                await self.go(name)
        return self.served

    def holding(self) -> int:
        """Who was served and has not ended, counted from outside."""
        return sum(not self.tasks[name].done() for name in self.served)


def test_a_free_place_is_taken_without_an_await() -> None:
    async def work() -> None:
        guests = Guests(most=2)
        for _ in range(2):
            with pytest.raises(StopIteration):
                guests.places.take(Ask(NORTH, 0, FAR)).send(None)
        assert guests.places.taken == 2
        third = guests.places.take(Ask(NORTH, 0, FAR))
        third.send(None)
        assert guests.places.waiting == {NORTH: 1}
        third.close()
        for _ in range(2):
            guests.places.release(NORTH)
        assert guests.places.taken == 0

    run(work)


def test_one_request_is_next_however_many_another_tenant_has_sent() -> None:
    async def work() -> None:
        guests = Guests(most=2)
        for number in range(100):
            guests.come(f"n{number}")
        await turn()
        guests.come("one", SOUTH)
        await turn()
        assert guests.served == ["n0", "n1"]
        await guests.go("n0")
        assert guests.served[2:] == ["one"]
        assert len(await guests.all_go()) == 101

    run(work)


def test_tenants_who_wait_take_turns_and_each_is_served_in_the_order_in_which_it_came() -> None:
    async def work() -> None:
        guests = Guests()
        guests.come("first")
        for tenant in (NORTH, SOUTH):
            for number in range(3):
                guests.come(f"{tenant}-{number}", tenant)
        await turn()
        expected = ["south-0", "north-0", "south-1", "north-1", "south-2", "north-2"]
        assert (await guests.all_go())[1:] == expected

    run(work)


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_twice_the_weight_has_twice_the_turns(most: int) -> None:
    async def work() -> None:
        guests = Guests(most)
        for number in range(30):
            guests.come(f"n{number}", NORTH)
            guests.come(f"s{number}", SOUTH, weight=2.0)
        await turn()
        served = Counter(name[0] for name in (await guests.all_go())[most : most + 30])
        assert served["s"] == pytest.approx(20, abs=2)

    run(work)


def test_a_tenant_whose_answers_take_long_leaves_another_its_share_of_the_places() -> None:
    async def work() -> None:
        guests = Guests(most=4)
        for number in range(20):
            guests.come(f"long-{number}")
            guests.come(f"short-{number}", SOUTH)
        await turn()
        for number in range(20):  # none of the others ends
            guests.ends[f"short-{number}"].set()
        await turn(200)
        assert {f"short-{number}" for number in range(20)} <= set(guests.served)
        assert [name for name in guests.served if name.startswith("long")] == ["long-0", "long-1", "long-2", "long-3"]
        assert guests.served.index("short-19") < guests.served.index("long-2"), "while others wait it has its share"
        for number in range(20):
            await guests.go(f"long-{number}")

    run(work)


def test_places_that_nobody_else_wants_are_one_tenants() -> None:
    async def work() -> None:
        guests = Guests(most=4)
        for number in range(4):
            guests.come(f"n{number}")
        await turn()
        assert len(guests.served) == 4
        await guests.all_go()

    run(work)


def test_priority_orders_a_tenants_own_requests_and_nobody_elses() -> None:
    async def work() -> None:
        guests = Guests()
        guests.come("first")
        guests.come("late", priority=5)
        guests.come("early", priority=-5)
        guests.come("other", SOUTH)
        guests.come("other-2", SOUTH)
        await turn()
        assert (await guests.all_go())[1:] == ["other", "early", "other-2", "late"]

    run(work)


def test_flex_is_behind_those_of_its_time_and_priority_before_them_until_waiting_has_made_up_for_it() -> None:
    async def work() -> None:
        guests = Guests(limits=tuned(QueueSettings, tier_s=1.0, aging=0.1))
        guests.come("first")
        guests.come("old-flex", tier="flex")
        await turn()
        await asyncio.sleep(11.0)  # a tier is worth ten seconds of waiting
        for tier in ("flex", "default", "priority"):
            guests.come(tier, tier=tier)
        await turn()
        assert (await guests.all_go())[1:] == ["priority", "old-flex", "default", "flex"]

    run(work)


def test_who_waits_for_too_long_is_told_and_leaves_no_place_behind() -> None:
    async def work() -> None:
        guests = Guests()
        guests.come("first")
        late = guests.come("late", deadline_s=now() + 5.0)
        guests.come("next")
        with pytest.raises(DeadlineError, match=r"queue\.max_wait_s") as told:
            await late
        assert now() == pytest.approx(1005.0)
        assert told.value.retry_after_s is not None
        assert guests.places.waiting == {NORTH: 1}
        await guests.go("first")
        assert guests.served == ["first", "next"]
        await guests.go("next")
        assert guests.places.taken == 0

    run(work)


def test_a_full_line_refuses_at_once_and_one_tenants_full_line_is_not_anothers() -> None:
    async def work() -> None:
        guests = Guests(limits=QueueSettings(max_waiting=3, max_waiting_per_tenant=2))
        for name in ("a", "b", "c"):
            guests.come(name)
        await turn()
        with pytest.raises(QueueFullError, match=r"2, the limit of queue\.max_waiting_per_tenant"):
            await guests.come("d")
        guests.come("e", SOUTH)
        await turn()
        with pytest.raises(QueueFullError, match=r"3, the limit of queue\.max_waiting\)") as full:
            await guests.come("f", SOUTH)
        assert full.value.retry_after_s == pytest.approx(1.0)
        del guests.tasks["d"], guests.tasks["f"]
        await guests.all_go()

    run(work)


def test_a_client_that_leaves_while_it_waits_frees_its_place_in_the_line() -> None:
    async def work() -> None:
        guests = Guests(limits=QueueSettings(max_waiting=1))
        guests.come("a")
        gone = guests.come("b")
        await turn()
        gone.cancel()
        await turn()
        assert guests.places.waiting == {}
        guests.come("c")
        await turn()
        await guests.go("a", "c")
        assert guests.served == ["a", "c"]

    run(work)


def test_a_place_given_to_a_client_that_left_in_the_same_turn_goes_to_the_next() -> None:
    async def work() -> None:
        guests = Guests()
        await guests.places.take(Ask(NORTH, 0, FAR))
        gone = guests.come("b")
        guests.come("c")
        await turn()
        guests.places.release(NORTH)  # b has the place and has not run yet
        gone.cancel()
        await turn()
        assert guests.served == ["c"]
        await guests.go("c")
        assert guests.places.taken == 0

    run(work)


def test_lines_of_batches_take_what_nobody_waits_for_and_count() -> None:
    async def work() -> None:
        guests = Guests(most=2, lines=8)
        for name in ("l0", "l1", "l2"):
            guests.line(name)
        await turn()
        assert guests.served == ["l0", "l1"], "they count in the bound"
        guests.come("o0")
        guests.come("o1")
        await turn()
        await guests.go("l0")
        await guests.go("l1")
        assert guests.served[2:] == ["o0", "o1"], "online requests go first"
        await guests.go("o0")
        assert guests.served[4:] == ["l2"]
        await guests.go("o1", "l2")
        assert not guests.places.taken

    run(work)


def test_a_tenant_that_went_away_is_forgotten() -> None:
    async def work() -> None:
        guests = Guests()
        for number in range(50):
            guests.come(f"r{number}", f"tenant-{number}")
            await turn()
            if number % 5 == 2:
                guests.tasks.pop(f"r{number}").cancel()
        await guests.all_go()
        assert not guests.places._held
        assert not guests.places._weights

    run(work)


TENANTS = (NORTH, SOUTH, "west")
EVENTS = st.one_of(
    st.tuples(st.just("come"), st.sampled_from(TENANTS), st.sampled_from(["default", "flex", "priority"])),
    st.tuples(st.just("come for a while"), st.sampled_from(TENANTS), st.floats(0.0, 3.0)),
    st.tuples(st.just("line"), st.none(), st.none()),
    st.tuples(st.just("end"), st.integers(0, 30), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
    st.tuples(st.just("end and cancel another at once"), st.integers(0, 30), st.integers(0, 30)),
    st.tuples(st.just("pass"), st.floats(0.0, 2.0), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(most=st.integers(1, 4), lines=st.integers(1, 5), events=st.lists(EVENTS, max_size=40))
def test_no_place_is_lost_or_given_twice(most: int, lines: int, events: list[tuple[str, Any, Any]]) -> None:
    async def work() -> None:
        guests = Guests(most, lines, QueueSettings(max_waiting=12, max_waiting_per_tenant=6))
        for number, (event, one, other) in enumerate(events):
            here = [name for name, task in guests.tasks.items() if not task.done()]
            match event:
                case "come":
                    guests.come(f"o{number}", one, tier=other)
                case "come for a while":
                    guests.come(f"o{number}", one, deadline_s=now() + other)
                case "line":
                    guests.line(f"l{number}")
                case "pass":
                    await asyncio.sleep(one)
                case "end" if here:
                    guests.ends[here[one % len(here)]].set()
                case "cancel" if here:
                    guests.tasks[here[one % len(here)]].cancel()
                case "end and cancel another at once" if here:
                    guests.ends[here[one % len(here)]].set()
                    await asyncio.sleep(0)
                    guests.tasks[here[other % len(here)]].cancel()
            before = len(guests.served)
            held_up = bool(guests.places.waiting)
            await turn(8)
            taken = guests.places.taken + guests.batch.taken
            assert taken == guests.holding() <= most
            assert not guests.places.waiting or taken == most, "nobody waits in front of a free place"
            if held_up and guests.places.waiting:
                assert not any(name.startswith("l") for name in guests.served[before:]), "a line went first"
        for event in guests.ends.values():
            event.set()
        results = await asyncio.gather(*guests.tasks.values(), return_exceptions=True)
        kinds = (DeadlineError, QueueFullError, asyncio.CancelledError)
        assert all(result is None or isinstance(result, kinds) for result in results), results
        assert (guests.places.taken, guests.batch.taken, guests.places.waiting) == (0, 0, {})

    run(work)
