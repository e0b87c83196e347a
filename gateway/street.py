"""The way of a request, in numbered steps. Each stage is a small Protocol here; app.py brings the real ones.

    1. (responses) was it answered before?            a later stage
    2. prompts     render, split, tokenise what is new, chain the block hashes
    3. index       who holds the longest part of this prompt?
    4. router      where will the first token come soonest?
    5. queue       wait for a place
    6. engine      stream the tokens; detokenise; stop; meter
    7. (responses) remember the answer                a later stage

What a failing stage does is written where it is called. Only api/stream.py consumes `answer`, through aclosing.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Protocol

from engine.protocol import Breakpoint, Hello, Load, Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import (
    BadRequestError,
    ContextLengthError,
    DeadlineError,
    EngineFailedError,
    EngineLostError,
    KvasirError,
    OverloadedError,
)
from gateway.types import (
    ChatPrompt,
    EncodedPrompt,
    Event,
    Finished,
    Lease,
    Request,
    ScoredToken,
    Started,
    Tenant,
    TextDelta,
    Trace,
    Usage,
)

log = logging.getLogger(__name__)


class TextDecoder(Protocol):
    """Tokens of one answer into text. Holds back unfinished characters and what may become a stop string."""

    met: str | None  # the stop string that was met; what follows is not part of the answer

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens, possibly empty."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        ...


class TokenScores(Protocol):
    """Log probabilities of one answer, held back for as long as the text that they belong to."""

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None: ...

    def release(self, text: str) -> tuple[ScoredToken, ...]:
        """Those of tokens that are complete with this piece of the answer; the pieces come in order."""
        ...

    def flush(self) -> tuple[ScoredToken, ...]:
        """All that are left, at the end of an answer that no stop string ended."""
        ...


class Prompts(Protocol):
    """Step 2. One tokeniser and template per model, loaded when its first engine joined."""

    async def encode(self, request: Request, model: Hello) -> EncodedPrompt:
        """Raises BadRequestError for what the template refuses."""
        ...

    def decoder(self, model: Hello, stop: tuple[str, ...]) -> TextDecoder: ...

    def scores(self, model: Hello) -> TokenScores: ...


class Index(Protocol):
    """Step 3. Never raises: an index that is down has found nothing."""

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """Leading blocks of `digests` that each engine holds; engines without any may be missing."""
        ...


class Engine(Protocol):
    """Step 6. One engine that has said hello."""

    @property
    def name(self) -> str:
        """Short, stable while the engine is configured; what headers, logs and metrics show."""
        ...

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...

    def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """Closing it aborts the sequence. Raises EngineLostError, and EngineFailedError for this sequence alone."""
        ...


class Registry(Protocol):
    """Which engines there are. Joined, reachable and not draining."""

    def serving(self, model: str) -> Sequence[Engine]:
        """Never empty. Raises ModelNotFoundError, and NoEngineError when the model's engines are away."""
        ...


class Router(Protocol):
    """Step 4. Pure."""

    def choose(self, engines: Sequence[Engine], prompt_tokens: int, cached_tokens: Mapping[str, int]) -> Engine:
        """`cached_tokens` by incarnation. `engines` is not empty."""
        ...


class Queue(Protocol):
    """Step 5. A bounded number of sequences per engine."""

    def place(self, engine: Engine, tenant: Tenant, deadline_s: float) -> AbstractAsyncContextManager[None]:
        """Raises QueueFullError at once, DeadlineError after waiting, EngineLostError when the engine went away."""
        ...


