"""Answers requests for models whose upstreams speak another API than the client: the client's dialect has made a
Request of its body, as for an engine; here a form writes it as the upstream's API has it, and reads the answer back.

The upstream is asked as for a request that passes through (upstreams/stage.py): with its slots, retries, breaker and
metering. What an upstream answers in place of an answer becomes an error with its status, in the client's own form.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson

from engine.protocol import Hello, Namespace
from gateway.errors import UnsupportedError, UpstreamLostError, UpstreamRefusedError, UpstreamsAwayError
from gateway.tasks import off_loop
from gateway.types import (
    CallDelta,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Request,
    Started,
    TextDelta,
    ThinkingDelta,
    Trace,
    UpstreamAnswer,
    UpstreamRequest,
)
from gateway.upstreams.apis import APIS
from gateway.upstreams.metering import Events, data_of
from gateway.upstreams.routes import Route
from gateway.upstreams.stage import Upstreams
from gateway.upstreams.translation.base import UNLIMITED, AnswerReader, Form, without
from gateway.upstreams.translation.limits import id_of, limits_of
from gateway.upstreams.translation.refusals import refusal, settled

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 64 << 20
"""Of an answer that is not streamed, or of an event."""

_ODD: Final = (LookupError, TypeError, ValueError, AttributeError)


class Translation:
    """stages.Hosted."""

    def __init__(self, upstreams: Upstreams, forms: Sequence[Form]) -> None:
        self._upstreams = upstreams
        self._forms = {form.name: form for form in forms}

    def find(self, model: str, tenant: str) -> Hello | None:
        """What stands for an engine's hello where an upstream serves the model; None where none does."""
        routes = [route for route in self._upstreams.routes(model, tenant) if route.form in self._forms]
        return _hello(model, routes[0].pattern, self._upstreams.route_text(model, tenant)) if routes else None

    async def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """See Pipeline.answer. Another API is tried where the upstreams of the one before cannot be reached."""
        trace, forms = request.trace, list(self._forms_of(self._upstreams.routes(request.model, request.tenant.name)))
        for number, form in enumerate(forms, 1):
            begun = False
            try:
                async with self._upstreams.answer(await self._asked(form, request)) as answer:
                    trace.allowance = limits_of(answer.headers, time.time())
                    trace.upstream_id = id_of(answer.headers)
                    if answer.status >= 400:
                        raise refusal(answer, await _read(answer), request.prompt_param)
                    trace.cached_late = begun = True
                    yield Started(answer.upstream, trace.usage)
                    read = _Read(answer, form.reader(request), request)
                    async for chunk in answer.chunks:
                        for delta in read.feed(chunk):
                            yield delta
                    for delta in read.end():
                        yield delta
                    yield read.finished(trace)
                return
            except (UpstreamsAwayError, UpstreamLostError) as error:
                if begun or number == len(forms) or (isinstance(error, UpstreamLostError) and error.begun):
                    raise
                log.warning("request %s goes on at an upstream of another API: %s", request.request_id, error.message)

    def _forms_of(self, routes: Sequence[Route]) -> Iterator[Form]:
        for name in dict.fromkeys(route.form for route in routes):
            if (form := self._forms.get(name)) is not None:
                yield form

    async def _asked(self, form: Form, request: Request) -> UpstreamRequest:
        found = self._upstreams.routes(request.model, request.tenant.name)
        routes = [route for route in found if route.form == form.name]
        lossy, model = all(route.lossy for route in routes), routes[0].model
        return await off_loop(request.work, lambda: _written(form, request, model, lossy=lossy))


