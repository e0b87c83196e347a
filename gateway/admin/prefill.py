"""How long a token of a prompt takes that is not cached: the slope of the time to the first token over them. Pure.

A ratio would put the fixed part of every request, such as the way to a hosted API, on the few tokens of a well cached
prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

DECAY: Final = 0.99
"""Weight of what was known before, at each request."""
LEAST: Final = 8.0
"""Requests, by weight, before a slope is believed."""
MODELS: Final = 1000


class PrefillTimes:
    """Of MODELS models, the latest."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, tuple[float, float, float, float, float]] = OrderedDict()

    def note(self, model: str, tokens: int, ms: float) -> None:
        """A request with so many tokens that were not cached had its first token after so long."""
        count, x, y, xx, xy = (DECAY * one for one in self._sums.pop(model, (0.0,) * 5))
        self._sums[model] = (count + 1, x + tokens, y + ms, xx + tokens * tokens, xy + tokens * ms)
        if len(self._sums) > MODELS:
            self._sums.popitem(last=False)

    def ms_per_token(self, model: str) -> float:
        """0 while nothing can be said."""
        count, x, y, xx, xy = self._sums.get(model, (0.0,) * 5)
        spread = count * xx - x * x
        if count < LEAST or spread <= 1e-9 * xx * count:
            return 0.0
        return min(max(0.0, (count * xy - x * y) / spread), y / x)
