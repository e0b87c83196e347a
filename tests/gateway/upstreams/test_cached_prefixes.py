"""Cached contents that the gateway keeps at an upstream, over an API that keeps them as Gemini does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from gateway.storage.memory_bytes import MemoryBytes
from gateway.types import CachePrefix, Scope, Tenant, Trace, UpstreamRequest
from gateway.upstreams.cached_prefixes import HOLD_S, RETRY_S, Shared
from gateway.upstreams.stage import Upstreams
from tests.fakes.cached_gemini import KEY, CachedGemini, cached_gemini, tokens_of
from tests.fakes.clock import Clock

PARTS = 5000
"""Tokens of a content that is long enough for any model."""


def content(number: int, tokens: int = PARTS) -> dict[str, Any]:
    text = f"{number:04}" * tokens
    return {"role": "model" if number % 2 else "user", "parts": [{"text": text}]}


def turns(count: int, tokens: int = PARTS) -> list[dict[str, Any]]:
    return [content(number, tokens) for number in range(count)]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[tuple[CachedGemini, Upstreams, Clock]]:
    """`options` of the settings. All clocks stand."""
    clock = Clock(1000.0)
    async with cached_gemini(now=clock) as fake:
        shared = Shared(lambda quota: MemoryBytes(quota, clock), None, clock)
        upstreams = Upstreams([fake.settings(**options)], {"up": KEY}, shared=shared, backoff_s=0.0)
        try:
            yield fake, upstreams, clock
        finally:
            await upstreams.close()


async def ask(
    upstreams: Upstreams,
    contents: Sequence[dict[str, Any]],
    prefix: CachePrefix | None,
    scope: Scope | None = None,
    model: str = "up-pro",
    **more: Any,
) -> Trace:
    now_s, values = time.monotonic(), {"contents": list(contents), **more}
    request = UpstreamRequest(
        "r",
        Tenant("a"),
        "gemini",
        model,
        "/v1beta/models/{model}:generateContent",
        "",
        (),
        orjson.dumps(values),
        values,
        now_s,
        now_s + 60,
        scope=scope,
        prefix=prefix,
        hinted=prefix is not None and prefix.contents is None,
    )
    async with upstreams.answer(request) as answer:
        body = b"".join([chunk async for chunk in answer.chunks])
    assert answer.status == 200, body
    return request.trace


def figures(trace: Trace) -> tuple[int, int, int]:
    """Tokens that were read, written, and neither."""
    read, written = trace.reported_cached_tokens, trace.cache_write_tokens
    assert written == sum(tokens for _, tokens in trace.lease_writes)
    return read, written, trace.prompt_tokens - read - written


MARKED = CachePrefix(1, 300.0)


async def test_the_first_request_writes_a_marked_prefix_and_others_read_it() -> None:
    instruction = {"parts": [{"text": "s" * 400}]}
    async with running() as (fake, upstreams, _):
        first = await ask(upstreams, turns(3), MARKED, systemInstruction=instruction)
        second = await ask(upstreams, [*turns(1), content(2), content(3)], MARKED, systemInstruction=instruction)
    assert figures(first) == (0, PARTS + 100, 2 * PARTS)
    assert first.lease_writes == ((300.0, PARTS + 100),)
    assert first.storage_token_s == 300 * (PARTS + 100)
    assert figures(second) == (PARTS + 100, 0, 2 * PARTS)
    assert second.storage_token_s == 0
    assert fake.calls == ["POST cachedContents", "POST generateContent", "POST generateContent"]
    assert fake.keys == {KEY}


async def test_what_differs_in_anything_shares_nothing() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}]}]
    async with running() as (fake, upstreams, _):
        await ask(upstreams, turns(2), MARKED)
        for more in ({"scope": Scope(tenant="b")}, {"model": "up-flash"}, {"tools": tools}):
            trace = await ask(upstreams, turns(2), MARKED, **more)
            assert figures(trace)[0] == 0
        assert (await ask(upstreams, turns(2), MARKED, scope=Scope(namespace="n"))).cache_write_tokens
        assert (await ask(upstreams, turns(2), MARKED, scope=Scope(namespace="n"))).reported_cached_tokens
    assert len(fake.held) == 5


async def test_requests_at_the_same_time_make_one() -> None:
    async with running() as (fake, upstreams, _):
        fake.gate.clear()
        asking = [asyncio.ensure_future(ask(upstreams, turns(2), MARKED)) for _ in range(5)]
        await fake.reached.wait()
        fake.gate.set()
        traces = await asyncio.gather(*asking)
    assert fake.count("POST cachedContents") == 1
    assert sorted(figures(trace)[:2] for trace in traces) == [(0, PARTS)] + [(PARTS, 0)] * 4


async def test_one_goes_on_for_others_when_the_first_client_leaves() -> None:
    async with running() as (fake, upstreams, _):
        fake.gate.clear()
        first = asyncio.ensure_future(ask(upstreams, turns(2), MARKED))
        await fake.reached.wait()
        second = asyncio.ensure_future(ask(upstreams, turns(2), MARKED))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        fake.gate.set()
        assert (await second).prompt_tokens == 2 * PARTS
        await ask(upstreams, turns(2), MARKED)
    assert fake.count("POST cachedContents") == 1


async def test_it_is_renewed_on_use_when_half_of_its_time_is_over() -> None:
    async with running() as (fake, upstreams, clock):
        await ask(upstreams, turns(2), MARKED)
        clock.now_s += 149
        assert (await ask(upstreams, turns(2), MARKED)).storage_token_s == 0
        clock.now_s += 11
        assert (await ask(upstreams, turns(2), MARKED)).storage_token_s == 160 * PARTS
        clock.now_s += 299 - 60
        assert figures(await ask(upstreams, turns(2), MARKED)) == (PARTS, 0, PARTS)
        assert fake.count("PATCH cachedContents") == 2
        hour = await ask(upstreams, turns(2), CachePrefix(1, 3600.0))  # one that shall live longer does
        assert hour.storage_token_s == 3300 * PARTS
        assert next(iter(fake.held.values())).ends_s == clock.now_s + 3600
    assert fake.count("POST cachedContents") == 1


async def test_unused_it_ends_and_is_made_again() -> None:
    async with running() as (fake, upstreams, clock):
        await ask(upstreams, turns(2), MARKED)
        clock.now_s += 301
        assert figures(await ask(upstreams, turns(2), MARKED)) == (0, PARTS, PARTS)
    assert fake.calls.count("POST generateContent") == 2


@pytest.mark.parametrize("when", ["before a request", "before it is renewed"])
async def test_one_that_vanished_is_forgotten_and_the_request_is_answered(when: str) -> None:
    async with running() as (fake, upstreams, clock):
        await ask(upstreams, turns(2), MARKED)
        fake.forget()
        if when == "before it is renewed":
            clock.now_s += 200
        assert figures(await ask(upstreams, turns(2), MARKED)) == (0, 0, 2 * PARTS)
        assert upstreams.figures()["up"]["cached_contents"]["lost"] == 1
        clock.now_s += RETRY_S
        assert figures(await ask(upstreams, turns(2), MARKED)) == (0, PARTS, PARTS)


@pytest.mark.parametrize("status", [400, 403, 429, 500])
async def test_what_cannot_be_made_is_left_out_and_not_tried_again_for_a_while(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as (fake, upstreams, clock):
        fake.refuses = status
        for _ in range(3):
            assert figures(await ask(upstreams, turns(2), MARKED)) == (0, 0, 2 * PARTS)
        await ask(upstreams, turns(2), MARKED, scope=Scope(tenant="b"))  # an upstream without room is left alone
        assert fake.count("POST cachedContents") == (1 if status >= 429 else 2)
        assert caplog.text.count("caches no prefix") == 1
        clock.now_s += HOLD_S + 1
        await ask(upstreams, turns(2), MARKED)
        assert fake.count("POST cachedContents") == (1 if status >= 429 else 2)
        fake.refuses = 0
        clock.now_s += RETRY_S
        assert (await ask(upstreams, turns(2), MARKED)).cache_write_tokens == PARTS


async def test_too_small_ones_are_not_made_and_what_the_upstream_calls_small_is_remembered() -> None:
    async with running() as (fake, upstreams, _):
        await ask(upstreams, turns(2, 4000), MARKED)
        await ask(upstreams, turns(2, 1000), MARKED, model="up-flash")
        assert fake.count("POST cachedContents") == 0
        fake.least = 6000
        await ask(upstreams, turns(2, 5000), MARKED)
        await ask(upstreams, turns(2, 5500), MARKED)
        assert fake.count("POST cachedContents") == 1
        await ask(upstreams, turns(2, 6500), MARKED)
        assert len(fake.held) == 1
        assert "failed" not in upstreams.figures()["up"]["cached_contents"]


async def test_past_its_room_a_tenant_loses_the_one_that_ends_first() -> None:
    async with running(cached_contents=2) as (fake, upstreams, clock):
        for number in range(3):
            await ask(upstreams, [content(2 * number), content(9)], MARKED)
            clock.now_s += 1
        assert fake.count("DELETE cachedContents") == 1
        assert [held.body["contents"][0] for held in fake.held.values()] == [content(2), content(4)]
        await ask(upstreams, [content(0), content(9)], MARKED, scope=Scope(tenant="b"))
        assert len(fake.held) == 3


async def test_a_conversation_that_grows_is_computed_twice_at_most() -> None:
    async with running() as (fake, upstreams, _):
        read = 0
        for count in range(1, 40, 2):
            trace = await ask(upstreams, turns(count, 4200), CachePrefix(count - 1, 300.0))
            read += trace.reported_cached_tokens
    assert fake.created_tokens <= 2 * fake.prompts[-1]
    assert fake.count("POST cachedContents") <= 6
    assert read > 0.5 * sum(fake.prompts)


async def test_a_longer_prefix_that_is_marked_again_gets_its_own() -> None:
    async with running() as (fake, upstreams, _):
        assert (await ask(upstreams, turns(4), CachePrefix(2, 300.0))).cache_write_tokens == 2 * PARTS
        assert figures(await ask(upstreams, turns(4), CachePrefix(3, 300.0))) == (2 * PARTS, 0, 2 * PARTS)
        assert figures(await ask(upstreams, turns(4), CachePrefix(3, 300.0))) == (0, 3 * PARTS, PARTS)
    assert len(fake.held) == 2


async def test_without_a_marker_only_what_comes_again_is_made() -> None:
    async with running() as (fake, upstreams, _):
        for number in range(3):
            await ask(upstreams, [content(2 * number), content(9)], CachePrefix())
        assert not fake.held
        assert figures(await ask(upstreams, [content(2), content(7)], CachePrefix())) == (0, PARTS, PARTS)
        assert figures(await ask(upstreams, [content(2), content(5)], CachePrefix())) == (PARTS, 0, PARTS)
        await ask(upstreams, turns(2), None)
    assert len(fake.held) == 1


async def test_nothing_is_made_where_the_settings_say_so() -> None:
    async with running(cached_contents=0) as (fake, upstreams, _):
        await ask(upstreams, turns(2), MARKED)
    assert fake.calls == ["POST generateContent"]


def test_tokens_of_the_fake_add_up() -> None:
    assert tokens_of(turns(3)) == sum(map(tokens_of, turns(3))) == 3 * PARTS
