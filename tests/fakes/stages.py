"""Stages of a pipeline that a test controls: a tokeniser of letters, an index, a queue, and engines with scripts."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from engine.protocol import Breakpoint, Grammar, Hello, Load, Namespace, Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import EngineLostError, KvasirError, NoEngineError
from gateway.pipeline import Pipeline
from gateway.prompt.reader import AnswerReader
from gateway.prompt.tool_calls import CallParser
from gateway.prompt.tool_styles import JSON
from gateway.receipts import Receipts
from gateway.types import Ask, Constraint, EncodedPrompt, Event, Request, ScoredToken, Spelled, Tenant, TextPrompt

LETTERS = 'abcdefghijklmnopqrstuvwxyz{}":, \n'
FORCED = Constraint(Grammar("lark_schemas", "{}"), "tools", (("schemas.arguments_0", "tools[3].function.parameters"),))
Script = list[SequenceUpdate | KvasirError]


def hello(incarnation: str = "one") -> Hello:
    return Hello(
        incarnation=incarnation,
        model="m",
        namespace=Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=4),
        context_tokens=32,
        vocab_size=26,
        num_blocks=8,
        max_sequences=2,
        eos_ids=(25,),
        tokenizer="t",
        created=0,
    )


def death() -> EngineLostError:
    error = EngineLostError("gone")
    error.died = True
    return error


@dataclass
class ScriptedEngine:
    """Plays one script per request."""

    name: str
    scripts: list[Script]
    context_tokens: int = 32
    load: Load = field(default_factory=Load)
    asked: list[Sampling] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    constraints: list[Constraint | None] = field(default_factory=list)
    closed: int = 0

    @property
    def hello(self) -> Hello:
        return replace(hello(self.name), context_tokens=self.context_tokens)

    def reused(self, held_tokens: int, prompt_tokens: int) -> int:
        return min(held_tokens, prompt_tokens - 1) // 4 * 4

    async def render(self, prompt: EncodedPrompt, request: Request) -> EncodedPrompt:
        return prompt

    async def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        self.asked.append(sampling)
        self.prompts.append(array("I", prompt.tokens).tolist())
        self.constraints.append(request.constraint)
        try:
            for item in self.scripts.pop(0):
                if isinstance(item, KvasirError):
                    raise item
                yield item
        finally:
            self.closed += 1


class Letters:
    """A decoder for which token n is the n-th letter; a stop string ends it."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.met: str | None = None
        self._stop = stop
        self._held = ""

    def feed(self, tokens: Sequence[int]) -> str:
        text = self._held + "".join(LETTERS[token] for token in tokens)
        self._held = ""
        for stop in self._stop:
            if stop in text:
                self.met = stop
                return text[: text.index(stop)]
            if text and stop.startswith(text[-1]):
                text, self._held = text[:-1], text[-1]
        return text

    def flush(self) -> str:
        return self._held


class LetterScores:
    """As gateway/prompt/reader.py, where every token is a letter."""

    def __init__(self) -> None:
        self._waiting: list[ScoredToken] = []

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token, found in zip(tokens, logprobs, strict=True):
            self._waiting.append(ScoredToken(Spelled(LETTERS[token], None), found.logprob, (), 0))

    def release(self, text: str) -> tuple[ScoredToken, ...]:
        released, self._waiting = self._waiting[: len(text)], self._waiting[len(text) :]
        return tuple(released)

    def flush(self) -> tuple[ScoredToken, ...]:
        return tuple(self._waiting)


