"""Answers of upstreams that are shared, below HTTP: what each request is told of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest

from gateway.api.openai.replay import ChatReplay
from gateway.api.routes import REPLAYS
from gateway.config import ResponseCacheSettings
from gateway.errors import DeadlineError, KvasirError, UpstreamLostError, UpstreamsAwayError, UpstreamTimeoutError
from gateway.responses.base import Query
from gateway.responses.entry_stores import MemoryEntries
from gateway.responses.recording import Form, UpstreamRecording, encode_upstream
from gateway.responses.stage import Figures, ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.responses.upstream_answers import RememberedUpstreams
from gateway.types import Hit, Reuse, Tenant, UpstreamAnswer, UpstreamRequest
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

MESSAGE = {"role": "assistant", "content": "Hi", "refusal": None}
WHOLE: dict[str, Any] = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop"}],
    "usage": {"total_tokens": 107},
}
VALUES: dict[str, Any] = {"model": "m", "temperature": 0, "messages": []}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Stub:
    """One upstream, which meters its answers at their end, whichever it is, as the real one does."""

    may: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    text: str = "Hi"
    asked: int = 0
    fails: int = 0  # so many answers do not come to their end
    error: KvasirError | None = None  # instead of any answer

    @property
    def whole(self) -> dict[str, Any]:
        return {**WHOLE, "choices": [{**WHOLE["choices"][0], "message": {**MESSAGE, "content": self.text}}]}

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        return True

    def speaks(self, model: str, tenant: str, dialect: str, path: str) -> bool:
        return True

    def models(self, tenant: str) -> Mapping[str, int]:
        return {"m": 0}

    def reachable(self, model: str, tenant: str) -> Mapping[str, bool]:
        return {"up": True}

    def route_text(self, model: str, tenant: str) -> str:
        return "up m"

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        self.asked += 1
        fails, streams = self.asked <= self.fails, bool(request.values.get("stream"))
        whole, usage = self.whole, "stream_options" in request.values
        if self.error is not None:
            await self.may.wait()
            raise self.error
        told = ChatReplay().unfold(whole, usage=usage) if streams else [orjson.dumps(whole)]
        assert told is not None

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                await self.may.wait()
                for piece in told:
                    yield piece
                    if fails:
                        raise UpstreamLostError("It ended in the middle of its answer.")
            finally:
                request.trace.prompt_tokens, request.trace.completion_tokens = 100, 7
                request.trace.engine = "up"

        media = "text/event-stream" if streams and self.status < 400 else "application/json"
        yield UpstreamAnswer("up", self.status, (("Content-Type", media),), pieces(), "m")


def remembered(stub: Stub, **options: Any) -> tuple[RememberedUpstreams, Figures]:
    settings = tuned(ResponseCacheSettings, **{"upstreams": "on", **options})
    exact = StoredAnswers(MemoryEntries(1 << 20, time.time), None)
    cache = ResponseCache(settings, {}, exact, None, time.time)
    return RememberedUpstreams(stub, REPLAYS, cache), cache.figures


def ask(**more: Any) -> UpstreamRequest:
    values = VALUES | more
    now = time.monotonic()
    path = "/v1/chat/completions"
    return UpstreamRequest("r", Tenant("a"), "openai", "m", path, "", (), orjson.dumps(values), values, now, now + 60)


def waiting(upstreams: RememberedUpstreams) -> int:
    """Requests that read an answer which may be joined."""
    return int(upstreams._cache.stats()["waiting"])


async def read(upstreams: RememberedUpstreams, request: UpstreamRequest) -> bytes:
    async with upstreams.answer(request) as answer:
        return b"".join([piece async for piece in answer.chunks])


async def begin(upstreams: RememberedUpstreams, *requests: UpstreamRequest) -> list[asyncio.Task[bytes]]:
    """Reads all of them, each once those before it wait."""
    reading: list[asyncio.Task[bytes]] = []
    for request in requests:
        reading.append(asyncio.create_task(read(upstreams, request)))
        await until(lambda: waiting(upstreams) == len(reading))
    return reading


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
    await until(lambda: waiting(upstreams) == 3)
    leader.cancel()
    await asyncio.gather(leader, return_exceptions=True)
    stub.may.set()
    await asyncio.gather(*others)
    assert stub.asked == 1
    paid = [request.trace for request in requests[1:] if request.trace.hit is None]
    assert [(trace.engine, trace.prompt_tokens, trace.completion_tokens) for trace in paid] == [("up", 100, 7)]
    (shared,) = [request.trace.hit for request in requests[1:] if request.trace.hit is not None]
    assert (shared.prompt_tokens, shared.completion_tokens) == (100, 7)


@pytest.mark.parametrize(
    ("first", "second"), [(STREAMED, {}), ({}, STREAMED), ({}, {"stream": True}), ({"stream": True}, STREAMED)]
)
async def test_requests_for_other_forms_of_an_answer_share_no_flight(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    stub = Stub()
    upstreams, figures = remembered(stub)
    reading = await begin(upstreams, ask(**first), ask(**second))
    stub.may.set()
    await asyncio.gather(*reading)
    assert (stub.asked, figures.outcomes) == (2, {"miss": 2})


@pytest.mark.parametrize(
    "other", [{"lane": "batch"}, {"reuse": Reuse(ttl_s=5.0)}, {"reuse": Reuse(asked=True)}, {"tenant": Tenant("b")}]
)
async def test_who_waits_in_another_lane_or_wants_it_kept_otherwise_shares_no_flight(
    other: dict[str, Any],
) -> None:
    stub = Stub()
    upstreams, figures = remembered(stub)
    reading = await begin(upstreams, ask(), replace(ask(), **other))
    stub.may.set()
    await asyncio.gather(*reading)
    assert (stub.asked, figures.outcomes) == (2, {"miss": 2})


@pytest.mark.parametrize(
    "slower",
    [{"service_tier": "flex"}, {"priority": 9}, {"service_tier": ["flex"]}, STREAMED | {"service_tier": "flex"}],
)
async def test_nobody_waits_for_what_an_upstream_may_let_wait_and_all_get_what_came_of_it(slower: Any) -> None:
    stub = Stub()
    upstreams, figures = remembered(stub)
    reading = await begin(upstreams, ask(**slower), ask())
    stub.may.set()
    await asyncio.gather(*reading)
    assert (stub.asked, figures.outcomes) == (2, {"miss": 2})
    await read(upstreams, ask(service_tier="priority"))
    assert figures.outcomes == {"miss": 2, "exact": 1}


@pytest.mark.parametrize(
    "error",
    [
        UpstreamsAwayError("m", 1.0),
        UpstreamLostError("refused"),
        UpstreamTimeoutError("slow"),
        DeadlineError.without_slot(1.0),
    ],
)
async def test_upstreams_that_cannot_be_asked_are_asked_once_for_all_who_joined(error: KvasirError) -> None:
    stub = Stub(error=error)
    upstreams, _ = remembered(stub)
    reading = await begin(upstreams, *(ask() for _ in range(8)))
    stub.may.set()
    assert await asyncio.gather(*reading, return_exceptions=True) == [error] * 8
    assert stub.asked == 1


@pytest.mark.parametrize(("room", "outcomes"), [(0, {"miss": 1, "exact": 1}), (-1, {"miss": 2})])
async def test_an_answer_may_have_just_the_bytes_that_one_may_have(
    room: int, outcomes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Query, "age_ms", 1.0)  # it is stored, as text
    stub = Stub(text="x" * 2000)
    stub.may.set()
    kept = UpstreamRecording(Form(False, False), "application/json", "m", (100, 7), 1.0, [orjson.dumps(stub.whole)])
    upstreams, figures = remembered(stub, max_entry_bytes=len(encode_upstream(kept)) + room)
    for _ in range(2):
        await read(upstreams, ask())
    assert figures.outcomes == outcomes
    assert figures.not_kept["too_large"] == (0 if room == 0 else 2)
