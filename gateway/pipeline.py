"""The request pipeline: seven stages, in order. Each is a small Protocol in stages.py; app.py builds the real ones.

    1. responses   was it answered before, or is it being answered?
    2. prompts     render, split, tokenise what is new, chain the block hashes
    3. index       which engine holds the longest prefix of this prompt?
    4. + 5. queue  wait for a slot, where the first token will come soonest
    6. engine      stream the tokens; detokenise; stop; meter; if it is lost, from step 3 on with another
    7. responses   remember the answer, if it may be remembered

What a failing stage does is written where it is called. Only api/stream.py consumes `answer`, through aclosing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from engine.protocol import Breakpoint, Hello, Sampling, SequenceUpdate
from gateway.errors import (
    ContextLengthError,
    EngineLostError,
    EnginesDiedError,
    NoEngineError,
    OverloadedError,
    QueueFullError,
    UnsupportedError,
)
from gateway.metering import KeyMisses
from gateway.receipts import Receipts
from gateway.sequence import RunningSequence
from gateway.stages import Engine, Hosted, Index, Prompts, Queue, Registry, Responses
from gateway.types import AnswerCheck, Ask, ChatPrompt, EncodedPrompt, Event, Group, Prompt, Request, elapsed_ms

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Engines that work on one request, one after another: as one was lost before its first token, or after it."""


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
        receipts: Receipts | None = None,
        hosted: Hosted | None = None,
    ) -> None:
        self._responses = responses
        self._prompts = prompts
        self._index = index
        self._registry = registry
        self._queue = queue
        self._receipts = receipts or Receipts()
        self._key_misses = KeyMisses()
        self._hosted = hosted

    def find_hosted(self, model: str, tenant: str) -> Hello | None:
        """What stands for the hello of a model that no engine serves, but an upstream."""
        if self._hosted is None or model in self._registry.models():
            return None
        return self._hosted.find(model, tenant)

    async def count(self, request: Request) -> int:
        """Tokens of its prompt. Raises what `answer` raises for a prompt that no engine can be given."""
        return (await self._encode(request))[0].num_tokens

    async def breakpoints(self, request: Request) -> tuple[Breakpoint, ...]:
        """Where the markers of its prompt are, in tokens, without asking an engine. Raises as `count` does."""
        return (await self._encode(request))[0].breakpoints

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Started, any number of TextDeltas and CallDeltas, Finished. Raises a KvasirError instead of, or after, any of
        them, also when it is called."""
        if request.check is not None:
            return self._checked(request, request.check)
        generate, model = self._answer, self.find_hosted(request.model, request.tenant.name)
        if model is not None and self._hosted is not None:
            generate = self._hosted.answer
        else:
            request = _without_thoughts(request)
        if self._responses is None:
            return generate(request)
        # 1. + 7. An answer that was there, or one that will be remembered.
        own = model or self._registry.serving(request.model)[0].hello.named(request.model)
        return self._responses.answer(request, own, generate)

    async def _checked(self, request: Request, check: AnswerCheck) -> AsyncGenerator[Event, None]:
        """The same, all at once, when the whole answer has passed. Raises CheckFailedError."""
        async with aclosing(self.answer(check.asked(request))) as events:
            held = [event async for event in events]
        for event in check.passed(held, request):
            yield event

    async def _encode(self, request: Request) -> tuple[EncodedPrompt, Hello, bool]:
        """As the first engine of its model renders it, which is how the others do, as a rule: its hello, and whether it
        could be asked."""
        check_text(request.prompt)
        engine = self._registry.serving(request.model)[0]
        hello = engine.hello.named(request.model)
        prompt = await self._prompts.encode(request, hello)
        with suppress(EngineLostError, UnsupportedError):  # the one that gets it is asked in step 6
            return await engine.render(prompt, request), hello, True
        return prompt, hello, False

    async def _answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Steps 2 to 6."""
        # 2. Render and tokenise. All engines of a model share tokeniser and context.
        request.trace.looked_up_ms = elapsed_ms(request)
        prompt, model, is_rendered = await self._encode(request)
        request.trace.encoded_ms = elapsed_ms(request)
        sampling = _fit(request, prompt, model)
        if request.tool_use is not None:
            request = replace(request, constraint=self._prompts.constraint(request, model))
        request.trace.prompt_tokens = prompt.num_tokens
        request.trace.tokenized_tokens = prompt.new_tokens

        sequence = RunningSequence(
            self._prompts, self._key_misses, self._receipts, self._index.lost, request, prompt, sampling
        )
        losses = _Losses()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            engine: Engine | None = None
            try:
                # 3. Which of the engines that are there now hold its prefix?
                engines, ask = await self._ask(request, sequence, losses.engines)
                asked_s = time.monotonic()
                # 4. + 5. Wait for a slot, at the one where the first token will come soonest.
                async with self._slot(request, engines, ask) as engine:
                    predicted = self._predict(request, sequence, engine, ask)
                    sequence.give(engine, predicted, time.monotonic() - asked_s, alone=len(engines) == 1)
                    if not is_rendered or engine.hello.named(request.model) is not model:
                        is_rendered = not await _render(request, sequence, engine, model)
                    # 6. Stream.
                    async with aclosing(engine.generate(sequence.prompt, sequence.sampling, request)) as updates:
                        async for update in updates:
                            for event in sequence.feed(update):
                                yield event
                            if sequence.ended:
                                return
                    raise EngineLostError(f"Engine {engine.name} ended the answer without a reason.")
            except EngineLostError as error:
                if sequence.is_complete:
                    break
                self._go_on(request, sequence, engine, error, losses, last=attempt == MAX_ATTEMPTS)
            except (OverloadedError, QueueFullError) as error:
                # Before the first token the client hears when to retry; in its answer, that the engine was lost.
                if not sequence.has_begun or engine is not None or losses.last is None:
                    raise
                raise losses.last from error
        for event in sequence.feed(SequenceUpdate(0, finish="length")):  # all that is missing is to be told the end
            yield event

    def _go_on(
        self,
        request: Request,
        sequence: RunningSequence,
        engine: Engine | None,
        error: EngineLostError,
        losses: _Losses,
        *,
        last: bool,
    ) -> None:
        """Another engine takes over, before the first byte and after it. Raises the error for the client where none
        may; the dialect ends a stream that has begun with it. `last`: no further one is tried."""
        if not sequence.may_go_on:
            raise error
        if error.died and request.lane == "batch":  # its line is counted, and tried again when it is alone
            raise error
        if error.died and losses.dead is not None:
            raise EnginesDiedError from error
        if last and sequence.has_begun:
            raise error
        if last:
            raise OverloadedError(f"No engine took the request. {error.message}", retry_after_s=1.0) from error
        losses.add(engine, error)
        sequence.take_back()
        request.trace.retries += 1
        name = engine.name if engine else "of a group"
        place = f"after {sequence.num_tokens} tokens of the answer" if sequence.has_begun else "before the first token"
        log.warning("engine %s was lost %s; request %s goes on at another", name, place, request.request_id)

    async def _ask(self, request: Request, sequence: RunningSequence, lost: set[str]) -> tuple[Sequence[Engine], Ask]:
        """The engines that serve its model, and what it would cost them."""
        engines, prompt = self._registry.serving(request.model), sequence.prompt
        if sequence.has_begun and not (engines := [engine for engine in engines if sequence.fits(engine)]):
            raise NoEngineError(request.model, retry_after_s=1.0)
        names = [engine.hello.incarnation for engine in engines]
        names = [name for name in names if name not in lost] or names
        held: Mapping[str, int] = {}
        # With one engine there is nothing to choose, and without waiting requests nothing to order.
        looked_up = request.use_cache and (
            len(names) > 1
            or (self._queue.waiting and request.lane == "online")
            or any(self._index.recall(name, b"") is None for name in names)
        )
        if looked_up:
            held = await self._index.find(engines[0].hello.model, prompt.digests, names)
        block_size = engines[0].hello.namespace.block_size
        return engines, Ask(
            tenant=request.tenant.name,
            prompt_tokens=prompt.num_tokens,
            deadline_s=request.deadline_s,
            cached_tokens={incarnation: blocks * block_size for incarnation, blocks in held.items() if blocks},
            avoid=frozenset(lost),
            lane=request.lane,
            tier="priority" if sequence.has_begun else request.tier,  # its client is in the middle of an answer
            priority=request.priority,
            weight=request.tenant.weight,
            digests=prompt.digests if looked_up or (request.use_cache and request.lane == "batch") else b"",
            block_size=block_size,
            affinity=request.affinity,
            route=request.trace.route if len(names) > 1 and request.lane == "online" else None,
        )

    def _predict(self, request: Request, sequence: RunningSequence, engine: Engine, ask: Ask) -> int | None:
        """Tokens of its prompt that the engine will reuse, as the index has it now that there is a slot. None for what
        reuses nothing, or what another answer to the same prompt computes."""
        if not request.use_cache or request.number:
            return None
        incarnation, prompt = engine.hello.incarnation, sequence.prompt
        blocks = self._index.recall(incarnation, prompt.digests)
        held = ask.cached_tokens.get(incarnation, 0) if blocks is None else blocks * ask.block_size
        return engine.reused(held, prompt.num_tokens)

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


