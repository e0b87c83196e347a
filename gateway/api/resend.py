"""Resend: a request that came before, byte for byte, gets what was written for it then, without being parsed, hashed
or written again.

It decides nothing. The request's tenant, its limits, and whether the response cache would give this very answer now are
checked each time; where anything has changed, the request goes through the pipeline. It is in no metric, line of the
log or header: it is a hit like any other, and the middleware counts it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import xxhash
from aiohttp import web
from multidict import CIMultiDict

from engine.protocol import Hello
from gateway.api.cache_control import RETRY_HEADER
from gateway.api.record import (
    OVERHEAD_MS,
    RECORD,
    REQUEST_ID,
    Record,
    common_headers,
    elapsed_ms,
    kvasir_headers,
)
from gateway.api.replies import Stamp
from gateway.api.sent import header_lines, send
from gateway.api.tenants import Limits, set_aside
from gateway.errors import KvasirError
from gateway.stages import Registry
from gateway.tasks import off_loop, work_of
from gateway.types import Lookup, Need, Tenant, Trace

OVERHEAD_BYTES: Final = 2048
"""What an answer costs besides its bytes: objects, headers, and its place in the order."""

UNHEEDED: Final = frozenset(
    b"""
    accept accept-encoding accept-language authorization connection content-length host idempotency-key traceparent
    tracestate user-agent x-api-key x-client-request-id x-forwarded-for x-goog-api-key x-real-ip x-request-id
    x-stainless-read-timeout x-stainless-timeout
    """.split()
)
"""Headers that change no answer and are often another with each request; the tenant stands for its keys. What is not
known counts."""

_FIRST_TRY: Final = (RETRY_HEADER.encode(), b"0")
"""Of an SDK that counts. A retry gets a new answer, and has a key of its own."""


class _Key(NamedTuple):
    """`rest` is a digest of URL and headers, in which there may be keys; `body` one that says where to look."""

    tenant: str
    rest: bytes
    body: bytes


class Rendered(NamedTuple):
    """An answer as the pipeline wrote it.

    model    as the client names it
    hello    of the engines that serve it; None: it is an upstream's
    need     of the tenant's limits
    headers  of the answer alone, without what its record says
    body     all its bytes
    stamp    those of them that are new in each answer; None: there are none
    """

    model: str
    hello: Hello | None
    need: Need
    headers: Mapping[str, str]
    body: bytes
    stamp: Stamp | None = None


class _Known(NamedTuple):
    """An answer to be sent again.

    sent    the request's body, to be compared
    record  of the request that it was first written for
    lines   of those headers that are the same each time
    parts   of the answer, between the stamps
    """

    sent: bytes
    rendered: Rendered
    record: Record
    lines: bytes
    parts: Sequence[bytes]
    num_bytes: int


_SEEN: web.RequestKey[partial[None]] = web.RequestKey("seen", partial)
"""Keeps the answer to a request that the resend cache could not answer."""


def find_keeper(http: web.Request) -> Callable[[Rendered], None] | None:
    """What keeps the answer of a request, to be called once all of it is sent. None for one that may not be sent again:
    it is not one answer which the response cache had in memory."""
    traces = http[RECORD].traces
    return http.get(_SEEN) if len(traces) == 1 and traces[0].repeat is not None else None


class ResendCache:
    """Known answers, within bytes, those used last. `max_bytes` 0 is none at all."""

    def __init__(self, max_bytes: int, models: Registry, serves: Callable[[str, Tenant], bool], limits: Limits) -> None:
        """`serves` says whether a tenant's requests for a model go to an upstream."""
        self._max_bytes = max_bytes
        self._models = models
        self._serves = serves
        self._limits = limits
        self._known: OrderedDict[_Key, _Known] = OrderedDict()  # used last at the end
        self._num_bytes = 0

    async def answer(self, http: web.Request, tenant: Tenant, body: bytes) -> web.StreamResponse | None:
        """What it got the last time, sent, or None; then what it gets now may be kept (`find_keeper`). Raises
        RateLimitError, and ConnectionResetError for a client that is gone."""
        if not self._max_bytes:
            return None
        key = await off_loop(work_of(len(body)), lambda: _key(http, tenant, body))
        known, record, lookup = self._known.get(key), http[RECORD], None
        if known is not None and known.sent == body and self._stands(known.rendered, tenant):
            rendered, first, (trace,) = known.rendered, known.record, known.record.traces
            record.tier = first.tier
            if rendered.hello is not None:
                record.model = first.model
            await set_aside(self._limits, record, lambda: rendered.need)
            lookup = None if trace.repeat is None else trace.repeat.again()
            if lookup is None:
                self._drop(key)
        if known is None or lookup is None:
            http[_SEEN] = partial(self._keep, key, body, record)
            return None
        if key in self._known:
            self._known.move_to_end(key)
        record.model, record.stream, record.ignored = first.model, first.stream, first.ignored
        passed_ms = elapsed_ms(record)
        record.traces = [_again(trace, lookup, passed_ms)]
        new = known.parts[0] if rendered.stamp is None else rendered.stamp.make().join(known.parts)
        return await send(http, known.lines, _new_headers(record, rendered, lookup, passed_ms), new)

    def _keep(self, key: _Key, sent: bytes, record: Record, rendered: Rendered) -> None:
        """In place of what was known of this request."""
        self._drop(key)
        (trace,) = record.traces
        assert trace.repeat is not None
        parts = [rendered.body] if rendered.stamp is None else rendered.body.split(rendered.stamp.written)
        lines = _same_headers(record, rendered)
        num_bytes = len(sent) + len(lines) + len(rendered.body) + 48 * len(parts) + trace.repeat.num_bytes
        num_bytes += OVERHEAD_BYTES
        if num_bytes > self._max_bytes or (rendered.stamp is not None and len(parts) < 2):
            return
        while self._num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._known)))
        self._known[key] = _Known(sent, rendered._replace(body=b"", headers={}), record, lines, parts, num_bytes)
        self._num_bytes += num_bytes

    def _stands(self, rendered: Rendered, tenant: Tenant) -> bool:
        """Whether the same would answer now, an upstream or engines that are alike. Where it is engines, no upstream
        goes before them: it would have done so before."""
        if rendered.hello is None:
            return self._serves(rendered.model, tenant)
        try:
            return self._models.serving(rendered.model)[0].hello is rendered.hello
        except KvasirError:
            return False

    def _drop(self, key: _Key) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._num_bytes -= known.num_bytes


