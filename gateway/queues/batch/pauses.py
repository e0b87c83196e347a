"""Which models' lines are left alone, and until when, because one of them found its model away or without room. Pure,
with a clock. The worker asks it before it claims lines, and tells it what became of them.

    stranger  neither paused nor answered, as far as is known here; its lines begin if its pause could be remembered
    paused    none of its lines begins
    doubted   its pause is over and none of its lines was answered since: they begin one by one, one each look
    answered  its lines begin, as many as have room

Names of models come from clients, who may make up any number of them under a pattern of an upstream. So MAX_PAUSES are
remembered. While as many run, strangers wait until one of them is over, each pause is the longest at once, and what was
answered goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

MAX_PAUSES: Final = 1024
"""Models that are paused or doubted at a time. Each costs its name (lines.MODEL_CHARS), and a look at it whenever lines
are claimed. Nobody serves that many; names that clients make up may be more."""

FIRST_S: Final = 2.0
LONGEST_S: Final = 30.0
"""Where nothing is asked for, a pause is twice as long as the one before it, from FIRST_S to LONGEST_S."""

MAX_REQUESTED_S: Final = 3600.0
"""That a model is left alone at a time, whatever its upstream asks for. Other tenants may have another one for it."""

LONG_OVER_S: Final = 600.0
"""After which a pause that is over is forgotten: nobody has lines for its model, or they run and do not end."""


class _Pause(NamedTuple):
    until_s: float
    next_s: float
    """How long the one after it is, where nothing is asked for."""


class Pauses:
    """One gateway's."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_PAUSES) -> None:
        self._clock = clock
        self._most = most
        self._pauses: dict[str, _Pause] = {}
        self._answered: dict[str, None] = {}  # the one whose last answer is longest ago first

    def num_paused(self) -> int:
        """Models none of whose lines begins now."""
        now_s = self._clock()
        return sum(pause.until_s > now_s for pause in self._pauses.values())

    def open(self, models: Iterable[str], running: Collection[str]) -> list[str]:
        """Those whose lines may begin: of `models`, and of those that were answered, which `models` may not tell of
        among many others. `running` are those of which lines run."""
        room = self._most - self.num_paused() - sum(self._is_stranger(model) for model in running)
        found = []
        for model in dict.fromkeys((*self._answered, *models)):
            if self.until_s(model) > self._clock():
                continue
            if self._is_stranger(model) and model not in running:
                if room <= 0:
                    continue
                room -= 1
            found.append(model)
        return found

    def until_s(self, model: str) -> float:
        """Until when it is paused, by the clock; long ago if it is not."""
        pause = self._pauses.get(model)
        return float("-inf") if pause is None else pause.until_s

    def is_doubted(self, model: str) -> bool:
        """Whether it was paused and none of its lines was answered since."""
        return model in self._pauses

    def pause(self, model: str, requested_s: float | None, left_s: float) -> None:
        """Each time for longer, not less than was asked for, but not beyond what is `left_s` of the job's time, nor for
        longer than MAX_REQUESTED_S. Lines that ran together count once."""
        now_s = self._clock()
        wanted_s = min(requested_s or 0.0, max(left_s, 0.0), MAX_REQUESTED_S)
        self._answered.pop(model, None)
        before = self._pauses.pop(model, None)
        if before is not None and before.until_s > now_s:
            self._pauses[model] = before._replace(until_s=max(before.until_s, now_s + wanted_s))
            return
        is_crowded = self._make_room()
        pause_s = before.next_s if before is not None else wanted_s or FIRST_S
        if is_crowded:
            pause_s = max(pause_s, LONGEST_S)
        self._pauses[model] = _Pause(now_s + max(pause_s, wanted_s), min(2 * pause_s, LONGEST_S))

    def answered(self, model: str) -> None:
        """One of its lines was, whatever with."""
        self._pauses.pop(model, None)
        self._answered.pop(model, None)
        self._answered[model] = None
        if len(self._answered) > self._most:
            del self._answered[next(iter(self._answered))]

    def idle(self, model: str) -> None:
        """None of its lines waits: there is nothing to be told of it beyond its pause."""
        self._answered.pop(model, None)

    def forget(self) -> None:
        """Those that are long over."""
        over_s = self._clock() - LONG_OVER_S
        self._pauses = {model: pause for model, pause in self._pauses.items() if pause.until_s > over_s}

    def _is_stranger(self, model: str) -> bool:
        return model not in self._pauses and model not in self._answered

    def _make_room(self) -> bool:
        """Whether room had to be made for one more: the pause goes that was over first, or will be."""
        if len(self._pauses) < self._most:
            return False
        del self._pauses[min(self._pauses, key=self.until_s)]
        return True
