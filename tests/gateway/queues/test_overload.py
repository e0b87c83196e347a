from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.queues.admission_control import MEMORY_S, Overload

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
