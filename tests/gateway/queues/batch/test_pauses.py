"""Pauses of models: how long they are, what is remembered of them, and what happens when there are too many."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from gateway.queues.batch.pauses import FIRST_S, LONG_OVER_S, LONGEST_S, MAX_REQUESTED_S, Pauses
from tests.fakes.clock import Clock


def test_a_model_is_left_alone_for_longer_each_time_and_not_for_less_than_was_asked_for() -> None:
    clock = Clock(0.0)
    pauses = Pauses(clock)

    def pause(asked_s: float | None, left_s: float = 1e6) -> float:
        """For how long its lines are left alone."""
        pauses.pause("m", asked_s, left_s)
        return pauses.until_s("m") - clock.now_s

    assert pause(None) == FIRST_S
    assert pause(3.0) == 3.0  # by a line that had begun before
    for after_s in (4.0, 8.0, 16.0, LONGEST_S, LONGEST_S):
        clock.now_s = pauses.until_s("m")
        assert pause(1.0) == after_s
    clock.now_s = pauses.until_s("m")
    assert pause(600.0) == 600.0
    clock.now_s = pauses.until_s("m")
    assert pause(1e9, left_s=50.0) == 50.0, "beyond the end of its job nobody waits"
    clock.now_s = pauses.until_s("m")
    assert pause(86400.0) == MAX_REQUESTED_S, "a day would be that of everybody's lines"
    clock.now_s = pauses.until_s("m")
    pauses.answered("m")
    assert pause(None) == FIRST_S


def test_a_model_is_doubted_from_its_pause_until_one_of_its_lines_is_answered() -> None:
    clock = Clock(0.0)
    pauses = Pauses(clock)
    assert (pauses.open(["m", "n"], []), pauses.is_doubted("m")) == (["m", "n"], False)
    pauses.pause("m", None, 60.0)
    assert (pauses.open(["m", "n"], []), pauses.num_paused()) == (["n"], 1)
    clock.now_s = FIRST_S
    assert (pauses.open(["m", "n"], []), pauses.num_paused()) == (["m", "n"], 0)
    assert pauses.is_doubted("m")
    pauses.answered("m")
    assert not pauses.is_doubted("m")


def test_a_pause_that_is_long_over_is_forgotten_and_no_other() -> None:
    clock = Clock(0.0)
    pauses = Pauses(clock)
    pauses.pause("never", None, 1e6)
    pauses.pause("long", MAX_REQUESTED_S, 1e6)
    clock.now_s = FIRST_S + LONG_OVER_S - 1
    pauses.forget()
    assert pauses.is_doubted("never")
    clock.now_s += 1
    pauses.forget()
    assert (pauses.is_doubted("never"), pauses.is_doubted("long")) == (False, True)
    pauses.pause("never", None, 1e6)
    assert pauses.until_s("never") - clock.now_s == FIRST_S


def test_while_as_many_are_paused_as_may_be_strangers_wait_and_what_was_answered_goes_on() -> None:
    clock = Clock(0.0)
    pauses = Pauses(clock, most=3)
    pauses.answered("good")
    for model in ("a", "b"):
        pauses.pause(model, None, 60.0)
    assert pauses.open(["x", "y", "a"], []) == ["good", "x"], "one more could be paused"
    assert pauses.open(["x", "y"], ["x"]) == ["good", "x"], "it runs, and may have to be"
    assert pauses.open(["x", "y"], ["good"]) == ["good", "x"]
    pauses.pause("x", None, 60.0)
    assert pauses.open(["x", "y"], []) == ["good"]
    pauses.idle("good")
    assert pauses.open(["x", "y"], []) == [], "one of which nothing waits is a stranger when it comes again"
    clock.now_s = FIRST_S
    assert pauses.open(["y", "z", "a"], []) == ["y", "z", "a"]


def test_what_has_to_be_paused_though_there_is_no_room_takes_that_of_the_pause_that_ends_first() -> None:
    clock = Clock(0.0)
    pauses = Pauses(clock, most=2)
    pauses.pause("long", 500.0, 1e6)
    pauses.pause("soon", None, 1e6)
    pauses.answered("good")
    pauses.pause("good", 0.01, 1e6)
    assert pauses.until_s("good") == LONGEST_S, "the longest at once"
    assert (pauses.is_doubted("long"), pauses.is_doubted("soon")) == (True, False)
    assert pauses.open(["soon", "long", "good"], []) == [], "whose pause was given up waits like any stranger"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["pause", "asked", "answered", "idle", "wait"])), max_size=40
    )
)
def test_the_limit_changes_nothing_for_those_who_are_no_more(happened: list[tuple[str, str]]) -> None:
    clock = Clock(0.0)
    both = (Pauses(clock, most=3), Pauses(clock, most=10**6))
    for model, what in happened:
        clock.now_s += 1.5 if what == "wait" else 0.0
        for pauses in both:
            if what in ("pause", "asked"):
                pauses.pause(model, 5.0 if what == "asked" else None, 1e6)
            elif what != "wait":
                (pauses.answered if what == "answered" else pauses.idle)(model)
        few, many = both
        assert sorted(few.open("abc", [])) == sorted(many.open("abc", []))
        assert [few.until_s(one) for one in "abc"] == [many.until_s(one) for one in "abc"]


MOST, AT_ONCE, LOOK_S = 64, 4, 0.5


def test_of_many_more_models_than_are_remembered_none_is_hammered_and_those_that_are_there_are_served() -> None:
    """300 names whose upstream is away, and two that are served; lines of the second come when all is crowded. As the
    worker does it: names by chance, four lines at a time, each of which takes a while."""
    chance, clock = random.Random(7), Clock(0.0)
    pauses = Pauses(clock, MOST)
    waiting = [f"made up {number}" for number in range(300)] + ["served"]
    tries: dict[str, list[float]] = defaultdict(list)
    told: dict[str, float] = {}
    running: list[tuple[float, str]] = []
    looks_without = 0
    for look in range(2400):
        clock.now_s = look * LOOK_S
        for _, model in [one for one in running if one[0] <= clock.now_s]:
            if model in ("served", "late"):
                pauses.answered(model)
            else:
                pauses.pause(model, None, 1e6)
                told.setdefault(model, clock.now_s)
        running = [one for one in running if one[0] > clock.now_s]
        if clock.now_s == 120.0:
            waiting.append("late")
        most = min(8 + pauses.num_paused(), len(waiting))
        models = pauses.open(chance.sample(waiting, most), {model for _, model in running})
        models.sort(key=[model for _, model in running].count)
        begun = models[: AT_ONCE - len(running)]
        for model in begun:
            tries[model].append(clock.now_s)
            assert clock.now_s - told.pop(model, -FIRST_S) >= FIRST_S
            running.append((clock.now_s + chance.choice((0.1, 0.6, 1.1)), model))
        looks_without = 0 if "served" in begun else looks_without + 1
        assert looks_without <= 5 or not tries["served"], "its lines begin as soon as there is room for one"
        assert pauses.num_paused() <= MOST
    assert len(tries["served"]) > 500
    assert len(tries["late"]) > 500
    made_up = [times for model, times in tries.items() if model.startswith("made up")]
    assert len(made_up) == 300
    late = sum(time_s >= 600.0 for times in made_up for time_s in times)
    assert late <= (MOST + AT_ONCE) * (1200 - 600) / LONGEST_S, "as if nobody else were away"
