"""Prometheus metrics of the gateway, in a registry of their own. Labels are bounded: tenants and models are configured
or served ones, endpoints are routes.

Requests are counted as they finish; figures of engines, queue, memos and Redis are read at every scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import LANES
from gateway.admin.engine_metrics import engine_metrics
from gateway.admin.ignored_fields import IgnoredFieldCounts
from gateway.admin.ledger_metrics import ledger_metrics
from gateway.admin.response_cache_metrics import response_cache_metrics
from gateway.admin.sources import Sources
from gateway.admin.tallies import Count, Counts, Durations, Seconds
from gateway.admin.upstream_metrics import upstream_metrics
from gateway.api.record import CLIENT_LEFT, Record, is_final
from gateway.storage.redis_calls import unreadable

TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTED_AT_ONCE: Final = 64
"""Records of hits. In a row they cost a fifth of what each does alone, between requests, when the processor has to
fetch all that counting needs."""


@dataclass(slots=True)
class Totals:
    """Since the start, for /admin/stats."""

    requests: int = 0
    errors: int = 0  # answers of 4xx and 5xx, without clients that left
    clients_left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lease_read_tokens: int = 0
    lease_write_tokens: int = 0
    completion_tokens: int = 0
    tokenized_tokens: int = 0
    embedded_tokens: int = 0
    response_hits: int = 0  # answers from the response cache, whose tokens are not among these


class Metrics:
    """Counts finished requests and writes the exposition. An Observer of the middleware."""

    def __init__(self, sources: Sources) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._totals: dict[str, Totals] = {}  # by tenant
        self._finished: list[Record] = []  # hits that are in no sum yet
        self.in_flight = 0
        self._children: dict[tuple[str, str], _Children] = {}
        self._requests = self._counts(
            "requests",
            "Finished requests; status 499 is a client that left.",
            ("endpoint", "model", "tenant", "status"),
        )
        tenant_model = ("model", "tenant")
        self._tokens = {
            kind: self._counts(f"{kind}_tokens", text, tenant_model)
            for kind, text in (
                ("prompt", "Tokens of prompts, cached ones included."),
                ("cached", "Tokens of prompts whose blocks were reused."),
                ("lease_read", "Tokens of prompts that began with a lease, up to its breakpoint."),
                ("lease_write", "Tokens of prompts beyond those, up to the last breakpoint that was kept."),
                ("completion", "Tokens generated."),
                ("tokenized", "Tokens of prompts that had to be tokenised, because their segments were new."),
            )
        }
        self._embedded = self._counts("embedded_tokens", "Tokens of texts that were embedded.", tenant_model)
        self._breakpoints = self._counts(
            "breakpoint_requests",
            "Answered requests with breakpoints: all of them kept, or any degraded.",
            (*tenant_model, "lease"),
        )
        self._key_misses = self._counts(
            "prompt_cache_key_misses",
            "Requests that reused nothing because a prompt that began alike had another prompt_cache_key.",
            tenant_model,
        )
        self._lookups = self._counts(
            "response_cache_answers",
            "Answers by outcome: exact, shared, semantic, miss, bypass.",
            (*tenant_model, "outcome"),
        )
        self._retries = self._counts("retries", "Requests sent to another engine before the first byte.", ("model",))
        self._first_token = self._histogram("first_token", "From arrival to the first token.", TOKEN_SECONDS)
        self._queue = self._histogram("queue", "Waiting for a slot, in the gateway and the engine.", TOKEN_SECONDS)
        self._overhead = self._histogram("overhead", "The gateway's own time for a request.", OVERHEAD_SECONDS)
        self._duration = self._histogram("request", "From arrival to the last byte.", REQUEST_SECONDS)
        self._ignored = IgnoredFieldCounts()
        self.registry.register(self._ignored)
        in_flight = Gauge("kvasir_requests_in_flight", "Requests being answered.", registry=self.registry)
        in_flight.set_function(lambda: self.in_flight)
        self.registry.register(_Scraped(sources))

    def started(self, record: Record) -> None:
        self.in_flight += 1

    def finished(self, record: Record) -> None:
        self.in_flight -= 1
        if is_final(record):
            self._finished.append(record)
            if len(self._finished) >= COUNTED_AT_ONCE:
                self._count_all()
        else:
            self._count(record)

    @property
    def totals(self) -> Mapping[str, Totals]:
        """By tenant."""
        self._count_all()
        return self._totals

    def exposition(self) -> bytes:
        """In the text format of Prometheus."""
        self._count_all()
        return generate_latest(self.registry)

    def _count_all(self) -> None:
        for record in self._finished:
            self._count(record)
        self._finished.clear()

    def _count(self, record: Record) -> None:
        model, tenant = record.model or "unknown", record.tenant or "unknown"
        self._requests.of(record.endpoint, model, tenant, str(record.status)).value += 1
        if record.endpoint.startswith("/v1"):
            self._add_up(record, tenant)
        if record.traces:
            self._meter(record, model, tenant)
        if record.ignored.names:
            self._ignored.add(record.ignored.names, record.endpoint, tenant)
        if record.embedded_tokens:
            self._embedded.of(model, tenant).value += record.embedded_tokens
            self._duration.of(model).add(record.total_ms / 1e3)

    def _add_up(self, record: Record, tenant: str) -> None:
        totals = self._totals.setdefault(tenant, Totals())
        totals.requests += 1
        totals.clients_left += record.status == CLIENT_LEFT
        totals.errors += record.status >= 400 and record.status != CLIENT_LEFT
        totals.embedded_tokens += record.embedded_tokens
        for trace in record.traces:
            if trace.hit is not None:
                totals.response_hits += 1
                totals.completion_tokens += trace.paid_tokens
                continue
            totals.prompt_tokens += trace.prompt_tokens
            totals.cached_tokens += trace.cached_tokens
            totals.lease_read_tokens += trace.lease_read_tokens
            totals.lease_write_tokens += trace.lease_write_tokens
            totals.completion_tokens += trace.completion_tokens
            totals.tokenized_tokens += trace.tokenized_tokens

    def _meter(self, record: Record, model: str, tenant: str) -> None:
        if (children := self._children.get((model, tenant))) is None:
            children = self._children[model, tenant] = self._labelled(model, tenant)
        for trace in record.traces:
            if trace.lookup is not None:
                self._lookups.of(model, tenant, trace.lookup.outcome).value += 1
            if trace.hit is not None:  # no engine worked, and its figures would look as if one had
                children.completion.value += trace.paid_tokens
                continue
            children.prompt.value += trace.prompt_tokens
            children.cached.value += trace.cached_tokens
            children.lease_read.value += trace.lease_read_tokens
            children.lease_write.value += trace.lease_write_tokens
            children.completion.value += trace.completion_tokens
            children.tokenized.value += trace.tokenized_tokens
            if trace.lease is not None:
                self._breakpoints.of(model, tenant, trace.lease.state).value += 1
            if trace.missed_by_key:
                self._key_misses.of(model, tenant).value += 1
            if trace.retries:
                self._retries.of(model).value += trace.retries
            if trace.first_token_ms is not None:
                children.first_token.add(trace.first_token_ms / 1e3)
                children.queue.add(trace.queue_ms / 1e3)
                children.overhead.add(trace.overhead_ms / 1e3)
        children.duration.add(record.total_ms / 1e3)

    def _labelled(self, model: str, tenant: str) -> _Children:
        tokens = {kind: counts.of(model, tenant) for kind, counts in self._tokens.items()}
        return _Children(
            **tokens,
            first_token=self._first_token.of(model),
            queue=self._queue.of(model),
            overhead=self._overhead.of(model),
            duration=self._duration.of(model),
        )

    def _counts(self, name: str, text: str, labels: Sequence[str]) -> Counts:
        counts = Counts(f"kvasir_{name}", text, labels)
        self.registry.register(counts)
        return counts

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Durations:
        durations = Durations(f"kvasir_{name}_seconds", f"Seconds. {text}", ("model",), buckets)
        self.registry.register(durations)
        return durations


@dataclass(frozen=True, slots=True)
class _Children:
    """The metrics of one model and tenant: looking labels up costs more than counting."""

    prompt: Count
    cached: Count
    lease_read: Count
    lease_write: Count
    completion: Count
    tokenized: Count
    first_token: Seconds
    queue: Seconds
    overhead: Seconds
    duration: Seconds


class _Scraped(Collector):
    """What the stages know of themselves."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield from engine_metrics(self._sources.engines())
        yield from self._queue()
        yield from self._prompts()
        yield self._embeddings()
        yield from ledger_metrics(self._sources.ledger)
        yield from upstream_metrics(self._sources.upstreams())
        yield from response_cache_metrics(self._sources.response_cache())
        responses = CounterMetricFamily(
            "kvasir_stored_responses", "Responses to be stored, by outcome.", labels=("outcome",)
        )
        for outcome, count in self._sources.responses().items():
            responses.add_metric([outcome], count)
        yield responses
        malformed = CounterMetricFamily(
            "kvasir_malformed_requests", "Requests that are not valid HTTP.", labels=("reason",)
        )
        for reason, count in self._sources.malformed().items():
            malformed.add_metric([reason], count)
        yield malformed
        yield from self._limits()
        yield from self._batches()
        yield GaugeMetricFamily(
            "kvasir_redis_up",
            "1 while Redis is reachable; 0 while this gateway goes on with its own memory.",
            value=float(bool(self._sources.redis().get("up"))),
        )
        yield CounterMetricFamily(
            "kvasir_redis_outages",
            "Times that Redis became unreachable.",
            value=self._sources.redis().get("outages", 0),
        )
        strange = CounterMetricFamily(
            "kvasir_redis_unreadable", "Skipped entries in Redis that no gateway wrote.", labels=("store",)
        )
        for store, count in unreadable.items():
            strange.add_metric([store], count)
        yield strange
        yield CounterMetricFamily(
            "kvasir_log_lost_lines",
            "Log lines dropped because the log is read too slowly or cannot be written.",
            value=self._sources.lost_lines(),
        )

    def _queue(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("kvasir_queue_waiting", "Requests that wait for a slot.", labels=("lane",))
        in_flight = GaugeMetricFamily("kvasir_queue_in_flight", "Slots taken.", labels=("engine", "lane"))
        outcomes = CounterMetricFamily("kvasir_queue_requests", "Requests by outcome.", labels=("lane", "outcome"))
        for lane in LANES:
            queue = self._sources.queue(lane)
            waiting.add_metric([lane], queue.waiting)
            for engine, taken in queue.in_flight.items():
                in_flight.add_metric([engine, lane], taken)
            for outcome in ("admitted", "refused", "expired", "abandoned"):
                outcomes.add_metric([lane, outcome], getattr(queue, outcome))
        holds = GaugeMetricFamily(
            "kvasir_queue_overloaded", "1 while sessions evict one another's blocks.", labels=("model",)
        )
        share = GaugeMetricFamily(
            "kvasir_queue_computed_again_ratio",
            "Share of engine time spent on recomputing evicted prefixes.",
            labels=("model",),
        )
        held_back = GaugeMetricFamily(
            "kvasir_queue_held_back",
            "Requests that wait for cache space although an engine is free.",
            labels=("model",),
        )
        for model, overload in self._sources.queue("online").overload.items():
            held_back.add_metric([model], overload.held_back)
            holds.add_metric([model], float(overload.holds))
            share.add_metric([model], overload.share)
        yield from (waiting, in_flight, outcomes, holds, share, held_back)

    def _batches(self) -> Iterator[Metric]:
        figures = dict(self._sources.batches())
        gauges = (
            ("in_flight", "kvasir_batch_lines_in_flight", "Lines of batches that this gateway works on."),
            (
                "paused_models",
                "kvasir_batch_models_paused",
                "Models whose lines are paused at this gateway.",
            ),
            ("open_jobs", "kvasir_batch_jobs_open", "Unfinished batches of all gateways."),
        )
        for name, metric, text in gauges:
            yield GaugeMetricFamily(metric, text, value=float(figures.pop(name, 0)))
        lines = CounterMetricFamily("kvasir_batch_lines", "Lines of batches by outcome.", labels=("outcome",))
        for outcome, count in figures.items():
            lines.add_metric([outcome], count)
        yield lines

    def _limits(self) -> Iterator[Metric]:
        limits = self._sources.limits()
        refused = CounterMetricFamily(
            "kvasir_limited_requests", "Requests refused by a limit of the tenant.", labels=("tenant", "limit")
        )
        for tenant, told in limits["tenants"].items():
            for limit, count in told["refused"].items():
                refused.add_metric([tenant, limit], count)
        yield refused
        yield CounterMetricFamily(
            "kvasir_limit_outages",
            "Outages of Redis, during which each gateway counts limits for itself.",
            value=self._sources.redis().get("outages", 0),
        )

    def _embeddings(self) -> Metric:
        embeddings = GaugeMetricFamily("kvasir_embeddings", "Figures of the embedder.", labels=("figure",))
        for figure, value in self._sources.embeddings().items():
            embeddings.add_metric([figure], float(value))
        return embeddings

    def _prompts(self) -> Iterator[Metric]:
        prompts = GaugeMetricFamily(
            "kvasir_prompt", "Figures of the prompt stage: memos and tokeniser.", labels=("model", "figure")
        )
        for model, figures in self._sources.prompts().items():
            for figure, value in figures.items():
                if isinstance(value, (int, float)):
                    prompts.add_metric([model, figure], float(value))
        yield prompts
