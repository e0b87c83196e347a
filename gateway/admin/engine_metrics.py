"""What /metrics says of each engine: what its last step reported, and its own counters, as far as it has any.

The counters come from another process, perhaps of another version: what is missing, or no number, is left out. Labels
stay few: tiers are those of the protocol, tenants the ones whose leases keep the most blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.protocol import TIER_CODES
from gateway.admin.sources import EngineStatus

MAX_TENANTS: Final = 32
"""Of one engine, in the metric of blocks that their leases keep."""

_LABELS: Final = ("engine", "model")

_LOAD: Final = (
    ("waiting", "Sequences admitted and not yet running."),
    ("running", "Sequences running."),
    ("prefill_backlog", "Tokens still to be prefilled."),
    ("batch_waiting", "Of the sequences that wait, those of the batch lane."),
    ("batch_running", "Of the sequences that run, those of the batch lane."),
    ("batch_backlog", "Of the tokens still to be prefilled, those of the batch lane."),
    ("free_blocks", "Blocks that hold nothing."),
    ("cached_blocks", "Blocks that can be hit and evicted."),
    ("live_blocks", "Blocks in use by a sequence."),
    ("leased_blocks", "Blocks that are kept by a lease, cached or live."),
    ("prefill_tokens_per_s", "Tokens per second, moving average."),
    ("decode_tokens_per_s", "Tokens per second, moving average."),
)
_COUNTERS: Final = (
    ("evictions", ("evictions",), "Evicted blocks."),
    ("shared_tokens", ("shared_tokens",), "Cached tokens that another request computed after this one had arrived."),
    ("shared_waits", ("shared_waits",), "Times a request waited for another to compute their common prefix."),
    ("forks", ("forks",), "Answers that forked from another answer to the same prompt."),
    ("steps_given_up", ("steps_given_up",), "Batch steps abandoned for online requests."),
    ("preemptions", ("preemptions",), "Preempted sequences, which are computed again."),
    ("copied_blocks", ("copied_blocks",), "Shared blocks that were copied when one of their answers wrote into them."),
    ("leases_granted", ("leases", "granted"), "New leases, those that degraded at once among them."),
    ("leases_renewed", ("leases", "renewed"), "Uses of a lease by a later request."),
    ("leases_degraded", ("leases", "degraded"), "Leases whose blocks were left to eviction, for want of budget."),
    ("leases_kept_again", ("leases", "kept_again"), "Degraded leases that were used again and fitted."),
    ("leases_expired", ("leases", "expired"), "Leases whose time was up."),
    ("leases_lost", ("leases", "lost"), "Leases whose blocks turned out to be unusable."),
    ("leases_restored", ("leases", "restored"), "Leases of an earlier run that were kept again at the start."),
    ("lease_read_tokens", ("leases", "read_tokens"), "Tokens of the longest lease that each prompt began with."),
)
_TIER_GAUGES: Final = (
    ("blocks", "Blocks in a tier that can be hit."),
    ("bytes", "Bytes of those blocks."),
    ("capacity_bytes", "Bytes that the tier may have."),
)
_TIER_COUNTERS: Final = (
    ("saved", "Blocks copied into a tier."),
    ("restored", "Blocks copied from a tier to where the model runs."),
    ("dropped", "Blocks not copied into a tier, because its queue was full or it failed."),
    ("torn", "Blocks missing or damaged when they were read."),
    ("evictions", "Blocks evicted from a tier."),
)


def engine_metrics(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    """One family after the other; those without a sample too."""
    up = GaugeMetricFamily("kvasir_engine_up", "1 while the engine is ready.", labels=_LABELS)
    for engine in engines:
        up.add_metric(_names(engine), float(engine.state == "ready"))
    yield up
    loads = [(engine, asdict(engine.load)) for engine in engines if engine.incarnation is not None]
    for name, text in _LOAD:
        gauge = GaugeMetricFamily(f"kvasir_engine_{name}", text, labels=_LABELS)
        for engine, load in loads:
            gauge.add_metric(_names(engine), float(load[name]))
        yield gauge
    for name, path, text in _COUNTERS:
        counter = CounterMetricFamily(f"kvasir_engine_{name}", text, labels=_LABELS)
        for engine in engines:
            if (value := find_number(engine.stats, *path)) is not None:
                counter.add_metric(_names(engine), value)
        yield counter
    yield from _leases(engines)
    yield from _tiers(engines)


def find_number(stats: Mapping[str, Any], *path: str) -> float | None:
    """The number there, or None when there is none."""
    value: Any = stats
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None


def _leases(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    leases = GaugeMetricFamily(
        "kvasir_engine_leases", "Leases that are kept, and those that degraded.", labels=(*_LABELS, "state")
    )
    tenants = GaugeMetricFamily(
        "kvasir_engine_tenant_leased_blocks",
        "Blocks that the leases of a tenant keep, of those that keep the most.",
        labels=(*_LABELS, "tenant"),
    )
    blocks = GaugeMetricFamily(
        "kvasir_engine_lease_blocks", "Blocks of a tier that leases keep.", labels=(*_LABELS, "tier")
    )
    budgets = GaugeMetricFamily(
        "kvasir_engine_lease_budget_blocks", "Blocks of a tier that leases may keep.", labels=(*_LABELS, "tier")
    )
    for engine in engines:
        for tier in TIER_CODES:
            for gauge, key in ((blocks, "blocks"), (budgets, "budget_blocks")):
                if (value := find_number(engine.stats, "leases", key, tier)) is not None:
                    gauge.add_metric([*_names(engine), tier], value)
        for state, key in (("kept", "kept"), ("degraded", "degraded_now")):
            if (value := find_number(engine.stats, "leases", key)) is not None:
                leases.add_metric([*_names(engine), state], value)
        for tenant, value in _by_tenant(engine.stats):
            tenants.add_metric([*_names(engine), tenant], value)
    yield from (leases, blocks, budgets, tenants)


def _by_tenant(stats: Mapping[str, Any]) -> list[tuple[str, float]]:
    found = find_mapping(find_mapping(stats, "leases"), "tenants")
    blocks = [(tenant, find_number(found, tenant, "blocks") or 0.0) for tenant in found]
    return sorted(blocks, key=lambda item: -item[1])[:MAX_TENANTS]


def find_mapping(stats: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What is there, or an empty one."""
    value = stats.get(key)
    return value if isinstance(value, Mapping) else {}


def _tiers(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    labels = (*_LABELS, "tier")
    kinds: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], tuple[tuple[str, str], ...]], ...] = (
        (GaugeMetricFamily, _TIER_GAUGES),
        (CounterMetricFamily, _TIER_COUNTERS),
    )
    for family, figures in kinds:
        for name, text in figures:
            unit = "" if family is GaugeMetricFamily or name == "evictions" else "_blocks"
            metric = family(f"kvasir_engine_tier_{name}{unit}", text, labels=labels)
            for engine in engines:
                for tier in TIER_CODES:
                    if (value := find_number(engine.stats, "tiers", tier, name)) is not None:
                        metric.add_metric([*_names(engine), tier], value)
            yield metric


def _names(engine: EngineStatus) -> list[str]:
    return [engine.name, engine.model or "unknown"]
