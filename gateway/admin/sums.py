"""Figures of several processes as those of one: what each worker of a gateway counted, added up for whoever asks one.

A snapshot is a tree of what the sources say, and of what the requests of one process added to its metrics. Numbers add
up, unless they are of something that all workers share, and so do the counters of workers that are no more: Prometheus
would take a counter that falls for one that began again, and count everything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from engine.protocol import LANES
from gateway.admin.metrics import Metrics
from gateway.admin.sources import EngineStatus, Ledger, Sources
from gateway.ledger.base import Entry, Figures, Row

Snapshot = dict[str, Any]

_STATES: Final = ("connecting", "lost", "draining", "ready")
_BREAKER: Final = ("closed", "half-open", "open")
_TRUSTS: Final = ("exact", "degraded", "fallback")
_INDEX_GAUGES: Final = (
    *("reason", "following", "holder", "blocks", "orphans", "unaligned", "last_sequence", "lag_s", "connected"),
)
"""Of a replica's index: one worker follows its events, and the others know nothing of them."""

REPLICA_COUNTERS: Final = (
    *("connections", "disconnections", "events", "batches", "gaps", "lost", "replays", "replay_failures", "restarts"),
    *("malformed", "unreadable", "truncations", "takeovers", "resyncs", "stored_blocks", "removed_blocks"),
)
"""Of a replica's index, since the start (replicas/stream.py and follower.py)."""

_SHARED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "uptime_s": max,
    "engines": lambda one, other: _added_engines(one, other),
    **{f"replicas/*/{name}": max for name in ("configured", "rank", "ranks", "reason")},
    **{f"replicas/*/index/{name}": max for name in _INDEX_GAUGES},
    "replicas/*/index/trust": lambda one, other: max(one, other, key=_TRUSTS.index),
    "redis/up": min,
    "limits/tenants/*/*/limit": max,
    "limits/tenants/*/*/remaining": min,
    "limits/tenants/*/*/reset_s": max,
    "queues/*/overload/*/holds": max,
    "queues/*/overload/*/share": max,
    "batches/paused_models": max,
    "batches/open_jobs": max,
    "aliases/*/targets/*/up": min,
    **{f"aliases/*/targets/*/{name}_ms": max for name in ("first_token", "whole_answer")},
    "upstreams/*/breaker": lambda one, other: max(one, other, key=_BREAKER.index),
    "response_cache/semantic/spaces": lambda one, other: _added_spaces(one, other),
    "response_cache/semantic/last_wrong": lambda one, other: sorted([*one, *other], key=lambda wrong: wrong["at_s"]),
}
"""What all workers know of one thing is not added up. The worst counts."""

_SPACE_SUMS: Final = frozenset(("bytes", "evicted", "requests", "exact", "hits", "audits"))
"""Of a space of questions, which all workers have; what only one has learned is of the one that learned most."""

_COUNTERS: Final = f"""
metrics
receipts/*/receipts receipts/*/exact receipts/*/predicted_tokens receipts/*/cached_tokens receipts/*/error_tokens
receipts/*/over_tokens receipts/*/distrusted replicas/*/requests replicas/*/failed replicas/*/lost
replicas/*/warmed_tokens
{" ".join(f"replicas/*/index/{name}" for name in REPLICA_COUNTERS)}
queues/*/admitted queues/*/refused queues/*/expired queues/*/abandoned
aliases/*/targets/*/requests
upstreams/*/requests upstreams/*/unmetered upstreams/*/hints upstreams/*/errors
upstreams/*/cached_contents
responses malformed lost_lines traces limits/tenants/*/refused redis/outages redis/unreadable
ledger/totals ledger/dropped ledger/capped
response_cache/outcomes response_cache/bypassed response_cache/events
response_cache/semantic/outcomes response_cache/semantic/events
batches/succeeded batches/failed batches/expired batches/cancelled batches/put_back batches/taken_over
"""
"""What is left of a worker that is no more."""


def snapshot(sources: Sources, metrics: Metrics, uptime_s: float) -> Snapshot:
    """Of this process, now. Only values: it is sent to another process."""
    ledger, engines = sources.ledger, sources.engines()
    return {
        "metrics": metrics.series(),
        "requests_in_flight": metrics.in_flight,
        "uptime_s": uptime_s,
        "engines": {(one.name, one.url): one for one in engines},
        "receipts": {(one.name, one.url): dict(one.receipts) for one in engines if one.receipts},
        "replicas": {(one.name, one.url): dict(one.replica) for one in engines if one.replica},
        "queues": {lane: sources.queue(lane) for lane in LANES},
        "prompts": dict(sources.prompts()),
        "embeddings": dict(sources.embeddings()),
        "upstreams": dict(sources.upstreams()),
        "aliases": dict(sources.aliases()),
        "responses": dict(sources.responses()),
        "ledger": {
            "totals": {row: dict(figures) for row, figures in ledger.totals.items()},
            **{name: getattr(ledger, name) for name in ("pending", "dropped", "capped")},
        },
        "limits": dict(sources.limits()),
        "redis": dict(sources.redis()),
        "response_cache": dict(sources.response_cache()),
        "batches": dict(sources.batches()),
        "lost_lines": sources.lost_lines(),
        "traces": dict(sources.traces()),
        "malformed": dict(sources.malformed()),
    }


