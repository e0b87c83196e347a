"""Around every handler: request id, errors in the dialect's shape, one access line, observers, cross-origin requests.

No answer leaves without its request id, no error in another shape than its dialect's, and no request without its line.
Three APIs share one port, and some of their paths are the same: the dialect of a request is found here. A URL that is
none of ours gets a 404 that names the one that was meant. Pages of other origins (the Fetch standard) may read answers
if the operator names them; keys come in headers, and the one cookie (sessions.py) is for this server's own pages, so no
header speaks of credentials.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from yarl import URL

from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.descriptors import check_descriptors
from gateway.api.dialect import JSON, Dialect, Handler, retry_headers
from gateway.api.gemini.wire import GEMINI
from gateway.api.openai.wire import OPENAI
from gateway.api.record import (
    CLIENT_LEFT,
    RECORD,
    Observer,
    Record,
    cache_headers,
    common_headers,
    failed,
    is_final,
    known_error,
)
from gateway.api.replies import new_id
from gateway.api.unknown_fields import collected
from gateway.errors import BadRequestError, KvasirError, MethodNotAllowedError, NotFoundError
from gateway.logs import Fields, later
from gateway.native import no_panic
from gateway.propagation import CURRENT, TRACEPARENT, TRACESTATE, read_parent
from gateway.types import elapsed_ms

DIALECTS: tuple[Dialect, ...] = (ANTHROPIC, GEMINI, OPENAI)
"""The first that a request speaks; the last takes all that are left."""

access_log = logging.getLogger("kvasir.access")

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")

MAX_AGE_S: Final = 600
"""For which a browser remembers a preflight; Chrome takes no more than two hours."""

_METHODS: Final = "GET, HEAD, POST, PATCH, DELETE"
_NOTHING: Final[Mapping[str, str]] = {}

MAX_PARTS: Final = 12
"""Of a path that is looked at for the one that was meant; the longest of ours has seven."""

_NOT_SERVED: Final = re.compile(
    r"/v1(?:beta)?/(assistants|audio|batches|containers|conversations|corpora|evals|fileSearchStores|fine_tuning|images"
    r"|moderations|organization|realtime|skills|threads|tunedModels|uploads|vector_stores|videos)(?:/.*)?"
)
_INSTEAD: Final = {
    "conversations": " Go on from a response with `previous_response_id`, or send the whole conversation.",
    "batches": " Batches of the Gemini API are not; `/v1/batches` is the OpenAI API's.",
}


def dialect_of(http: web.Request) -> Dialect:
    for dialect in DIALECTS:
        if dialect.speaks(http):
            return dialect
    raise AssertionError("the last one speaks everything")


def observed(observer: Observer, cors: Cors, *, traces: bool = False) -> Middleware:
    """The one middleware of the gateway. `traces`: whether the observer makes spans."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = _record(request)
        record.cors = cors.headers(request)
        if traces:
            headers = request.headers
            record.parent = read_parent(headers.getall(TRACEPARENT, ()), headers.getall(TRACESTATE, ()))
        with noted(observer, record):
            response = cors.preflight(request) or await _answered(request, handler, record)
            record.status = record.status or response.status
            if not response.prepared:
                response.headers.update(common_headers(record))
            return response

    return middleware


class noted(collected):  # noqa: N801 - reads as a statement, like contextlib.suppress
    """Around the work for one record: it is counted, and has its line in the log, however it ends."""

    def __init__(self, observer: Observer, record: Record) -> None:
        super().__init__(record.ignored)
        self._observer = observer
        self._record = record

    def __enter__(self) -> None:
        self._observer.started(self._record)
        self._current = None if self._record.span is None else CURRENT.set(self._record.span)
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._current is not None:
            CURRENT.reset(self._current)
        record = self._record
        if isinstance(error, asyncio.CancelledError):
            record.status = CLIENT_LEFT
        if record.body is not None:
            record.body.release()
        record.total_ms = elapsed_ms(record)
        if record.hold is not None:
            record.hold.settle(record.usage)
        self._observer.finished(record)
        if record.money is not None:  # now that the ledger has what it cost
            record.money.settle(None)
        _log(record)


async def _answered(http: web.Request, handler: Handler, record: Record) -> web.StreamResponse:
    try:
        check_descriptors(http)
    except KvasirError as error:
        answer = _refuse(error, record)
        answer.force_close()
        return answer
    try:
        with no_panic():
            return await handler(http)
    except web.HTTPNotFound:
        return _refuse(await unknown_url(http), record)
    except web.HTTPMethodNotAllowed as error:
        if record.dialect.unknown(http):
            return _refuse(await unknown_url(http), record)
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{http.path} cannot be asked with {error.method}; it takes {allowed}."
        if error.method == "OPTIONS" and "Origin" in http.headers:
            message += " Pages of this origin are not among server.cors_origins."
        return _refuse(MethodNotAllowedError(message), record, {"Allow": allowed})
    except web.HTTPException as error:
        refused = BadRequestError(error.reason)
        refused.status = error.status
        return _refuse(refused, record)
    except ConnectionResetError:
        return web.Response(status=CLIENT_LEFT)
    except Exception as error:
        return _refuse(known_error(error, record), record)


