"""What is noted about one HTTP request while it is answered. The middleware makes it, handlers fill it in, the access
line and admin/metrics.py read it. Holds no prompt text and no keys.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

from aiohttp import web

from engine.protocol import Lane
from gateway.api.bodies import Claim
from gateway.api.dialect import Dialect
from gateway.api.unknown_fields import HEADER as IGNORED_FIELDS
from gateway.api.unknown_fields import IgnoredFields
from gateway.errors import KvasirError
from gateway.issued.base import IssuedKey
from gateway.ledger.base import Entry
from gateway.limits.holds import Hold
from gateway.propagation import Parent, RequestSpan
from gateway.types import PLAIN_REUSE, Allowance, Lookup, Reuse, Tenant, Tier, Trace, Usage, elapsed_ms, owners_of

if TYPE_CHECKING:
    from gateway.api.checks import Check

log = logging.getLogger(__name__)

_SAYS = {"miss": 0, "bypass": 1, "semantic": 2, "shared": 3, "exact": 4}

_SAFE = " !#$%&'()*+,/:;<=>?@[]^_`{|}~"
"""Characters of a header that are no letters."""

_SANE_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]{0,79}")

REQUEST_ID = "x-kvasir-request-id"
"""Header with the gateway's own id, where the usual one has an upstream's."""

OVERHEAD_MS = "x-kvasir-overhead-ms"

CLIENT_LEFT = 499  # nginx's number for a client that closed the connection before its answer was complete


@dataclass(frozen=True, slots=True)
class ChosenTarget:
    """Which of the targets of an alias has a request.

    alias       its name in the settings
    reason      a word
    begun_ms    from the request's arrival until this target was tried
    is_only     the alias has no others
    has_others  another one is tried if this one fails before the first byte
    check       of an answer, before the client gets any of it
    """

    alias: str
    policy: str
    model: str
    reason: str
    begun_ms: float = 0.0
    is_only: bool = False
    has_others: bool = False
    check: Check | None = None


class Spent(NamedTuple):
    """What a target has used that did not answer in the end. `model` as in Record."""

    model: str | None
    traces: list[Trace]


@dataclass(slots=True)
class Record:
    """One HTTP request. `model` and `tenant` are set only when they are known ones, so that labels stay few."""

    request_id: str
    endpoint: str  # the route's pattern, "unknown" without one
    received_s: float  # monotonic clock
    dialect: Dialect
    tenant: str | None = None
    key: str = ""  # its id, where an admin made it
    namespace: str = ""  # that the request asks for, by header
    lane: Lane = "online"
    at_batch_price: bool = False  # what is generated for it, as far as is known before
    may_have_priority: bool = False
    tier: Tier = "default"  # of its requests
    reuse: Reuse = PLAIN_REUSE  # what its headers say of the response cache
    model: str | None = None
    target: ChosenTarget | None = None  # of an alias
    may_use: Callable[[str], bool] | None = None  # which models, by the names that clients use; None: all
    spent: list[Spent] = field(default_factory=list)  # by targets before it
    cors: Mapping[str, str] = field(default_factory=dict)  # headers for browsers
    allowance: Allowance | None = None  # what its tenant and key may still send, when it asked
    money: Hold | None = None  # with a budget
    budget: str = ""  # what a header says of it
    hold: Hold | None = None  # with limits, once the request was let in
    body: Claim | None = None  # on memory for it; middleware.py lets go of it
    body_bytes: int = 0  # of what was sent, decoded
    work: int = 0  # that it is to check and render it (tasks.work_of)
    traces: list[Trace] = field(default_factory=list)  # one for each prompt
    ignored: IgnoredFields = field(default_factory=IgnoredFields)  # that its body has, and the gateway does not know
    embedded_tokens: int = 0  # of texts whose vectors were computed
    stream: bool = False
    status: int = 0  # what the client got, or would have got had the first byte not been sent
    parent: Parent | None = None  # of its span, where traces are made
    span: RequestSpan | None = None  # where it has one
    admitted_ms: float = 0.0  # from arrival until its limits had let it in, of one with a span
    error: str = ""  # why the gateway refused or failed it, as `failed` names it
    total_ms: float = 0.0
    entry: Entry | None = None  # of the ledger, once it is over

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose limits and budgets it has to fit."""
        return () if self.tenant is None else owners_of(self.tenant, self.key)

    @property
    def trace(self) -> Trace:
        """What happened to all its prompts together."""
        return self.traces[0] if len(self.traces) == 1 else _together(self.traces)

    @property
    def shown_id(self) -> str:
        """The id that the client gets: that of an upstream which was asked in another API, where it has one."""
        return next((trace.upstream_id for trace in self.traces if trace.upstream_id), self.request_id)

    @property
    def usage(self) -> Usage | None:
        """What was computed for it, or begun to be; a remembered answer was not. None where an upstream did not report
        it."""
        traces = [*self.traces, *(trace for spent in self.spent for trace in spent.traces)]
        if any(trace.unmetered for trace in traces):
            return None
        begun = [trace for trace in traces if trace.engine is not None and trace.hit is None]
        return Usage(
            sum(trace.prompt_tokens for trace in begun) + self.embedded_tokens,
            sum(trace.completion_tokens for trace in begun) + sum(trace.paid_tokens for trace in traces),
            sum(trace.cached_tokens for trace in begun),
        )


