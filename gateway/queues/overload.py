"""Recognises sessions that push one another out of the caches. Pure: no I/O, no clock.

A session asks again when it has read its answer, and needs what was computed for it then. While the caches hold the
sessions that take turns, hardly anything is computed twice. When they do not, whoever gets in pushes out somebody who
will be back, and the engines compute again and again what they had; all the more the more of them wait.

    share    what went into computing again, of the seconds that engines gave us and those in which nobody waited
    holds    from `overload_share` on, until the share is less than half of that

New prompts, however many and however long, are nothing of this kind: nothing that is known of them was lost. Seconds in
which nobody waits count as well, because a session that comes back rarely may be computed again by who has time for it.
lane.py tells it what it sends.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 60.0
"""What was seconds ago counts for exp(-seconds / MEMORY_S)."""

LEAST_S: Final = 15.0
"""Of engines' time, before a share of it means anything."""


class Overload:
    """Of one lane. Times are those of any clock that does not go back."""

    def __init__(self, begins: float) -> None:
        """`begins` is the share from which on it holds."""
        self.holds = False
        self._begins = begins
        self._now_s = 0.0
        self._again_s = 0.0
        self._total_s = 0.0

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self._again_s / max(self._total_s, LEAST_S)

    def computed(self, seconds: float, again_s: float) -> None:
        """So much time an engine will need for a request, `again_s` of it for what had been computed before."""
        self._total_s += seconds
        self._again_s += again_s

    def look(self, now_s: float, idle_engines: int, *, goes_on: bool = False) -> bool:
        """Whether it holds now. `idle_engines` are those that had nobody waiting for them since the last look. What
        `goes_on` does not end, however little is computed again: that is so because somebody is kept waiting."""
        passed_s = max(0.0, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        kept = math.exp(-passed_s / MEMORY_S)
        self._again_s *= kept
        self._total_s = self._total_s * kept + MEMORY_S * (1 - kept) * idle_engines
        self.holds = (self.holds and goes_on) or self.share >= self._begins / (2 if self.holds else 1)
        return self.holds
