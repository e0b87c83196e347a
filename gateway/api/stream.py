"""Consumes the street, and nobody else does: whole answers, and answers as server-sent events.

Every answer is closed whichever way it is left (aclosing), which aborts the sequence in its engine: when the client
hangs up, when writing fails, when another prompt of the same request fails, when the request took too long.

An SSE answer begins when its first token is there. Before that an error is raised, and the middleware writes it as
plain JSON; after it the error becomes the last event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from gateway.api.openai_response import Answer
from gateway.api.record import CLIENT_LEFT, RECORD, Record
from gateway.api.wire import common_headers, error_event, json_text, kvasir_headers
from gateway.errors import DeadlineError, KvasirError
from gateway.types import Event, Finished, Request, ScoredToken, Started, TextDelta, Usage

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

LAST_WRITE_S = 5.0  # for the error event at the end of a stream whose client may have stopped reading

Echo = Callable[[int], str]
"""The text to put in front of the answer to a prompt; asked for when its first token is there."""


class Answers(Protocol):
    """The street."""

    def answer(self, request: Request) -> AsyncGenerator[Event, None]: ...


class Shape(Protocol):
    """How a dialect writes the events of a stream. `index` is the choice's."""

    def prelude(self) -> bytes: ...

    def opening(self, index: int, echo: str, prompt: tuple[ScoredToken, ...]) -> bytes: ...

    def piece(self, index: int) -> tuple[bytes, bytes]: ...

    def scored(self, index: int, echoed: int, delta: TextDelta) -> bytes: ...

    def closing(self, index: int, reason: str) -> bytes: ...

    def ending(self, usage: Usage) -> bytes: ...


async def collect(street: Answers, requests: Sequence[Request], echo: Echo, *, at_once: int) -> list[Answer]:
    """The complete answers, in the order of the requests. Raises the first error, after closing all others."""

    async def one(index: int, request: Request) -> Answer:
        pieces: list[str] = []
        scored: list[ScoredToken] = []
        prompt: tuple[ScoredToken, ...] = ()
        async with aclosing(street.answer(request)) as events:
            async for event in events:
                if type(event) is TextDelta:
                    pieces.append(event.text)
                    scored += event.scored
                elif type(event) is Started:
                    prompt = event.scored
                elif type(event) is Finished:
                    reason, usage = _finish(event, request)
                    told = None if request.sampling.logprobs is None else tuple(scored)
                    echoed = echo(index)
                    return Answer(echoed + "".join(pieces), reason, usage, told, len(echoed), prompt)
        raise KvasirError("The answer ended without a reason.")

    return await _within(requests, _all(one, requests, at_once))


async def stream(
    http: web.Request,
    street: Answers,
    requests: Sequence[Request],
    shape: Shape,
    echo: Echo,
    *,
    at_once: int,
) -> web.StreamResponse:
    """Answers over SSE, complete, and ended as it has to be. Raises only while nothing was sent."""
    sse = _Sse(http, shape, final=len(requests) == 1)

    async def one(index: int, request: Request) -> tuple[bytes, Usage]:
        async with aclosing(street.answer(request)) as events:
            started = await anext(events)
            echoed = echo(index)
            response = await sse.begin(index, echoed, started.scored if type(started) is Started else ())
            scored = partial(shape.scored, index, len(echoed))
            write, (before, after) = response.write, shape.piece(index)
            async for event in events:
                if type(event) is TextDelta:
                    plain = not event.scored
                    await write(before + json_text(event.text) + after if plain else scored(event))
                elif type(event) is Finished:
                    reason, usage = _finish(event, request)
                    closing = shape.closing(index, reason)
                    if len(requests) == 1:
                        return closing, usage  # goes out together with the ending
                    await write(closing)
                    return b"", usage
        raise KvasirError("The answer ended without a reason.")

    try:
        ends = await _within(requests, _all(one, requests, at_once))
        return await sse.end(ends[-1][0] + shape.ending(sum((usage for _, usage in ends), Usage(0, 0))))
    except ConnectionResetError:
        return sse.left()
    except KvasirError as error:
        if sse.response is None:
            raise
        return await sse.fail(error)
    except Exception:
        if sse.response is None:
            raise
        log.exception("request %s failed after its first byte", sse.record.request_id)
        return await sse.fail(KvasirError("The server had an error while it answered."))


def _finish(event: Finished, request: Request) -> tuple[str, Usage]:
    """Reason and usage to report. The prompt of a group is counted with its first request."""
    trace, usage = request.trace, event.usage
    if request.number:
        trace.prompt_tokens = trace.cached_tokens = trace.cache_write_tokens = 0
        trace.lease_read_tokens = trace.lease_write_tokens = 0
        trace.lease = None
        usage = Usage(0, usage.completion_tokens)
    return event.reason, usage


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
    one: Callable[[int, Request], Coroutine[Any, Any, _Result]], requests: Sequence[Request], at_once: int
) -> list[_Result]:
    """Every request's result, in order, or the first error."""
    if len(requests) == 1:
        return [await one(0, requests[0])]
    gate = asyncio.Semaphore(at_once)

    async def gated(index: int, request: Request) -> _Result:
        async with gate:
            return await one(index, request)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gated(index, request)) for index, request in enumerate(requests)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class _Sse:
    """The response of one stream. It exists from the first token on."""

    def __init__(self, http: web.Request, shape: Shape, *, final: bool) -> None:
        self.record: Record = http[RECORD]
        self.response: web.StreamResponse | None = None
        self._http, self._shape, self._final = http, shape, final
        self._opening = asyncio.Lock()

    async def begin(self, index: int, echoed: str, prompt: tuple[ScoredToken, ...]) -> web.StreamResponse:
        async with self._opening:
            if self.response is None:
                headers = {
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no",
                    **common_headers(self.record),
                    **kvasir_headers(self.record, cached=self._final),
                }
                response = web.StreamResponse(headers=headers)
                await response.prepare(self._http)
                self.response = response
                if prelude := self._shape.prelude():
                    await response.write(prelude)
        if opening := self._shape.opening(index, echoed, prompt):
            await self.response.write(opening)
        return self.response

    async def end(self, data: bytes) -> web.StreamResponse:
        if self.response is None:
            raise KvasirError("The answer ended before it began.")
        await self.response.write_eof(data)
        return self.response

    async def fail(self, error: KvasirError) -> web.StreamResponse:
        """Ends the stream with an error event; gives up on a client that does not read it."""
        self.record.status = error.status
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                return await self.end(error_event(error))
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            return self.left()
        except ConnectionResetError:
            return self.left()

    def left(self) -> web.StreamResponse:
        self.record.status = CLIENT_LEFT
        return self.response or web.Response(status=CLIENT_LEFT)
