"""What /metrics reads from the stages at every scrape: tables of figures, in the order in which they are shown.

Counters of engines come from another process, perhaps of another version: what is missing, or no number, is left out.
Labels stay few: reasons, kinds, events and outcomes are names in the code; models, tenants, owners, engines and
upstreams are configured or served ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import LANES, TIER_CODES
from gateway.admin.sources import EngineStatus, Ledger, Sources
from gateway.ledger.base import NANO, SAVERS
from gateway.storage.redis_calls import unreadable

MAX_TENANTS: Final = 32
"""Of one engine, in the metric of blocks that their leases keep."""

_ENGINE: Final = ("engine", "model")
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
_LEASE_TIERS: Final = (
    ("lease_blocks", "blocks", "Blocks of a tier that leases keep."),
    ("lease_budget_blocks", "budget_blocks", "Blocks of a tier that leases may keep."),
)
_TIER_GAUGES: Final = (
    ("blocks", "Blocks in a tier that can be hit."),
    ("bytes", "Bytes of those blocks."),
    ("capacity_bytes", "Bytes that the tier may have."),
)
_TIER_COUNTERS: Final = (
    ("saved_blocks", "saved", "Blocks copied into a tier."),
    ("restored_blocks", "restored", "Blocks copied from a tier to where the model runs."),
    ("dropped_blocks", "dropped", "Blocks not copied into a tier, because its queue was full or it failed."),
    ("torn_blocks", "torn", "Blocks missing or damaged when they were read."),
    ("evictions", "evictions", "Blocks evicted from a tier."),
)
_UPSTREAM_COUNTERS: Final = (
    ("requests", "Requests sent to an upstream, retries among them."),
    ("unmetered", "Answers of an upstream without usage, or with an absurd one."),
    ("hints", "Requests to which a caching hint was added."),
)
_UPSTREAM_GAUGES: Final = (
    ("in_flight", "Requests that an upstream has, or that wait for it."),
    ("waiting", "Online requests that wait in the gateway for a slot there."),
    ("batch_in_flight", "Lines of batches that have a slot at an upstream."),
    ("batch_waiting", "Lines of batches that wait for a slot there."),
)
_UPSTREAM_ERRORS: Final = (
    "Failed requests to an upstream by kind: connect, timeout, lost, busy, full, late, key, "
    "redirect, usage, or a status from 400 on."
)
_BREAKER: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}
_RESPONSE_CACHE: Final = (
    ("entries", "Answers in the memory of this gateway."),
    ("bytes", "Bytes of these answers."),
    ("in_flight", "Generations that identical requests may share."),
    ("waiting", "Requests that wait for these generations."),
)
_SPACES: Final = (
    ("entries", "Questions that are kept."),
    ("hits", "Answers by meaning since the budget began."),
    ("audits", "Hits that were compared with a fresh answer since the budget began."),
    ("wrong_requests", "Estimated wrong hits, as a share of the requests that the bound is about."),
    ("wrong_requests_high", "Upper end of the 95% interval of that share."),
    ("bound", "The bound for wrong hits."),
    ("closed", "1 while the bound leaves no room for hits."),
)
_BATCHES: Final = (
    ("in_flight", "batch_lines_in_flight", "Lines of batches that this gateway works on."),
    ("paused_models", "batch_models_paused", "Models whose lines are paused at this gateway."),
    ("open_jobs", "batch_jobs_open", "Unfinished batches of all gateways."),
)
_OVERLOAD: Final = (
    ("overloaded", "holds", "1 while sessions evict one another's blocks."),
    ("computed_again_ratio", "share", "Share of engine time spent on recomputing evicted prefixes."),
    ("held_back", "held_back", "Requests that wait for cache space although an engine is free."),
)

_Samples = Iterable[tuple[Sequence[str], float]]
_Paths = Mapping[tuple[str, ...], tuple[str, ...]]
"""Labels besides the engine's -> where the number is in its counters."""


