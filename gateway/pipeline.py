"""The request pipeline: seven stages, in order. Each is a small Protocol in stages.py; app.py builds the real ones.

    1. responses   was it answered before, or is it being answered?
    2. prompts     render, split, tokenise what is new, chain the block hashes
    3. index       which engine holds the longest prefix of this prompt?
    4. + 5. queue  wait for a slot, where the first token will come soonest
    6. engine      stream the tokens; detokenise; stop; meter
    7. responses   remember the answer, if it may be remembered

What a failing stage does is written where it is called. Only api/stream.py consumes `answer`, through aclosing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from engine.protocol import Breakpoint, Hello, Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import (
    BadRequestError,
    ContextLengthError,
    DeadlineError,
    EngineFailedError,
    EngineLostError,
    EnginesDiedError,
    KvasirError,
    OverloadedError,
)
from gateway.metering import KeyMisses, meter_start, usage_of
from gateway.stages import Engine, Index, Prompts, Queue, Reader, Registry, Responses
from gateway.types import Ask, EncodedPrompt, Event, Finished, FinishReason, Group, Request, Started

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Engines that are tried before the first byte is sent."""


class Pipeline:
    """Holds the stages. Knows no dialect, no Redis and no HTTP."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        index: Index,
        registry: Registry,
        queue: Queue,
        responses: Responses | None = None,
    ) -> None:
        self._responses = responses
        self._prompts = prompts
        self._index = index
        self._registry = registry
        self._queue = queue
        self._key_misses = KeyMisses()

    async def count(self, request: Request) -> int:
        """Tokens of its prompt. Raises what `answer` raises for a prompt that no engine can be given."""
        model = self._registry.serving(request.model)[0].hello
        return (await self._prompts.encode(request, model)).num_tokens

    async def breakpoints(self, request: Request) -> tuple[Breakpoint, ...]:
        """Where the markers of its prompt are, in tokens, without asking an engine. Raises as `count` does."""
        model = self._registry.serving(request.model)[0].hello
        return (await self._prompts.encode(request, model)).breakpoints

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Started, any number of TextDeltas and CallDeltas, Finished. Raises a KvasirError instead of, or after, any of
        them, also when it is called."""
        if self._responses is None:
            return self._answer(request)
        # 1. + 7. An answer that was there, or one that will be remembered.
        model = self._registry.serving(request.model)[0].hello
        return self._responses.answer(request, model, self._answer)

    async def _answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Steps 2 to 6."""
        # 2. Render and tokenise. All engines of a model share tokeniser and context.
        model = self._registry.serving(request.model)[0].hello
        prompt = await self._prompts.encode(request, model)
        sampling = _fit(request, prompt, model)
        if request.tool_use is not None:
            request = replace(request, constraint=self._prompts.constraint(request, model))
        request.trace.prompt_tokens = prompt.num_tokens
        request.trace.tokenized_tokens = prompt.new_tokens

        lost: set[str] = set()
        dead: EngineLostError | None = None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            engine: Engine | None = None
            try:
                # 3. Which of the engines that are there now hold its prefix?
                engines, ask = await self._ask(request, prompt, lost)
                waited_s = time.monotonic()
                # 4. + 5. Wait for a slot, at the one where the first token will come soonest.
                async with self._slot(request, engines, ask) as engine:
                    now = time.monotonic()
                    request.trace.queue_ms += (now - waited_s) * 1e3
                    request.trace.overhead_ms = (now - request.received_s) * 1e3 - request.trace.queue_ms
                    # 6. Stream.
                    sequence = _Sequence(self._prompts, self._key_misses, request, prompt, engine)
                    async with aclosing(engine.generate(prompt, sampling, request)) as updates:
                        async for update in updates:
                            for event in sequence.feed(update):
                                yield event
                            if sequence.ended:
                                return
                            if time.monotonic() > request.deadline_s:
                                raise DeadlineError(
                                    "The answer took longer than this server allows (server.request_timeout_s)."
                                )
                    raise EngineLostError(f"Engine {engine.name} ended the answer without a reason.")
            except EngineLostError as error:
                dead = self._try_again(request, error, dead, attempt)
                if engine is not None:
                    lost.add(engine.hello.incarnation)
                name = engine.name if engine else "of a group"
                log.warning("engine %s was lost before the first token; request %s goes on", name, request.request_id)
            except OverloadedError as error:
                if dead is None or request.trace.first_token_ms is not None:
                    raise
                raise dead from error

    def _try_again(
        self, request: Request, error: EngineLostError, dead: EngineLostError | None, attempt: int
    ) -> EngineLostError | None:
        """Before the first byte another engine takes over; after it the dialect ends the stream with an error. Returns
        the error of an engine that died, if one has; raises the error for the client."""
        if request.trace.first_token_ms is not None:
            raise error
        if error.died and request.lane == "batch":  # its line is counted, and tried again when it is alone
            raise error
        if error.died and dead is not None:
            raise EnginesDiedError from error
        if attempt == MAX_ATTEMPTS:
            raise OverloadedError(f"No engine took the request. {error.message}", retry_after_s=1.0) from error
        request.trace.retries = attempt
        return error if error.died else dead

    async def _ask(self, request: Request, prompt: EncodedPrompt, lost: set[str]) -> tuple[Sequence[Engine], Ask]:
        """The engines that serve its model, and what it would cost them."""
        engines = self._registry.serving(request.model)
        names = [engine.hello.incarnation for engine in engines]
        names = [name for name in names if name not in lost] or names
        held: Mapping[str, int] = {}
        # With one engine there is nothing to choose, and without waiting requests nothing to order.
        looked_up = request.use_cache and (len(names) > 1 or (self._queue.waiting and request.lane == "online"))
        if looked_up:
            held = await self._index.find(request.model, prompt.digests, names)
        block_size = engines[0].hello.namespace.block_size
        return engines, Ask(
            tenant=request.tenant.name,
            prompt_tokens=prompt.num_tokens,
            deadline_s=request.deadline_s,
            cached_tokens={incarnation: blocks * block_size for incarnation, blocks in held.items()},
            avoid=frozenset(lost),
            lane=request.lane,
            tier=request.tier,
            priority=request.priority,
            weight=request.tenant.weight,
            digests=prompt.digests if looked_up or (request.use_cache and request.lane == "batch") else b"",
            block_size=block_size,
            affinity=request.affinity,
        )

    def _slot(self, request: Request, engines: Sequence[Engine], ask: Ask) -> AbstractAsyncContextManager[Engine]:
        group = request.group
        return self._queue.slot(engines, ask) if group is None else self._slot_in_group(group, engines, ask)

    @asynccontextmanager
    async def _slot_in_group(self, group: Group, engines: Sequence[Engine], ask: Ask) -> AsyncGenerator[Engine, None]:
        """At the engine of the group's first, as long as that serves. Until it has a slot, the others wait for it."""
        async with AsyncExitStack() as slot:
            engine: Engine | None = None
            async with group.choosing:
                if group.incarnation not in {engine.hello.incarnation for engine in engines} - ask.avoid:
                    engine = await slot.enter_async_context(self._queue.slot(engines, ask))
                    group.incarnation = engine.hello.incarnation
            if engine is None:
                assert group.incarnation is not None
                ask = replace(ask, only=group.incarnation, cached_tokens={group.incarnation: ask.prompt_tokens})
                engine = await slot.enter_async_context(self._queue.slot(engines, ask))
            yield engine


