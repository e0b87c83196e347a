from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Load
from gateway.errors import DeadlineError, EngineLostError, QueueFullError
from gateway.queues.engine_queue import EngineQueue
from gateway.queues.slots import FEW
from tests.fakes.guests import FAR, NORTH, SOUTH, Guests, JumpingLoop, ask, engines, queue_of, run, turn
from tests.fakes.pipeline import FakeEngine, hello
from tests.fakes.waiting import until


def test_a_free_place_is_taken_without_waiting() -> None:
    async def work() -> None:
        queue = queue_of(places=2)
        place = queue.slot([FakeEngine(hello())], ask())
        entering = place.__aenter__()
        with pytest.raises(StopIteration):
            entering.send(None)  # not one await between asking and having it
        assert queue.status().in_flight == {"engine-1": 1}
        await place.__aexit__(None, None, None)
        assert queue.status().in_flight == {}

    run(work)


def test_places_are_twice_what_the_engine_runs_unless_set() -> None:
    async def work() -> None:
        guests = Guests(queue_of(places=0), [FakeEngine(hello(max_sequences=3))])
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
        assert guests.served == ["first", "south-0", "north-0", "south-1", "north-1", "north-2", "north-3"]

    run(work)


def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    async def work() -> None:
        guests = Guests(queue_of())
        holder = guests.queue.slot(guests.engines, ask())
        await holder.__aenter__()
        guests.come("second")
        await turn()
        await holder.__aexit__(None, None, None)  # the slot is second's now, though second has not run yet
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
        await guests.go("a", "d", "b")

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


def test_an_overload_is_told_once_when_it_begins_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="gateway.queues.slots")

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        guests = Guests(queue_of(max_wait_s=1e6))
        assert guests.queue.status().overload == {}
        for turns in range(8):
            for session in range(4):
                digests = b"".join((1000 * session + block).to_bytes(16, "big") for block in range(600))
                guests.come(f"{turns}-{session}", prompt_tokens=10_000, digests=digests, block_size=16)
            await turn()
            for name in [f"{turns}-{session}" for session in range(4)]:
                loop.now += 10.0
                await guests.go(name)
        told = guests.queue.status().overload["demo"]
        assert told.holds
        assert told.share > 0.5
        assert told.held_back == 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "KV cache thrashing on model demo" in caplog.text
        loop.now += 600.0
        assert not guests.queue.status().overload["demo"].holds
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        assert guests.queue.status("batch").overload == {}

    run(work)


def test_who_is_held_back_is_looked_at_though_nothing_happens() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        here = [FakeEngine(hello(incarnation=name, num_blocks=600), name) for name in "ab"]
        guests = Guests(queue_of(max_wait_s=1e6), here)
        for session, engine in enumerate(here):  # each has its cache full
            digests = b"".join((1000 * session + block).to_bytes(16, "big") for block in range(600))
            name = f"first-{engine.name}"
            guests.come(name, prompt_tokens=9600, digests=digests, block_size=16, only=engine.hello.incarnation)
            await turn()
            await guests.go(name)
        group = next(iter(guests.queue._groups.values()))
        group.online.overload.computed(1000.0, 900.0)
        guests.queue.status()
        guests.come("x", prompt_tokens=8000)
        held_back = guests.come("y", prompt_tokens=8000)
        await turn()
        assert guests.served[2:] == ["x"]
        assert guests.queue.status().overload["demo"].held_back == 1
        await asyncio.sleep(60.0)
        assert "y" not in guests.served
        await asyncio.sleep(65.0)  # the others have stayed away for long enough
        assert "y" in guests.served
        assert guests.where["x"] != guests.where["y"]
        await guests.go("x", "y")
        await held_back

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
        await guests.go("a")
        assert guests.queue.status().in_flight == {}
        guests.queue.forget("never heard of")

    run(work)


def test_an_engine_that_has_left_or_come_back_since_it_was_looked_up_is_none_of_before() -> None:
    async def work() -> None:
        guests = Guests(queue_of(), engines("a", "b"))
        a, b = guests.engines
        guests.queue.forget("a")
        a.joined = False
        guests.come("one")
        guests.come("two")
        await turn()
        assert guests.where == {"one": "b"}
        a.hello, a.joined = hello(incarnation="a2"), True
        guests.queue.heard(a)
        await turn()
        assert guests.where == {"one": "b", "two": "a"}
        a.hello = hello(incarnation="a3", context_tokens=7)  # another model behind the same address
        guests.queue.forget("a2")
        guests.engines.reverse()
        guests.come("three")
        await guests.go("one")
        assert guests.where["three"] == "b"
        a.joined = b.joined = False
        with pytest.raises(EngineLostError):
            await guests.come("four")
        await guests.go("two", "three")

    run(work)


