"""How quickly an engine computes: a moving average that needs no clock."""

from __future__ import annotations

import math

RATE_MEMORY_S = 30.0
"""Seconds of computing after which a measurement counts a third."""


class Rate:
    """Tokens per second as a moving average; long steps weigh more than short ones."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = math.exp(-seconds / RATE_MEMORY_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def per_s(self) -> float:
        """0 before anything was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