def _together(traces: Sequence[Trace]) -> Trace:
    """Of several answers the lookup that says least counts: a miss, if any is one."""
    lookups = [trace.lookup for trace in traces if trace.lookup is not None]
    predicted = [trace.predicted_tokens for trace in traces if trace.predicted_tokens is not None]
    first_tokens = [trace.first_token_ms for trace in traces if trace.first_token_ms is not None]
    return Trace(
        prompt=traces[0].prompt if traces else None,
        body=traces[0].body if traces else None,
        salt=traces[0].salt if traces else "",
        lost=traces[0].lost if traces else None,
        uncached=traces[0].uncached if traces else False,
        by_upstream=any(trace.by_upstream for trace in traces),
        route=traces[0].route if traces else [],
        engine=",".join(dict.fromkeys(trace.engine for trace in traces if trace.engine)) or None,
        prompt_tokens=sum(trace.prompt_tokens for trace in traces),
        cached_tokens=sum(trace.cached_tokens for trace in traces),
        cached_late=any(trace.cached_late for trace in traces),
        predicted_tokens=sum(predicted) if predicted else None,
        lease_read_tokens=sum(trace.lease_read_tokens for trace in traces),
        lease_write_tokens=sum(trace.lease_write_tokens for trace in traces),
        lease=next((trace.lease for trace in traces if trace.lease is not None), None),
        completion_tokens=sum(trace.completion_tokens for trace in traces),
        reported_cached_tokens=sum(trace.reported_cached_tokens for trace in traces),
        retries=sum(trace.retries for trace in traces),
        looked_up_ms=max((trace.looked_up_ms for trace in traces), default=0.0),
        encoded_ms=max((trace.encoded_ms for trace in traces), default=0.0),
        overhead_ms=max((trace.overhead_ms for trace in traces), default=0.0),
        queue_ms=max((trace.queue_ms for trace in traces), default=0.0),
        first_token_ms=min(first_tokens, default=None),
        lookup=min(lookups, key=lambda lookup: (_SAYS[lookup.outcome], -lookup.age_s), default=None),
    )


RECORD: web.RequestKey[Record] = web.RequestKey("record", Record)
TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)
"""The tenant, on routes that need a tenant's key."""

ISSUED: web.RequestKey[IssuedKey] = web.RequestKey("issued", IssuedKey)
"""The key that the request came with, if an admin made it."""

ADMIN_KEY: web.RequestKey[bytes] = web.RequestKey("admin_key", bytes)
"""A digest of the key that opened /admin."""

CHANGED: web.RequestKey[dict[str, Any] | None] = web.RequestKey("changed")
"""Of an admin's change: what the audit log says besides the request's own names, such as the id of what was created.
None: nothing was changed."""

BODY: web.RequestKey[dict[str, Any]] = web.RequestKey("body", dict)
"""Its JSON, of routes that read it."""


class Observer(Protocol):
    """Counts requests."""

    def started(self, record: Record) -> None: ...

    def finished(self, record: Record) -> None: ...


