"""Over the waits for the pieces of one answer: one timer for all of them, because a timer for each costs more than
passing the piece on.

Time in which nobody waits does not count: while a client reads slowly, it is not the upstream that is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Watch:
    """A context manager, entered for each wait. Calls `give_up` once, when a wait has lasted for `idle_s`, or when one
    lasts beyond `until_s` of the clock."""

    def __init__(
        self,
        idle_s: float,
        until_s: float,
        give_up: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], Timer],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call_later` is the event loop's."""
        self._idle_s = idle_s
        self._until_s = until_s
        self._give_up = give_up
        self._call_later = call_later
        self._clock = clock
        self._since_s: float | None = None  # when the wait began that is going on
        self._timer: Timer | None = None
        self._look()

    def __enter__(self) -> None:
        self._since_s = self._clock()

    def __exit__(self, *exc: object) -> None:
        self._since_s = None

    @property
    def over(self) -> bool:
        """Whether all time is over, and not that of one wait alone."""
        return self._clock() >= self._until_s

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Now, and again as soon as a wait can have lasted too long."""
        now_s = self._clock()
        since_s = now_s if self._since_s is None else self._since_s
        left_s = min(since_s + self._idle_s, self._until_s) - now_s
        if left_s <= 0 and self._since_s is not None:
            self._give_up()
            return
        self._timer = self._call_later(left_s if left_s > 0 else self._idle_s, self._look)