def test_the_place_is_given_back_when_the_work_fails() -> None:
    async def work() -> None:
        queue = queue_of()
        with pytest.raises(ValueError, match="broken"):
            async with queue.slot([FakeEngine(hello())], ask()):
                raise ValueError("broken")
        assert queue.status().in_flight == {}

    run(work)


TENANTS = ["x", "y", "z"]


def warm_at(name: str, tokens: int = 100) -> dict[str, Any]:
    return {"cached_tokens": {name: tokens}}


def test_who_is_better_off_waiting_for_its_engine_waits_and_gets_it() -> None:
    async def work() -> None:
        busy = Load(running=1, prefill_tokens_per_s=1000.0, decode_tokens_per_s=1000.0)
        guests = Guests(queue_of(), engines("a", "b", a=busy, b=Load(prefill_tokens_per_s=1000.0)))
        guests.come("first", prompt_tokens=5000, cached_tokens={"a": 5000})
        guests.come("next", prompt_tokens=5000, cached_tokens={"a": 5000})
        await turn()
        assert guests.where == {"first": "a"}
        guests.come("new", prompt_tokens=5000)
        await turn()
        assert guests.where == {"first": "a", "new": "b"}
        await guests.go("first")
        assert guests.where["next"] == "a"
        await guests.go("new", "next")

    run(work)


def test_an_engine_with_much_to_prefill_is_given_more_when_it_says_that_it_has_less() -> None:
    async def work() -> None:
        (engine,) = engines("a")
        guests = Guests(queue_of(places=4), [engine])
        guests.come("first")
        await turn()
        engine.load = Load(running=1, prefill_backlog=10_000, prefill_tokens_per_s=1000.0)
        engine.prefilling = {ask().tenant: 10_000}
        guests.come("second")
        await turn()
        assert guests.served == ["first"]
        guests.queue.heard(engine)
        await turn()
        assert guests.served == ["first"]
        engine.load = Load(running=1, prefill_backlog=400, prefill_tokens_per_s=1000.0)
        guests.queue.heard(engine)
        await turn()
        assert guests.served == ["first", "second"]
        await guests.go("first", "second")

    run(work)


def test_reports_of_many_engines_lead_to_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        here = engines(*(f"e{number}" for number in range(FEW + 1)))
        guests = Guests(queue_of(places=4), here)
        for number in range(len(here)):
            guests.come(f"first-{number}")
        await turn()
        for engine in here:
            engine.load = Load(running=1, prefill_backlog=10_000, prefill_tokens_per_s=1000.0)
            engine.prefilling = {ask().tenant: 10_000}
        guests.come("second")
        await turn()
        assert "second" not in guests.served
        looks, assign = [0], EngineQueue.assign

        def counting(queue: EngineQueue[Any], now_s: float) -> Any:
            looks[0] += queue.name == "online"
            return assign(queue, now_s)

        monkeypatch.setattr(EngineQueue, "assign", counting)
        for engine in here:
            engine.load = Load(running=1, prefill_backlog=400, prefill_tokens_per_s=1000.0)
            guests.queue.heard(engine)
        assert looks == [0]
        await until(lambda: "second" in guests.served)
        assert looks == [1]
        await guests.go(*guests.tasks)

    run(work)


def test_an_engine_that_joins_takes_from_those_who_wait() -> None:
    async def work() -> None:
        guests = Guests(queue_of(), engines("a"))
        guests.come("first")
        guests.come("second")
        await turn()
        other, same = FakeEngine(hello(incarnation="x", tokenizer="other"), "x"), engines("b")[0]
        guests.queue.heard(other)
        await turn()
        assert guests.where == {"first": "a"}
        guests.queue.heard(same)
        await turn()
        assert guests.where == {"first": "a", "second": "b"}
        await guests.go("first", "second")

    run(work)


def test_those_who_wait_for_several_engines_stay_when_one_is_lost() -> None:
    async def work() -> None:
        guests = Guests(queue_of(), engines("a", "b"))
        guests.come("one")
        guests.come("two")
        guests.come("three")
        pinned = guests.come("pinned", only="b")
        await turn()
        guests.queue.forget("b")
        with pytest.raises(EngineLostError):
            await pinned
        assert guests.queue.status().waiting == 1
        await guests.go("one", "two")
        assert guests.where["three"] == "a"
        await guests.go("three")

    run(work)


