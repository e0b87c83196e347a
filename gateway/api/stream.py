"""Consumes the pipeline: whole answers, and answers as server-sent events.

Every answer is closed however it ends (aclosing), which aborts the sequence in its engine: when the client hangs up,
when writing fails, when another prompt of the same request fails, when the request took too long.

An SSE answer begins when its first token is there, or when its prompt is still being computed after
server.first_byte_s: then its headers go out, and pings until that token, so that no proxy takes the connection for
idle. Before the beginning an error is raised, and the middleware writes it as plain JSON; after it the error becomes
the last event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from aiohttp import web

from engine.protocol import Hello
from gateway import tasks
from gateway.api.call import Call
from gateway.api.record import CLIENT_LEFT, RECORD, Record, common_headers, failed, known_error, kvasir_headers
from gateway.api.replies import COMMENT, Answer, Stamp, join_calls, join_thoughts
from gateway.errors import DeadlineError, KvasirError
from gateway.native import no_panic
from gateway.pipeline import Pipeline
from gateway.types import (
    CallDelta,
    Delta,
    Event,
    Finished,
    Request,
    ScoredToken,
    Started,
    TextDelta,
    ThinkingDelta,
    Usage,
)

_Result = TypeVar("_Result")

MAX_WRITE = 64 << 10  # bytes of a remembered answer that are written together
LAST_WRITE_S = 5.0  # for the error event at the end of a stream whose client may have stopped reading

PROMPTS_AT_ONCE: Final = 16
"""Prompts of one request that are computed at the same time."""

PING_S: Final = 10.0
"""Between two pings: proxies cut what is idle for 30 or 60 seconds."""

LOOK_S: Final = 0.5
"""Between two checks whether a late stream may begin."""

Echo = Callable[[int], str]
"""The text to put in front of the answer to a prompt; called when its first token is there."""


class Shape:
    """How a dialect writes one answer, whole or as an event stream. It may remember what it wrote: there is one for
    each answer.

    `index` is the choice's. Any of the parts of a stream may be empty bytes; they go out in this order, choices mixed.
    """

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream. `usage` is that of all generated answers together."""
        raise NotImplementedError

    def prelude(self) -> bytes:
        """Before everything, once the first choice has its first token, or is late."""
        return b""

    def ping(self) -> bytes:
        """What every client skips, after the prelude and before anything else."""
        return COMMENT

    def opening(self, index: int, echo: str, started: Started) -> bytes:
        """`echo` is the text to put in front of the answer, nearly always empty."""
        return b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        raise NotImplementedError

    def call(self, index: int, delta: CallDelta) -> bytes:
        raise NotImplementedError

    def thinking(self, index: int, delta: ThinkingDelta) -> bytes:
        """Nothing, where the API has no place for it."""
        return b""

    def closing(self, index: int, finished: Finished) -> bytes:
        raise NotImplementedError

    def ending(self, usage: Usage) -> bytes:
        """After the last choice was closed. `usage` is that of all together."""
        raise NotImplementedError

    def failure(self, error: KvasirError) -> bytes:
        """In place of everything that has not been written."""
        raise NotImplementedError


class Account:
    """What a dialect does beside an answer, such as finding out its usage or storing it. This one does nothing."""

    async def started(self, request: Request) -> None:
        """Before the first byte of its answer is written."""

    async def finished(self, request: Request) -> None:
        """Before its last."""

    async def completed(self, usage: Usage) -> None:
        """After all choices of a stream, before its client knows. Never raises, as `failed`."""

    async def failed(self, error: KvasirError) -> None:
        """In place of `completed`, of a stream that has begun."""


NO_ACCOUNT: Final = Account()


class Generation(NamedTuple):
    """A Call, its model, and how its answer is written and accounted for.

    stamp  makes the bytes that are new in each answer, of one that may be sent again; None: it may not
    """

    call: Call
    model: Hello
    shape: Shape
    account: Account = NO_ACCOUNT
    stamp: Callable[[], Stamp] | None = None