class Street:
    """Holds the stages. Knows no dialect, no Redis and no HTTP."""

    def __init__(
        self, *, prompts: Prompts, index: Index, registry: Registry, router: Router, queue: Queue, max_attempts: int
    ) -> None:
        self._prompts = prompts
        self._index = index
        self._registry = registry
        self._router = router
        self._queue = queue
        self._max_attempts = max_attempts

    async def count(self, request: Request) -> int:
        """Tokens of its prompt. Raises what `answer` raises for a prompt that no engine can be given."""
        model = self._registry.serving(request.model)[0].hello
        return (await self._prompts.encode(request, model)).num_tokens

    async def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Started, any number of TextDeltas, Finished. Raises a KvasirError instead of, or after, any of them."""
        # 2. Render and tokenise. All engines of a model share tokeniser and context.
        model = self._registry.serving(request.model)[0].hello
        prompt = await self._prompts.encode(request, model)
        sampling = _fit(request, prompt, model)
        request.trace.prompt_tokens = prompt.num_tokens
        request.trace.tokenized_tokens = prompt.new_tokens

        lost: set[str] = set()
        for attempt in range(1, self._max_attempts + 1):
            # 3. + 4. Choose among the engines that are there now, but not one that was just lost.
            engine = await self._choose(request, prompt, lost)
            waited_s = time.monotonic()
            try:
                # 5. Wait for a place.
                async with self._queue.place(engine, request.tenant, request.deadline_s):
                    now = time.monotonic()
                    request.trace.queue_ms += (now - waited_s) * 1e3
                    request.trace.overhead_ms = (now - request.received_s) * 1e3 - request.trace.queue_ms
                    # 6. Stream.
                    async with aclosing(self._generate(request, prompt, sampling, engine)) as events:
                        async for event in events:
                            yield event
                    return
            except EngineLostError as error:
                # Before the first byte another engine takes over; after it the dialect ends the stream with an error.
                if request.trace.first_token_ms is not None:
                    raise
                if attempt == self._max_attempts:
                    raise OverloadedError(f"No engine took the request. {error.message}", retry_after_s=1.0) from error
                lost.add(engine.hello.incarnation)
                request.trace.retries = attempt
                log.warning(
                    "engine %s was lost before the first token; request %s goes on", engine.name, request.request_id
                )

    async def _choose(self, request: Request, prompt: EncodedPrompt, lost: set[str]) -> Engine:
        """For a group the engine that its first request chose, as long as it serves."""
        group = request.group
        if group is None:
            return await self._choose_best(request, prompt, lost)
        async with group.choosing:
            for engine in self._registry.serving(request.model):
                if engine.hello.incarnation == group.incarnation and group.incarnation not in lost:
                    return engine
            engine = await self._choose_best(request, prompt, lost)
            group.incarnation = engine.hello.incarnation
            return engine

    async def _choose_best(self, request: Request, prompt: EncodedPrompt, lost: set[str]) -> Engine:
        engines = self._registry.serving(request.model)
        engines = [engine for engine in engines if engine.hello.incarnation not in lost] or engines
        if len(engines) == 1:
            return engines[0]  # nothing to choose, so nothing to look up
        if not request.use_cache:
            return self._router.choose(engines, prompt.num_tokens, {})
        block_size = engines[0].hello.namespace.block_size
        held = await self._index.find(request.model, prompt.digests, [engine.hello.incarnation for engine in engines])
        cached = {incarnation: blocks * block_size for incarnation, blocks in held.items()}
        return self._router.choose(engines, prompt.num_tokens, cached)

    async def _generate(
        self, request: Request, prompt: EncodedPrompt, sampling: Sampling, engine: Engine
    ) -> AsyncGenerator[Event, None]:
        trace, decoder = request.trace, self._prompts.decoder(engine.hello, request.stop)
        scores = None if sampling.logprobs is None else self._prompts.scores(engine.hello)
        trace.engine = engine.name
        async with aclosing(engine.generate(prompt, sampling, request)) as updates:
            async for update in updates:
                if update.finish == "error":
                    raise _failure(request, update)
                if trace.first_token_ms is None:
                    _meter_start(request, prompt, engine, update)
                    scored = self._score_prompt(prompt, engine, update)
                    yield Started(engine.name, _usage(trace), scored)
                trace.completion_tokens += len(update.tokens) + (update.stop_id is not None)
                if scores is not None:
                    scores.feed(update.tokens, update.logprobs or ())
                if text := decoder.feed(update.tokens):
                    yield TextDelta(text, scores.release(text) if scores else ())
                if decoder.met or update.finish in ("stop", "length"):
                    if not decoder.met and (rest := _rest(decoder, scores)):
                        yield rest
                    trace.finish = "stop" if decoder.met or update.finish == "stop" else "length"
                    yield Finished("length" if trace.finish == "length" else "stop", _usage(trace), decoder.met)
                    return
                if time.monotonic() > request.deadline_s:
                    raise DeadlineError("The answer took longer than this server allows (server.request_timeout_s).")
        raise EngineLostError(f"Engine {engine.name} ended the answer without a reason.")

    def _score_prompt(self, prompt: EncodedPrompt, engine: Engine, update: SequenceUpdate) -> tuple[ScoredToken, ...]:
        if update.prompt_logprobs is None:
            return ()
        scores = self._prompts.scores(engine.hello)
        scores.feed(array("I", prompt.tokens), [TokenLogprobs(0.0, ()), *update.prompt_logprobs])
        return scores.flush()


def _rest(decoder: TextDecoder, scores: TokenScores | None) -> TextDelta | None:
    """What was held back, at the end of an answer. A stop string may show up here, too."""
    text = decoder.flush()
    scored: tuple[ScoredToken, ...] = ()
    if scores is not None:
        scored = scores.release(text)
        scored += () if decoder.met else scores.flush()
    return TextDelta(text, scored) if text or scored else None


def _failure(request: Request, update: SequenceUpdate) -> KvasirError:
    """A grammar that cannot be carried out is the client's; everything else is the engine's."""
    if update.grammar_path is None or request.constraint is None:
        return EngineFailedError(update.error or "The engine failed on this request.")
    param = request.constraint.param
    path = f"{param}.{update.grammar_path}" if update.grammar_path else param
    return BadRequestError(f"Invalid '{path}': {update.error}.", param=path, code="invalid_grammar")


def _fit(request: Request, prompt: EncodedPrompt, model: Hello) -> Sampling:
    """Checks the prompt against the context and settles max_tokens, where 0 stands for all that is left, unless nothing
    is to be generated."""
    room = model.context_tokens - prompt.num_tokens
    asked = request.sampling.max_tokens
    if room < (0 if request.prewarm else max(asked, 1)):
        raise ContextLengthError(model.context_tokens, prompt.num_tokens, asked, param=request.prompt_param)
    return request.sampling if asked or request.prewarm else replace(request.sampling, max_tokens=room)


def _meter_start(request: Request, prompt: EncodedPrompt, engine: Engine, update: SequenceUpdate) -> None:
    trace, block_size = request.trace, engine.hello.namespace.block_size
    trace.first_token_ms = (time.monotonic() - request.received_s) * 1e3
    trace.queue_ms += update.queue_ms or 0.0
    trace.cached_tokens = update.cached_tokens or 0
    trace.lease_read_tokens = update.lease_read_tokens or 0
    trace.lease_write_tokens = update.lease_write_tokens or 0
    if isinstance(request.prompt, ChatPrompt) and request.prompt.markers:
        points = prompt.breakpoints
        degraded = len(points) if update.leases_degraded is None else update.leases_degraded
        trace.lease = Lease(degraded, points[-1] if points and not degraded else None)
        end = min(trace.lease_read_tokens + trace.lease_write_tokens, trace.prompt_tokens)
        trace.lease_writes = tuple(_lease_writes(points, trace.lease_read_tokens, end))
    else:
        end = prompt.num_tokens // block_size * block_size if request.use_cache else 0
    trace.cache_write_tokens = max(0, end - _cached(trace))


def _lease_writes(points: Sequence[Breakpoint], read: int, end: int) -> Iterator[tuple[float, int]]:
    """Time to live and tokens of what each breakpoint adds to the one before it, between what was read and the last
    that is kept."""
    for point in points:
        if read < point.tokens <= end:
            yield point.ttl_s, point.tokens - read
            read = point.tokens


def _cached(trace: Trace) -> int:
    """To report: nobody is told of less than a lease promised, however much of it was computed again."""
    return min(max(trace.cached_tokens, trace.lease_read_tokens), trace.prompt_tokens)


def _usage(trace: Trace) -> Usage:
    return Usage(
        prompt_tokens=trace.prompt_tokens,
        completion_tokens=trace.completion_tokens,
        cached_tokens=_cached(trace),
        cache_write_tokens=trace.cache_write_tokens,
        lease=trace.lease.state if trace.lease else None,
        lease_read_tokens=min(trace.lease_read_tokens, trace.prompt_tokens),
        lease_writes=trace.lease_writes,
    )