def test_answers_that_belong_together_go_to_their_engine_whatever_it_has_to_prefill() -> None:
    async def work() -> None:
        busy = Load(running=1, prefill_backlog=10**6, prefill_tokens_per_s=1000.0)
        guests = Guests(queue_of(places=2), engines("a", "b", a=busy))
        guests.come("one", only="a")
        guests.come("two", only="a")
        guests.come("three", only="a")
        await turn()
        assert guests.where == {"one": "a", "two": "a"}
        with pytest.raises(EngineLostError):
            await guests.come("nowhere", only="c")
        await guests.go("one")
        assert guests.where["three"] == "a"
        await guests.go("two", "three")

    run(work)


def test_an_engine_that_failed_a_request_gets_it_only_where_there_is_no_other() -> None:
    async def work() -> None:
        guests = Guests(queue_of(places=2), engines("a", "b"))
        guests.come("one", avoid=frozenset("a"), **warm_at("a"))
        guests.come("two", avoid=frozenset("ab"), **warm_at("a"))
        await turn()
        assert guests.where == {"one": "b", "two": "a"}
        await guests.go("one", "two")

    run(work)


MOVES = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["online", "batch"]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.sampled_from([1.0, 30.0, FAR]),
        ),
        st.tuples(st.sampled_from(["finish", "cancel", "fail"]), st.integers(0, 30)),
        st.tuples(st.just("lose"), st.integers(0, 1)),
        st.tuples(st.just("load"), st.integers(0, 1), st.sampled_from([0, 300, 10**6])),
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
    """Random arrivals, ends, failures, cancellations, losses, loads and jumps in time, with and without a turn between
    them. An engine that is lost comes back as another incarnation. Everybody ends exactly once."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        queue = queue_of(places, waiting, per_tenant)
        here = engines("e0", "e1")
        inside: dict[tuple[str, str], int] = {}
        guests: list[tuple[asyncio.Task[None], asyncio.Event, list[bool]]] = []

        def come(lane: Any, tenant: str, number: int, patience_s: float) -> None:
            done, fail = asyncio.Event(), [False]
            only = here[number].hello.incarnation if number < 2 else None
            cached = {} if only is None else {only: 80}

            async def stay() -> None:
                asked = ask(tenant, loop.time() + patience_s, 100 + number, cached_tokens=cached, lane=lane)
                async with queue.slot(list(here), asked) as engine:
                    name = (engine.hello.incarnation, lane)
                    inside[name] = inside.get(name, 0) + 1
                    assert inside[name] <= (places if lane == "online" else 2)
                    try:
                        await done.wait()
                        if fail[0]:
                            raise ValueError
                    finally:
                        inside[name] -= 1

            guests.append((asyncio.create_task(stay()), done, fail))

        def lose(number: int) -> None:
            lost = here[number]
            here[number] = FakeEngine(hello(incarnation=lost.hello.incarnation + "'"), lost.name)
            queue.forget(lost.hello.incarnation)

        def check() -> None:
            status = queue.status()
            assert status.waiting == queue.waiting == sum(status.waiting_by_tenant.values()) <= waiting
            assert all(0 < count <= per_tenant for count in status.waiting_by_tenant.values())
            assert all(taken <= places for taken in status.in_flight.values())
            assert sum(len(group.online) for group in queue._groups.values()) == status.waiting
            assert sum(len(group.batch) for group in queue._groups.values()) == queue.status("batch").waiting

        for kind, *given_ in moves:
            if kind in ("online", "batch"):
                come(kind, TENANTS[given_[0]], given_[1], given_[2])
            elif kind == "lose":
                lose(given_[0])
            elif kind == "load":
                here[given_[0]].load = Load(prefill_backlog=given_[1], prefill_tokens_per_s=1000.0)
                here[given_[0]].prefilling = {TENANTS[0]: given_[1]}
                queue.heard(here[given_[0]])
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
        for engine in here:
            engine.load = Load()
            queue.heard(engine)
        results = await asyncio.gather(*(task for task, _, _ in guests), return_exceptions=True)
        allowed = (QueueFullError, DeadlineError, EngineLostError, ValueError, asyncio.CancelledError)
        assert all(result is None or isinstance(result, allowed) for result in results), results
        for status in (queue.status(), queue.status("batch")):
            assert (status.waiting, status.in_flight, status.waiting_by_tenant) == (0, {}, {})
        assert not any(inside.values())
        engine_slots = [
            slots
            for group in queue._groups.values()
            for lane in group.queues.values()
            for slots in lane.engine_slots.values()
        ]
        assert all(not slots.taken for slots in engine_slots)
        for engine in here:
            queue.forget(engine.hello.incarnation)
        assert not queue._groups

    run(work)