class Scraped(Collector):
    """What the stages know of themselves; families without a sample too."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self._sources
        redis = sources.redis()
        yield from _engines(sources.engines())
        yield from _queues(sources)
        prompts = [
            ((model, figure), float(value))
            for model, figures in sources.prompts().items()
            for figure, value in figures.items()
            if isinstance(value, (int, float))
        ]
        yield _gauge("prompt", "Figures of the prompt stage: memos and tokeniser.", ("model", "figure"), prompts)
        yield _gauge("embeddings", "Figures of the embedder.", ("figure",), _by_name(sources.embeddings()))
        yield from _ledger(sources.ledger)
        yield from _upstreams(sources.upstreams())
        yield from _response_cache(sources.response_cache())
        stored = _by_name(sources.responses())
        yield _counter("stored_responses", "Responses to be stored, by outcome.", ("outcome",), stored)
        malformed = _by_name(sources.malformed())
        yield _counter("malformed_requests", "Requests that are not valid HTTP.", ("reason",), malformed)
        refused = [
            ((tenant, limit), count)
            for tenant, limits in sources.limits()["tenants"].items()
            for limit, count in limits["refused"].items()
        ]
        yield _counter("limited_requests", "Requests refused by a limit of the tenant.", ("tenant", "limit"), refused)
        batches = dict(sources.batches())
        for figure, name, text in _BATCHES:
            yield _one(_gauge, name, text, float(batches.pop(figure, 0)))
        yield _counter("batch_lines", "Lines of batches by outcome.", ("outcome",), _by_name(batches))
        up = "1 while Redis is reachable; 0 while this gateway goes on with its own memory."
        yield _one(_gauge, "redis_up", up, float(bool(redis.get("up"))))
        yield _one(_counter, "redis_outages", "Times that Redis became unreachable.", redis.get("outages", 0))
        skipped = _by_name(unreadable)
        yield _counter("redis_unreadable", "Skipped entries in Redis that no gateway wrote.", ("store",), skipped)
        lost = "Log lines dropped because the log is read too slowly or cannot be written."
        yield _one(_counter, "log_lost_lines", lost, sources.lost_lines())


def find_number(stats: Mapping[str, Any], *path: str) -> float | None:
    """The number there, or None when there is none."""
    value: Any = stats
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None


def _gauge(name: str, text: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"kvasir_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(f"kvasir_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _one(family: Any, name: str, text: str, value: float) -> Metric:
    """Without labels."""
    metric: Metric = family(name, text, (), [((), value)])
    return metric


def _by_name(figures: Mapping[str, float]) -> _Samples:
    return [((name,), float(value)) for name, value in figures.items()]


def _engines(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    up = [(_names(engine), float(engine.state == "ready")) for engine in engines]
    yield _gauge("engine_up", "1 while the engine is ready.", _ENGINE, up)
    loads = [(engine, asdict(engine.load)) for engine in engines if engine.incarnation is not None]
    for name, text in _LOAD:
        yield _gauge(f"engine_{name}", text, _ENGINE, [(_names(engine), float(load[name])) for engine, load in loads])
    for name, path, text in _COUNTERS:
        yield _counter(f"engine_{name}", text, _ENGINE, _found(engines, {(): path}))
    states: _Paths = {("kept",): ("leases", "kept"), ("degraded",): ("leases", "degraded_now")}
    yield _gauge(
        "engine_leases", "Leases that are kept, and those that degraded.", (*_ENGINE, "state"), _found(engines, states)
    )
    tiers = (*_ENGINE, "tier")
    for name, key, text in _LEASE_TIERS:
        yield _gauge(
            f"engine_{name}", text, tiers, _found(engines, {(tier,): ("leases", key, tier) for tier in TIER_CODES})
        )
    tenants = [((*_names(engine), tenant), value) for engine in engines for tenant, value in _by_tenant(engine.stats)]
    kept = "Blocks that the leases of a tenant keep, of those that keep the most."
    yield _gauge("engine_tenant_leased_blocks", kept, (*_ENGINE, "tenant"), tenants)
    for name, text in _TIER_GAUGES:
        yield _gauge(f"engine_tier_{name}", text, tiers, _found(engines, _in_tiers(name)))
    for name, key, text in _TIER_COUNTERS:
        yield _counter(f"engine_tier_{name}", text, tiers, _found(engines, _in_tiers(key)))


def _in_tiers(key: str) -> _Paths:
    return {(tier,): ("tiers", tier, key) for tier in TIER_CODES}


def _found(engines: Sequence[EngineStatus], paths: _Paths) -> _Samples:
    """The numbers of each engine's counters."""
    for engine in engines:
        for labels, path in paths.items():
            if (value := find_number(engine.stats, *path)) is not None:
                yield (*_names(engine), *labels), value


def _by_tenant(stats: Mapping[str, Any]) -> list[tuple[str, float]]:
    leases = stats.get("leases")
    tenants = leases.get("tenants") if isinstance(leases, Mapping) else None
    found = tenants if isinstance(tenants, Mapping) else {}
    blocks = [(tenant, find_number(found, tenant, "blocks") or 0.0) for tenant in found]
    return sorted(blocks, key=lambda item: -item[1])[:MAX_TENANTS]


def _names(engine: EngineStatus) -> tuple[str, str]:
    return engine.name, engine.model or "unknown"