def added(one: Any, other: Any, shared: Mapping[str, Any] | None = None) -> Any:
    """Two snapshots as one. Changes neither. `shared`: the part of _SHARED that is about these two parts of them."""
    shared = _tree(_SHARED) if shared is None else shared
    if one is None or other is None:
        return other if one is None else one
    if is_dataclass(one) and not isinstance(one, type):
        return replace(one, **added(_fields(one), _fields(other), shared))
    if isinstance(one, Mapping):
        return {key: _added(key, one, other, shared) for key in (*one, *(key for key in other if key not in one))}
    if isinstance(one, list):  # of a histogram
        return [a + b for a, b in zip(one, other, strict=True)]
    return one if isinstance(one, str | bool) else one + other


def _added(key: Any, one: Mapping[Any, Any], other: Mapping[Any, Any], shared: Mapping[str, Any]) -> Any:
    rule = shared.get(key, shared.get("*", {}))
    if callable(rule) and key in one and key in other:
        return rule(one[key], other[key])
    return added(one.get(key), other.get(key), {} if callable(rule) else rule)


def counters(tree: Snapshot) -> Snapshot:
    """What of it only grows: that of a worker goes on to count when it is no more."""
    return _only(tree, _tree(dict.fromkeys(_COUNTERS.split(), True))) or {}


def merged(sources: Sources, tree: Snapshot) -> tuple[Sources, Metrics]:
    """What `tree` says, in the form in which a process shows what it knows itself."""
    plain: dict[str, Any] = {name: _constant(tree[name]) for name in _PLAIN}
    receipts, replicas = tree["receipts"], tree["replicas"]
    engines = [
        replace(one, receipts=receipts.get(key, {}), replica=replicas.get(key, {}) if one.replica else {})
        for key, one in tree["engines"].items()
    ]
    shown = replace(
        sources,
        engines=lambda: engines,
        queue=lambda lane: tree["queues"][lane],
        ledger=_Ledger(sources.ledger, tree["ledger"]),
        **plain,
    )
    metrics = Metrics(shown)
    metrics.load(tree["metrics"], tree["requests_in_flight"])
    return shown, metrics


_PLAIN: Final = (
    *("prompts", "embeddings", "upstreams", "aliases", "responses", "limits", "redis", "response_cache", "batches"),
    *("lost_lines", "traces", "malformed", "workers"),
)


class _Ledger:
    """A ledger whose figures are those of a snapshot."""

    def __init__(self, own: Ledger, figures: Mapping[str, Any]) -> None:
        self._own = own
        self.totals: Mapping[Row, Figures] = figures["totals"]
        self.pending: int = figures["pending"]
        self.dropped: int = figures["dropped"]
        self.capped: int = figures["capped"]

    def add(self, entry: Entry) -> None:
        self._own.add(entry)

    def priced(self, entry: Entry) -> tuple[str, Figures]:
        return self._own.priced(entry)

    async def flush(self) -> bool:
        return await self._own.flush()

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        return await self._own.read(first, last)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _added_engines(one: Mapping[Any, EngineStatus], other: Mapping[Any, EngineStatus]) -> dict[Any, EngineStatus]:
    """One that some worker has not heard of yet is not ready."""
    added = {key: _worse(one[key], other[key]) for key in one if key in other}
    for key, status in {**one, **other}.items():
        if key not in added:
            added[key] = replace(status, state="connecting") if status.state == "ready" else status
    return added


def _worse(one: EngineStatus, other: EngineStatus) -> EngineStatus:
    """The state that is worse, and the figures of one that knows them."""
    known = max(one, other, key=lambda status: (_STATES.index(status.state), bool(status.stats)))
    state = min(one.state, other.state, key=_STATES.index)
    return replace(known, state=state, stats=known.stats or one.stats, replica=known.replica or one.replica)


def _added_spaces(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_owner = {(space["owner"], space["model"]): space for space in one}
    for space in other:
        key = space["owner"], space["model"]
        if (known := by_owner.get(key)) is None:
            by_owner[key] = space
            continue
        most = max(known, space, key=lambda space: int(space["audits"]))
        by_owner[key] = most | {name: known[name] + space[name] for name in _SPACE_SUMS & most.keys()}
    return list(by_owner.values())


def _only(tree: Any, paths: Mapping[str, Any] | bool) -> Any:
    """What is at these paths, where there is anything; the other fields of a dataclass are empty."""
    if not isinstance(paths, Mapping):
        return tree
    if is_dataclass(tree) and not isinstance(tree, type):
        found = _only(_fields(tree), paths) or {}
        return replace(tree, **{name: found.get(name, type(value)()) for name, value in _fields(tree).items()})
    if not isinstance(tree, Mapping):
        return None
    inner = {key: paths.get(key, paths.get("*")) for key in tree}
    found = {key: _only(value, inner[key]) for key, value in tree.items() if inner[key] is not None}
    return {key: value for key, value in found.items() if value is not None} or None


def _tree(paths: Mapping[str, Any]) -> dict[str, Any]:
    """`a/b` -> value as {"a": {"b": value}}."""
    tree: dict[str, Any] = {}
    for path, value in paths.items():
        *names, last = path.split("/")
        node = tree
        for name in names:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