def _key(http: web.Request, tenant: Tenant, body: bytes) -> _Key:
    heeded = [http.raw_path.encode("utf-8", "surrogateescape")]
    for name, value in http.raw_headers:
        if (lower := name.lower()) not in UNHEEDED and (lower, value) != _FIRST_TRY:
            heeded += (lower, value)  # neither can have a line end in it
    return _Key(tenant.name, hashlib.sha256(b"\n".join(heeded)).digest(), xxhash.xxh3_128_digest(body))


def _again(trace: Trace, lookup: Lookup, passed_ms: float) -> Trace:
    """What the trace of a hit says, at another time. dataclasses.replace would take four times as long."""
    return Trace(
        hit=trace.hit,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        reported_cached_tokens=trace.reported_cached_tokens,
        cache_write_tokens=trace.cache_write_tokens,
        lease_writes=trace.lease_writes,
        completion_tokens=trace.completion_tokens,
        overhead_ms=passed_ms,
        first_token_ms=passed_ms,
        finish=trace.finish,
        lookup=lookup,
    )


def _same_headers(record: Record, rendered: Rendered) -> bytes:
    """Those of an answer that will be what they are."""
    passed_on = rendered.hello is None
    headers = CIMultiDict({**rendered.headers, **kvasir_headers(record, cached=not passed_on)})
    for name in _new_headers(record, rendered, Lookup("exact"), 0.0):
        headers.popall(name, None)
    return header_lines(headers)


def _new_headers(record: Record, rendered: Rendered, lookup: Lookup, overhead_ms: float) -> dict[str, str]:
    """The other ones."""
    headers = common_headers(record)
    headers[OVERHEAD_MS] = f"{overhead_ms:.2f}"
    headers["Age"] = str(int(lookup.age_s))
    if rendered.hello is None:
        headers[REQUEST_ID] = record.request_id
    return headers