async def collect(
    pipeline: Pipeline, requests: Sequence[Request], echo: Echo, account: Account = NO_ACCOUNT
) -> list[Answer]:
    """The complete answers, in the order of the requests. Raises the first error, after closing all others."""

    async def one(index: int, request: Request) -> Answer:
        deltas: list[Delta] = []
        prompt: tuple[ScoredToken, ...] = ()
        async with aclosing(pipeline.answer(request)) as events:
            async for event in events:
                if type(event) is TextDelta or type(event) is CallDelta or type(event) is ThinkingDelta:
                    deltas.append(event)
                elif type(event) is Started:
                    prompt = event.scored
                    await account.started(request)
                elif type(event) is Finished:
                    end = await _finished(event, request, account)
                    echoed = echo(index)
                    texts = [delta for delta in deltas if type(delta) is TextDelta and not delta.refusal]
                    refused = [delta.text for delta in deltas if type(delta) is TextDelta and delta.refusal]
                    is_scored = request.sampling.logprobs is not None
                    return Answer(
                        text=echoed + "".join([delta.text for delta in texts]),
                        reason=end.reason,
                        usage=end.usage,
                        scored=tuple(one for delta in texts for one in delta.scored) if is_scored else None,
                        echoed=len(echoed),
                        prompt=prompt,
                        calls=join_calls(deltas),
                        thoughts=join_thoughts(deltas),
                        refusal="".join(refused),
                        stop=end.stop,
                    )
        raise KvasirError("The answer ended without a reason.")

    return await _within(requests, _all(one, requests))


async def stream(
    http: web.Request,
    pipeline: Pipeline,
    requests: Sequence[Request],
    generation: Generation,
    echo: Echo,
    *,
    media_type: str,
    first_byte_s: float,
    noted: list[bytes] | None,
) -> web.StreamResponse:
    """Answers over SSE, or in another form of the shape, to the end. Raises only while nothing was sent. All that was
    written is added to `noted`, of one answer that may be sent again. `first_byte_s`: see server.first_byte_s."""
    out = _EventStream(http, generation, media_type, alone=len(requests) == 1, noted=noted)

    async def one(index: int, request: Request) -> tuple[bytes, Usage]:
        async with aclosing(pipeline.answer(request)) as events:
            return await out.choice(index, request, events, echo)

    if first_byte_s:
        out.ping_from(requests[0].received_s + first_byte_s, requests)
    try:
        with no_panic():
            ends = await _within(requests, _all(one, requests))
        usage = sum((usage for _, usage in ends), Usage(0, 0))
        await generation.account.completed(usage)
        return await out.end(ends[-1][0] + generation.shape.ending(usage))
    except ConnectionResetError:
        return out.left()
    except Exception as error:
        if out.response is None:
            raise
        return await out.fail(known_error(error, out.record))
    finally:
        out.stop_pings()


def _has_engine(request: Request) -> bool:
    """Not while it waits for a slot: then it may still be refused with a status, after which SDKs try again."""
    return (request.trace.shared or request.trace).engine is not None


