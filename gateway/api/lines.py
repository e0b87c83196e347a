"""Runs the lines of batches: requests without an HTTP request, each of one of the endpoints that generate.

A dialect brings its endpoints (`endpoints()` of its handlers) and how its rows are read and written (`RowFormat`).
`BatchRunner` gives a line what the middleware gives a request: an id, a line in the log, metrics, and errors in its
dialect's shape. Lines whose prompts begin alike run one after the other. For that their text is compared: tokenising a
large job takes a minute and fills the memos that online requests need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import orjson

from engine.protocol import TOKEN_BYTES, chain_digests
from gateway.api.answering import Answering, parsed
from gateway.api.call import Call
from gateway.api.dialect import Dialect
from gateway.api.middleware import noted
from gateway.api.passthrough import Headers, Passthrough, Upstreams, may_keep, need_of
from gateway.api.record import Observer, Record, failed, known_error
from gateway.api.router import Router
from gateway.api.stream import Generation
from gateway.api.structure import work_of_json
from gateway.api.tenants import Namespaces, set_aside
from gateway.api.unknown_fields import IgnoredFields, collected
from gateway.config import BatchSettings
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
    UpstreamRefusedError,
)
from gateway.native import no_panic
from gateway.queues.batch.base import Checked, Job, LinePlan, LineResult, Unrun
from gateway.tasks import off_loop
from gateway.types import ChatPrompt, Prompt, Tenant, TextPrompt, TokenPrompt, UpstreamAnswer, Usage

log = logging.getLogger(__name__)

Row = dict[str, Any]
Body = dict[str, Any]
Retry = Literal["no", "again", "died", "later"]

OK: Final = 200

PAUSE_S: Final = 2.0
"""Until an upstream gets a failed line again, where it names no time."""

COMPLETION_TOKENS: Final = 256
"""Expected length of an answer without a limit."""

BLOCK_TOKENS: Final = 16
"""Tokens of four bytes each: how finely beginnings are compared."""

MAX_PREFIX_BYTES: Final = 1 << 19
"""Bytes of a prompt that are compared."""

_LATER: Final = frozenset((429, 503, 529))
"""Statuses of an upstream that has too much to do: it has not worked on the request."""

_NEVER: Final = frozenset((501, 505))
"""Failures that are the same the next time."""

_READ_IN_ORDER: Final = ("tools", "functions", "system", "instructions", "messages", "prompt", "input")
"""Fields with a model's input, about in the order in which it is read."""

_NEWLINES: Final = bytes.maketrans(b"\r\n", b"  ")


class Endpoint(NamedTuple):
    """A route that lines may call. Both functions raise KvasirError.

    path     of a client's URL, and `headers` that a client would send: for lines that go to an upstream
    answer   the body of the answer
    call     what it generates from, for finding lines with a common beginning; None: it generates nothing
    chats    whether its lines are translated for upstreams that speak another API
    """

    dialect: Dialect
    path: str
    answer: Callable[[Record, Tenant, Body], Awaitable[bytes]]
    call: Callable[[Record, Tenant, Body], Awaitable[Call]] | None = None
    headers: Headers = ()
    chats: bool = False


def generating(
    answering: Answering,
    dialect: Dialect,
    path: str,
    parse: Callable[[Record, Body], Generation],
    headers: Headers = (),
    *,
    chats: bool = True,
) -> Endpoint:
    """The endpoint of a route whose body holds the whole request."""

    async def answer(record: Record, tenant: Tenant, body: Body) -> bytes:
        return await answering.whole(record, tenant, await generation(record, tenant, body))

    async def call(record: Record, tenant: Tenant, body: Body) -> Call:
        return (await generation(record, tenant, body)).call

    async def generation(record: Record, tenant: Tenant, body: Body) -> Generation:
        return await parsed(record, parse, await answering.with_files(record, tenant, body.get("model"), body))

    return Endpoint(dialect, path, answer, call, headers, chats)


class LineRequest(NamedTuple):
    """A line. `endpoint` is the name of one; `headers` are for upstreams, besides those of the endpoint. `num_bytes`
    are those of its row, `work` is the work of reading it (tasks.work_of).
    `asked` is the model by the row's own name, perhaps an alias; `key` is as in Job."""

    endpoint: str
    tenant: Tenant
    body: Body
    namespace: str = ""
    request_id: str = ""
    headers: Headers = ()
    num_bytes: int = 0
    work: int = 0
    asked: str | None = None
    key: str = ""


