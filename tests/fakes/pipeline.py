"""A pipeline without stages: answers that a test wrote, for the HTTP side alone."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.protocol import Breakpoint, Hello, Load, Namespace, Sampling
from gateway.errors import KvasirError, ModelNotFoundError
from gateway.stages import Responses
from gateway.types import (
    CallDelta,
    ChatPrompt,
    EncodedPrompt,
    Event,
    Finished,
    FinishReason,
    Lease,
    Marker,
    Request,
    Started,
    TextDelta,
    TokenPrompt,
    Usage,
)


def hello(model: str = "demo", **changes: object) -> Hello:
    values: dict[str, object] = {
        "incarnation": f"{model}-1",
        "model": model,
        "namespace": Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=16),
        "context_tokens": 8192,
        "vocab_size": 1000,
        "num_blocks": 100,
        "max_sequences": 4,
        "eos_ids": (0,),
        "tokenizer": "t",
        "created": 1700000000,
    }
    return Hello(**{**values, **changes})  # type: ignore[arg-type]


NOTHING = Usage(0, 0)


@dataclass
class FakeEngine:
    hello: Hello
    name: str = "engine-1"
    load: Load = field(default_factory=Load)
    prefilling: dict[str, int] = field(default_factory=dict)
    joined: bool = True


@dataclass
class FakeModels:
    """A registry with these models."""

    hellos: list[Hello] = field(default_factory=lambda: [hello()])
    away: KvasirError | None = None

    def serving(self, model: str) -> Sequence[FakeEngine]:
        engines = [FakeEngine(item) for item in self.hellos if item.model == model]
        if not engines:
            raise ModelNotFoundError(model)
        if self.away is not None:
            raise self.away
        return engines

    def models(self) -> Mapping[str, int]:
        return {item.model: item.created for item in self.hellos}


class FakeDecoders:
    def spell(self, prompt: TokenPrompt, model: Hello) -> str:
        return "".join(f"<{token}>" for token in array("I", prompt.tokens))

    async def encode(self, request: Request, model: Hello) -> EncodedPrompt:
        """A token for each character of its messages."""
        assert isinstance(request.prompt, ChatPrompt)
        text = "".join(message["content"] for message in request.prompt.messages)
        return EncodedPrompt(array("I", map(ord, text)).tobytes(), b"")


@dataclass
class FakePipeline:
    """Answers every request with `pieces`.

    fails_before, fails_after   raised instead of the first event, or after all pieces
    hold_before, hold_after     awaited there
    has_place                   whether an engine works on it while it is held
    """

    pieces: Sequence[str | TextDelta | CallDelta] = ("Hello", " world")
    cached_tokens: int = 32
    prompt_tokens: int = 40
    reason: FinishReason = "stop"
    stop: str | None = None
    leased: Usage = NOTHING  # what the usage says of leases
    lease: Lease | None = None  # and the trace
    traced: Mapping[str, object] = field(default_factory=dict)  # what the trace says of breakpoints and leases
    late: Mapping[str, object] = field(default_factory=dict)  # and what is in its place at the end of the answer
    places: Sequence[int] = ()  # in tokens, of markers that are looked for
    looked_up: list[tuple[Marker, ...]] = field(default_factory=list)
    fails_before: Exception | None = None
    fails_after: Exception | None = None
    hold_before: asyncio.Event | None = None
    hold_after: asyncio.Event | None = None
    has_place: bool = False
    requests: list[Request] = field(default_factory=list)
    responses: Responses | None = None  # steps 1 and 7
    open: int = 0
    most_open: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # a hold was reached

    @property
    def sampling(self) -> Sampling:
        return self.requests[-1].sampling

    @property
    def usage(self) -> Usage:
        return replace(self.leased, cached_tokens=self.cached_tokens)

    async def breakpoints(self, request: Request) -> tuple[Breakpoint, ...]:
        assert isinstance(request.prompt, ChatPrompt)
        self.looked_up.append(request.prompt.markers)
        return tuple(Breakpoint(tokens, 0.0) for tokens in self.places)

    def find_hosted(self, model: str, tenant: str) -> None:
        return None

    async def count(self, request: Request) -> int:
        self.requests.append(request)
        return self.prompt_tokens

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        if self.responses is None:
            return self._answer(request)
        return self.responses.answer(request, hello(request.model), self._answer)

    async def _answer(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async for event in self._events(request):
                yield event
        finally:
            self.open -= 1
            self.closed.set()

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        if self.has_place:
            request.trace.engine = "engine-1"
        await self._hold(self.hold_before)
        if self.fails_before is not None:
            raise self.fails_before
        trace, prompt_tokens = request.trace, self.prompt_tokens
        if isinstance(request.prompt, TokenPrompt):
            prompt_tokens = len(request.prompt.tokens) // 4
        trace.engine, trace.prompt_tokens, trace.cached_tokens = "engine-1", prompt_tokens, self.cached_tokens
        trace.reported_cached_tokens = self.cached_tokens
        trace.first_token_ms = (time.monotonic() - request.received_s) * 1e3
        trace.overhead_ms = 0.5
        trace.lease = self.lease
        for name, value in self.traced.items():
            setattr(trace, name, value)
        yield Started("engine-1", replace(self.usage, prompt_tokens=prompt_tokens))
        for piece in () if request.prewarm else self.pieces:
            trace.completion_tokens += 1
            yield TextDelta(piece) if isinstance(piece, str) else piece
            await asyncio.sleep(0)
        await self._hold(self.hold_after)
        if self.fails_after is not None:
            raise self.fails_after
        for name, value in self.late.items():
            setattr(trace, name, value)
        yield Finished(
            "length" if request.prewarm else self.reason,
            replace(self.usage, prompt_tokens=prompt_tokens, completion_tokens=trace.completion_tokens),
            self.stop,
        )

    async def _hold(self, event: asyncio.Event | None) -> None:
        if event is not None:
            self.reached.set()
            await event.wait()
