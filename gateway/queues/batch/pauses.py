"""Pauses of models whose lines found no engine, or no room there. Pure, with a clock.

    paused    none of its lines begins
    doubted   its pause is over and none of its lines was answered since: they begin one by one
    open      its lines begin, as many as have room

Clients choose names of models, so MAX_PAUSES are remembered, and models that were answered come before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

MAX_PAUSES: Final = 1024
"""Models that are paused or doubted, and models that were answered, at most."""

FIRST_S: Final = 2.0
LONGEST_S: Final = 30.0
"""Without a requested time, a pause is twice as long as the one before it, from FIRST_S to LONGEST_S."""

MAX_REQUESTED_S: Final = 3600.0
"""Longest pause that an upstream may request: other tenants may have another one for the model."""


class Pauses:
    """Those of one gateway."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_PAUSES) -> None:
        self._clock = clock
        self._most = most
        self._pauses: dict[str, tuple[float, float]] = {}  # model -> its end by the clock, seconds of the next one
        self._answered: dict[str, None] = {}  # the one whose last answer is longest ago first

    def num_paused(self) -> int:
        """Models none of whose lines begins now."""
        now_s = self._clock()
        return sum(until_s > now_s for until_s, _ in self._pauses.values())

    def open(self, models: Iterable[str]) -> list[str]:
        """Models whose lines may begin: of those that were answered, and of `models`."""
        now_s = self._clock()
        return [model for model in dict.fromkeys((*self._answered, *models)) if self.until_s(model) <= now_s]

    def until_s(self, model: str) -> float:
        """The end of its pause, by the clock; long ago without one."""
        return self._pauses.get(model, (float("-inf"), 0.0))[0]

    def is_doubted(self, model: str) -> bool:
        """Whether it was paused and none of its lines was answered since."""
        return model in self._pauses

    def pause(self, model: str, requested_s: float | None, left_s: float) -> None:
        """Each time for longer and at least as requested, but for no longer than MAX_REQUESTED_S and the `left_s` of
        the job. Lines that ran together count once."""
        now_s = self._clock()
        wanted_s = min(requested_s or 0.0, max(left_s, 0.0), MAX_REQUESTED_S)
        self._answered.pop(model, None)
        until_s, pause_s = self._pauses.pop(model, (float("-inf"), wanted_s or FIRST_S))
        if until_s > now_s:
            self._pauses[model] = max(until_s, now_s + wanted_s), pause_s
            return
        if len(self._pauses) >= self._most:
            del self._pauses[min(self._pauses, key=self.until_s)]
        self._pauses[model] = now_s + max(pause_s, wanted_s), min(2 * pause_s, LONGEST_S)

    def answered(self, model: str) -> None:
        """One of its lines was answered, even with an error."""
        self._pauses.pop(model, None)
        self._answered.pop(model, None)
        self._answered[model] = None
        if len(self._answered) > self._most:
            del self._answered[next(iter(self._answered))]

    def idle(self, model: str) -> None:
        """None of its lines waits."""
        self._answered.pop(model, None)
