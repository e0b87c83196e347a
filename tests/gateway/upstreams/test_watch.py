"""Over the waits for the pieces of an answer."""

from __future__ import annotations

from collections.abc import Callable

from gateway.upstreams.watch import Watch


class Time:
    """A clock and its one timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at = 0.0
        self.then: Callable[[], None] | None = None
        self.gave_up: list[float] = []

    def call_later(self, delay_s: float, then: Callable[[], None]) -> Time:
        assert delay_s > 0
        self.at, self.then = self.now + delay_s, then
        return self

    def cancel(self) -> None:
        self.then = None

    def watch(self, idle_s: float = 10.0, until_s: float = 100.0) -> Watch:
        return Watch(idle_s, until_s, lambda: self.gave_up.append(self.now), self.call_later, clock=lambda: self.now)

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self.then is not None and self.at <= end:
            self.now, then, self.then = self.at, self.then, None
            then()
        self.now = end


def test_a_wait_that_lasts_too_long_is_given_up_once_and_to_the_second() -> None:
    time = Time()
    watch = time.watch()
    time.go(3)
    with watch:
        time.go(50)
    assert time.gave_up == [13.0]
    assert not watch.over


def test_waits_that_end_in_time_are_none_of_its_business() -> None:
    time = Time()
    watch = time.watch()
    for _ in range(10):
        with watch:
            time.go(9)
    assert time.gave_up == []


def test_time_in_which_nobody_waits_does_not_count() -> None:
    time = Time()
    watch = time.watch()
    time.go(95)
    with watch:
        time.go(4)
    assert time.gave_up == []


def test_no_wait_lasts_beyond_the_end_of_all_time() -> None:
    time = Time()
    watch = time.watch()
    time.go(95)
    with watch:
        time.go(20)
    assert time.gave_up == [100.0]
    assert watch.over


def test_a_wait_that_begins_after_the_end_is_given_up_soon() -> None:
    time = Time()
    watch = time.watch()
    time.go(120)
    with watch:
        time.go(10)
    assert len(time.gave_up) == 1


def test_once_closed_it_is_quiet() -> None:
    time = Time()
    watch = time.watch()
    watch.close()
    with watch:
        time.go(200)
    assert time.gave_up == []
