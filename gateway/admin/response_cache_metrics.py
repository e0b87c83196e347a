"""What /metrics says of the response cache, the semantic one included. Labels are few: reasons, events and outcomes are
names in the code, owners and models configured or served ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def response_cache_metrics(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """One family after the other; those of the semantic cache without a sample where it is not in use."""
    for name, text in (
        ("entries", "Answers in the memory of this gateway."),
        ("bytes", "Bytes of these answers."),
        ("in_flight", "Generations that identical requests may share."),
        ("waiting", "Requests that wait for these generations."),
    ):
        yield GaugeMetricFamily(f"kvasir_response_cache_{name}", text, value=float(stats[name]))
    for name, text, label in (
        ("bypassed", "Bypasses of the response cache by reason.", "reason"),
        ("events", "Events of the response cache.", "event"),
    ):
        counts = CounterMetricFamily(f"kvasir_response_cache_{name}", text, labels=(label,))
        for value, count in stats[name].items():
            counts.add_metric([value], count)
        yield counts
    yield from _semantic_cache(stats["semantic"] or {"outcomes": {}, "events": {}, "spaces": []})


def _semantic_cache(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for name, text, label in (
        ("outcomes", "Look-ups of the semantic cache by outcome.", "outcome"),
        ("events", "Events of the semantic cache.", "event"),
    ):
        counts = CounterMetricFamily(f"kvasir_semantic_cache_{name}", text, labels=(label,))
        for value, count in stats[name].items():
            counts.add_metric([value], count)
        yield counts
    for name, text in (
        ("entries", "Questions that are kept."),
        ("hits", "Answers by meaning since the budget began."),
        ("audits", "Hits that were compared with a fresh answer since the budget began."),
        ("wrong_requests", "Estimated wrong hits, as a share of the requests that the bound is about."),
        ("wrong_requests_high", "Upper end of the 95% interval of that share."),
        ("bound", "The bound for wrong hits."),
        ("closed", "1 while the bound leaves no room for hits."),
    ):
        figures = GaugeMetricFamily(f"kvasir_semantic_cache_{name}", text, labels=("owner", "model"))
        for space in stats["spaces"]:
            figures.add_metric([space["owner"], space["model"]], float(space[name]))
        yield figures
