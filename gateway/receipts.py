"""Route receipts: of each request, the cached tokens that the index predicted beside those that its engine reported.

An index that says more than its engine's cache holds sends prompts to where they are computed again. Knows no index and
no I/O: the pipeline notes receipts here, app.py says what happens to an index that cannot be believed.

    exact   both are the same
    under   more was reused: another request computed the beginning meanwhile
    over    less was reused: it was evicted on the way, or the index is wrong
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW: Final = 100
"""Receipts of an engine, the latest ones that predict something, that decide whether its index is believed."""

MOST_LOST: Final = 0.1 * WINDOW
"""Predicted prefixes that may be missing in a window, each counted by the share of it that was missing.

Some are missing with a right index: they are evicted between the look-up and the engine's own. A prefix that waits w
seconds in an engine whose cache turns over in T seconds is evicted with probability w / T, about 1 s in 60; of 100
prefixes that is 2, and 10 or more once in 20,000 windows. A prefix counts once however long it is, because it is
evicted once: by tokens, a conversation that is a hundred times as long as the others would decide alone. A cache that
was lost without notice is found after 11 requests."""

HALF_LIFE_S: Final = 600.0
"""After which a reused token counts half for what its engine's cache is worth."""

WARN_S: Final = 60.0
"""From one line in the log about an engine's index to the next."""

MAX_ENGINES: Final = 1024
"""Whose receipts are kept; those of the one with the oldest receipt go first."""


@dataclass(slots=True)
class Figures:
    """Receipts of one engine, by name, since the start of the gateway."""

    receipts: int = 0
    exact: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0  # as reported
    error_tokens: int = 0  # sum of the absolute differences
    over_tokens: int = 0  # predicted and not reused
    distrusted: int = 0  # times that its index was not believed any more


@dataclass(slots=True)
class _Window:
    """Of one incarnation. `shares` of predicted prefixes that were missing, of receipts that predicted something;
    `recent_tokens` that were reused, each counting half after every HALF_LIFE_S, at `recent_s`."""

    recent_tokens: float = 0.0
    recent_s: float = 0.0
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    since_s: float = float("-inf")  # earlier predictions were made by an index that is gone


class Receipts:
    """Of all engines. `on_distrust` is called with an incarnation whose index is to be dropped, or read anew."""

    def __init__(
        self, on_distrust: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_distrust = on_distrust
        self._clock = clock
        self._figures: OrderedDict[str, Figures] = OrderedDict()  # by name of the engine
        self._incarnations: OrderedDict[str, str] = OrderedDict()  # by name
        self._windows: OrderedDict[str, _Window] = OrderedDict()  # by incarnation
        self._warned_s: OrderedDict[str, float] = OrderedDict()  # by name

    def note(self, engine: str, incarnation: str, predicted: int, cached: int, predicted_s: float) -> None:
        """A request's receipt. `predicted_s`, by `clock`, is when it was predicted."""
        figures = _newest(self._figures, engine, Figures)
        over = max(0, predicted - cached)
        figures.receipts += 1
        figures.exact += predicted == cached
        figures.predicted_tokens += predicted
        figures.cached_tokens += cached
        figures.error_tokens += abs(predicted - cached)
        figures.over_tokens += over
        window = _newest(self._windows, incarnation, _Window)
        window.recent_tokens, window.recent_s = self._recent(window) + cached, self._clock()
        _newest(self._incarnations, engine, str)
        self._incarnations[engine] = incarnation
        if predicted and predicted_s >= window.since_s:
            window.shares.append(over / predicted)
            if over and sum(window.shares) > MOST_LOST:
                self._distrust(engine, incarnation, figures, window)

    def of(self, engine: str) -> Mapping[str, float]:
        """An engine's figures by name; empty before its first receipt."""
        figures = self._figures.get(engine)
        if figures is None:
            return {}
        window = self._windows.get(self._incarnations.get(engine, "")) or _Window()
        return {**asdict(figures), "recent_tokens": round(self._recent(window), 1)}

    def _recent(self, window: _Window) -> float:
        """Tokens that were reused lately from the cache of one lifetime of an engine."""
        return float(window.recent_tokens * 0.5 ** ((self._clock() - window.recent_s) / HALF_LIFE_S))

    def _distrust(self, engine: str, incarnation: str, figures: Figures, window: _Window) -> None:
        figures.distrusted += 1
        if self._clock() - _newest(self._warned_s, engine, lambda: float("-inf")) >= WARN_S:
            self._warned_s[engine] = self._clock()
            log.warning(
                "index of engine %s dropped (%d times so far): of %d prompts whose prefix it should hold, %.0f%% of "
                "the prefix was missing. %s",
                engine,
                figures.distrusted,
                len(window.shares),
                100 * sum(window.shares) / len(window.shares),
                _SOME_REUSED if figures.cached_tokens else _NONE_REUSED,
            )
        window.shares.clear()
        window.since_s = self._clock()
        self._on_distrust(incarnation)


_SOME_REUSED: Final = "Its cache was cleared without notice, or its KV events are lost or wrong"
_NONE_REUSED: Final = (
    "It has not reported one cached token so far: its prefix caching is off, or it does not count cached tokens "
    "(vLLM counts them with --enable-prompt-tokens-details)"
)


def _newest(kept: OrderedDict[str, T], name: str, make: Callable[[], T]) -> T:
    """The value of a name, new where it has none. It is the last to go."""
    value = kept[name] = kept.pop(name) if name in kept else make()
    if len(kept) > MAX_ENGINES:
        kept.popitem(last=False)
    return value
