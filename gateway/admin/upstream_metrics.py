"""What /metrics says of each upstream. Labels are few: upstreams are configured ones, kinds names in the code,
and statuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_OPEN: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


def upstream_metrics(upstreams: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """One family after the other; those without a sample too."""
    requests = CounterMetricFamily(
        "kvasir_upstream_requests", "Requests sent to an upstream, retries among them.", labels=("upstream",)
    )
    errors = CounterMetricFamily(
        "kvasir_upstream_errors",
        "Failed requests to an upstream by kind: connect, timeout, lost, busy, full, late, key, "
        "redirect, usage, or a status from 400 on.",
        labels=("upstream", "kind"),
    )
    unmetered = CounterMetricFamily(
        "kvasir_upstream_unmetered",
        "Answers of an upstream without usage, or with an absurd one.",
        labels=("upstream",),
    )
    hints = CounterMetricFamily(
        "kvasir_upstream_hints", "Requests to which a caching hint was added.", labels=("upstream",)
    )
    in_flight = GaugeMetricFamily(
        "kvasir_upstream_in_flight", "Requests that an upstream has, or that wait for it.", labels=("upstream",)
    )
    waiting = GaugeMetricFamily(
        "kvasir_upstream_waiting", "Online requests that wait in the gateway for a slot there.", labels=("upstream",)
    )
    batch_in_flight = GaugeMetricFamily(
        "kvasir_upstream_batch_in_flight", "Lines of batches that have a slot at an upstream.", labels=("upstream",)
    )
    batch_waiting = GaugeMetricFamily(
        "kvasir_upstream_batch_waiting", "Lines of batches that wait for a slot there.", labels=("upstream",)
    )
    breaker = GaugeMetricFamily(
        "kvasir_upstream_breaker_open",
        "1 while the breaker is open, 0.5 while one request tries the upstream, 0 while it is closed.",
        labels=("upstream",),
    )
    for name, figures in upstreams.items():
        requests.add_metric([name], figures["requests"])
        unmetered.add_metric([name], figures["unmetered"])
        hints.add_metric([name], figures["hints"])
        in_flight.add_metric([name], figures["in_flight"])
        waiting.add_metric([name], figures["waiting"])
        batch_in_flight.add_metric([name], figures["batch_in_flight"])
        batch_waiting.add_metric([name], figures["batch_waiting"])
        breaker.add_metric([name], _OPEN[figures["breaker"]])
        for kind, count in figures["errors"].items():
            errors.add_metric([name, kind], count)
    yield from (requests, errors, unmetered, hints, in_flight, waiting, batch_in_flight, batch_waiting, breaker)
