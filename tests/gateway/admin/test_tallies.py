"""What is counted without locks is written out as prometheus_client's own would be."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.tallies import Counts, Durations

BOUNDS = (0.001, 0.01, 0.5, 1, 10)
LABELS = ("model", "tenant")


def samples(registry: CollectorRegistry) -> list[object]:
    """All that a scrape tells, without when series were made, which is not told here."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [
        (family.name, family.type, family.documentation, [(one.name, one.labels, one.value) for one in family.samples])
        for family in families
        if not family.name.endswith("_created")
    ]


def test_a_scrape_is_that_of_prometheus_client() -> None:
    ours, theirs, dice = CollectorRegistry(), CollectorRegistry(), random.Random(3)
    count, seconds = Counts("kvasir_a", "Of a.", LABELS), Durations("kvasir_b_seconds", "Of b.", ("model",), BOUNDS)
    ours.register(count)
    ours.register(seconds)
    counter = Counter("kvasir_a", "Of a.", LABELS, registry=theirs)
    histogram = Histogram("kvasir_b_seconds", "Of b.", ("model",), buckets=BOUNDS, registry=theirs)
    assert samples(ours) == samples(theirs)
    for _ in range(300):
        model, tenant = dice.choice("ab"), dice.choice(["c", 'd"\n'])
        value = dice.choice([dice.choice(BOUNDS), dice.random(), 20 * dice.random(), 0])
        count.of(model, tenant).value += value
        counter.labels(model, tenant).inc(value)
        seconds.of(model).add(value)
        histogram.labels(model).observe(value)
    assert samples(ours) == samples(theirs)
    assert len(samples(ours)) == 2
