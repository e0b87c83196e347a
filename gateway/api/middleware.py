"""Around every handler: request id, errors in the dialect's shape, one access line, observers.

No answer leaves without its request id, no error in another shape than its dialect's, and no request without its line.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.api.cors import Cors
from gateway.api.descriptors import check_descriptors
from gateway.api.dialect import JSON, Handler, retry_headers
from gateway.api.dialects import dialect_of
from gateway.api.record import (
    CLIENT_LEFT,
    RECORD,
    Observer,
    Record,
    cache_headers,
    common_headers,
    elapsed_ms,
    failed,
    is_final,
)
from gateway.api.stamps import new_id
from gateway.api.unknown_fields import collected
from gateway.api.unknown_urls import unknown_url
from gateway.errors import BadRequestError, KvasirError, MethodNotAllowedError
from gateway.logs import Fields, later
from gateway.native import no_panic
from gateway.types import Trace

log = logging.getLogger(__name__)
access_log = logging.getLogger("kvasir.access")

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")


def observed(observer: Observer, cors: Cors) -> Middleware:
    """The one middleware of the gateway."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = _record(request)
        record.cors = cors.headers(request)
        observer.started(record)
        try:
            with collected(record.ignored):
                response = cors.preflight(request) or await _answered(request, handler, record)
            record.status = record.status or response.status
            if not response.prepared:
                response.headers.update(common_headers(record))
            return response
        except asyncio.CancelledError:
            record.status = CLIENT_LEFT
            raise
        finally:
            _finish(observer, record)

    return middleware


@contextmanager
def noted(observer: Observer, record: Record) -> Iterator[None]:
    """Around what is done for one record: it is counted, and has its line in the log, however it ends."""
    observer.started(record)
    try:
        with collected(record.ignored):
            yield
    finally:
        _finish(observer, record)


def _finish(observer: Observer, record: Record) -> None:
    if record.body is not None:
        record.body.release()
    record.total_ms = elapsed_ms(record)
    if record.hold is not None:
        record.hold.settle(record.usage)
    observer.finished(record)
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
    except KvasirError as error:
        return _refuse(error, record)
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
    except Exception:
        log.exception("request %s failed", record.request_id)
        return _refuse(KvasirError("The server had an error while processing your request."), record)


def _refuse(error: KvasirError, record: Record, headers: Mapping[str, str] | None = None) -> web.Response:
    failed(record, error)
    body = orjson.dumps(record.dialect.error_json(error, record.request_id))
    every = {**retry_headers(error), **cache_headers(record), **(headers or {})}
    return web.Response(status=record.status, body=body, content_type=JSON, headers=every)


def _record(http: web.Request) -> Record:
    asked = http.headers.get("X-Request-Id", "")
    resource = http.match_info.route.resource
    return Record(
        request_id=asked if asked and _SANE_ID.fullmatch(asked) else f"req_{new_id()}",
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
    if is_final(record):
        later(access_log, level, partial(_fields, record))
    else:
        access_log.log(level, "%s", _fields(record))


def _fields(record: Record) -> Fields:
    """Of the request's line."""
    # What one trace says is what the record would say of it, in a third of the time.
    told: Record | Trace = record.traces[0] if len(record.traces) == 1 else record
    lease, lookup = told.lease, told.lookup
    return Fields(
        request_id=record.request_id,
        tenant=record.tenant,
        endpoint=record.endpoint,
        model=record.model,
        engine=told.engine,
        lane=record.lane if record.traces else "",
        stream=int(record.stream),
        prompt_tokens=told.prompt_tokens,
        cached_tokens=told.cached_tokens,
        lease=lease and lease.state,
        lease_read_tokens=told.lease_read_tokens,
        lease_write_tokens=told.lease_write_tokens,
        completion_tokens=told.completion_tokens,
        queue_ms=round(told.queue_ms, 1),
        overhead_ms=round(told.overhead_ms, 2),
        hit=lookup and lookup.outcome,
        embedded_tokens=record.embedded_tokens,
        first_token_ms=round(told.first_token_ms or 0.0, 1),
        total_ms=round(record.total_ms, 1),
        retries=sum(trace.retries for trace in record.traces),
        status=record.status,
        error=record.error,
    )