class Answered(NamedTuple):
    """How a line ended. `body` is that of the answer, or of the error; `retry` and `retry_after_s` are as in
    LineResult."""

    status: int
    body: bytes
    usage: Usage = Usage(0, 0)
    retry: Retry = "no"
    retry_after_s: float | None = None


class RowFormat(NamedTuple):
    """How a dialect writes batches. Rows that passed its check are JSON objects with a `custom_id`.

    check     all rows of a job, blocking
    request   name of the endpoint that a row calls, and the body
    answered  row, request id and how the line ended -> the result
    unrun     row, and why it never ran -> the result
    headers   that upstreams get with the requests of a job
    """

    check: Callable[[Job, BinaryIO], Checked]
    request: Callable[[Job, Row], tuple[str, Body]]
    answered: Callable[[Row, str, Answered], bytes]
    unrun: Callable[[Row, Unrun], bytes]
    headers: Callable[[Job], Headers] = lambda job: ()


class Beginning(NamedTuple):
    """The beginning of a prompt, and its estimated tokens. `digests` are chained, as those of blocks."""

    digests: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """queues.batch.base.Runner, of all dialects that have batches: each line is one request of the batch lane.

    formats          by the name of the dialect
    all_joined       every engine has named its model, so that a model which none has does not exist
    refuses_unknown  whether unknown fields of a tenant's lines are refused
    may_use          whether a tenant may use a model
    """

    settings: BatchSettings
    endpoints: Mapping[str, Endpoint]
    formats: Mapping[str, RowFormat]
    observer: Observer
    all_joined: Callable[[], bool]
    passthrough: Passthrough
    upstreams: Upstreams
    namespaces: Namespaces
    refuses_unknown: Callable[[str], bool]
    router: Router
    may_use: Callable[[str, str], bool]

    def check(self, job: Job, rows: BinaryIO) -> Checked:
        return self.formats[job.dialect].check(job, rows)

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        line = self._line(job, *await _loaded(row), "", len(row))
        model = line.body.get("model")
        try:
            beginning = await self.find_beginning(line)
        except OverloadedError:
            return None
        digests = b"" if beginning is None else beginning.digests
        return LinePlan(model if type(model) is str else "", digests, _expected_tokens(line.body, beginning, len(row)))

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        value, work = await _loaded(row)
        answered = await self.answer(self._line(job, value, work, request_id, len(row)))
        body = self.formats[job.dialect].answered(value, request_id, answered)
        return LineResult(answered.status == OK, body, answered.usage, answered.retry, answered.retry_after_s)

    def unrun(self, job: Job, row: bytes, why: Unrun) -> bytes:
        return self.formats[job.dialect].unrun(orjson.loads(row) if row else {}, why)

    async def answer(self, line: LineRequest) -> Answered:
        """Never raises but when it is cancelled."""
        record = self._record(line)
        with noted(self.observer, record):
            try:
                with no_panic():
                    return await self._answer(line, record)
            except Exception as error:
                return self._refused(known_error(error, record), record)

    async def find_beginning(self, line: LineRequest) -> Beginning | None:
        """The beginning of a line's prompt. None for a line without a prompt, or with an error that its answer will
        tell. Raises OverloadedError when none of its engines can be reached."""
        call = self.endpoints[line.endpoint].call
        if call is None:
            return None
        try:
            if self._goes_on(line):
                return await off_loop(line.work, lambda: beginning_of_body(line.body))
            record = self._record(line)
            with no_panic(), collected(record.ignored):
                generation = await call(record, line.tenant, line.body)
                key = self.namespaces.separating_key(line.tenant, generation.cache_key)
                return await off_loop(record.work, lambda: beginning_of_call(generation, key))
        except KvasirError as error:
            if isinstance(error, OverloadedError) or self._may_join(error):
                raise OverloadedError(error.message, retry_after_s=error.retry_after_s) from error
            return None
        except Exception:
            log.exception("line %s has no prompt", line.request_id)
            return None

    async def _answer(self, line: LineRequest, record: Record) -> Answered:
        """Raises KvasirError."""
        if line.asked is not None and not self.may_use(line.tenant.name, line.asked):
            raise ModelNotFoundError(line.asked)
        for name in ("stream", "background"):
            if line.body.get(name):
                raise BadRequestError(f"A line of a batch has no `{name}`.", param=name, code="unsupported_parameter")
        if self._goes_on(line) and not self._is_translated(line):
            return await self._pass(line, record)
        try:
            body = await self.endpoints[line.endpoint].answer(record, line.tenant, line.body)
        finally:
            for trace in record.traces if self._goes_on(line) else ():
                trace.by_upstream = True  # as in _pass
        record.status = OK
        return Answered(OK, body, _usage(record))

    async def _pass(self, line: LineRequest, record: Record) -> Answered:
        """The answer of an upstream, as it wrote it but on one line. Raises KvasirError when no upstream answered, or
        none with JSON."""
        endpoint, timeout_s = self.endpoints[line.endpoint], self.settings.line_timeout_s
        body = await off_loop(record.work, lambda: orjson.dumps(line.body))
        request = self.passthrough.request(
            record,
            line.tenant,
            line.body,
            timeout_s=timeout_s,
            keeps=may_keep(endpoint.path, line.body),
            dialect=record.dialect.name,
            model=line.body["model"],
            path=endpoint.path,
            query="",
            headers=(*endpoint.headers, *line.headers),
            body=body,
        )
        await set_aside(self.passthrough.limits, record, lambda: need_of(request), line.body["model"])
        record.traces = [request.trace]
        request.trace.by_upstream = True  # also where its cached answer is given again: it is paid as upstreams are
        try:
            async with asyncio.timeout(timeout_s), self.upstreams.answer(request) as answer:
                record.model = answer.label
                row = await _read(answer, self.settings.max_answer_bytes)
        except TimeoutError:
            raise DeadlineError("The answer took longer than a line may (batches.line_timeout_s).") from None
        record.status = answer.status
        retry = _retry_of_status(answer.status)
        after_s = None if retry == "no" else answer.retry_after_s or PAUSE_S
        return Answered(answer.status, row, _usage(record), retry, after_s)

    def _goes_on(self, line: LineRequest) -> bool:
        """Whether a line goes to an upstream."""
        model = line.body.get("model")
        return type(model) is str and self.passthrough.serves(model, line.tenant)

    def _is_translated(self, line: LineRequest) -> bool:
        """Whether no upstream of a line's model speaks its API, and another can be asked in its own."""
        endpoint, model = self.endpoints[line.endpoint], line.body["model"]
        return endpoint.chats and not self.upstreams.speaks(
            model, line.tenant.name, endpoint.dialect.name, endpoint.path
        )

    def _may_join(self, error: KvasirError) -> bool:
        """Whether the model that was not found may still be that of an engine."""
        return isinstance(error, ModelNotFoundError) and not self.all_joined()

    def _refused(self, error: KvasirError, record: Record) -> Answered:
        failed(record, error)
        body = orjson.dumps(record.dialect.error_json(error, record.request_id))
        retry: Retry = "later" if self._may_join(error) else _retry_of(error)
        of_upstream = isinstance(error, UpstreamLostError | UpstreamRefusedError) and retry != "no"
        after_s = error.retry_after_s or (PAUSE_S if of_upstream else None)
        return Answered(record.status, body, Usage(0, 0), retry, after_s)

    def _line(self, job: Job, row: Row, work: int, request_id: str, num_bytes: int) -> LineRequest:
        rows = self.formats[job.dialect]
        endpoint, body = rows.request(job, row)
        tenant, headers = Tenant(job.tenant), rows.headers(job)
        asked = body.get("model")
        if isinstance(asked, str):
            asks = self.endpoints[endpoint]
            dialect, translated = asks.dialect.name, asks.chats
            body["model"] = self.router.line_target(asked, tenant, dialect, asks.path, translated=translated)
        name = asked if isinstance(asked, str) else None
        namespace = job.namespace or ""
        return LineRequest(endpoint, tenant, body, namespace, request_id, headers, num_bytes, work, name, job.key)

    def _record(self, line: LineRequest) -> Record:
        return Record(
            request_id=line.request_id,
            endpoint=f"{line.endpoint} (batch)",
            received_s=time.monotonic(),
            dialect=self.endpoints[line.endpoint].dialect,
            tenant=line.tenant.name,
            namespace=line.namespace,
            key=line.key,
            lane="batch",
            at_batch_price=not self._goes_on(line),  # upstreams know nothing of it
            body_bytes=line.num_bytes,
            ignored=IgnoredFields(self.refuses_unknown(line.tenant.name)),
            work=line.work,
        )


