"""Requests that no HTTP request brought: the lines of batches, each asked of one of the endpoints that generate.

An endpoint is made by the dialect that has it (`endpoints()` of its handlers). `Lines` gives a line what the middleware
gives a request: an id, its line in the log, its place in the metrics, and errors in its dialect's shape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.answering import Answering, Asked
from gateway.api.body import parse_object
from gateway.api.dialect import Dialect
from gateway.api.middleware import noted
from gateway.api.record import CLIENT_LEFT, Observer, Record
from gateway.errors import BadRequestError, DeadlineError, KvasirError, OverloadedError, QueueFullError
from gateway.types import Tenant, Usage

log = logging.getLogger(__name__)

Body = dict[str, Any]
Retry = Literal["no", "again", "later"]

OK: Final = 200


class Endpoint(NamedTuple):
    """What a line asks for. Both raise KvasirError.

    dialect  that it is of
    answer   the body of the answer
    digests  the chain digests of its prompt, by which lines with a common beginning are found; None: it has no such
    """

    dialect: Dialect
    answer: Callable[[Record, Tenant, Body], Awaitable[bytes]]
    digests: Callable[[Record, Tenant, Body], Awaitable[bytes]] | None = None


def asking(answering: Answering, dialect: Dialect, ask: Callable[[Record, Body], Asked]) -> Endpoint:
    """Of requests that are all in what they ask: `ask` makes it of a body."""

    async def answer(record: Record, tenant: Tenant, body: Body) -> bytes:
        return await answering.whole(record, tenant, _checked(ask(record, body)))

    async def digests(record: Record, tenant: Tenant, body: Body) -> bytes:
        asked = _checked(ask(record, body))
        return await answering.digests(record, tenant, asked.call, asked.model)

    return Endpoint(dialect, answer, digests)


def _checked(asked: Asked) -> Asked:
    check_whole(asked.call.stream)
    return asked


def check_whole(stream: bool) -> None:
    """Raises BadRequestError: nobody reads a stream while a batch runs."""
    if stream:
        raise BadRequestError("A line of a batch does not stream.", param="stream", code="unsupported_parameter")


class Line(NamedTuple):
    """A line. `endpoint` is the name of one that there is; `body` JSON, if the client wrote any."""

    endpoint: str
    tenant: Tenant
    body: bytes
    namespace: str = ""
    request_id: str = ""


class Answered(NamedTuple):
    """What became of a line.

    body           of the answer, or of the error
    retry          "again": it failed in a way that need not be its own fault; "later": nobody has worked on it yet, and
                   somebody may after a while
    retry_after_s  so long, where that is known
    """

    status: int
    body: bytes
    usage: Usage = Usage(0, 0)
    retry: Retry = "no"
    retry_after_s: float | None = None


class Lines:
    """Answers lines, each as one request of the batch lane."""

    def __init__(self, endpoints: Mapping[str, Endpoint], observer: Observer, *, max_depth: int) -> None:
        """`max_depth` is that of their JSON."""
        self._endpoints = endpoints
        self._observer = observer
        self._max_depth = max_depth

    async def answer(self, line: Line) -> Answered:
        """Never raises but when it is cancelled."""
        record = self._record(line)
        with noted(self._observer, record):
            try:
                answer = self._endpoints[line.endpoint].answer
                told = await answer(record, line.tenant, parse_object(line.body, self._max_depth))
                record.status = OK
                return Answered(OK, told, _usage(record))
            except asyncio.CancelledError:
                record.status = CLIENT_LEFT
                raise
            except KvasirError as error:
                return _refused(error, record)
            except Exception:
                log.exception("line %s failed", record.request_id)
                return _refused(KvasirError("The server had an error while processing your request."), record)

    async def digests(self, line: Line) -> bytes:
        """The chain digests of a line's prompt; none for what has no prompt, or is wrong, which its answer will say."""
        digests = self._endpoints[line.endpoint].digests
        if digests is None:
            return b""
        try:
            return await digests(self._record(line), line.tenant, parse_object(line.body, self._max_depth))
        except KvasirError:
            return b""

    def _record(self, line: Line) -> Record:
        return Record(
            request_id=line.request_id,
            endpoint=f"{line.endpoint} (batch)",
            received_s=time.monotonic(),
            dialect=self._endpoints[line.endpoint].dialect,
            tenant=line.tenant.name,
            namespace=line.namespace,
            lane="batch",
        )


def _usage(record: Record) -> Usage:
    told_cached = sum(trace.told_cached_tokens for trace in record.traces)
    return Usage(record.prompt_tokens + record.embedded_tokens, record.completion_tokens, told_cached)


def _refused(error: KvasirError, record: Record) -> Answered:
    dialect = record.dialect
    record.status = dialect.status(error)
    body = orjson.dumps(dialect.error_json(error, record.request_id))
    return Answered(record.status, body, Usage(0, 0), _retry(error), error.retry_after_s)


def _retry(error: KvasirError) -> Retry:
    match error:
        case DeadlineError(retry_after_s=None):  # all its time went into the answer, and would again
            return "no"
        case OverloadedError() | QueueFullError():
            return "later"
    return "again" if error.status >= 500 else "no"
