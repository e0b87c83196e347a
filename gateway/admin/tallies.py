"""What is counted with every request: counters and histograms of Prometheus that one thread adds to.

prometheus_client writes them out like its own. Its own take a lock for each sum, which is a microsecond, and a dozen of
them are as much as the rest of what is noted about a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


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

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [_name(bound) for bound in (*self._bounds, float("inf"))]
        for labels, seconds in self._series.items():
            family.add_metric(labels, list(zip(names, accumulate(seconds.counts), strict=True)), seconds.sum)
        yield family


def _name(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
