"""Whose turn it is among tenants, and how long a wait is."""

from __future__ import annotations

import pytest

from gateway.fair_queue import MAX_RETRY_S, MIN_RETRY_S, RATE_SAMPLES, Pace, Turns, Waiting
from gateway.types import Ask


def took(turns: Turns, tenant: str, cost_s: float = 1.0) -> float:
    """Where the tenant stood whose request came now, and was sent."""
    waiter = Waiting(Ask(tenant, 1, 1e9), 0.0, cost_s=cost_s, since_s=turns.now_s)
    start_s = turns.start_s(waiter)
    turns.took(waiter)
    return start_s


def test_what_was_not_used_is_not_saved_up() -> None:
    turns = Turns()
    took(turns, "early")
    for _ in range(100):
        took(turns, "busy")
    assert took(turns, "early") >= took(turns, "busy") - 1.0


def test_turns_of_tenants_that_went_away_are_forgotten() -> None:
    turns = Turns()
    for number in range(5000):
        took(turns, f"t{number}", 0.001)
        took(turns, "busy")
        turns.forget_all_but(["busy"])
    assert len(turns._next_s) <= 1026


def test_a_wait_is_told_by_the_rate_of_the_last_ends_within_limits() -> None:
    pace = Pace()
    assert pace.wait_s(100, 0.0) == MIN_RETRY_S
    pace.ends.extend(number / 10 for number in range(3 * RATE_SAMPLES))
    now = pace.ends[-1]
    assert pace.wait_s(200, now) == pytest.approx(20.0, rel=0.05)
    assert (pace.wait_s(1, now), pace.wait_s(10_000, now)) == (MIN_RETRY_S, MAX_RETRY_S)
