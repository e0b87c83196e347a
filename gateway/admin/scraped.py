"""What /metrics reads from the stages at every scrape: one tree of figures, and a table of where in it each metric is.

Counters of engines come from another process, perhaps of another version: what is missing, or no number, is left out.
Labels stay few: reasons, kinds, events and outcomes are names in the code; models, tenants, owners, engines and
upstreams are configured or served ones.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import LANES, TIER_CODES
from gateway.admin.sources import EngineStatus, Ledger, Sources
from gateway.ledger.base import SAVERS
from gateway.types import NANO

MAX_TENANTS: Final = 32
"""Of one engine, in the metric of blocks that their leases keep."""

_METRICS: Final = """
[engines/{engine,model}/] engine_
up | up | 1 while the engine is ready.
waiting | load/waiting | Sequences admitted and not yet running.
running | load/running | Sequences running.
prefill_backlog | load/prefill_backlog | Tokens still to be prefilled.
batch_waiting | load/batch_waiting | Of the sequences that wait, those of the batch lane.
batch_running | load/batch_running | Of the sequences that run, those of the batch lane.
batch_backlog | load/batch_backlog | Of the tokens still to be prefilled, those of the batch lane.
free_blocks | load/free_blocks | Blocks that hold nothing.
cached_blocks | load/cached_blocks | Blocks that can be hit and evicted.
live_blocks | load/live_blocks | Blocks in use by a sequence.
leased_blocks | load/leased_blocks | Blocks that are kept by a lease, cached or live.
prefill_tokens_per_second | load/prefill_tokens_per_s | Tokens per second, moving average.
decode_tokens_per_second | load/decode_tokens_per_s | Tokens per second, moving average.
leases | lease_states/{state} | Leases that are kept, and those that degraded.
tenant_leased_blocks | leased_by/{tenant} | Blocks that the leases of a tenant keep, of those that keep the most.
[engines/{engine,model}/receipts/] engine_
receipts_total | receipts | Requests with predicted and reported cached tokens.
receipts_exact_total | exact | Of these, those where both are the same.
predicted_tokens_total | predicted_tokens | Cached tokens that the index predicted.
reported_tokens_total | cached_tokens | Cached tokens that the engine reported.
prediction_error_tokens_total | error_tokens | Sum of the absolute differences between the two.
over_predicted_tokens_total | over_tokens | Predicted tokens that were computed again.
index_distrusted_total | distrusted | Times that the engine's index was dropped, because it predicted too much.
[engines/{engine,model}/] replica_
trust | trusts/{trust} | 1 for how far the index of the replica's cache can be trusted: exact, degraded, fallback.
cache_worth_tokens | worth | Tokens reused from its cache, each counting half after every ten minutes.
[engines/{engine,model}/replica/] replica_
requests_total | requests | Sequences sent to the replica.
failed_total | failed | Of these, those that it failed on.
lost_total | lost | Of these, those whose connection was lost.
warmed_tokens_total | warmed_tokens | Prompt tokens computed before any request wanted them.
[engines/{engine,model}/replica/index/] replica_
following | following | 1 while this gateway reads the replica's KV events.
connected | connected | 1 while it is connected to them.
indexed_blocks | blocks | Blocks of its index that this gateway keeps.
orphans | orphans | Blocks that are not in the index, because the one in front of them is unknown.
last_sequence | last_sequence | Number of the last batch of KV events; -1 before the first one.
event_lag_seconds | lag_s | For how long it has not been known that all KV events are here.
event_connections_total | connections | Connections made to the KV events.
event_disconnections_total | disconnections | Of these, those that were lost.
event_batches_total | batches | Batches of KV events.
events_total | events | KV events.
event_gaps_total | gaps | Times that batches were missing.
event_lost_batches_total | lost | Batches that no replay had.
event_replays_total | replays | Replays that were asked for.
event_replay_failures_total | replay_failures | Of these, those that were not answered to their end.
event_restarts_total | restarts | Times that the numbers began anew, because the server did.
event_malformed_total | malformed | Messages that are no batch.
event_unreadable_total | unreadable | Batches that could not be decoded.
event_stored_blocks_total | stored_blocks | Blocks that entered the index.
event_removed_blocks_total | removed_blocks | Blocks that left it.
index_truncations_total | truncations | Times that the index began empty, because older events are lost.
index_takeovers_total | takeovers | Times that this gateway began to follow the events.
index_resyncs_total | resyncs | Times that the events were read again, because the index predicted too much.
[engines/{engine,model}/stats/] engine_
evictions_total | evictions | Evicted blocks.
shared_tokens_total | shared_tokens | Cached tokens that another request computed after this one had arrived.
shared_waits_total | shared_waits | Times a request waited for another to compute their common prefix.
forks_total | forks | Answers that forked from another answer to the same prompt.
steps_given_up_total | steps_given_up | Batch steps abandoned for online requests.
preemptions_total | preemptions | Preempted sequences, which are computed again.
copied_blocks_total | copied_blocks | Shared blocks copied when one of their answers wrote into them.
drafted_tokens_total | drafted_tokens | Tokens computed ahead of an answer (engine.speculation).
accepted_tokens_total | accepted_tokens | Of these, those that the answer went on with.
busy_seconds_total | busy_s | Seconds in which an engine computed steps.
[engines/{engine,model}/stats/utilisation/] engine_
flops_total | flops | Floating-point operations that the model took.
read_bytes_total | read_bytes | Bytes of weights, keys and values that steps had to read.
peak_flops_per_second | peak_flops_per_s | Floating-point operations per second that its machine did at the start.
peak_bytes_per_second | peak_bytes_per_s | Bytes per second that its machine read at the start.
mfu_ratio | mfu | Model FLOPs utilisation while it computes, moving average: operations per second over the peak.
mbu_ratio | mbu | Model bandwidth utilisation while it computes, moving average: bytes per second over the peak.
[engines/{engine,model}/stats/leases/] engine_
leases_granted_total | granted | New leases, those that degraded at once among them.
leases_renewed_total | renewed | Uses of a lease by a later request.
leases_degraded_total | degraded | Leases whose blocks were left to eviction, for want of budget.
leases_kept_again_total | kept_again | Degraded leases that were used again and fitted.
leases_expired_total | expired | Leases whose time was up.
leases_lost_total | lost | Leases whose blocks turned out to be unusable.
leases_restored_total | restored | Leases of an earlier run that were kept again at the start.
lease_touches_total | touches | Requests that renewed a lease on a replica.
lease_touched_tokens_total | touched_tokens | Tokens that touches found.
lease_recomputed_tokens_total | recomputed_tokens | Tokens that touches computed.
lease_touch_failures_total | touch_failures | Touches that failed.
lease_read_tokens_total | read_tokens | Tokens of the longest lease that each prompt began with.
lease_blocks | blocks/{tier} | Blocks of a tier that leases keep.
lease_budget_blocks | budget_blocks/{tier} | Blocks of a tier that leases may keep.
[engines/{engine,model}/stats/tiers/{tier}/] engine_tier_
blocks | blocks | Blocks in a tier that can be hit.
bytes | bytes | Bytes of those blocks.
capacity_bytes | capacity_bytes | Bytes that the tier may have.
saved_blocks_total | saved | Blocks copied into a tier.
restored_blocks_total | restored | Blocks copied from a tier to where the model runs.
dropped_blocks_total | dropped | Blocks not copied into a tier, because its queue was full or it failed.
torn_blocks_total | torn | Blocks missing or damaged when they were read.
evictions_total | evictions | Blocks evicted from a tier.
[queues/{lane}/] queue_
waiting | waiting | Requests that wait for a slot.
in_flight | in_flight/{engine} | Slots taken.
requests_total | outcomes/{outcome} | Requests by outcome.
[queues/online/overload/{model}/] queue_
overloaded | holds | 1 while sessions evict one another's blocks.
computed_again_ratio | share | Share of engine time spent on recomputing evicted prefixes.
held_back | held_back | Requests that wait for cache space although an engine is free.
[]
prompt | prompts/{model}/{figure} | Figures of the prompt stage: memos and tokeniser.
embeddings | embeddings/{figure} | Figures of the embedder.
[ledger/]
cost_total | cost/{model,tenant,lane,currency} | What requests cost, by [[prices]].
saved_tokens_total | tokens/{by,model,tenant,lane} | Tokens that were not computed.
saved_seconds_total | seconds/{by,model,tenant,lane} | Seconds that computing them would have taken.
saved_cost_total | money/{by,model,tenant,lane,currency} | What the saved work would have cost.
ledger_pending_rows | pending | Rows of the ledger that are not written to Redis yet.
ledger_dropped_total | dropped | Requests that no ledger row was left for.
ledger_capped_total | capped | Figures too large for 64 bits, or that replaced what was no number.
[upstreams/{upstream}/] upstream_
requests_total | requests | Requests sent to an upstream, retries among them.
unmetered_total | unmetered | Answers of an upstream without usage, or with an absurd one.
cached_contents_total | cached_contents/{event} | Cached contents of Gemini: made, used, renewed, deleted, lost, failed.
hints_total | hints | Requests to which a caching hint was added.
errors_total | errors/{kind} | Failures: connect, timeout, lost, busy, full, late, key, redirect, usage, a status.
in_flight | in_flight | Requests that an upstream has, or that wait for it.
waiting | waiting | Online requests that wait in the gateway for a slot there.
batch_in_flight | batch_in_flight | Lines of batches that have a slot at an upstream.
batch_waiting | batch_waiting | Lines of batches that wait for a slot there.
breaker_open | breaker_open | 1 while the breaker is open, 0.5 while one request tries, 0 while it is closed.
[response_cache/] response_cache_
entries | entries | Answers in the memory of this gateway.
bytes | bytes | Bytes of these answers.
in_flight | in_flight | Generations that identical requests may share.
waiting | waiting | Requests that wait for these generations.
bypassed_total | bypassed/{reason} | Bypasses of the response cache by reason.
events_total | events/{event} | Events of the response cache.
[response_cache/semantic/] semantic_cache_
outcomes_total | outcomes/{outcome} | Look-ups of the semantic cache by outcome.
events_total | events/{event} | Events of the semantic cache.
[spaces/{owner,model}/] semantic_cache_
entries | entries | Questions that are kept.
hits | hits | Answers by meaning since the budget began.
audits | audits | Hits that were compared with a fresh answer since the budget began.
wrong_requests | wrong_requests | Estimated wrong hits, as a share of the requests that the bound is about.
wrong_requests_high | wrong_requests_high | Upper end of the 95% interval of that share.
bound | bound | The bound for wrong hits.
closed | closed | 1 while the bound leaves no room for hits.
[]
stored_responses_total | responses/{outcome} | Responses to be stored, by outcome.
malformed_requests_total | malformed/{reason} | Requests that are not valid HTTP.
limited_requests_total | limits/{tenant}/refused/{limit} | Requests refused by limits or budgets of a tenant or key.
budget_limit | limits/{tenant}/budget/limit | Money that a tenant may spend in its period.
budget_remaining | limits/{tenant}/budget/remaining | What is left of it; below 0 where more was spent.
batch_lines_in_flight | batches/in_flight | Lines of batches that this gateway works on.
batch_models_paused | batches/paused_models | Models whose lines are paused at this gateway.
batch_jobs_open | batches/open_jobs | Unfinished batches of all gateways.
batch_lines_total | lines/{outcome} | Lines of batches by outcome.
redis_up | redis/up | 1 while Redis is reachable; 0 while this gateway goes on with its own memory.
redis_outages_total | redis/outages | Times that Redis became unreachable.
redis_unreadable_total | redis/unreadable/{store} | Skipped entries in Redis that no gateway wrote.
workers | workers/running | Processes of this gateway that answer requests, where it has several.
worker_restarts_total | workers/restarts | Times that a process of this gateway ended and was started again.
log_lost_lines_total | lost_lines | Log lines dropped because the log is read too slowly or cannot be written.
traced_requests_total | traces/{outcome} | Traced requests: exported, failed at the collector, dropped.
"""
"""[beginning of the paths] beginning of the names; then name | path | help of each metric. A name that ends with _total
is a counter. `{label}` in a path stands for all keys there, which are the values of the label."""


class Scraped(Collector):
    """What the stages know of themselves; families without a sample too."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        figures = _figures(self._sources)
        start = prefix = ""
        for line in _METRICS.strip().splitlines():
            if line.startswith("["):
                start, _, prefix = line[1:].partition("]")
                continue
            name, end, text = line.split(" | ")
            path = start + end
            labels = [label for names in re.findall(r"\{(.+?)\}", path) for label in names.split(",")]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"kvasir_{prefix.strip()}{name}", text, labels=labels)
            for values, number in _samples(figures, path.split("/")):
                family.add_metric(values, number)
            yield family


