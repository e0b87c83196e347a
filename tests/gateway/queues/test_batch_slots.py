"""The batch lane gets what the online lane leaves, and is never in its way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.protocol import Load
from gateway.errors import DeadlineError, EngineLostError
from tests.fakes.guests import FAR, Guests, engines, queue_of, run, turn
from tests.fakes.pipeline import FakeEngine, hello

WARM = Load(prefill_tokens_per_s=1000.0, decode_tokens_per_s=1000.0)


def one_engine(**load: int) -> list[FakeEngine]:
    return [FakeEngine(hello(max_sequences=4), load=replace(WARM, **load))]


def test_batch_requests_take_their_own_places_and_no_more() -> None:
    async def work() -> None:
        guests = Guests(queue_of(places=1, batch_slots=2), one_engine())
        for name in ("b1", "b2", "b3"):
            guests.come(name, lane="batch")
        await turn()
        assert guests.served == ["b1", "b2"]
        guests.come("online")
        await turn()
        assert guests.served == ["b1", "b2", "online"]  # the batch lane holds no place of it
        status = guests.queue.status("batch")
        assert (status.waiting, status.in_flight, status.admitted) == (1, {"engine-1": 2}, 2)
        assert guests.queue.status().in_flight == {"engine-1": 1}
        await guests.go("b1", "b2", "b3", "online")

    run(work)


def test_nobody_of_the_batch_lane_is_sent_while_an_online_request_waits() -> None:
    async def work() -> None:
        guests = Guests(queue_of(places=1, batch_slots=4), one_engine())
        guests.come("first")
        guests.come("second")
        guests.come("batch", lane="batch")
        await turn()
        assert guests.served == ["first"]
        await guests.go("first")
        assert guests.served == ["first", "second", "batch"]
        await guests.go("second", "batch")

    run(work)


def test_one_that_stops_waiting_in_the_online_lane_makes_way_for_the_batch_lane() -> None:
    async def work() -> None:
        guests = Guests(queue_of(places=1, batch_slots=4, max_wait_s=5.0), one_engine())
        guests.come("holder")
        leaver, late = guests.come("leaver"), guests.come("late")
        guests.come("batch", lane="batch")
        await turn()
        leaver.cancel()
        await turn()
        assert guests.served == ["holder"]
        with pytest.raises(DeadlineError):
            await late
        await turn()
        assert guests.served == ["holder", "batch"]
        await guests.go("holder", "batch")

    run(work)


def test_the_online_lane_leaves_what_the_engine_could_run_besides() -> None:
    async def work() -> None:
        (engine,) = here = one_engine(running=3)
        guests = Guests(queue_of(places=8, batch_slots=4), here)
        for name in ("b1", "b2"):
            guests.come(name, lane="batch")
        await turn()
        assert guests.served == ["b1"]
        engine.load = replace(WARM, running=3, batch_running=1)  # one of the others' has ended, one is ours
        guests.queue.heard(engine)
        await turn()
        assert guests.served == ["b1", "b2"]
        await guests.go("b1", "b2")

    run(work)


def test_nothing_is_sent_before_what_the_online_lane_has_to_prefill() -> None:
    async def work() -> None:
        (engine,) = here = one_engine(waiting=1, prefill_backlog=100)
        guests = Guests(queue_of(), here)
        guests.come("batch", lane="batch")
        await turn()
        assert guests.served == []
        engine.load = replace(WARM, waiting=1, running=1, prefill_backlog=100, batch_waiting=1, batch_backlog=100)
        guests.queue.heard(engine)
        await turn()
        assert guests.served == ["batch"]  # what is left to prefill is the batch lane's own
        await guests.go("batch")

    run(work)


def test_an_online_request_goes_by_what_the_batch_lane_has_at_an_engine() -> None:
    async def work() -> None:
        busy = replace(WARM, waiting=9, running=4, prefill_backlog=10**6)
        all_batch = replace(busy, batch_waiting=9, batch_running=4, batch_backlog=10**6)
        guests = Guests(queue_of(places=4), engines("a", "b", a=all_batch, b=replace(WARM, prefill_backlog=400)))
        guests.come("one", cached_tokens={"a": 100})
        guests.come("two", cached_tokens={"a": 100})
        await turn()
        assert guests.where == {"one": "a", "two": "a"}
        await guests.go("one", "two")

    run(work)


def test_batch_requests_go_where_their_prefix_is_and_in_the_order_in_which_they_came() -> None:
    async def work() -> None:
        guests = Guests(queue_of(batch_slots=1), engines("a", "b", a=WARM, b=WARM))
        held = {"b": 4000}
        for name, tokens in (("long", 4090), ("short", 4010), ("middle", 4050)):
            guests.come(name, lane="batch", prompt_tokens=tokens, cached_tokens=held)
        await turn()
        assert guests.where == {"long": "b"}
        await guests.go("long")
        await guests.go("short")
        assert guests.served == ["long", "short", "middle"]
        assert set(guests.where.values()) == {"b"}
        await guests.go("middle")

    run(work)


def test_batch_requests_are_not_counted_against_the_limits_of_the_online_line() -> None:
    async def work() -> None:
        guests = Guests(queue_of(waiting=1, per_tenant=1, batch_slots=1), one_engine())
        names = [f"b{number}" for number in range(20)]
        for name in names:
            guests.come(name, lane="batch")
        guests.come("first")
        guests.come("second")
        await turn()
        assert guests.served == ["b0", "first"]
        assert guests.queue.status("batch").waiting == 19
        assert guests.queue.waiting == 1
        for name in [*names, "first", "second"]:
            guests.leave[name].set()
        await asyncio.gather(*guests.tasks.values())
        assert guests.served[2] == "second"

    run(work)


def test_a_batch_request_waits_until_its_own_deadline_and_no_shorter() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        guests = Guests(queue_of(max_wait_s=60.0), one_engine(waiting=1, prefill_backlog=100))
        start_s = loop.time()
        with pytest.raises(DeadlineError):
            await guests.come("batch", lane="batch", deadline_s=start_s + 5000.0)
        assert loop.time() - start_s == pytest.approx(5000.0)
        assert guests.queue.status("batch").expired == 1

    run(work)


def test_the_batch_line_of_an_engine_that_is_gone_is_told_so() -> None:
    async def work() -> None:
        guests = Guests(queue_of(), one_engine(waiting=1, prefill_backlog=100))
        lost = guests.come("batch", lane="batch", deadline_s=FAR)
        await turn()
        guests.queue.forget("demo-1")
        with pytest.raises(EngineLostError):
            await lost
        assert guests.queue.status("batch").waiting == 0

    run(work)