def _queues(sources: Sources) -> Iterator[Metric]:
    queues = {lane: sources.queue(lane) for lane in LANES}
    waiting = [((lane,), queue.waiting) for lane, queue in queues.items()]
    yield _gauge("queue_waiting", "Requests that wait for a slot.", ("lane",), waiting)
    taken = [((engine, lane), count) for lane, queue in queues.items() for engine, count in queue.in_flight.items()]
    yield _gauge("queue_in_flight", "Slots taken.", ("engine", "lane"), taken)
    outcomes = [
        ((lane, outcome), getattr(queue, outcome))
        for lane, queue in queues.items()
        for outcome in ("admitted", "refused", "expired", "abandoned")
    ]
    yield _counter("queue_requests", "Requests by outcome.", ("lane", "outcome"), outcomes)
    overload = queues["online"].overload.items()
    for name, figure, text in _OVERLOAD:
        samples = [((model,), float(getattr(one, figure))) for model, one in overload]
        yield _gauge(f"queue_{name}", text, ("model",), samples)


def _ledger(ledger: Ledger) -> Iterator[Metric]:
    """What this gateway's requests cost and saved since its start."""
    cost, tokens, seconds, money = [], [], [], []
    for row, figures in ledger.totals.items():
        labels = (row.model, row.tenant, row.lane)
        if row.currency:
            cost.append(((*labels, row.currency), figures.get("cost_nano", 0) / NANO))
        for saver in SAVERS:
            if f"{saver}_requests" not in figures:
                continue
            if saver != "batch":  # computed, and cheaper
                tokens.append(((saver, *labels), figures.get(f"{saver}_tokens", 0)))
                seconds.append(((saver, *labels), figures.get(f"{saver}_micros", 0) / 1e6))
            if row.currency:
                money.append(((saver, *labels, row.currency), figures.get(f"{saver}_nano", 0) / NANO))
    names = ("model", "tenant", "lane")
    yield _counter("cost", "What requests cost, by [[prices]].", (*names, "currency"), cost)
    yield _counter("saved_tokens", "Tokens that were not computed.", ("by", *names), tokens)
    yield _counter("saved_seconds", "Seconds that computing them would have taken.", ("by", *names), seconds)
    yield _counter("saved_cost", "What the saved work would have cost.", ("by", *names, "currency"), money)
    pending = "Rows of the ledger that are not written to Redis yet."
    yield _one(_gauge, "ledger_pending_rows", pending, ledger.pending)
    yield _one(_counter, "ledger_dropped", "Requests that no ledger row was left for.", ledger.dropped)
    capped = "Figures of rows that were too large for 64 bits, or replaced what was no number."
    yield _one(_counter, "ledger_capped", capped, ledger.capped)


def _upstreams(upstreams: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    own = ("upstream",)
    for name, text in _UPSTREAM_COUNTERS:
        yield _counter(f"upstream_{name}", text, own, [((one,), found[name]) for one, found in upstreams.items()])
    errors = [((one, kind), count) for one, found in upstreams.items() for kind, count in found["errors"].items()]
    yield _counter("upstream_errors", _UPSTREAM_ERRORS, ("upstream", "kind"), errors)
    for name, text in _UPSTREAM_GAUGES:
        yield _gauge(f"upstream_{name}", text, own, [((one,), found[name]) for one, found in upstreams.items()])
    breaker = [((one,), _BREAKER[found["breaker"]]) for one, found in upstreams.items()]
    tried = "1 while the breaker is open, 0.5 while one request tries the upstream, 0 while it is closed."
    yield _gauge("upstream_breaker_open", tried, own, breaker)


def _response_cache(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Those of the semantic cache without a sample where it is not in use."""
    for name, text in _RESPONSE_CACHE:
        yield _one(_gauge, f"response_cache_{name}", text, float(stats[name]))
    bypassed = _by_name(stats["bypassed"])
    yield _counter("response_cache_bypassed", "Bypasses of the response cache by reason.", ("reason",), bypassed)
    yield _counter("response_cache_events", "Events of the response cache.", ("event",), _by_name(stats["events"]))
    semantic = stats["semantic"] or {"outcomes": {}, "events": {}, "spaces": []}
    outcomes = _by_name(semantic["outcomes"])
    yield _counter("semantic_cache_outcomes", "Look-ups of the semantic cache by outcome.", ("outcome",), outcomes)
    yield _counter("semantic_cache_events", "Events of the semantic cache.", ("event",), _by_name(semantic["events"]))
    for name, text in _SPACES:
        samples = [((space["owner"], space["model"]), float(space[name])) for space in semantic["spaces"]]
        yield _gauge(f"semantic_cache_{name}", text, ("owner", "model"), samples)
