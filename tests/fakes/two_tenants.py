"""Everything that tenants have in common, in one process without sockets: response cache, semantic cache, prompt stage,
index, queue and engines. The engines work for each block that they do not hold, so that a clock tells what they hold.

    house = House(); await house.open()
    await house.ask("north", text)     what one tenant asks
    await house.seen("south", text)    what is done for another, call by call and step by step
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from engine.protocol import BlockEvents, Hello, Load, Sampling, SequenceUpdate, split_digests
from gateway.config import PromptSettings, QueueSettings, ResponseCacheSettings, SemanticCacheSettings
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.pipeline import Pipeline
from gateway.prompt.stage import PromptStage
from gateway.queues.slots import SlotQueue
from gateway.responses.entry_stores import MemoryEntries
from gateway.responses.semantic.cache import SemanticCache
from gateway.responses.semantic.space import Space
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.types import ChatPrompt, EmbeddingInput, EncodedPrompt, Request, Scope, Started, Tenant
from tests.fakes import tokenisers
from tests.fakes.shelf import Shelf

WORK = 20
"""Digests that an engine makes for a block that it does not hold: about ten microseconds."""

DIMENSIONS = 64
Way = Literal["exact", "semantic", "blocks"]
"""What an answer could be reused by. For blocks it is asked in a way that is not for the response cache."""


@dataclass
class WorkingEngine:
    """Holds every block that it computed."""

    hello: Hello
    index: MemoryIndex
    load: Load = field(default_factory=Load)
    held: set[bytes] = field(default_factory=set)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)  # tenant -> before its first token
    prefilling: dict[str, int] = field(default_factory=dict)
    joined: bool = True
    log: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.hello.incarnation

    def reused(self, held_tokens: int, prompt_tokens: int) -> int:
        return held_tokens

    async def render(self, prompt: EncodedPrompt, request: Request) -> EncodedPrompt:
        return prompt

    async def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        digests = split_digests(prompt.digests)
        cached = next((at for at, digest in enumerate(digests) if digest not in self.held), len(digests))
        self.log.append(("engine", len(digests), cached))
        if (gate := self.gates.get(request.tenant.name)) is not None:
            await gate.wait()
        for digest in digests[cached:]:
            for _ in range(WORK):
                digest = hashlib.sha256(digest * 8).digest()
        self.held.update(digests)
        self.index.apply(self.name, BlockEvents(stored=prompt.digests))
        block_size = self.hello.namespace.block_size
        yield SequenceUpdate(1, [5, 6], cached_tokens=cached * block_size, queue_ms=0.0, prefill_ms=0.0)
        await asyncio.sleep(0)
        yield SequenceUpdate(1, [7], finish="stop", stop_id=0)


class LastWords:
    """Texts with the same last word mean the same, and all others something else."""

    digest = "fake"
    dimensions = DIMENSIONS
    max_tokens = 256

    async def model(self) -> LastWords:
        return self

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return [[zlib.crc32(word.encode()) for word in text.split()] for text in texts]

    async def embed(self, texts: Sequence[EmbeddingInput], deadline_s: float, *, tenant: str) -> list[bytes]:
        await asyncio.sleep(0)
        return [self._vector(one.tokens[-1]) for one in texts]

    def _vector(self, seed: int) -> bytes:
        vector = np.random.default_rng(seed).standard_normal(DIMENSIONS).astype("<f4")
        return (vector / np.linalg.norm(vector)).tobytes()


class Registry:
    def __init__(self, engines: Sequence[WorkingEngine]) -> None:
        self.engines = engines

    def serving(self, model: str) -> Sequence[WorkingEngine]:
        return self.engines


class House:
    """Two engines behind one gateway. `namespace` is what tenants share; nobody does by accident."""

    def __init__(self, namespace: str = "") -> None:
        files = tokenisers.qwen()
        hello = tokenisers.hello(files, model="demo", block_size=16, num_blocks=1 << 20, max_sequences=8)
        self.namespace = namespace
        self.log: list[Any] = []
        self.memory_index = MemoryIndex()
        self.engines = [
            WorkingEngine(replace(hello, incarnation=name), self.memory_index, log=self.log) for name in ("one", "two")
        ]
        self.index = PrefixIndex(self.memory_index, None, retry_s=1.0)
        self.prompts = PromptStage(PromptSettings())
        self._files, self._hello = files, hello
        own = ResponseCacheSettings()
        self.memory, self.shelf = MemoryEntries(own.max_memory_bytes, time.time), Shelf()
        exact = StoredAnswers(self.memory, self.shelf, memory_s=60.0)
        judged = SemanticCacheSettings(mode="on", judged=False, lookup_timeout_s=10.0)
        self.semantic = SemanticCache(
            judged,
            {},
            LastWords(),
            None,
            random=lambda: 1.0,
            now=time.time,
            namespaces=[namespace] if namespace else (),
        )
        self.responses = ResponseCache(own, {}, exact, self.semantic, time.time)
        self.pipeline = Pipeline(
            prompts=self.prompts,
            index=self.index,
            registry=Registry(self.engines),
            queue=SlotQueue[Any](QueueSettings()),
            responses=self.responses,
        )

    async def open(self) -> None:
        threadpool_limits(1, user_api="blas")  # as loading the encoder does
        await self.prompts.load(self._hello, self._files)
        for engine in self.engines:
            self.memory_index.apply(engine.name, BlockEvents())

    async def close(self) -> None:
        await self.semantic.close()
        self.prompts.close()

    def request(self, tenant: str, text: str, way: Way) -> Request:
        """`text` is a system prompt, a line end, and a question."""
        system, _, question = text.rpartition("\n")
        now = time.monotonic()
        return Request(
            request_id="r",
            tenant=Tenant(tenant),
            model="demo",
            prompt=ChatPrompt([{"role": "system", "content": system}, {"role": "user", "content": question}]),
            sampling=Sampling(max_tokens=8, temperature=1.0 if way == "blocks" else 0.0),
            received_s=now,
            deadline_s=now + 600,
            scope=Scope(namespace=self.namespace) if self.namespace else Scope(tenant=tenant),
        )

    async def ask(self, tenant: str, text: str, way: Way = "exact") -> Request:
        request = self.request(tenant, text, way)
        async with aclosing(self.pipeline.answer(request)) as events:
            async for _ in events:
                pass
        return request

    async def seen(self, tenant: str, text: str, way: Way) -> list[Any]:
        """Every call that is made for it, with what came back, the steps of the event loop until its answer was there,
        and what the request was told; but for which engine it was."""
        del self.log[:]
        with self._watched(), _counted() as steps:
            request = self.request(tenant, text, way)
            async with aclosing(self.pipeline.answer(request)) as events:
                told = [event.usage if isinstance(event, Started) else event async for event in events]
            self.log.append(("steps", steps()))
        trace = request.trace
        assert trace.lookup is not None
        tokens = trace.prompt_tokens, trace.cached_tokens, trace.tokenized_tokens, trace.completion_tokens
        return [*self.log, trace.lookup.outcome, tokens, told]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        places: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (self.memory, "get", bool),
            (self.memory, "set", bool),
            (self.shelf, "find", bool),
            (self.index, "find", dict),
            (self.semantic, "find", bool),
            *((space, "_near", _lengths) for space in self._spaces()),
        ]
        for place, name, told in places:
            setattr(place, name, _noting(self.log, getattr(place, name), told))
        try:
            yield
        finally:
            for place, name, _ in places:
                delattr(place, name)

    def _spaces(self) -> list[Space]:
        return list(self.semantic._spaces)


def _lengths(found: tuple[list[Any], list[str]]) -> tuple[int, ...]:
    return tuple(map(len, found))


def _noting(log: list[Any], call: Callable[..., Any], told: Callable[[Any], Any]) -> Callable[..., Any]:
    async def waited(coming: Any) -> Any:
        found = await coming
        log.append((call.__qualname__, told(found)))
        return found

    def noted(*given: Any, **named: Any) -> Any:
        found = call(*given, **named)
        if asyncio.iscoroutine(found):
            return waited(found)
        log.append((call.__qualname__, told(found)))
        return found

    return noted


@contextmanager
def _counted() -> Iterator[Callable[[], int]]:
    """Counts what is put before the event loop."""
    loop, count = asyncio.get_running_loop(), 0
    before = loop.call_soon

    def call_soon(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return before(*given, **named)

    loop.call_soon = call_soon  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        del loop.call_soon


def rank_sum(some: Sequence[float], others: Sequence[float]) -> float:
    """How many standard deviations the ranks of `some` are off those of chance (Mann and Whitney); negative where
    they are smaller. Equal values share their ranks."""
    values = np.array([*some, *others])
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    n, m = len(some), len(others)
    above = float(ranks[:n].sum()) - n * (n + 1) / 2
    ties = float((counts**3 - counts).sum()) / ((n + m) * (n + m - 1))
    return (above - n * m / 2) / math.sqrt(n * m / 12 * (n + m + 1 - ties))
