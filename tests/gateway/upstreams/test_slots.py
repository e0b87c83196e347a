"""Which request gets the next of an upstream's slots. Time is a number; nothing waits in real time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.config import QueueSettings
from gateway.errors import DeadlineError, QueueFullError
from gateway.types import Ask
from gateway.upstreams.slots import LONGEST_S, UpstreamSlots
from tests.fakes.guests import FAR, NORTH, SOUTH, run, turn
from tests.fakes.tuned import tuned


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Guests:
    """Tasks that take a slot, say so in `served`, and hold it until they are told to go."""

    most: int | None = 1
    lines: int = 2  # batch_slots
    limits: QueueSettings = field(default_factory=QueueSettings)
    served: list[str] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = UpstreamSlots(self.most, self.lines, self.limits, now)

    def come(self, name: str, tenant: str = NORTH, deadline_s: float = FAR, **fields: Any) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()

        async def stay() -> None:
            ask = Ask(tenant, 0, deadline_s, **fields)
            await self.slots.take(ask)
            try:
                self.served.append(name)
                await self.ends[name].wait()
            finally:
                self.slots.release(ask)

        self.tasks[name] = asyncio.create_task(stay())
        return self.tasks[name]

    def line(self, name: str, deadline_s: float = FAR) -> asyncio.Task[None]:
        """One of the batch lane."""
        return self.come(name, "batches", deadline_s, lane="batch")

    @property
    def waiting(self) -> dict[str, int]:
        return dict(self.slots.gates["online"].by_tenant)

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


def test_a_free_slot_is_taken_without_an_await() -> None:
    async def work() -> None:
        slots, ask = UpstreamSlots(2, 1, QueueSettings(), now), Ask(NORTH, 0, FAR)
        for _ in range(2):
            with pytest.raises(StopIteration):
                slots.take(ask).send(None)
        assert slots.taken["online"] == 2
        third = slots.take(ask)
        third.send(None)
        assert slots.gates["online"].by_tenant == {NORTH: 1}
        third.close()
        for _ in range(2):
            slots.release(ask)
        assert (slots.taken["online"], slots.gates["online"].waiting) == (0, 0)

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
        assert guests.waiting == {NORTH: 1}
        await guests.go("first")
        assert guests.served == ["first", "next"]
        await guests.go("next")
        assert guests.slots.taken["online"] == 0

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
        assert not guests.slots.taken["online"]

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
        assert not guests.slots._held
        assert not guests.slots._weights

    run(work)


# -- lines of batches -------------------------------------------------------------------------------------------------


def lines_only(lines: int = 1) -> Guests:
    """At an upstream that has no bound for online requests."""
    return Guests(most=None, lines=lines)


def test_lines_take_what_online_requests_leave_and_count_only_those_of_the_other_lane() -> None:
    async def work() -> None:
        guests = lines_only(2)
        guests.come("o0")
        guests.come("o1")
        for name in ("a", "b", "c"):
            guests.line(name)
        await turn()
        assert guests.served == ["o0", "o1"]
        await guests.go("o0")
        assert guests.served[2:] == ["a"]
        await guests.go("o1")
        assert guests.served[2:] == ["a", "b"]
        await guests.go("a")
        assert guests.served[2:] == ["a", "b", "c"]
        await guests.go("b", "c")

    run(work)


def test_lines_of_tenants_take_turns_and_those_of_one_go_as_they_came() -> None:
    async def work() -> None:
        guests = lines_only()
        guests.line("first")
        for tenant in (NORTH, SOUTH):
            for number in range(2):
                guests.come(f"{tenant}-{number}", tenant, lane="batch")
        await turn()
        assert (await guests.all_go())[1:] == ["north-0", "south-0", "north-1", "south-1"]

    run(work)


def test_a_line_that_waits_in_vain_leaves_no_slot_behind() -> None:
    async def work() -> None:
        guests = lines_only()
        guests.line("first")
        with pytest.raises(DeadlineError):
            await guests.line("late", now() + 5.0)
        await guests.go("first")
        assert (guests.slots.taken["batch"], guests.slots.gates["batch"].waiting) == (0, 0)

    run(work)


def test_while_lines_are_held_off_none_gets_a_slot_and_none_waits() -> None:
    async def work() -> None:
        guests = lines_only()
        guests.line("first")
        waiter = guests.line("waiter")
        await turn()
        guests.slots.hold_off(5.0)
        with pytest.raises(DeadlineError):
            await waiter
        await guests.go("first")
        with pytest.raises(DeadlineError):
            await guests.line("late")
        guests.slots.hold_off(1.0)  # less than what was asked for before
        assert guests.slots.held_off_s() == pytest.approx(5.0)
        await asyncio.sleep(5.0)
        guests.line("again")
        await turn()
        await guests.go("again")
        guests.slots.hold_off(1e9)
        assert guests.slots.held_off_s() == pytest.approx(LONGEST_S)

    run(work)


async def room(slots: UpstreamSlots) -> int:
    """Lines that it takes now; all are given back."""
    count, ask = 0, Ask("t", 0, now(), lane="batch")
    try:
        while True:
            await slots.take(ask)
            count += 1
    except DeadlineError:
        for _ in range(count):
            slots.release(ask)
    return count


def test_an_upstream_that_had_no_room_gets_half_as_many_lines_and_more_as_it_answers() -> None:
    async def work() -> None:
        slots = UpstreamSlots(None, 8, QueueSettings(), now)
        for lines in (4, 2, 1, 1):
            slots.hold_off(1.0)
            slots.hold_off(1.0)  # the answer to another line of the same time
            await asyncio.sleep(1.0)
            assert await room(slots) == lines
        for lines in (2, 3, 4):
            for _ in range(lines):
                slots.answered()
            assert await room(slots) == lines
        for _ in range(100):
            slots.answered()
        assert await room(slots) == 8

    run(work)


def test_online_requests_do_not_keep_an_upstream_that_had_no_room_from_every_line() -> None:
    async def work() -> None:
        slots = UpstreamSlots(None, 8, QueueSettings(), now)
        for _ in range(6):
            await slots.take(Ask("t", 0, now()))
        for _ in range(5):
            slots.hold_off(1.0)
            await asyncio.sleep(1.0)
        assert await room(slots) == 1

    run(work)