class Observers:
    """Several of them, called one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, record: Record) -> None:
        for observer in self._observers:
            observer.started(record)

    def finished(self, record: Record) -> None:
        for observer in self._observers:
            observer.finished(record)


def failed(record: Record, error: KvasirError) -> None:
    """Notes the status that its dialect has for the error, and which error of which field it was: never its message,
    which may quote the request."""
    record.status = record.dialect.status(error)
    record.error = type(error).__name__.removesuffix("Error")
    if error.param and _SANE_PATH.fullmatch(error.param):
        record.error += f":{error.param}"


def known_error(error: Exception, record: Record) -> KvasirError:
    """The error as clients may see it: one that is not ours is logged and hidden."""
    if isinstance(error, KvasirError):
        return error
    log.error("request %s failed", record.request_id, exc_info=error)
    return KvasirError("The server had an error while processing your request.")


def is_final(record: Record) -> bool:
    """Whether one that is over may be counted and written down later: nothing of it changes any more, and it holds
    nothing large. What is generated for one that has left goes on in its trace, unless it has passed through alone, and
    what may be given again is held by the first who got it."""
    if len(record.traces) != 1 or record.spent:
        return False
    (trace,) = record.traces
    passed = trace.by_upstream and trace.lookup is not None and trace.lookup.outcome == "bypass"
    return passed or (trace.hit is not None and trace.repeat is None)


def listed(models: Mapping[str, int], record: Record) -> dict[str, int]:
    """Those that the request's tenant and key may use."""
    may_use = record.may_use
    return dict(models) if may_use is None else {name: at for name, at in models.items() if may_use(name)}


def common_headers(record: Record) -> dict[str, str]:
    """What every answer carries, in its dialect."""
    headers = record.dialect.headers(shown := record.shown_id, elapsed_ms(record))
    if shown != record.request_id:
        headers[REQUEST_ID] = record.request_id
    if record.cors:
        headers |= record.cors
    if (target := record.target) is not None:
        headers["x-kvasir-target"] = quote(target.model, safe=_SAFE)
        headers["x-kvasir-route"] = f"{target.policy}; reason={target.reason}"
    if record.budget:
        headers["x-kvasir-budget"] = record.budget
    if record.ignored.names:
        headers[IGNORED_FIELDS] = record.ignored.header
    theirs = next((trace.allowance for trace in record.traces if trace.allowance), None)
    allowance = theirs or record.allowance
    return headers if allowance is None else headers | record.dialect.allowance(allowance)


def kvasir_headers(record: Record, *, cached: bool = True) -> dict[str, str]:
    """What the gateway did for this answer. `cached` False leaves out the cached tokens, when they are not final."""
    trace = record.trace
    headers = {OVERHEAD_MS: f"{trace.overhead_ms:.2f}"}
    if trace.engine:
        headers["x-kvasir-engine"] = trace.engine
    if cached and not trace.cached_late:
        headers["x-kvasir-cached-tokens"] = str(trace.cached_tokens)
    if cached and trace.predicted_tokens is not None:
        headers["x-kvasir-predicted-tokens"] = str(trace.predicted_tokens)
    if trace.dropped:
        headers["x-kvasir-dropped"] = ", ".join(trace.dropped)
    if lease := trace.lease:
        kept = lease.kept
        headers["x-kvasir-lease"] = f"kept; tokens={kept.tokens}; ttl={kept.ttl_s:g}" if kept else "degraded"
    return headers | cache_headers(trace.lookup)


def cache_headers(lookup: Lookup | None) -> dict[str, str]:
    """What the response cache had for a request. An answer generated for another request at the same time is an exact
    one, and new."""
    if lookup is None:
        return {}
    outcome = "exact" if lookup.outcome == "shared" else lookup.outcome
    headers = {"x-kvasir-cache": f"{outcome}; reason={lookup.reason}" if lookup.reason else outcome}
    if lookup.found:
        headers["Age"] = str(int(lookup.age_s))
    if lookup.entry:
        headers["x-kvasir-cache-key"] = lookup.entry
    if lookup.similarity is not None:
        headers["x-kvasir-cache-similarity"] = f"{lookup.similarity:.4f}"
    return headers
