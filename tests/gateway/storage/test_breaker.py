"""When Redis is left alone, and what the log says of it. No Redis is asked: the tests say what became of each call."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from gateway.storage.breaker import REFUSALS_S, RedisBreaker
from tests.fakes.clock import Clock

RETRY_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> RedisBreaker:
    return RedisBreaker(retry_s=RETRY_S, clock=clock)


def fail(breaker: RedisBreaker, error: BaseException | None = None) -> None:
    wanted = error or RedisConnectionError("refused")
    with pytest.raises(type(wanted)), breaker.call():
        raise wanted


def answer(breaker: RedisBreaker) -> None:
    with breaker.call():
        pass


def is_kept_back(breaker: RedisBreaker) -> bool:
    try:
        answer(breaker)
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("error", [RedisConnectionError("refused"), OSError("no route"), TimeoutError()])
def test_a_failure_opens_it_for_a_time_and_the_answer_to_a_probe_closes_it(
    breaker: RedisBreaker, clock: Clock, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fail(breaker, error)
    assert (breaker.up, breaker.outages, breaker.wait_s()) == (False, 1, RETRY_S)
    assert is_kept_back(breaker)
    clock.now_s += RETRY_S
    fail(breaker)
    assert is_kept_back(breaker)
    clock.now_s += RETRY_S
    answer(breaker)
    assert (breaker.up, breaker.outages, breaker.wait_s()) == (True, 1, 0.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "is reachable again after 10.0 s" in caplog.text


def test_one_call_at_a_time_probes(breaker: RedisBreaker, clock: Clock) -> None:
    fail(breaker)
    clock.now_s += RETRY_S
    with breaker.call():
        assert is_kept_back(breaker)
    assert not is_kept_back(breaker)


def test_a_probe_that_is_cancelled_leaves_it_to_the_next_call(breaker: RedisBreaker, clock: Clock) -> None:
    fail(breaker)
    clock.now_s += RETRY_S
    fail(breaker, KeyboardInterrupt())
    assert not breaker.up
    answer(breaker)
    assert breaker.up


def test_a_call_that_is_slow_while_others_are_answered_opens_nothing(breaker: RedisBreaker) -> None:
    with pytest.raises(TimeoutError), breaker.call():
        answer(breaker)
        raise TimeoutError
    assert breaker.up
    answer(breaker)
    fail(breaker, TimeoutError())
    assert not breaker.up, "what was answered before the call began says nothing"


def test_what_was_asked_before_a_failure_does_not_say_that_redis_is_back(breaker: RedisBreaker) -> None:
    with breaker.call():
        fail(breaker)
    assert not breaker.up
    assert breaker.outages == 1


def test_what_redis_refuses_is_an_answer_and_is_logged_once_a_minute(
    breaker: RedisBreaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    full = OutOfMemoryError("command not allowed when used memory > 'maxmemory'")
    for _ in range(3):
        fail(breaker, full)
        breaker.refused(full)
    assert breaker.up
    assert caplog.text.count("used memory") == 1
    clock.now_s += REFUSALS_S
    breaker.refused(full)
    assert caplog.text.count("used memory") == 2