def _refuse(error: KvasirError, record: Record, headers: Mapping[str, str] | None = None) -> web.Response:
    failed(record, error)
    body = orjson.dumps(record.dialect.error_json(error, record.shown_id))
    every = {**retry_headers(error), **cache_headers(record.trace.lookup), **(headers or {})}
    return web.Response(status=record.status, body=body, content_type=JSON, headers=every)


def _record(http: web.Request) -> Record:
    own_id = http.headers.get("X-Request-Id", "")
    resource = http.match_info.route.resource
    return Record(
        request_id=own_id if own_id and _SANE_ID.fullmatch(own_id) else f"req_{new_id()}",
        endpoint=resource.canonical if resource is not None else "unknown",
        received_s=time.monotonic(),
        dialect=dialect_of(http),
    )


def _log(record: Record) -> None:
    # Probes and scrapes come every few seconds, and readiness is 503 while the server starts: the line is not for them.
    failed_elsewhere = record.status >= 500 and not record.endpoint.startswith("/health")
    level = logging.INFO if record.endpoint.startswith("/v1") or failed_elsewhere else logging.DEBUG
    if not access_log.isEnabledFor(level):
        return
    later(access_log, level, partial(_fields, record) if is_final(record) else partial(_same, _fields(record)))


def _same(fields: Fields) -> Fields:
    return fields


def _fields(record: Record) -> Fields:
    """Of the request's line."""
    trace = record.trace
    lease, lookup, target = trace.lease, trace.lookup, record.target
    return Fields(
        request_id=record.request_id,
        tenant=record.tenant,
        endpoint=record.endpoint,
        model=record.model,
        engine=trace.engine,
        alias=target and target.alias,
        route=target and f"{target.policy}:{target.reason}",
        lane=record.lane if record.traces else "",
        stream=int(record.stream),
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        predicted_tokens=trace.predicted_tokens,
        lease=lease and lease.state,
        lease_read_tokens=trace.lease_read_tokens,
        lease_write_tokens=trace.lease_write_tokens,
        completion_tokens=trace.completion_tokens,
        queue_ms=round(trace.queue_ms, 1),
        overhead_ms=round(trace.overhead_ms, 2),
        hit=lookup and lookup.outcome,
        embedded_tokens=record.embedded_tokens,
        first_token_ms=round(trace.first_token_ms or 0.0, 1),
        total_ms=round(record.total_ms, 1),
        retries=trace.retries,
        status=record.status,
        error=record.error,
        trace_id=None if record.span is None else f"{record.span.trace_id:032x}",
    )


class Cors:
    """`origins` are those of server.cors_origins."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, http: web.Request) -> Mapping[str, str]:
        """Of every answer to this request, errors and streams too."""
        origin = http.headers.get("Origin") if self._origins else None
        if origin is None:
            return _NOTHING
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": "*"}
        if origin not in self._origins:
            return _NOTHING
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    def preflight(self, http: web.Request) -> web.Response | None:
        """The answer to a preflight of an origin that is allowed, without `headers`. It asks for no key and no route:
        the request itself will."""
        method = http.headers.get("Access-Control-Request-Method")
        if http.method != "OPTIONS" or method is None or not self.headers(http):
            return None
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted := http.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = wanted  # `*` would leave out Authorization
        return web.Response(status=204, headers=headers)


async def unknown_url(http: web.Request) -> NotFoundError:
    """Never reads the body."""
    message = f"Unknown request URL: {http.method} {http.path[:200]}."
    if known := _NOT_SERVED.fullmatch(http.path):
        message += f" The {known[1]} API is not served here.{_INSTEAD.get(known[1], '')}"
    elif (meant := await _meant(http)) is not None:
        message += (
            f" Did you mean {meant}? The base URL is {http.host}/v1 for OpenAI's SDKs and {http.host} for those of "
            "Anthropic and Gemini."
        )
    return NotFoundError(message, code="unknown_url")


async def _meant(http: web.Request) -> str | None:
    """A path of ours that this one ends with, slashes and what an SDK or a proxy puts in front aside."""
    parts = [part for part in http.rel_url.raw_path.split("/") if part]
    if len(parts) > MAX_PARTS:
        return None
    for begin in range(len(parts)):
        tail = "/".join(parts[begin:])
        for path in (f"/{tail}", f"/v1/{tail}"):
            other = http.clone(rel_url=URL.build(path=path, encoded=True))
            if (await http.app.router.resolve(other)).http_exception is None:
                return path
    return None