@dataclass
class Stages:
    """All other stages, which also note who was called in which order."""

    engines: list[ScriptedEngine]
    held: Mapping[str, int] = field(default_factory=dict)
    remembered: Mapping[str, int | None] = field(default_factory=dict)  # as memory has it; else it has what is held
    num_tokens: int = 9
    breakpoints: tuple[Breakpoint, ...] = ()
    receipts: Receipts = field(default_factory=Receipts)
    calls: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    places: int = 0
    waiting: int = 0

    async def encode(self, request: Request, model: Hello) -> EncodedPrompt:
        self.calls.append("encode")
        tokens = array("I", range(self.num_tokens)).tobytes()
        return EncodedPrompt(tokens, b"x" * 32, new_tokens=3, breakpoints=self.breakpoints)

    def extend(self, prompt: EncodedPrompt, answer: bytes, request: Request, model: Hello) -> EncodedPrompt:
        return replace(prompt, tokens=prompt.tokens + answer)

    def constraint(self, request: Request, model: Hello) -> Constraint | None:
        use = request.tool_use
        return FORCED if use is not None and use.mode == "required" else None

    def reader(self, request: Request, model: Hello) -> AnswerReader:
        scores = None if request.sampling.logprobs is None else LetterScores()
        if request.tool_use is None:
            return AnswerReader(Letters(request.stop), scores)
        return AnswerReader(Letters(()), scores, CallParser(JSON, request.tool_use, request.stop))

    def score(self, prompt: EncodedPrompt, logprobs: Sequence[TokenLogprobs], model: Hello) -> tuple[ScoredToken, ...]:
        scores = LetterScores()
        scores.feed(array("I", prompt.tokens), [TokenLogprobs(0.0, ()), *logprobs])
        return scores.flush()

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        self.calls.append("find " + ",".join(incarnations))
        return self.held

    def recall(self, incarnation: str, digests: bytes) -> int | None:
        return self.remembered.get(incarnation, self.held.get(incarnation, 0))

    def lost(self, incarnation: str, digests: bytes, held: int) -> None:
        """Nothing ever is."""

    def serving(self, model: str) -> Sequence[ScriptedEngine]:
        if not self.engines:
            raise NoEngineError(model, 1.0)
        return self.engines

    @asynccontextmanager
    async def slot(self, engines: Sequence[ScriptedEngine], ask: Ask) -> AsyncIterator[ScriptedEngine]:
        """At the one that it has to be, or of those that did not fail it the one that holds most."""
        held = ask.cached_tokens
        possible = [e for e in engines if e.hello.incarnation not in ask.avoid] or engines
        possible = [e for e in possible if ask.only in (None, e.hello.incarnation)]
        engine = max(possible, key=lambda engine: held.get(engine.hello.incarnation, 0))
        self.calls.append(f"place {engine.name} {dict(held)}")
        self.asks.append(ask)
        self.places += 1
        try:
            yield engine
        finally:
            self.places -= 1

    def pipeline(self) -> Pipeline:
        return Pipeline(prompts=self, index=self, registry=self, queue=self, receipts=self.receipts)


def request(max_tokens: int = 5, stop: tuple[str, ...] = ()) -> Request:
    now = time.monotonic()
    return Request(
        request_id="r",
        tenant=Tenant("t"),
        model="m",
        prompt=TextPrompt("p"),
        sampling=Sampling(max_tokens=max_tokens),
        received_s=now,
        deadline_s=now + 60,
        stop=stop,
        prompt_param="prompt",
    )


async def walk(stages: Stages, asked: Request) -> list[Event]:
    async with aclosing(stages.pipeline().answer(asked)) as events:
        return [event async for event in events]


@dataclass
class MortalEngine(ScriptedEngine):
    """Continues every prompt with what is left of one answer, and dies in the middle of it.

    answer      tokens; then a stop token ends it, unless max_tokens did before
    dies_after  so many tokens of the answer; None lives
    """

    answer: tuple[int, ...] = ()
    dies_after: int | None = None
    tokens_per_update: int = 1
    prompt_tokens: int = 9
    cached_tokens: int = 4
    error: KvasirError = field(default_factory=death)

    async def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        ids = array("I", prompt.tokens).tolist()
        self.asked.append(sampling)
        self.prompts.append(ids)
        at = len(ids) - self.prompt_tokens
        assert tuple(ids[self.prompt_tokens :]) == self.answer[:at], "it goes on behind what was generated"
        assert sampling.max_tokens > 0
        goal, update = min(len(self.answer), at + sampling.max_tokens), None
        while update is None or update.finish is None:
            if at == self.dies_after:
                raise self.error
            to = min(at + self.tokens_per_update, goal, goal if self.dies_after is None else max(self.dies_after, at))
            tokens = list(self.answer[at:to])
            scores = [TokenLogprobs(-float(token), ()) for token in tokens] if sampling.logprobs is not None else None
            first = self.cached_tokens if update is None else None
            update = SequenceUpdate(1, tokens, cached_tokens=first, logprobs=scores)
            if to == goal != self.dies_after:
                update.finish = "length" if goal == len(ids) - self.prompt_tokens + sampling.max_tokens else "stop"
                update.stop_id = 25 if update.finish == "stop" else None
            at = to
            yield update
