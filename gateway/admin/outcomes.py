"""What became of a request, in a word, and as figures of the history: how many ended in which way, and how long they
took, as counts of times by bucket, which add up over processes and steps of time. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.api.record import CLIENT_LEFT
from gateway.ledger.base import Figures
from gateway.types import Trace

HITS: Final = ("exact", "shared", "semantic", "prefix", "miss", "bypass")
"""What answered: the response cache, an answer that was being generated, one that means the same; of what was
generated, whether a part of its prompt was cached, by an engine or an upstream; where none was, "bypass" is what its
client kept from a cache (no-store, off, no blocks)."""

BUCKETS: Final = 96
_LEAST_MS: Final = 0.1
_A_DOUBLING: Final = 4
"""Buckets in which a time doubles: a percentile is wrong by no more than 9%."""

_BOUNDS_MS: Final = [_LEAST_MS * 2 ** ((number + 0.5) / _A_DOUBLING) for number in range(BUCKETS - 1)]

FIRST_TOKEN: Final = tuple(f"first_token_{number}" for number in range(BUCKETS))
INTER_TOKEN: Final = tuple(f"inter_token_{number}" for number in range(BUCKETS))
COLUMNS: Final = frozenset((*HITS, "ended", "errors", *FIRST_TOKEN, *INTER_TOKEN))
"""Of the history, besides those of the ledger: how many ended, and of them failed or were answered by what; times by
bucket."""


def has_failed(status: int) -> bool:
    """A client that left is no error."""
    return status >= 400 and status != CLIENT_LEFT


def hit_of(trace: Trace, status: int) -> str:
    """One of HITS; empty where nothing answered."""
    lookup = trace.lookup
    if trace.hit is not None and lookup is not None and lookup.outcome in HITS:
        return lookup.outcome
    if trace.first_token_ms is None or has_failed(status):
        return ""
    if trace.cached_tokens:
        return "prefix"
    return "bypass" if trace.uncached or (lookup is not None and lookup.unwanted) else "miss"


def add_figures(figures: Figures, trace: Trace, status: int, total_ms: float, hit: str) -> None:
    """Of one request that is over."""
    failed = has_failed(status)
    columns = ["ended", *(["errors"] if failed else []), *([hit] if hit else [])]
    if (first_ms := trace.first_token_ms) is not None and not failed:
        columns.append(FIRST_TOKEN[bucket(first_ms)])
        if trace.completion_tokens > 1 and trace.hit is None:
            each_ms = (total_ms - first_ms) / (trace.completion_tokens - 1)
            columns.append(INTER_TOKEN[bucket(each_ms)])
    for column in columns:
        figures[column] = figures.get(column, 0) + 1


def bucket(ms: float) -> int:
    return bisect_left(_BOUNDS_MS, ms)


def percentile(figures: Mapping[str, int], names: Sequence[str], share: float) -> float | None:
    """Of the times in these buckets, in milliseconds."""
    counts = [figures.get(name, 0) for name in names]
    left = share * sum(counts)
    if not any(counts):
        return None
    for number, count in enumerate(counts):
        left -= count
        if left <= 0 and count:
            return float(f"{_LEAST_MS * 2 ** (number / _A_DOUBLING):.3g}")
    return None