class _Sequence:
    """Updates of one sequence into the events of its answer, metered in the request's trace. `ended` when the last of
    them is there."""

    def __init__(
        self, prompts: Prompts, key_misses: KeyMisses, request: Request, prompt: EncodedPrompt, engine: Engine
    ) -> None:
        self._prompts = prompts
        self._key_misses = key_misses
        self._request = request
        self._prompt = prompt
        self._engine = engine
        self._reader = prompts.reader(request, engine.hello)
        self.ended = False
        request.trace.engine = engine.name

    def feed(self, update: SequenceUpdate) -> list[Event]:
        """What became certain with this update. Raises what the engine failed with."""
        if update.finish == "error":
            raise _failure(self._request, update)
        trace, reader = self._request.trace, self._reader
        events: list[Event] = [self._start(update)] if trace.first_token_ms is None else []
        for tokens, logprobs in _slices(self._request, update):
            trace.completion_tokens += len(tokens)
            events += reader.feed(tokens, logprobs)
            if reader.ended:
                break
        trace.completion_tokens += update.stop_id is not None and not reader.ended
        complete = update.finish in ("stop", "length")
        if complete and not reader.ended:
            events += reader.flush()
        if complete or reader.ended:
            self.ended = True
            trace.finish = reason = _reason(reader, update)
            events.append(Finished(reason, usage_of(trace), reader.met))
        return events

    def _start(self, update: SequenceUpdate) -> Started:
        request, hello = self._request, self._engine.hello
        meter_start(request, self._prompt, hello.namespace.block_size, update)
        self._key_misses.look(request, self._prompt)
        logprobs = update.prompt_logprobs
        scored = () if logprobs is None else self._prompts.score(self._prompt, logprobs, hello)
        return Started(self._engine.name, usage_of(request.trace), scored)


def _slices(request: Request, update: SequenceUpdate) -> Iterator[tuple[Sequence[int], Sequence[TokenLogprobs]]]:
    """Its tokens one by one where the text may end an answer, so that nothing behind that end is counted: how many
    tokens come with an update is chance."""
    tokens, logprobs = update.tokens, update.logprobs or ()
    if len(tokens) < 2 or not (request.stop or (request.tool_use and not request.tool_use.parallel)):
        yield tokens, logprobs
        return
    for index in range(len(tokens)):
        yield tokens[index : index + 1], logprobs[index : index + 1]


def _reason(reader: Reader, update: SequenceUpdate) -> FinishReason:
    if update.finish == "length" and not reader.ended:
        return "length"
    return "tool_calls" if reader.called else "stop"


def _failure(request: Request, update: SequenceUpdate) -> KvasirError:
    """A grammar that cannot be carried out is the client's; everything else is the engine's."""
    if update.grammar_path is None or request.constraint is None:
        return EngineFailedError(update.error or "The engine failed on this request.")
    param = request.constraint.param
    path = f"{param}.{update.grammar_path}" if update.grammar_path else param
    for inside, place in request.constraint.places:
        if update.grammar_path == inside or update.grammar_path.startswith(f"{inside}."):
            path = place + update.grammar_path[len(inside) :]
    message = f"Invalid '{path}': {update.error}."
    return BadRequestError(message, param=path, code="invalid_grammar", reason=update.error)


def _fit(request: Request, prompt: EncodedPrompt, model: Hello) -> Sampling:
    """Checks the prompt against the context and settles max_tokens, where 0 stands for all that is left, unless nothing
    is to be generated."""
    room = model.context_tokens - prompt.num_tokens
    max_tokens = min(request.sampling.max_tokens, max(room, 1)) if request.fit else request.sampling.max_tokens
    if room < (0 if request.prewarm else max(max_tokens, 1)):
        raise ContextLengthError(model.context_tokens, prompt.num_tokens, max_tokens, param=request.prompt_param)
    if request.prewarm or max_tokens == request.sampling.max_tokens != 0:
        return request.sampling
    return replace(request.sampling, max_tokens=max_tokens or room)
