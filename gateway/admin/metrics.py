"""Prometheus metrics of the gateway, in a registry of their own. Labels are bounded: tenants and models are configured
or served ones, endpoints are routes.

Requests are counted as they finish; figures of engines, queue, memos and Redis are read at every scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gateway.admin.outcomes import hit_of
from gateway.admin.scraped import Scraped
from gateway.admin.sources import Sources
from gateway.admin.tallies import BOUNDS_S, Counts, Durations, IgnoredFieldCounts
from gateway.api.record import CLIENT_LEFT, Record, is_final
from gateway.config import SloSettings
from gateway.types import Trace

TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

TOKENS: Final = {
    "prompt": "Tokens of prompts, cached ones included.",
    "cached": "Tokens of prompts whose blocks were reused.",
    "lease_read": "Tokens of prompts that began with a lease, up to its breakpoint.",
    "lease_write": "Tokens of prompts beyond those, up to the last breakpoint that was kept.",
    "completion": "Tokens generated.",
    "tokenized": "Tokens of prompts that had to be tokenised, because their segments were new.",
}
"""Of traces and totals, where `_tokens` is in their names."""
_tokens_of: Final = attrgetter(*(f"{kind}_tokens" for kind in TOKENS))

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HITS: Final = "hits"
"""Among the series; of no metric of its own."""

COUNTED_AT_ONCE: Final = 64
"""Records of hits. In a row they cost a fifth of what each does alone, between requests, when the processor has to
fetch all that counting needs."""


TOTALS: Final = (
    *("requests", "errors", "clients_left"),
    *(f"{kind}_tokens" for kind in TOKENS),
    *("embedded_tokens", "response_hits"),
)
"""What /admin/stats shows of a tenant. Errors are answers of 4xx and 5xx; tokens of hits are not among the others."""


class Metrics:
    """Counts finished requests and writes the exposition. An Observer of the middleware."""

    def __init__(self, sources: Sources, slo: SloSettings | None = None) -> None:
        """Without `slo` no request is held to anything."""
        self._slo = slo or SloSettings()
        self._has_slo = bool(self._slo.first_token_ms or self._slo.inter_token_ms)
        self.registry = CollectorRegistry(auto_describe=False)
        self._hits: Counter[str] = Counter()  # answers from the response cache, by tenant
        self._finished: list[Record] = []  # hits that are in no sum yet
        self.in_flight = 0
        self._own: dict[str, Counts | Durations] = {}  # by name
        self._requests = self._counts(
            "requests",
            "Finished requests; status 499 is a client that left.",
            ("endpoint", "model", "tenant", "status"),
        )
        tenant_model = ("model", "tenant")
        self._tokens = {
            f"{kind}_tokens": self._counts(f"{kind}_tokens", text, tenant_model) for kind, text in TOKENS.items()
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
        self._routed = self._counts(
            "alias_requests",
            "Requests for an alias by the target that was taken last, and why.",
            ("alias", "target", "reason"),
        )
        self._retries = self._counts("retries", "Times that another engine took over a request.", ("model",))
        self._first_token = self._durations(
            "first_token_seconds",
            "From arrival to the first token, by what answered: exact, shared, semantic, prefix, miss, bypass.",
            ("model", "hit"),
            TOKEN_SECONDS,
        )
        self._inter_token = self._histogram(
            "inter_token", "From one token to the next: the mean of each generated answer.", INTER_TOKEN_SECONDS
        )
        self._objectives = self._counts(
            "slo_requests",
            "Answered requests by outcome, where [slo] asks for something: met, or first_token or inter_token missed.",
            ("model", "outcome"),
        )
        self._queue = self._histogram("queue", "Waiting for a slot, in the gateway and the engine.", TOKEN_SECONDS)
        self._overhead = self._histogram("overhead", "The gateway's own time for a request.", OVERHEAD_SECONDS)
        self._duration = self._histogram("request", "From arrival to the last byte.", REQUEST_SECONDS)
        lag = "event_loop_{}_seconds".format
        self.lag = self._durations(lag("lag"), "How late the event loop came to a timer.", (), BOUNDS_S)
        self.own_lag = self._durations(
            lag("own_lag"), "The part of the lag in which the gateway itself ran.", (), BOUNDS_S
        )
        self._ignored = IgnoredFieldCounts()
        self._register("ignored_fields", self._ignored)
        in_flight = Gauge("kvasir_requests_in_flight", "Requests being answered.", registry=self.registry)
        in_flight.set_function(lambda: self.in_flight)
        self.registry.register(Scraped(sources))

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
    def totals(self) -> dict[str, dict[str, int]]:
        """By tenant and name, of the routes under /v1 and /v1beta."""
        self._count_all()
        found: list[tuple[str, str, float]] = [(tenant, "response_hits", hits) for tenant, hits in self._hits.items()]
        for (endpoint, _, tenant, status), count in self._requests.items():
            if endpoint.startswith("/v1"):
                found.append((tenant, "requests", count.value))
                if status >= "400":
                    found.append((tenant, "clients_left" if status == str(CLIENT_LEFT) else "errors", count.value))
        for name, counts in (*self._tokens.items(), ("embedded_tokens", self._embedded)):
            found += [(tenant, name, count.value) for (_, tenant), count in counts.items()]
        totals: dict[str, dict[str, int]] = {}
        for tenant, name, number in found:
            totals.setdefault(tenant, dict.fromkeys(TOTALS, 0))[name] += int(number)
        return totals

    def exposition(self) -> bytes:
        """In the text format of Prometheus."""
        self._count_all()
        return generate_latest(self.registry)

    def series(self) -> dict[str, Mapping[Any, Any]]:
        """What requests added to each metric, by labels: for `load`."""
        self._count_all()
        return {_HITS: dict(self._hits), **{name: own.values() for name, own in self._own.items()}}

    def load(self, series: Mapping[str, Mapping[Any, Any]], in_flight: int) -> None:
        """Makes these, that are new, what `series` of others say."""
        for name, own in self._own.items():
            own.load(series.get(name, {}))
        self._hits.update(series.get(_HITS, {}))
        self.in_flight = in_flight

    def _count_all(self) -> None:
        for record in self._finished:
            self._count(record)
        self._finished.clear()

    def _count(self, record: Record) -> None:
        model, tenant = record.model or "unknown", record.tenant or "unknown"
        self._requests.of(record.endpoint, model, tenant, str(record.status)).value += 1
        if record.traces:
            self._meter(record.traces, model, tenant)
            self._duration.of(model).add(record.total_ms / 1e3)
            if self._has_slo or len(record.traces) > 1 or record.traces[0].hit is None:
                self._judge(record, model)
        for spent in record.spent:
            self._meter(spent.traces, spent.model or "unknown", tenant)
        if (target := record.target) is not None:
            self._routed.of(target.alias, target.model, target.reason).value += 1
        if record.ignored.names:
            self._ignored.add(record.ignored.names)
        if record.embedded_tokens:
            self._embedded.of(model, tenant).value += record.embedded_tokens
            self._duration.of(model).add(record.total_ms / 1e3)

    def _judge(self, record: Record, model: str) -> None:
        """How fast it was answered: of several answers, the longest counts."""
        if record.status >= 400 and record.status != CLIENT_LEFT:
            return
        trace = record.traces[0] if len(record.traces) == 1 else max(record.traces, key=_length)
        if trace.hit is not None and not self._has_slo:
            return
        if (first_ms := trace.first_token_ms) is None:
            return
        each_ms = 0.0
        # An upstream's answer that is no stream comes at once, whenever its tokens were generated.
        if trace.completion_tokens > 1 and trace.hit is None and (record.stream or not trace.by_upstream):
            each_ms = max(0.0, record.total_ms - first_ms) / (trace.completion_tokens - 1)
            self._inter_token.of(model).add(each_ms / 1e3)
        if self._has_slo:
            self._objectives.of(model, _outcome(self._slo, first_ms, each_ms)).value += 1

    def _meter(self, traces: Sequence[Trace], model: str, tenant: str) -> None:
        for trace in traces:
            if trace.lookup is not None:
                self._lookups.of(model, tenant, trace.lookup.outcome).value += 1
            if trace.hit is not None:  # no engine worked, and its figures would look as if one had
                self._hits[tenant] += 1
                if (hit_ms := trace.first_token_ms) is not None:
                    self._first_token.of(model, hit_of(trace, 200)).add(hit_ms / 1e3)
                self._tokens["completion_tokens"].of(model, tenant).value += trace.paid_tokens
                continue
            for counts, tokens in zip(self._tokens.values(), _tokens_of(trace), strict=True):
                counts.of(model, tenant).value += tokens
            if trace.lease is not None:
                self._breakpoints.of(model, tenant, trace.lease.state).value += 1
            if trace.missed_by_key:
                self._key_misses.of(model, tenant).value += 1
            if trace.retries:
                self._retries.of(model).value += trace.retries
            if trace.first_token_ms is not None:
                self._first_token.of(model, hit_of(trace, 200)).add(trace.first_token_ms / 1e3)
                self._queue.of(model).add(trace.queue_ms / 1e3)
                self._overhead.of(model).add(trace.overhead_ms / 1e3)

    def _counts(self, name: str, text: str, labels: Sequence[str]) -> Counts:
        counts = Counts(f"kvasir_{name}", text, labels)
        self._register(name, counts)
        return counts

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Durations:
        return self._durations(f"{name}_seconds", text, ("model",), buckets)

    def _durations(self, name: str, text: str, labels: Sequence[str], bounds: tuple[float, ...]) -> Durations:
        durations = Durations(f"kvasir_{name}", f"Seconds. {text}", labels, bounds)
        self._register(name, durations)
        return durations

    def _register(self, name: str, own: Counts | Durations) -> None:
        self.registry.register(own)
        self._own[name] = own


def _length(trace: Trace) -> int:
    return -1 if trace.first_token_ms is None else trace.completion_tokens


def _outcome(slo: SloSettings, first_ms: float, each_ms: float) -> str:
    if 0 < slo.first_token_ms < first_ms:
        return "first_token"
    return "inter_token" if 0 < slo.inter_token_ms < each_ms else "met"