def stream_headers(media_type: str) -> dict[str, str]:
    """Those that every stream has."""
    return {"Content-Type": f"{media_type}; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _finished(event: Finished, request: Request, account: Account) -> Finished:
    """What is reported of an end. The prompt of a group is counted with its first request."""
    await account.finished(request)
    if not request.number:
        return event
    trace = request.trace
    trace.prompt_tokens = trace.cached_tokens = trace.cache_write_tokens = 0
    trace.lease_read_tokens = trace.lease_write_tokens = 0
    trace.lease = None
    return replace(event, usage=Usage(0, event.usage.completion_tokens))


async def _within(requests: Sequence[Request], work: Coroutine[Any, Any, _Result]) -> _Result:
    """Bounds generating and writing alike: a client that stops reading holds its place no longer than this."""
    try:
        async with asyncio.timeout(requests[0].deadline_s - time.monotonic()) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineError("The answer took longer than this server allows (server.request_timeout_s).") from None


async def _all(
    one: Callable[[int, Request], Coroutine[Any, Any, _Result]], requests: Sequence[Request]
) -> list[_Result]:
    """Every request's result, in order, or the first error."""
    if len(requests) == 1:
        return [await one(0, requests[0])]
    gate = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def gated(index: int, request: Request) -> _Result:
        async with gate:
            return await one(index, request)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(gated(index, request)) for index, request in enumerate(requests)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


class _EventStream:
    """The response of one stream. It exists from the first token, or the first ping, on."""

    def __init__(
        self, http: web.Request, generation: Generation, media_type: str, *, alone: bool, noted: list[bytes] | None
    ) -> None:
        """`alone`: there is one choice."""
        self.record: Record = http[RECORD]
        self.response: web.StreamResponse | None = None
        self._http, self._shape, self._account = http, generation.shape, generation.account
        self._media_type, self._alone, self._noted = media_type, alone, noted
        self._opening = asyncio.Lock()
        self._ping_timer: asyncio.TimerHandle | None = None
        self._ping_task: asyncio.Task[None] | None = None

    def ping_from(self, start_s: float, requests: Sequence[Request]) -> None:
        """Pings from `start_s` (monotonic clock) on, once one of the requests has an engine, until `stop_pings`."""

        def begin() -> None:
            self._ping_task = tasks.spawn(self._ping(requests), name="ping")

        delay_s = max(0.0, start_s - time.monotonic())
        self._ping_timer = asyncio.get_running_loop().call_later(delay_s, begin)

    async def _ping(self, requests: Sequence[Request]) -> None:
        with suppress(ConnectionResetError):
            while not any(map(_has_engine, requests)):  # noqa: ASYNC110 - there is no event for a request's slot
                await asyncio.sleep(LOOK_S)
            response = await self._open(cached=False)
            while True:
                await response.write(self._shape.ping())
                await asyncio.sleep(PING_S)

    def stop_pings(self) -> None:
        """A ping that is being written is written to its end."""
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._ping_task is not None:
            self._ping_task.cancel()

    async def choice(
        self, index: int, request: Request, events: AsyncGenerator[Event, None], echo: Echo
    ) -> tuple[bytes, Usage]:
        """Writes one choice. Returns what is still to be written of it, together with the ending, and its usage."""
        started = await anext(events)
        if type(started) is not Started:
            raise KvasirError("The answer began with something else.")
        await self._account.started(request)
        if request.trace.repeat is None:
            self._noted = None
        self.stop_pings()
        response = await self._open(cached=self._alone)
        if opening := self._shape.opening(index, echo(index), started):
            await self._write(response, opening)
        write, text, call = response.write, self._shape.text, self._shape.call
        lookup = request.trace.lookup
        at_once = lookup is not None and lookup.all_there
        held: list[bytes] = []  # chunks of an answer that is all there, which go out together
        size = 0
        async for event in events:
            if type(event) is TextDelta:
                chunk = text(index, event)
            elif type(event) is CallDelta:
                chunk = call(index, event)
            elif type(event) is ThinkingDelta:
                chunk = self._shape.thinking(index, event)
            elif type(event) is Finished:
                end = await _finished(event, request, self._account)
                break
            if not at_once:
                await write(chunk)
                continue
            held.append(chunk)
            if (size := size + len(chunk)) > MAX_WRITE:
                await self._write(response, b"".join(held))
                held, size = [], 0
        else:
            raise KvasirError("The answer ended without a reason.")
        closing = b"".join([*held, self._shape.closing(index, end)])
        if self._alone:
            return closing, end.usage
        await write(closing)
        return b"", end.usage

    async def _open(self, *, cached: bool) -> web.StreamResponse:
        """Sends headers and prelude, once. `cached` False: how many tokens were cached is not known."""
        async with self._opening:
            if self.response is None:
                headers = {
                    **stream_headers(self._media_type),
                    **common_headers(self.record),
                    **kvasir_headers(self.record, cached=cached),
                }
                response = web.StreamResponse(headers=headers)
                await response.prepare(self._http)
                self.response = response
                if prelude := self._shape.prelude():
                    await self._write(response, prelude)
        return self.response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Of an answer that is all there, or what comes before any other."""
        if self._noted is not None:
            self._noted.append(data)
        await response.write(data)

    async def end(self, data: bytes) -> web.StreamResponse:
        if self.response is None:
            raise KvasirError("The answer ended before it began.")
        if self._noted is not None:
            self._noted.append(data)
        await self.response.write_eof(data)
        return self.response

    async def fail(self, error: KvasirError) -> web.StreamResponse:
        """Ends the stream with an error event; gives up on a client that does not read it."""
        failed(self.record, error)
        await self._account.failed(error)
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                return await self.end(self._shape.failure(error))
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            return self.left()
        except ConnectionResetError:
            return self.left()

    def left(self) -> web.StreamResponse:
        self.record.status = CLIENT_LEFT
        return self.response or web.Response(status=CLIENT_LEFT)
