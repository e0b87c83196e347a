"""What is counted without locks is written out as prometheus_client's own would be."""

from __future__ import annotations

import random
import threading
import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.tallies import Counts, Durations
from tests.fakes.gateway import Gateway, running
from tests.fakes.waiting import until

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


NAME = 'kvasir_event_loop_{}_seconds_bucket{{le="{}"}} '
STOP_S = 0.2


async def late(gateway: Gateway, which: str) -> int:
    """Looks that were late by more than 0.1 s."""
    async with gateway.session.get(gateway.url + "/metrics") as response:
        text = await response.text()
    looks, soon = (
        int(float(text.partition(NAME.format(which, bound))[2].partition("\n")[0])) for bound in ("+Inf", 0.1)
    )
    return looks - soon


async def test_a_stop_of_the_loop_is_seen_and_whether_the_gateway_itself_worked() -> None:
    async with running() as gateway:

        async def grew(which: str, before: int) -> bool:
            return await late(gateway, which) > before

        before, own_before = await late(gateway, "lag"), await late(gateway, "own_lag")
        threading.Event().wait(STOP_S)  # no work: what a machine without a free processor looks like
        await until(lambda: grew("lag", before))
        assert await late(gateway, "own_lag") == own_before
        ends_s = time.process_time() + STOP_S
        while time.process_time() < ends_s:
            pass
        await until(lambda: grew("own_lag", own_before))
