from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import DIGEST_BYTES
from gateway.queues.admission_control import MEMORY_S, AdmissionControl, Overload, choose_open
from gateway.queues.router import EngineSlots
from gateway.queues.sessions import Sessions
from gateway.types import Ask
from tests.fakes.pipeline import FakeEngine, hello

BLOCKS = 1000


def engine_slots(*names: str) -> list[EngineSlots[FakeEngine]]:
    return [EngineSlots(FakeEngine(hello(incarnation=name, num_blocks=BLOCKS), name), name, 1) for name in names]


BLOCK = hello().namespace.block_size


def ask(blocks: int, **fields: Any) -> Ask:
    return Ask("t", blocks * BLOCK, 1e9, **fields)


def filled(**sent: tuple[int, float]) -> Sessions:
    """A session of so many blocks that was sent to each engine at some time."""
    sessions = Sessions()
    for number, (name, (blocks, sent_s)) in enumerate(sent.items()):
        digests = b"".join((10_000 * number + block).to_bytes(DIGEST_BYTES, "big") for block in range(blocks))
        sessions.sent(None, digests, name, sent_s)
    sessions.kept_s = 30.0
    return sessions


def test_who_would_push_somebody_out_is_taken_by_the_engine_that_is_open_to_all() -> None:
    admission = AdmissionControl(engine_slots("a", "b", "c"), filled(a=(800, 0.0), b=(500, 0.0)), {"c"}, 10.0)
    assert admission.closed(ask(600)) == {"a", "b"}
    assert admission.closed(ask(400)) == {"a"}
    assert admission.closed(ask(100)) == frozenset()


def test_who_finds_half_of_its_prompt_somewhere_is_kept_from_nowhere() -> None:
    admission = AdmissionControl(engine_slots("a", "b", "c"), filled(a=(900, 0.0), b=(900, 0.0)), {"c"}, 10.0)
    assert admission.closed(ask(900, cached_tokens={"a": 450 * BLOCK})) == frozenset()
    assert admission.closed(ask(900, cached_tokens={"a": 449 * BLOCK, "b": 400 * BLOCK})) == {"a", "b"}


def test_a_little_is_taken_everywhere_and_priority_and_groups_as_well() -> None:
    admission = AdmissionControl(engine_slots("a", "b"), filled(a=(1000, 0.0)), {"b"}, 10.0)
    assert admission.closed(ask(11)) == {"a"}
    for free in (ask(10), ask(600, tier="priority"), ask(600, only="a")):
        assert admission.closed(free) == frozenset()


def test_who_stays_away_is_not_waited_for() -> None:
    assert AdmissionControl(engine_slots("a", "b"), filled(a=(800, 0.0)), {"b"}, 31.0).closed(ask(600)) == frozenset()


def test_a_prompt_that_is_longer_than_the_cache_is_taken_by_an_empty_one() -> None:
    admission = AdmissionControl(engine_slots("a", "b", "c"), filled(b=(20, 0.0)), {"c"}, 10.0)
    assert admission.closed(ask(5000)) == {"b"}


def test_what_is_sent_takes_room() -> None:
    admission = AdmissionControl(engine_slots("a", "b"), filled(), {"b"}, 10.0)
    assert admission.closed(ask(600)) == frozenset()
    admission.add("a", ask(600))
    assert admission.closed(ask(600)) == {"a"}
    admission.add("b", ask(600))


def test_one_engine_in_eight_is_open_to_all_and_stays_so() -> None:
    names = [f"e{number}" for number in range(9)]
    sessions = filled(e3=(900, 0.0), e5=(800, 0.0))
    assert choose_open(engine_slots("e0"), set(), sessions, 1.0) == {"e0"}
    assert choose_open(engine_slots(*names[:8]), set(), sessions, 1.0) == {"e3"}
    assert choose_open(engine_slots(*names), set(), sessions, 1.0) == {"e3", "e5"}
    assert choose_open(engine_slots(*names[:8]), {"e7"}, sessions, 1.0) == {"e7"}
    assert choose_open(engine_slots(*names[:7]), {"e7"}, sessions, 1.0) == {"e3"}


BEGINS = 0.4


def play(overload: Overload, seconds: int, *, again: float, busy: float = 1.0, idle_engines: int = 0) -> None:
    """One engine, a second at a time: it works for `busy` of it, and a share `again` of that is for the second time."""
    for _ in range(seconds):
        overload.look(overload._now_s + 1.0, idle_engines)
        overload.computed(busy, busy * again)


def test_engines_that_compute_the_same_again_while_others_wait_are_overloaded() -> None:
    overload = Overload(BEGINS)
    play(overload, 120, again=0.8)
    assert overload.look(121.0, 0)
    assert 0.75 < overload.share < 0.85


def test_new_prompts_are_no_overload_however_many() -> None:
    overload = Overload(BEGINS)
    play(overload, 600, again=0.0)
    assert overload.share == 0.0
    assert not overload.holds


def test_what_is_computed_again_in_spare_time_is_no_overload() -> None:
    overload = Overload(BEGINS)
    play(overload, 600, again=0.9, busy=0.2, idle_engines=1)
    assert not overload.holds
    assert overload.share < 0.2


def test_it_ends_when_the_share_is_half_of_that_with_which_it_begins() -> None:
    overload = Overload(BEGINS)
    play(overload, 300, again=0.35)
    assert not overload.holds
    play(overload, 300, again=0.45)
    assert overload.holds
    play(overload, 300, again=0.25)
    assert overload.holds
    play(overload, 300, again=0.15)
    assert not overload.holds


def test_it_ends_by_itself_when_nobody_comes_any_more() -> None:
    overload = Overload(BEGINS)
    play(overload, 300, again=0.9)
    assert overload.holds
    assert not overload.look(300.0 + 3 * MEMORY_S, 1)


def test_a_few_seconds_of_work_say_nothing() -> None:
    overload = Overload(BEGINS)
    play(overload, 5, again=1.0)
    assert not overload.look(5.0, 0)


def test_one_of_several_gateways_sees_what_all_of_them_would() -> None:
    """Each sends half of it, and nobody's engines are idle."""
    whole, half = Overload(BEGINS), Overload(BEGINS)
    play(whole, 300, again=0.6)
    play(half, 300, again=0.6, busy=0.5)
    assert abs(whole.share - half.share) < 1e-9


EVENTS = st.lists(st.tuples(st.floats(0, 600), st.floats(0, 100), st.floats(0, 1), st.integers(0, 8)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.floats(0, 1e9))
def test_the_share_is_one(events: list[tuple[float, float, float, int]], began_s: float) -> None:
    overload, now_s = Overload(BEGINS), began_s
    for passed_s, seconds, again, idle_engines in events:
        now_s += passed_s
        overload.look(now_s, idle_engines)
        overload.computed(seconds, seconds * again)
        assert 0.0 <= overload.share <= 1.0 + 1e-9
        before_s = now_s - 1.0
        held = overload.share
        overload.look(before_s, idle_engines)  # a clock that went back changes nothing
        assert overload.share == held
