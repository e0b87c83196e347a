"""What is counted with every request: counters and histograms of Prometheus that one thread adds to.

prometheus_client writes them out like its own. Its own take a lock for each sum, which is a microsecond, and a dozen of
them are as much as the rest of what is noted about a request.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.api.unknown_fields import ODD

MAX_NAMES: Final = 100
OTHER: Final = "other"

EVERY_S: Final = 0.02
"""From one look to the next. A stop is found but for so much of it."""

BOUNDS_S: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class Count:
    """One series. Add to `value`, and never less than nothing."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Counts(Collector):
    """A counter, by labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._series: dict[tuple[str, ...], Count] = {}

    def of(self, *labels: str) -> Count:
        """The series with these values of its labels, which is there from now on."""
        if (count := self._series.get(labels)) is None:
            count = self._series[labels] = Count()
        return count

    def items(self) -> Iterable[tuple[tuple[str, ...], Count]]:
        """The values of the labels of each series, and the series."""
        return self._series.items()

    def values(self) -> dict[tuple[str, ...], float]:
        """By the values of the labels."""
        return {labels: count.value for labels, count in self._series.items()}

    def load(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Makes it what `values` of another, or the sum of several, say."""
        for labels, value in values.items():
            self.of(*labels).value = value

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._series.items():
            family.add_metric(labels, count.value)
        yield family


class Seconds:
    """One series of durations."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # by the bucket that is the first to hold it; behind them those of none
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds


class Durations(Collector):
    """A histogram of seconds, by labels. `bounds` are those of its buckets, the largest last."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, tuple(bounds)
        self._series: dict[tuple[str, ...], Seconds] = {}

    def of(self, *labels: str) -> Seconds:
        """See Counts."""
        if (seconds := self._series.get(labels)) is None:
            seconds = self._series[labels] = Seconds(self._bounds)
        return seconds

    def values(self) -> dict[tuple[str, ...], list[float]]:
        """By the values of the labels: how many are in each bucket, and the sum of all."""
        return {labels: [*seconds.counts, seconds.sum] for labels, seconds in self._series.items()}

    def load(self, values: Mapping[tuple[str, ...], Sequence[float]]) -> None:
        """See Counts."""
        for labels, (*counts, total) in values.items():
            seconds = self.of(*labels)
            seconds.counts, seconds.sum = list(map(int, counts)), total

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [_name(bound) for bound in (*self._bounds, float("inf"))]
        for labels, seconds in self._series.items():
            family.add_metric(labels, list(zip(names, accumulate(seconds.counts), strict=True)), seconds.sum)
        yield family


def _name(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


class IgnoredFieldCounts(Counts):
    """Unknown fields that requests had and the gateway ignored. Names are the clients' own, so their number is bounded:
    further ones are counted together, and so are those of other characters than names have, which may be anything."""

    def __init__(self) -> None:
        text = "Requests with a field that the gateway does not know and ignored."
        super().__init__("kvasir_ignored_fields", text, ("field",))

    def add(self, names: Iterable[str]) -> None:
        """Those of one request."""
        for name in names:
            is_known = (name,) in self._series or (len(self._series) < MAX_NAMES and ODD not in name)
            self.of(name if is_known else OTHER).value += 1


class LoopLag:
    """How long the event loop of an application stands still, measured by itself: what every request of this gateway
    waits besides its own work. Two histograms of how late a timer was:

        lag      as clients notice it
        own lag  the part of it in which this process ran: work on the loop, or a thread that kept the interpreter. The
                 rest is a machine that had no processor for it
    """

    def __init__(self, lag: Durations, own_lag: Durations) -> None:
        self._lag, self._own_lag = lag.of(), own_lag.of()
        self._timer: asyncio.TimerHandle | None = None

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """While the application runs."""
        self._look_again(asyncio.get_running_loop(), time.monotonic(), time.process_time())
        yield
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self, loop: asyncio.AbstractEventLoop, now_s: float, ran_s: float) -> None:
        self._timer = loop.call_later(EVERY_S, self._look, loop, now_s + EVERY_S, ran_s)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float, ran_before_s: float) -> None:
        now_s, ran_s = time.monotonic(), time.process_time()
        late_s = max(0.0, now_s - due_s)
        self._lag.add(late_s)
        self._own_lag.add(min(late_s, ran_s - ran_before_s))
        self._look_again(loop, now_s, ran_s)
