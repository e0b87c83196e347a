"""Resend: a request that was seen before, byte for byte, gets what was written for it then, without being
parsed, put into a key or written again.

    seen    one request as it came: whose it is, its URL, the headers that may matter, its body
    known   what the pipeline found for it in the response cache, and what it wrote

It decides nothing. Whose request it is, the tenant's limits, and whether the response cache would give this very answer
now are asked each time; where anything has changed, the request goes the pipeline. Nothing of it is in a metric, a line
of the log or a header: it is a hit like any other, and the middleware counts it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import xxhash
from aiohttp import web
from multidict import CIMultiDict

from engine.protocol import Hello
from gateway.api.cache_control import RETRY_HEADER
from gateway.api.limiting import Limits, set_aside
from gateway.api.record import (
    OVERHEAD_MS,
    RECORD,
    REQUEST_ID,
    Record,
    common_headers,
    elapsed_ms,
    kvasir_headers,
)
from gateway.api.sent import header_lines, send
from gateway.api.stamps import Stamp
from gateway.api.unknown_fields import IgnoredFields
from gateway.errors import KvasirError
from gateway.tasks import off_loop, work_of
from gateway.types import Lookup, Need, Tenant, Tier, Trace

OVERHEAD_BYTES: Final = 2048
"""What an answer costs besides its bytes: objects, headers, and its place in the order."""

UNHEEDED: Final = frozenset(
    name.encode()
    for name in (
        "accept",
        "accept-encoding",
        "accept-language",
        "authorization",  # the tenant stands for it
        "connection",
        "content-length",
        "host",
        "idempotency-key",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-api-key",
        "x-client-request-id",
        "x-forwarded-for",
        "x-goog-api-key",
        "x-real-ip",
        "x-request-id",
        "x-stainless-read-timeout",
        "x-stainless-timeout",
    )
)
"""Headers that change no answer and are often another with each request. What is not known counts."""

_FIRST_TRY: Final = (RETRY_HEADER.encode(), b"0")
"""Of an SDK that counts. A retry gets a new answer, and has a key of its own."""


class Engine(Protocol):
    """One that has said hello."""

    @property
    def hello(self) -> Hello: ...


class Models(Protocol):
    """Those of our own engines."""

    def serving(self, model: str) -> Sequence[Engine]:
        """Never empty. Raises a KvasirError when nobody serves it."""
        ...


class _Key(NamedTuple):
    """`rest` is a digest of URL and headers, in which there may be keys; `body` one that says where to look."""

    tenant: str
    rest: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """An answer, and how the pipeline came to it.

    asked    the model, as the client names it
    hello    of the engines that serve it; None: it is an upstream's
    need     of the tenant's limits
    headers  of the answer alone, without what its record says
    body     all its bytes
    stamp    those of them that are new in each answer; None: there are none
    """

    asked: str
    hello: Hello | None
    need: Need
    headers: Mapping[str, str]
    body: bytes
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """Beside what was written: the request's body, to be compared, and what the record said in the end."""

    sent: bytes
    written: Written
    lines: bytes  # of those headers that are the same each time
    parts: Sequence[bytes]  # of the answer, between the stamps
    trace: Trace
    model: str | None
    stream: bool
    tier: Tier
    ignored: IgnoredFields
    num_bytes: int


class Seen:
    """One request that the resend cache could not answer."""

    def __init__(self, way: ResendCache, key: _Key, sent: bytes) -> None:
        self._way, self._key, self._sent = way, key, sent

    def keep(self, record: Record, written: Written) -> None:
        """What was written for it, which `may_come_again`."""
        self._way.keep(self._key, self._sent, record, written)


SEEN: web.RequestKey[Seen] = web.RequestKey("seen", Seen)