class _Read:
    """One answer, out of bytes that are cut anywhere. Raises UpstreamLostError for one that is none of its API."""

    def __init__(self, answer: UpstreamAnswer, reader: AnswerReader, request: Request) -> None:
        self._upstream, self._reader = answer.upstream, reader
        self._thinking, self._param = request.thinking, request.prompt_param
        self._held: list[Delta] = []  # signatures that no one asked for, until a call is to have them
        self._events = Events(MAX_ANSWER_BYTES) if _is_stream(answer) else None
        self._whole = bytearray()

    def feed(self, chunk: bytes) -> list[Delta]:
        """What became certain with these bytes."""
        if self._events is None:
            self._whole += chunk
            if len(self._whole) > MAX_ANSWER_BYTES:
                raise _lost(self._upstream, "sent an answer that is too long")
            return []
        is_short = len(chunk) <= _SIMPLE_BYTES
        if is_short and self._events.between and (simple := _SIMPLE.fullmatch(chunk)):  # as nearly all chunks are
            return self._made(self._reader.event, data) if (data := simple[1]) not in _NOTHING else []
        deltas: list[Delta] = []
        for event in self._events.feed(chunk):
            if (data := data_of(event)) not in _NOTHING:
                deltas += self._made(self._reader.event, data)
        return deltas

    def end(self) -> list[Delta]:
        """The same at their end."""
        return self._made(self._reader.whole, self._whole) if self._events is None else []

    def finished(self, trace: Trace) -> Finished:
        if self._reader.reason is None:
            raise _lost(self._upstream, "ended in the middle of its answer")
        trace.finish, trace.cached_late = self._reader.reason, False
        return Finished(self._reader.reason, trace.usage, self._reader.stop)

    def _made(self, read: Callable[[Mapping[str, Any]], Iterator[Delta]], data: bytes | bytearray) -> list[Delta]:
        try:
            value = orjson.loads(data)
            if not isinstance(value, dict):
                raise TypeError("no object")
            return [one for delta in read(value) for one in self._passed(delta)]
        except UpstreamRefusedError as error:
            raise settled(error, self._upstream, self._param) from None
        except _ODD as error:
            raise _lost(self._upstream, f"answered in a form that is not known ({type(error).__name__})") from None

    def _passed(self, delta: Delta) -> Sequence[Delta]:
        """Thoughts as they were asked for: clients that did not would take their text for the answer's, or stumble over
        them. Before a call they have what the next turn needs, so that is always passed on."""
        if type(delta) is TextDelta:
            return (delta,)
        thinking = self._thinking
        if type(delta) is ThinkingDelta:
            if thinking is not None and thinking.shown:
                return (delta,)
            signature = [ThinkingDelta(signature=delta.signature)] if delta.signature else []
            if thinking is not None and thinking.is_on:
                return signature
            self._held += signature
            return ()
        if not self._held or (type(delta) is CallDelta and not delta.name):
            return (delta,)
        held, self._held = self._held, []
        return (*held, delta)


_SIMPLE: Final = re.compile(rb"(?:event: [^\r\n]*\n)?data: ([^\r\n]*)\n\n")
"""An event as nearly all are."""

_SIMPLE_BYTES: Final = 1 << 16
"""Of a chunk that the pattern reads: it takes 6 ns for a byte."""

_NOTHING: Final = (b"", b"[DONE]")


@lru_cache(4096)
def _hello(model: str, label: str, route_text: str) -> Hello:
    """`label` in metrics. What answers is a part of the key of remembered answers."""
    space = Namespace(weights=f"upstreams:{route_text}", dtype="", kv_dtype="", block_size=1)
    return Hello(
        incarnation=f"upstreams:{model}",
        model=label,
        namespace=space,
        context_tokens=UNLIMITED,
        vocab_size=UNLIMITED,
        num_blocks=0,
        max_sequences=0,
        eos_ids=(),
        tokenizer="",
        created=int(time.time()),
    )


def _written(form: Form, request: Request, model: str, *, lossy: bool) -> UpstreamRequest:
    """The request that the upstream gets. `model` is its name there, at the first of several. `lossy`: without
    parameters that its API has no field for."""
    written, request.trace.dropped = None, ()
    while written is None:
        try:
            written = form.write(request, model)
        except UnsupportedError as error:
            less = without(request, error.param) if lossy and error.param not in request.trace.dropped else None
            if less is None:
                raise
            request = less
            request.trace.dropped += (error.param or "",)
    if "model" in written.body:  # each upstream gets its own
        written.body["model"] = request.model
    marked = isinstance(request.prompt, ChatPrompt) and bool(request.prompt.markers)
    own_key = request.affinity or (request.scope.key if request.scope is not None else "")
    return UpstreamRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        dialect=form.dialect,
        model=request.model,
        path=written.path,
        query=written.query,
        headers=(("content-type", "application/json"), *APIS[form.dialect].headers.items()),
        body=orjson.dumps(written.body),
        values=written.body,
        received_s=request.received_s,
        deadline_s=request.deadline_s,
        lane=request.lane,
        tier=request.tier,
        priority=request.priority,
        scope=request.scope,
        prefix=form.prefix(request) if request.use_cache else None,
        # Forms of OpenAI have written the key.
        hinted=bool(request.use_cache and own_key and not marked and form.dialect != "openai"),
        work=request.work,
        trace=request.trace,
    )


async def _read(answer: UpstreamAnswer) -> bytes:
    body = bytearray()
    async for chunk in answer.chunks:
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise _lost(answer.upstream, "sent an answer that is too long")
    return bytes(body)


def _is_stream(answer: UpstreamAnswer) -> bool:
    return any(name.lower() == "content-type" and "text/event-stream" in value for name, value in answer.headers)


def _lost(upstream: str, what: str) -> UpstreamLostError:
    return UpstreamLostError(f"Upstream {upstream} {what}.")
