"""The circuit breaker."""

from __future__ import annotations

from gateway.breaker import Breaker
from tests.fakes.clock import Clock


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(2, 10.0, clock)
    breaker.failed()
    breaker.failed()
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(2, 10.0, Clock())
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert (breaker.state, breaker.admit(), breaker.wait_s()) == ("closed", True, 0.0)
    breaker.failed()
    assert (breaker.state, breaker.admit(), breaker.wait_s()) == ("open", False, 10.0)


def test_after_its_time_one_request_alone_tries_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 9.9
    assert not breaker.admit()
    clock.now_s += 0.1
    assert breaker.state == "half-open"
    assert breaker.wait_s() == 0.0
    assert breaker.admit()
    assert not breaker.admit()
    assert breaker.wait_s() == 10.0


def test_the_try_that_succeeds_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 10
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "closed"


def test_the_try_that_fails_opens_it_for_as_long_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 10
    assert breaker.admit()
    breaker.failed()
    assert (breaker.state, breaker.wait_s()) == ("open", 10.0)


def test_a_try_whose_client_left_leaves_the_next_one_to_try() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 10
    assert breaker.admit()
    breaker.abandoned()
    assert breaker.admit()


def test_a_request_from_before_it_opened_does_not_keep_it_open_for_longer() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 5
    breaker.failed()
    assert breaker.wait_s() == 5.0


def test_answers_that_begin_and_break_off_are_failures_in_a_row() -> None:
    breaker = Breaker(2, 10.0, Clock())
    for _ in range(2):
        breaker.began()
        breaker.failed()
    assert breaker.state == "open"


def test_a_try_that_begins_to_answer_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 10
    assert breaker.admit()
    breaker.began()
    assert (breaker.state, breaker.admit()) == ("closed", True)