def _without_thoughts(request: Request) -> Request:
    """As an engine answers it, and the response cache knows it: a model here thinks as it was made to."""
    if isinstance(request.prompt, ChatPrompt) and request.prompt.thoughts:
        request = replace(request, prompt=replace(request.prompt, thoughts=()))
    return request if request.thinking is None else replace(request, thinking=None)


def check_text(prompt: Prompt) -> None:
    """Raises UnsupportedError for a prompt with images or files: engines are given text."""
    if isinstance(prompt, ChatPrompt) and prompt.media:
        first = prompt.media[0]
        raise UnsupportedError(first.refusal, param=first.path, reason=first.refusal)


@dataclass(slots=True)
class _Losses:
    """Engines that one request lost."""

    engines: set[str] = field(default_factory=set)  # incarnations
    last: EngineLostError | None = None
    dead: EngineLostError | None = None  # of one that died

    def add(self, engine: Engine | None, error: EngineLostError) -> None:
        self.last, self.dead = error, error if error.died else self.dead
        if engine is not None:
            self.engines.add(engine.hello.incarnation)


async def _render(request: Request, sequence: RunningSequence, engine: Engine, model: Hello) -> bool:
    """Renders its prompt as the engine does. Whether that is another rendering: of that nothing can be continued."""
    prompt = await engine.render(sequence.prompt, request)
    if prompt is sequence.prompt:
        return False
    sequence.replace_prompt(prompt, _fit(request, prompt, model))
    return True


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