async def _loaded(row: bytes) -> tuple[Row, int]:
    """The parsed row and the work that it makes; in a thread if it is large. RowFormat.check has counted its values."""
    return await off_loop(len(row), lambda: (orjson.loads(row), work_of_json(row)))


def _usage(record: Record) -> Usage:
    trace = record.trace
    return Usage(trace.prompt_tokens + record.embedded_tokens, trace.completion_tokens, trace.reported_cached_tokens)


# -- retries ----------------------------------------------------------------------------------------------------------


def _retry_of(error: KvasirError) -> Retry:
    match error:
        case EngineLostError(died=True):
            return "died"
        case DeadlineError(retry_after_s=None):  # all its time went into the answer, and would again
            return "no"
        case NotCachedError() | EnginesDiedError():
            return "no"
        case UpstreamRefusedError():
            return _retry_of_status(error.status)
        case OverloadedError() | QueueFullError() | UpstreamLostError(begun=False):
            return "later"
    return "again" if error.status >= 500 else "no"


def _retry_of_status(status: int) -> Retry:
    """Of an upstream's answer."""
    if status in _LATER:
        return "later"
    return "again" if status == 408 or (status >= 500 and status not in _NEVER) else "no"


# -- answers of upstreams ---------------------------------------------------------------------------------------------