def _samples(
    figures: Any, path: Sequence[str], labels: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers at a path, with the values of its labels."""
    if not path:
        if isinstance(figures, int | float):
            yield labels, float(figures)
        return
    if not isinstance(figures, Mapping):
        return
    key, *rest = path
    if not key.startswith("{"):
        yield from _samples(figures.get(key), rest, labels)
        return
    for value, inner in figures.items():
        if key != "{tier}" or value in TIER_CODES:
            yield from _samples(inner, rest, (*labels, *(value if isinstance(value, tuple) else (value,))))


def _figures(sources: Sources) -> dict[str, Any]:
    response_cache, redis, batches = sources.response_cache(), sources.redis(), sources.batches()
    semantic = response_cache["semantic"] or {"spaces": ()}
    redis = {"up": bool(redis.get("up")), **{name: redis.get(name, 0) for name in ("outages", "unreadable")}}
    jobs = ("in_flight", "paused_models", "open_jobs")
    return {
        "engines": {(engine.name, engine.model or "unknown"): _engine(engine) for engine in sources.engines()},
        "queues": {lane: _queue(sources.queue(lane)) for lane in LANES},
        "prompts": sources.prompts(),
        "embeddings": sources.embeddings(),
        "ledger": _ledger(sources.ledger),
        "upstreams": {
            name: {**one, "breaker_open": _BREAKER[one["breaker"]]} for name, one in sources.upstreams().items()
        },
        "response_cache": response_cache,
        "spaces": {(space["owner"], space["model"]): space for space in semantic["spaces"]},
        "responses": sources.responses(),
        "malformed": sources.malformed(),
        "limits": sources.limits()["tenants"],
        "batches": {name: batches.get(name, 0) for name in jobs},
        "lines": {name: count for name, count in batches.items() if name not in jobs},
        "redis": {
            "up": bool(redis.get("up")),
            "outages": redis.get("outages", 0),
            "unreadable": redis.get("unreadable", {}),
        },
        "lost_lines": sources.lost_lines(),
        "traces": sources.traces(),
        "workers": sources.workers(),
    }


_TRUSTS: Final = ("exact", "degraded", "fallback")
_BREAKER: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


def _engine(engine: EngineStatus) -> dict[str, Any]:
    leases = engine.stats.get("leases")
    leases = leases if isinstance(leases, Mapping) else {}
    blocks = list(_samples(leases, ("tenants", "{tenant}", "blocks")))
    index = engine.replica.get("index") or {}
    most = heapq.nlargest(MAX_TENANTS, blocks, key=lambda sample: sample[1])
    return {
        "up": engine.state == "ready",
        "load": asdict(engine.load) if engine.incarnation is not None else {},
        "stats": engine.stats,
        "receipts": engine.receipts,
        "replica": engine.replica,
        "trusts": {trust: float(trust == index["trust"]) for trust in _TRUSTS if index},
        "worth": engine.receipts.get("recent_tokens") if engine.replica else None,
        "lease_states": {"kept": leases.get("kept"), "degraded": leases.get("degraded_now")},
        "leased_by": dict(most),
    }


def _queue(status: Any) -> dict[str, Any]:
    """Of a QueueStatus (queues/slots.py)."""
    outcomes = ("admitted", "refused", "expired", "abandoned")
    return {**asdict(status), "outcomes": {outcome: getattr(status, outcome) for outcome in outcomes}}


def _ledger(ledger: Ledger) -> dict[str, Any]:
    """What this gateway's requests cost and saved since its start."""
    cost, tokens, seconds, money = {}, {}, {}, {}
    for row, figures in ledger.totals.items():
        labels = (row.model, row.tenant, row.lane)
        if row.currency:
            cost[*labels, row.currency] = figures.get("cost_nano", 0) / NANO
        for saver in SAVERS:
            if f"{saver}_requests" not in figures:
                continue
            if saver != "batch":  # computed, and cheaper
                tokens[saver, *labels] = figures.get(f"{saver}_tokens", 0)
                seconds[saver, *labels] = figures.get(f"{saver}_micros", 0) / 1e6
            if row.currency:
                money[saver, *labels, row.currency] = figures.get(f"{saver}_nano", 0) / NANO
    return {
        "cost": cost,
        "tokens": tokens,
        "seconds": seconds,
        "money": money,
        "pending": ledger.pending,
        "dropped": ledger.dropped,
        "capped": ledger.capped,
    }
