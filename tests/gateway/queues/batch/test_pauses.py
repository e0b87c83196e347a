"""Pauses of models: how long they are, and how many are remembered."""

from __future__ import annotations

from gateway.queues.batch.pauses import FIRST_S, LONGEST_S, MAX_REQUESTED_S, Pauses
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
    assert (pauses.open(["m", "n"]), pauses.is_doubted("m")) == (["m", "n"], False)
    pauses.pause("m", None, 60.0)
    assert (pauses.open(["m", "n"]), pauses.num_paused()) == (["n"], 1)
    clock.now_s = FIRST_S
    assert (pauses.open(["m", "n"]), pauses.num_paused()) == (["m", "n"], 0)
    assert pauses.is_doubted("m")
    pauses.answered("m")
    assert not pauses.is_doubted("m")


def test_models_that_were_answered_come_first_until_none_of_their_lines_waits() -> None:
    pauses = Pauses(Clock(0.0))
    pauses.answered("good")
    assert pauses.open(["x", "y"]) == ["good", "x", "y"]
    pauses.idle("good")
    assert pauses.open(["x"]) == ["x"]


def test_so_many_are_remembered_and_the_pause_that_ends_first_is_forgotten_for_one_more() -> None:
    pauses = Pauses(Clock(0.0), most=2)
    pauses.pause("long", 500.0, 1e6)
    pauses.pause("soon", None, 1e6)
    pauses.pause("one more", None, 1e6)
    assert [pauses.is_doubted(model) for model in ("long", "soon", "one more")] == [True, False, True]
    for model in "abc":
        pauses.answered(model)
    assert pauses.open([]) == ["b", "c"]