class ResendCache:
    """Known answers, within bytes, those used last. `max_bytes` 0 is none at all."""

    def __init__(self, max_bytes: int, models: Models, serves: Callable[[str, Tenant], bool], limits: Limits) -> None:
        """`serves` says whether a tenant's requests for a model go to an upstream."""
        self._max_bytes = max_bytes
        self._models = models
        self._serves = serves
        self._limits = limits
        self._known: OrderedDict[_Key, _Known] = OrderedDict()  # used last at the end
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    async def answer(self, http: web.Request, tenant: Tenant, body: bytes) -> web.StreamResponse | None:
        """What it got the last time, sent, or None; then `SEEN` takes what it gets now. Raises RateLimitError, and
        ConnectionResetError for a client that is gone."""
        if not self._max_bytes:
            return None
        key = await off_loop(work_of(len(body)), lambda: _key(http, tenant, body))
        known = self._known.get(key)
        if known is None or known.sent != body or not self._stands(known.written, tenant):
            http[SEEN] = Seen(self, key, body)
            return None
        record = http[RECORD]
        record.tier = known.tier
        if known.written.hello is not None:
            record.model = known.model
        await set_aside(self._limits, record, lambda: known.written.need)
        lookup = known.trace.repeat.again() if known.trace.repeat is not None else None
        if lookup is None:
            self._drop(key)
            http[SEEN] = Seen(self, key, body)
            return None
        if key in self._known:
            self._known.move_to_end(key)
        record.model, record.stream, record.ignored = known.model, known.stream, known.ignored
        passed_ms = elapsed_ms(record)
        record.traces = [_again(known.trace, lookup, passed_ms)]
        new = known.parts[0] if known.written.stamp is None else known.written.stamp.make().join(known.parts)
        return await send(http, known.lines, _new_headers(record, known.written, lookup, passed_ms), new)

    def keep(self, key: _Key, sent: bytes, record: Record, written: Written) -> None:
        """In place of what was known of this request."""
        self._drop(key)
        (trace,) = record.traces
        assert trace.repeat is not None
        parts = [written.body] if written.stamp is None else written.body.split(written.stamp.written)
        lines = _same_headers(record, written)
        num_bytes = len(sent) + len(lines) + len(written.body) + 48 * len(parts) + trace.repeat.num_bytes
        num_bytes += OVERHEAD_BYTES
        if num_bytes > self._max_bytes or (written.stamp is not None and len(parts) < 2):
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._known)))
        kept = replace(written, body=b"", headers={})
        self._known[key] = _Known(
            sent, kept, lines, parts, trace, record.model, record.stream, record.tier, record.ignored, num_bytes
        )
        self.num_bytes += num_bytes

    def _stands(self, written: Written, tenant: Tenant) -> bool:
        """Whether the same would answer now, an upstream or engines that are alike. Where it is engines, no upstream
        goes before them: it would have done so before."""
        if written.hello is None:
            return self._serves(written.asked, tenant)
        try:
            return self._models.serving(written.asked)[0].hello is written.hello
        except KvasirError:
            return False

    def _drop(self, key: _Key) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self.num_bytes -= known.num_bytes


def may_come_again(record: Record) -> bool:
    """Whether it got one answer, which the response cache had in memory."""
    return len(record.traces) == 1 and record.traces[0].repeat is not None


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
        told_cached_tokens=trace.told_cached_tokens,
        cache_write_tokens=trace.cache_write_tokens,
        lease_writes=trace.lease_writes,
        completion_tokens=trace.completion_tokens,
        overhead_ms=passed_ms,
        first_token_ms=passed_ms,
        finish=trace.finish,
        lookup=lookup,
    )


def _same_headers(record: Record, written: Written) -> bytes:
    """Those of an answer that will be what they are."""
    passed_on = written.hello is None
    headers = CIMultiDict({**written.headers, **kvasir_headers(record, cached=not passed_on)})
    for name in _new_headers(record, written, Lookup("exact"), 0.0):
        headers.popall(name, None)
    return header_lines(headers)


def _new_headers(record: Record, written: Written, lookup: Lookup, overhead_ms: float) -> dict[str, str]:
    """The other ones."""
    headers = common_headers(record)
    headers[OVERHEAD_MS] = f"{overhead_ms:.2f}"
    headers["Age"] = str(int(lookup.age_s))
    if written.hello is None:
        headers[REQUEST_ID] = record.request_id
    return headers
