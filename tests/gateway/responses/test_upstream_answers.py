"""Answers of upstreams that are shared, below HTTP: what each request is told of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from gateway.api.replays import REPLAYS
from gateway.config import ResponseCacheSettings
from gateway.responses.base import Figures
from gateway.responses.exact import ExactCache
from gateway.responses.lookups import Lookups
from gateway.responses.memory_entries import MemoryEntries
from gateway.responses.upstream_answers import RememberedUpstreams
from gateway.types import Hit, Tenant, UpstreamAnswer, UpstreamRequest
from tests.fakes.waiting import until

WHOLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]}
VALUES = {"model": "m", "temperature": 0, "messages": []}


@dataclass
class Stub:
    """One upstream, which meters its answers at their end, as the real one does."""

    may: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    asked: int = 0

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        return True

    def models(self, dialect: str, tenant: str) -> Mapping[str, int]:
        return {"m": 0}

    def whose(self, model: str, tenant: str) -> str:
        return "up m"

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        self.asked += 1

        async def pieces() -> AsyncGenerator[bytes, None]:
            await self.may.wait()
            yield orjson.dumps(WHOLE)
            request.trace.prompt_tokens, request.trace.completion_tokens = 100, 7
            request.trace.engine = "up"

        yield UpstreamAnswer("up", self.status, (("Content-Type", "application/json"),), pieces(), "m")


def remembered(stub: Stub) -> tuple[RememberedUpstreams, Figures]:
    settings = ResponseCacheSettings()
    exact = ExactCache(MemoryEntries(1 << 20, time.time), None, retry_s=1.0, clock=time.monotonic)
    lookups = Lookups(settings, exact, None, time.time)
    return RememberedUpstreams(stub, REPLAYS, settings, {}, lookups), lookups.figures


def ask() -> UpstreamRequest:
    body = orjson.dumps(VALUES)
    now = time.monotonic()
    path = "/v1/chat/completions"
    return UpstreamRequest("r", Tenant("a"), "openai", "m", path, "", (), body, VALUES, now, now + 60)


async def read(upstreams: RememberedUpstreams, request: UpstreamRequest) -> bytes:
    async with upstreams.answer(request) as answer:
        return b"".join([piece async for piece in answer.pieces])


async def test_who_shares_an_answer_is_told_what_it_took_and_used_nothing() -> None:
    stub = Stub()
    upstreams, figures = remembered(stub)
    requests = [ask() for _ in range(3)]
    reading = [asyncio.create_task(read(upstreams, request)) for request in requests]
    await asyncio.sleep(0)
    stub.may.set()
    assert set(await asyncio.gather(*reading)) == {orjson.dumps(WHOLE)}
    assert stub.asked == 1
    assert requests[0].trace.hit is None
    for request in requests[1:]:
        hit = request.trace.hit
        assert isinstance(hit, Hit)
        assert (hit.prompt_tokens, hit.completion_tokens, request.trace.prompt_tokens) == (100, 7, 100)
    later = ask()
    await read(upstreams, later)
    assert later.trace.hit is not None
    assert (later.trace.hit.prompt_tokens, later.trace.hit.completion_tokens) == (100, 7)
    assert figures.outcomes == {"miss": 1, "shared": 2, "exact": 1}


async def test_an_error_that_is_shared_is_no_hit_and_saves_nothing() -> None:
    stub = Stub(status=429)
    upstreams, figures = remembered(stub)
    requests = [ask() for _ in range(3)]
    reading = [asyncio.create_task(read(upstreams, request)) for request in requests]
    await asyncio.sleep(0)
    stub.may.set()
    await asyncio.gather(*reading)
    assert stub.asked == 1
    assert [request.trace.hit for request in requests] == [None] * 3
    assert figures.outcomes == {"miss": 3}


async def test_what_was_used_is_accounted_for_once_when_the_request_that_asked_for_it_left() -> None:
    stub = Stub()
    upstreams, _ = remembered(stub)
    requests = [ask() for _ in range(3)]
    leader, *others = [asyncio.create_task(read(upstreams, request)) for request in requests]
    await until(lambda: upstreams.waiting == 3)
    leader.cancel()
    await asyncio.gather(leader, return_exceptions=True)
    stub.may.set()
    await asyncio.gather(*others)
    assert stub.asked == 1
    paid = [request.trace for request in requests[1:] if request.trace.hit is None]
    assert [(trace.engine, trace.prompt_tokens, trace.completion_tokens) for trace in paid] == [("up", 100, 7)]
    (shared,) = [request.trace.hit for request in requests[1:] if request.trace.hit is not None]
    assert (shared.prompt_tokens, shared.completion_tokens) == (100, 7)