async def _read(answer: UpstreamAnswer, max_bytes: int) -> bytes:
    """The body as one row of JSON. Raises UpstreamLostError for any other body."""
    whole = bytearray()
    async for chunk in answer.chunks:
        whole += chunk
        if len(whole) > max_bytes:
            raise _unreadable(answer, f"more than {max_bytes} bytes")
    body = bytes(whole)
    row = await off_loop(len(body), lambda: one_row(body))
    if row is None:
        raise _unreadable(answer, "no JSON")
    return row


def one_row(body: bytes) -> bytes | None:
    """JSON on one line: line ends stand between its tokens alone. None for other bytes."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return body.translate(_NEWLINES).strip()


def _unreadable(answer: UpstreamAnswer, why: str) -> UpstreamLostError:
    """Keeps a status that blames the request; others are a failure of the upstream."""
    error = UpstreamLostError(f"Upstream {answer.upstream} answered with status {answer.status} and {why}.")
    if 400 <= answer.status < 500:
        error.status = answer.status
    return error


# -- beginnings of prompts --------------------------------------------------------------------------------------------


def beginning_of_body(body: Mapping[str, Any]) -> Beginning:
    """For an upstream, from the client's body."""
    return _beginning(b"".join(orjson.dumps(body.get(name)) for name in _READ_IN_ORDER))


def beginning_of_call(call: Call, key: str) -> Beginning:
    """For an engine: of its first prompt, the same in all dialects. Lines with other keys or salts share nothing;
    `key` is the call's where it separates."""
    return _beginning(_text_of(call.prompts[0]), orjson.dumps((key, call.cache_salt)))


def _text_of(prompt: Prompt) -> bytes:
    """A chat's system message stands before its tools, as in most templates."""
    match prompt:
        case TokenPrompt():
            return prompt.tokens
        case TextPrompt():
            return prompt.text.encode()
        case ChatPrompt():
            messages = [orjson.dumps(message, option=orjson.OPT_SORT_KEYS) for message in prompt.messages]
            first = int(bool(prompt.messages) and prompt.messages[0].get("role") in ("system", "developer"))
            return b"".join([*messages[:first], *map(orjson.dumps, prompt.tools), *messages[first:]])


def _beginning(text: bytes, root: bytes = b"") -> Beginning:
    return Beginning(chain_digests(root, text[:MAX_PREFIX_BYTES], BLOCK_TOKENS), len(text) // TOKEN_BYTES)


def _expected_tokens(body: Body, beginning: Beginning | None, num_bytes: int) -> int:
    """An estimate, for turns between tenants. A line that generates nothing has about a token for each four bytes."""
    if beginning is None:
        return num_bytes // TOKEN_BYTES
    limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    limit = next((limit for limit in limits if type(limit) is int and limit > 0), COMPLETION_TOKENS)
    return beginning.num_tokens + limit
