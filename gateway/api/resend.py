"""The resend path: a request that came before, byte for byte, gets the answer that was written for it then, without
being parsed or hashed again.

It decides nothing. The request's tenant, its limits, and whether the response cache would give this very answer now are
checked each time; where anything has changed, the request goes through the pipeline. Such a request is in no metric,
log line or header of its own: it is a hit like any other.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache, partial
from typing import Final, NamedTuple

import xxhash
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11
from multidict import CIMultiDict

from engine.protocol import Hello
from gateway.api.cache_control import RETRY_HEADER
from gateway.api.record import (
    OVERHEAD_MS,
    RECORD,
    REQUEST_ID,
    Record,
    common_headers,
    kvasir_headers,
)
from gateway.api.replies import Stamp
from gateway.api.tenants import set_aside
from gateway.errors import KvasirError
from gateway.limits.limits import TenantLimits
from gateway.stages import Registry
from gateway.tasks import off_loop, work_of
from gateway.types import Lookup, Need, Tenant, Trace, elapsed_ms

OVERHEAD_BYTES: Final = 2048
"""Of an entry, besides its bytes: objects, headers, its place in the order."""

UNHEEDED: Final = frozenset(
    b"""
    accept accept-encoding accept-language authorization connection content-length host idempotency-key traceparent
    tracestate user-agent x-api-key x-client-request-id x-forwarded-for x-goog-api-key x-real-ip x-request-id
    x-stainless-read-timeout x-stainless-timeout
    """.split()
)
"""Headers that change no answer and often differ between requests; the tenant stands for its keys. All others count."""

_FIRST_TRY: Final = (RETRY_HEADER.encode(), b"0")
"""Of an SDK that counts. A retry gets a new answer, and has a key of its own."""

_OWN: Final = frozenset(("connection", "content-length", "date", "server", "transfer-encoding"))
"""Headers that `send` writes."""

_SERVER: Final = f"\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"

_Key = tuple[str, bytes, bytes]
"""Tenant, digest of URL and headers (which may hold keys), digest of the body that says where to look."""


class Rendered(NamedTuple):
    """An answer as the pipeline wrote it.

    model    as the client names it
    hello    of the engines that serve it; None: it is an upstream's
    need     of the tenant's limits
    headers  of the answer alone, without those of its record
    body     all its bytes
    stamp    those of them that are new in each answer; None: there are none
    """

    model: str
    hello: Hello | None
    need: Need
    headers: Mapping[str, str]
    body: bytes
    stamp: Stamp | None = None


class _Entry(NamedTuple):
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


_KEEP: web.RequestKey[partial[None]] = web.RequestKey("keep", partial)
"""Keeps the answer to a request without an entry."""


def find_keeper(http: web.Request) -> Callable[[Rendered], None] | None:
    """A function that keeps the answer of a request, to be called once all of it is sent. None for one that may not be
    sent again: it is not one answer which the response cache had in memory, or another target may be the next."""
    traces, target = http[RECORD].traces, http[RECORD].target
    if target is not None and not target.is_only:
        return None
    return http.get(_KEEP) if len(traces) == 1 and traces[0].repeat is not None else None


class ResendCache:
    """The latest answers, within bytes. `max_bytes` 0 is none at all."""

    def __init__(
        self, max_bytes: int, models: Registry, serves: Callable[[str, Tenant], bool], limits: TenantLimits
    ) -> None:
        """`serves` says whether a tenant's requests for a model go to an upstream."""
        self._max_bytes = max_bytes
        self._models = models
        self._serves = serves
        self._limits = limits
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # used last at the end
        self._num_bytes = 0
        self._state = 0  # of the settings

    def forget(self) -> None:
        """The settings have changed: an answer that was written before may be another one now, also one of a request
        that has not ended yet."""
        self._entries.clear()
        self._num_bytes = 0
        self._state += 1

    async def answer(self, http: web.Request, tenant: Tenant, body: bytes) -> web.StreamResponse | None:
        """The answer, sent, or None; then the next one may be kept (`find_keeper`). Raises RateLimitError, and
        ConnectionResetError for a client that is gone."""
        if not self._max_bytes:
            return None
        key = await off_loop(work_of(len(body)), lambda: _key(http, tenant, body))
        entry, record, lookup = self._entries.get(key), http[RECORD], None
        if entry is not None and entry.sent == body and self._stands(entry.rendered, tenant):
            rendered, first, (trace,) = entry.rendered, entry.record, entry.record.traces
            record.tier = first.tier
            if rendered.hello is not None:
                record.model = first.model
            await set_aside(self._limits, record, lambda: rendered.need)
            lookup = None if trace.repeat is None else trace.repeat.again()
            if lookup is None:
                self._drop(key)
        if entry is None or lookup is None:
            http[_KEEP] = partial(self._keep, self._state, key, body, record)
            return None
        if key in self._entries:
            self._entries.move_to_end(key)
        record.model, record.stream, record.ignored = first.model, first.stream, first.ignored
        record.target = first.target
        passed_ms = elapsed_ms(record)
        record.traces = [_again(trace, lookup, passed_ms)]
        new = entry.parts[0] if rendered.stamp is None else rendered.stamp.make().join(entry.parts)
        return await send(http, entry.lines, _new_headers(record, rendered, lookup, passed_ms), new)

    def _keep(self, state: int, key: _Key, sent: bytes, record: Record, rendered: Rendered) -> None:
        """In place of an older entry of this request. `state`: that in which it began."""
        if state != self._state:
            return
        self._drop(key)
        (trace,) = record.traces
        assert trace.repeat is not None
        parts = [rendered.body] if rendered.stamp is None else rendered.body.split(rendered.stamp.written)
        headers = CIMultiDict({**rendered.headers, **kvasir_headers(record, cached=rendered.hello is not None)})
        for name in _new_headers(record, rendered, Lookup("exact"), 0.0):
            headers.popall(name, None)
        lines = header_lines(headers)
        num_bytes = len(sent) + len(lines) + len(rendered.body) + 48 * len(parts) + trace.repeat.num_bytes
        num_bytes += OVERHEAD_BYTES
        if num_bytes > self._max_bytes or (rendered.stamp is not None and len(parts) < 2):
            return
        while self._num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[key] = _Entry(sent, rendered._replace(body=b"", headers={}), record, lines, parts, num_bytes)
        self._num_bytes += num_bytes

    def _stands(self, rendered: Rendered, tenant: Tenant) -> bool:
        """Whether the same would answer now, an upstream or engines that are alike. Where it is engines, no upstream
        goes before them: it would have done so before."""
        if rendered.hello is None:
            return self._serves(rendered.model, tenant)
        try:
            return self._models.serving(rendered.model)[0].hello.named(rendered.model) is rendered.hello
        except KvasirError:
            return False

    def _drop(self, key: _Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._num_bytes -= entry.num_bytes


def _key(http: web.Request, tenant: Tenant, body: bytes) -> _Key:
    heeded = [http.raw_path.encode("utf-8", "surrogateescape")]
    for name, value in http.raw_headers:
        if (lower := name.lower()) not in UNHEEDED and (lower, value) != _FIRST_TRY:
            heeded += (lower, value)  # neither can have a line end in it
    return tenant.name, hashlib.sha256(b"\n".join(heeded)).digest(), xxhash.xxh3_128_digest(body)


def _again(trace: Trace, lookup: Lookup, passed_ms: float) -> Trace:
    """The trace of a hit, at another time. dataclasses.replace would take four times as long."""
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


def _new_headers(record: Record, rendered: Rendered, lookup: Lookup, overhead_ms: float) -> dict[str, str]:
    """Headers that differ each time."""
    headers = common_headers(record)
    headers[OVERHEAD_MS] = f"{overhead_ms:.2f}"
    headers["Age"] = str(int(lookup.age_s))
    if rendered.hello is None:
        headers[REQUEST_ID] = record.request_id
    return headers


# -- writing all bytes at once ----------------------------------------------------------------------------------------


class Sent(web.StreamResponse):
    """For aiohttp: an answer that was sent already, without any of the dozen steps in which aiohttp prepares one."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._goes_on = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._goes_on

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """It is written."""


_GOES_ON: Final = Sent(keep_alive=True)
_ENDS: Final = Sent(keep_alive=False)


async def send(http: web.Request, headers: bytes, more: Mapping[str, str], body: bytes) -> Sent:
    """Writes the bytes that aiohttp would write for a 200, and returns when the client has room for more. Raises
    ConnectionResetError when the client is gone.

    headers  from `header_lines`, with the type of the content
    more     other ones
    """
    goes_on = bool(http.keep_alive)
    if http.version == HttpVersion11:
        begin = b"HTTP/1.1 200 OK\r\n" if goes_on else b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    else:
        begin = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" if goes_on else b"HTTP/1.0 200 OK\r\n"
    lines = [f"{name}: {value}\r\n" for name, value in more.items()]
    lines.append(f"Content-Length: {len(body)}\r\nDate: {_date(int(time.time()))}{_SERVER}")
    writer = http.writer
    await writer.write(b"".join((begin, headers, "".join(lines).encode(), body)))
    await writer.drain()
    return _GOES_ON if goes_on else _ENDS


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Ready to be sent, without those that `send` writes. Names and values have no line end in them."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if name.lower() not in _OWN]
    return "".join(lines).encode("utf-8", "surrogateescape")


@lru_cache(maxsize=2)
def _date(now_s: int) -> str:
    """Of a second since 1970, as HTTP writes it."""
    return formatdate(now_s, usegmt=True)
