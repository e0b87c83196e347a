"""Requests that no HTTP request brought: the lines of batches, each asked of one of the endpoints that generate.

An endpoint is made by the dialect that has it (`endpoints()` of its handlers); upstream_lines.py answers for models
of upstreams. `Lines` gives a line what the middleware gives a request: an id, its line in the log, its place in the
metrics, and errors in its dialect's shape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.answering import Answering, Generation, parsed
from gateway.api.beginnings import Beginning, beginning_of_body, beginning_of_call
from gateway.api.call import Call
from gateway.api.dialect import Dialect
from gateway.api.middleware import noted
from gateway.api.record import CLIENT_LEFT, Observer, Record, failed
from gateway.api.tenants import Namespaces
from gateway.api.unknown_fields import IgnoredFields, collected
from gateway.api.upstream_lines import Headers, Target, UpstreamLines
from gateway.errors import (
    BadRequestError,
    DeadlineError,
    EngineLostError,
    EnginesDiedError,
    KvasirError,
    ModelNotFoundError,
    NotCachedError,
    OverloadedError,
    QueueFullError,
    UpstreamLostError,
)
from gateway.native import no_panic
from gateway.tasks import off_loop
from gateway.types import Tenant, Usage

log = logging.getLogger(__name__)

Body = dict[str, Any]
Retry = Literal["no", "again", "died", "later"]

OK: Final = 200

PAUSE_S: Final = 2.0
"""Until an upstream is asked again that failed a line, where it does not say."""

_LATER: Final = frozenset((429, 503, 529))
"""Statuses with which an upstream says that it has too much to do: nobody has worked on the request."""

_NEVER: Final = frozenset((501, 505))
"""Failures that are the same the next time."""


class Endpoint(NamedTuple):
    """What a line asks for. Both raise KvasirError.

    dialect  that it is of
    target   where lines for models of upstreams go
    answer   the body of the answer
    call     what it generates from, by which lines with a common beginning are found; None: it generates nothing
    """

    dialect: Dialect
    target: Target
    answer: Callable[[Record, Tenant, Body], Awaitable[bytes]]
    call: Callable[[Record, Tenant, Body], Awaitable[Call]] | None = None


def asking(
    answering: Answering, dialect: Dialect, target: Target, ask: Callable[[Record, Body], Generation]
) -> Endpoint:
    """Of requests that are all in what they ask: `ask` makes it of a body."""

    async def answer(record: Record, tenant: Tenant, body: Body) -> bytes:
        return await answering.whole(record, tenant, _checked(await parsed(record, ask, body)))

    async def call(record: Record, _: Tenant, body: Body) -> Call:
        return _checked(await parsed(record, ask, body)).call

    return Endpoint(dialect, target, answer, call)


def _checked(generation: Generation) -> Generation:
    check_whole(generation.call.stream)
    return generation


def check_whole(stream: bool) -> None:
    """Raises BadRequestError: nobody reads a stream while a batch runs."""
    if stream:
        raise BadRequestError("A line of a batch does not stream.", param="stream", code="unsupported_parameter")


def check_body(body: Body) -> None:
    """Raises BadRequestError for what no line may ask for, whoever would answer it."""
    check_whole(bool(body.get("stream")))
    if body.get("background"):
        raise BadRequestError(
            "A line of a batch runs in the background by itself.", param="background", code="unsupported_parameter"
        )


class Line(NamedTuple):
    """A line. `endpoint` is the name of one that there is; `headers` are for upstreams, besides those of its target.
    `num_bytes` are those of its row, `work` is that it is to read it (tasks.work_of)."""

    endpoint: str
    tenant: Tenant
    body: Body
    namespace: str = ""
    request_id: str = ""
    headers: Headers = ()
    num_bytes: int = 0
    work: int = 0


class Answered(NamedTuple):
    """What became of a line.

    body           of the answer, or of the error
    retry          "again": it failed in a way that need not be its own fault; "died": its engine died at work on it;
                   "later": nobody has worked on it yet, and
                   somebody may after a while
    retry_after_s  its model is left alone for so long, at least; None: that is not known, or need not be
    """

    status: int
    body: bytes
    usage: Usage = Usage(0, 0)
    retry: Retry = "no"
    retry_after_s: float | None = None


class Lines:
    """Answers lines, each as one request of the batch lane."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        observer: Observer,
        all_joined: Callable[[], bool],
        upstreams: UpstreamLines,
        namespaces: Namespaces,
        refuses_unknown: Callable[[str], bool],
    ) -> None:
        """all_joined       every engine has said which model it has, so that one which nobody has does not exist
        refuses_unknown  whether unknown fields of a tenant's lines are refused
        """
        self._refuses_unknown = refuses_unknown
        self._all_joined = all_joined
        self._upstreams = upstreams
        self._namespaces = namespaces
        self._endpoints = endpoints
        self._observer = observer

    async def answer(self, line: Line) -> Answered:
        """Never raises but when it is cancelled."""
        record = self._record(line)
        with noted(self._observer, record):
            try:
                with no_panic():
                    return await self._answer(line, record)
            except asyncio.CancelledError:
                record.status = CLIENT_LEFT
                raise
            except KvasirError as error:
                return self._refused(error, record)
            except Exception:
                log.exception("line %s failed", record.request_id)
                return self._refused(KvasirError("The server had an error while processing your request."), record)

    async def find_beginning(self, line: Line) -> Beginning | None:
        """What a line's prompt begins with. None for what has none, or is wrong, which its answer will say. Raises
        OverloadedError when its engines are away."""
        call = self._endpoints[line.endpoint].call
        if call is None:
            return None
        try:
            if self._upstreams.serves(line.body, line.tenant):
                return await off_loop(line.work, lambda: beginning_of_body(line.body))
            record = self._record(line)
            with no_panic(), collected(record.ignored):
                generation = await call(record, line.tenant, line.body)
                key = self._namespaces.separating_key(line.tenant, generation.cache_key)
                return await off_loop(record.work, lambda: beginning_of_call(generation, key))
        except KvasirError as error:
            if isinstance(error, OverloadedError) or self._may_join(error):
                raise OverloadedError(error.message, retry_after_s=error.retry_after_s) from error
            return None
        except Exception:
            log.exception("line %s has no prompt", line.request_id)
            return None

    async def _answer(self, line: Line, record: Record) -> Answered:
        """Raises KvasirError."""
        endpoint = self._endpoints[line.endpoint]
        if not self._upstreams.serves(line.body, line.tenant):
            body = await endpoint.answer(record, line.tenant, line.body)
            record.status = OK
            return Answered(OK, body, _usage(record))
        check_body(line.body)
        target = Target(endpoint.target.path, (*endpoint.target.headers, *line.headers))
        reply = await self._upstreams.answer(record, line.tenant, line.body, target)
        record.status = reply.status
        retry = _retry_of(reply.status)
        after_s = None if retry == "no" else reply.retry_after_s or PAUSE_S
        return Answered(reply.status, reply.body, _usage(record), retry, after_s)

    def _may_join(self, error: KvasirError) -> bool:
        """Whether the model that was not found may still be that of an engine."""
        return isinstance(error, ModelNotFoundError) and not self._all_joined()

    def _refused(self, error: KvasirError, record: Record) -> Answered:
        failed(record, error)
        body = orjson.dumps(record.dialect.error_json(error, record.request_id))
        retry: Retry = "later" if self._may_join(error) else _retry(error)
        after_s = PAUSE_S if isinstance(error, UpstreamLostError) and retry != "no" else error.retry_after_s
        return Answered(record.status, body, Usage(0, 0), retry, after_s)

    def _record(self, line: Line) -> Record:
        return Record(
            request_id=line.request_id,
            endpoint=f"{line.endpoint} (batch)",
            received_s=time.monotonic(),
            dialect=self._endpoints[line.endpoint].dialect,
            tenant=line.tenant.name,
            namespace=line.namespace,
            lane="batch",
            body_bytes=line.num_bytes,
            ignored=IgnoredFields(self._refuses_unknown(line.tenant.name)),
            work=line.work,
        )


def _usage(record: Record) -> Usage:
    told_cached = sum(trace.reported_cached_tokens for trace in record.traces)
    return Usage(record.prompt_tokens + record.embedded_tokens, record.completion_tokens, told_cached)


def _retry(error: KvasirError) -> Retry:
    match error:
        case EngineLostError(died=True):
            return "died"
        case DeadlineError(retry_after_s=None):  # all its time went into the answer, and would again
            return "no"
        case NotCachedError() | EnginesDiedError():
            return "no"
        case OverloadedError() | QueueFullError() | UpstreamLostError(begun=False):
            return "later"
    return "again" if error.status >= 500 else "no"


def _retry_of(status: int) -> Retry:
    """Of what an upstream answered."""
    if status in _LATER:
        return "later"
    return "again" if status == 408 or (status >= 500 and status not in _NEVER) else "no"
