"""An embedder whose vectors a test chooses, and a semantic cache with the exact one in front of engines that count."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from engine.protocol import Sampling
from gateway.config import ResponseCacheSettings, SemanticCacheSettings
from gateway.errors import EmbedderError, KvasirError
from gateway.responses.entry_stores import MemoryEntries
from gateway.responses.semantic.cache import SemanticCache
from gateway.responses.semantic.questions import RedisQuestions
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.types import ChatPrompt, EmbeddingInput, Event, Finished, Request, Reuse, Started, Tenant, TextDelta, Usage
from tests.fakes.pipeline import hello
from tests.fakes.tuned import tuned

MODEL = hello()


@dataclass
class Meanings:
    """Texts have the direction (degrees) of the first word in `angles` that is in them, else one far from all."""

    angles: dict[str, float] = field(default_factory=dict)
    error: KvasirError | None = None
    digest: str = "fake"
    dimensions: int = 2
    max_tokens: int = 256
    embedded: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    loading: asyncio.Event | None = None
    loads: int = 0

    async def model(self) -> Meanings:
        self.loads += 1
        if self.loading is not None:
            await self.loading.wait()
        if self.error is not None:
            raise self.error
        return self

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    async def embed(self, texts: Sequence[EmbeddingInput], deadline_s: float, *, tenant: str) -> list[bytes]:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        read = ["".join(map(chr, one.tokens)) for one in texts]
        self.embedded += read
        return [self._vector(text) for text in read]

    def _vector(self, text: str) -> bytes:
        angle = math.radians(next((angle for word, angle in self.angles.items() if word in text), 90.0))
        return array("f", [math.cos(angle), math.sin(angle), *[0.0] * (self.dimensions - 2)]).tobytes()


def semantic_cache(meanings: Meanings, *, chance: float = 1.0, **settings: Any) -> SemanticCache:
    """One gateway's, of which a hit is audited where `chance` is below its share."""
    return SemanticCache(
        tuned(SemanticCacheSettings, **{"mode": "on", **settings}),
        {},
        meanings,
        None,
        random=lambda: chance,
        now=time.time,
    )


@dataclass
class Kitchen:
    """One gateway's response cache over an engine whose answers a test writes."""

    settings: SemanticCacheSettings = field(default_factory=lambda: SemanticCacheSettings(mode="on"))
    meanings: Meanings = field(default_factory=Meanings)
    redis: RedisQuestions | None = None
    exact: StoredAnswers | None = None
    answers: dict[str, str] = field(default_factory=dict)
    chance: float = 1.0
    now: float = 1000.0
    runs: list[Request] = field(default_factory=list)
    modes: dict[str, Any] = field(default_factory=dict)
    namespaces: Sequence[str] = ()
    shows_texts: bool = False
    before: Callable[[Request], None] = lambda request: None

    def __post_init__(self) -> None:
        own = ResponseCacheSettings()
        memory = MemoryEntries(own.max_memory_bytes, lambda: self.now)
        exact = self.exact or StoredAnswers(memory, None, memory_s=60.0)
        self.semantic = SemanticCache(
            self.settings,
            self.modes,
            self.meanings,
            self.redis,
            random=lambda: self.chance,
            now=lambda: self.now,
            namespaces=self.namespaces,
            shows_texts=self.shows_texts,
        )
        self.exact = exact
        self.cache = ResponseCache(own, {}, exact, self.semantic, lambda: self.now)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.runs.append(request)
        self.before(request)
        yield Started("engine-1", Usage(10, 0))
        yield TextDelta(self.answers.get(last_text(request), f"answer {len(self.runs)} of many different words"))
        yield Finished("stop", Usage(10, 3), None)

    async def ask(self, text: str, **changes: Any) -> tuple[str, str]:
        """The answer, and what the cache had for it."""
        request = chat(text, **changes)
        async with aclosing(self.cache.answer(request, MODEL, self.generate)) as events:
            said = "".join([event.text async for event in events if isinstance(event, TextDelta)])
        assert request.trace.lookup is not None
        return said, request.trace.lookup.outcome


def chat(text: str, *, before: Sequence[dict[str, Any]] = (), tenant: str = "a", **changes: Any) -> Request:
    request = Request(
        request_id="r",
        tenant=Tenant(tenant),
        model="demo",
        prompt=ChatPrompt([*before, {"role": "user", "content": text}]),
        sampling=Sampling(max_tokens=8, temperature=0.0),
        received_s=0.0,
        deadline_s=9e9,
        reuse=Reuse(),
    )
    return replace(request, **changes)


def last_text(request: Request) -> str:
    assert isinstance(request.prompt, ChatPrompt)
    return str(request.prompt.messages[-1]["content"])


BROKEN = EmbedderError("The texts could not be embedded: RuntimeError.")
