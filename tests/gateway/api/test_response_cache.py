"""Answers from the response cache over HTTP: in every API with its own SDK, whole and streamed, with what the headers
and the usage say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest
from google.genai import types

from gateway.config import NamespaceSettings, ResponseCacheSettings, TenantSettings
from gateway.errors import EngineLostError
from gateway.responses.entry_stores import RedisEntries
from gateway.responses.stage import ResponseCache
from gateway.storage.redis_calls import RedisCalls, connect
from gateway.types import CallDelta
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.gemini import gemini
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
ASK: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 64}
PIECES = ("One", " two", "\n\u2028 three \U0001f469\u200d\U0001f680")
TEXT = "".join(PIECES)


def remembering(**settings: Any) -> FakePipeline:
    return FakePipeline(PIECES, responses=response_cache(**settings))


Asking = Callable[[Gateway], Coroutine[Any, Any, tuple[list[str], int, int]]]
"""The pieces of an answer, and of its usage the tokens of the prompt and those of them that were cached."""


async def chat(gateway: Gateway) -> tuple[list[str], int, int]:
    answer = await gateway.sdk().chat.completions.create(**ASK)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert answer.choices[0].finish_reason == "stop"
    return (
        [answer.choices[0].message.content or ""],
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens or 0,
    )


async def chat_stream(gateway: Gateway) -> tuple[list[str], int, int]:
    stream = await gateway.sdk().chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    pieces, usage = [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return pieces, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


async def responses(gateway: Gateway) -> tuple[list[str], int, int]:
    answer = await gateway.sdk().responses.create(
        model="demo", input=MESSAGES, temperature=0, max_output_tokens=64, store=False
    )
    assert answer.usage is not None
    return [answer.output_text], answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


async def responses_stream(gateway: Gateway) -> tuple[list[str], int, int]:
    pieces, usage = [], None
    async for event in await gateway.sdk().responses.create(
        model="demo", input=MESSAGES, temperature=0, max_output_tokens=64, store=False, stream=True
    ):
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        if event.type == "response.completed":
            usage = event.response.usage
    assert usage is not None
    return pieces, usage.input_tokens, usage.input_tokens_details.cached_tokens


ANTHROPIC: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 64,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Hi."}],
}
OLDER: dict[str, Any] = {"extra_headers": {"anthropic-version": "2023-06-01"}, "extra_body": {"temperature": 0}}
"""The newer version has no temperature, and nothing else that would make an answer the same twice."""


async def message(gateway: Gateway) -> tuple[list[str], int, int]:
    answer = await gateway.anthropic().messages.create(**ANTHROPIC, **OLDER)
    read = answer.usage.cache_read_input_tokens or 0
    return [answer.content[0].text], answer.usage.input_tokens + read, read  # type: ignore[union-attr]


async def message_stream(gateway: Gateway) -> tuple[list[str], int, int]:
    async with gateway.anthropic().messages.stream(**ANTHROPIC, **OLDER) as stream:
        pieces = [text async for text in stream.text_stream]
        answer = await stream.get_final_message()
    read = answer.usage.cache_read_input_tokens or 0
    return pieces, answer.usage.input_tokens + read, read


GEMINI = types.GenerateContentConfig(temperature=0, max_output_tokens=64, system_instruction="Be brief.")


async def generate(gateway: Gateway) -> tuple[list[str], int, int]:
    sdk = gemini(gateway.url)
    try:
        answer = await sdk.aio.models.generate_content(model="demo", contents="Hi.", config=GEMINI)
    finally:
        await sdk.aio.aclose()
        sdk.close()
    usage = answer.usage_metadata
    assert usage is not None
    return [answer.text or ""], usage.prompt_token_count or 0, usage.cached_content_token_count or 0


async def generate_stream(gateway: Gateway) -> tuple[list[str], int, int]:
    sdk = gemini(gateway.url)
    pieces, usage = [], None
    try:
        async for chunk in await sdk.aio.models.generate_content_stream(model="demo", contents="Hi.", config=GEMINI):
            pieces += [chunk.text] if chunk.text else []
            usage = chunk.usage_metadata or usage
    finally:
        await sdk.aio.aclose()
        sdk.close()
    assert usage is not None
    return pieces, usage.prompt_token_count or 0, usage.cached_content_token_count or 0


EVERY: list[Asking] = [
    chat,
    chat_stream,
    responses,
    responses_stream,
    message,
    message_stream,
    generate,
    generate_stream,
]


@pytest.mark.parametrize("first", [chat, message_stream, generate], ids=lambda asking: asking.__name__)
async def test_one_answer_serves_every_api_whole_and_in_its_own_pieces(first: Asking) -> None:
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        await first(gateway)
        for asking in EVERY:
            pieces, prompt_tokens, cached_tokens = await asking(gateway)
            assert pieces == (list(PIECES) if asking.__name__.endswith("stream") else [TEXT]), asking.__name__
            assert (prompt_tokens, cached_tokens) == (40, 40), asking.__name__
    assert len(pipeline.requests) == 1


async def test_headers_tell_what_became_of_it_and_ids_are_new() -> None:
    now = [1000.0]
    pipeline = remembering(now=lambda: now[0])
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        _, first, missed = await gateway.post(CHAT, ASK)
        now[0] += 90.5
        _, second, found = await gateway.post(CHAT, ASK)
        async with gateway.session.post(gateway.url + CHAT, json={**ASK, "stream": True}) as answer:
            await answer.read()
            streamed = answer.headers
        status, _, hot = await gateway.post(CHAT, {**ASK, "temperature": 1})
    assert (missed["x-kvasir-cache"], "Age" in missed) == ("miss", False)
    for headers in (found, streamed):
        assert (headers["x-kvasir-cache"], headers["Age"]) == ("exact", "90")
        assert headers["x-kvasir-cache-key"] == missed["x-kvasir-cache-key"]
        assert "x-kvasir-engine" not in headers
        assert headers["x-kvasir-cached-tokens"] == "40"
    assert (status, hot["x-kvasir-cache"]) == (200, "bypass; reason=sampling")
    assert first["id"] != second["id"]
    assert first["choices"] == second["choices"]


async def test_cache_control_and_the_body_decide_about_their_request() -> None:
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:

        async def outcome(cache: dict[str, Any] | None = None, **headers: str) -> str:
            body = ASK if cache is None else {**ASK, "cache": cache}
            _, _, told = await gateway.post(CHAT, body, headers=headers)
            return told["x-kvasir-cache"]

        assert await outcome() == "miss"
        assert await outcome() == "exact"
        assert await outcome(**{"Cache-Control": "no-cache"}) == "miss"
        assert await outcome({"no-cache": True}) == "miss"
        assert await outcome({"use-cache": False}) == "bypass; reason=off"
        assert await outcome(**{"X-Kvasir-Cache": "off"}) == "bypass; reason=off"
        assert await outcome(**{"Cache-Control": "no-cache, no-store"}) == "bypass; reason=no-store"
        assert await outcome({"namespace": "other"}) == "miss"
        assert await outcome({"namespace": "other"}) == "exact"
        assert await outcome(**{"Cache-Control": "max-age=3600"}) == "exact"
        status, told, _ = await gateway.post(CHAT, ASK, headers={"X-Kvasir-Cache": "maybe"})
        assert (status, told["error"]["param"]) == (400, "x-kvasir-cache")
        status, told, _ = await gateway.post(CHAT, {**ASK, "cache": {"tenant": "x"}})
        assert (status, told["error"]["param"]) == (400, "cache.tenant")


@pytest.mark.parametrize(
    ("path", "body", "headers", "kind"),
    [
        (CHAT, ASK, {}, lambda told: told["error"]["code"] == "not_cached"),
        (
            "/v1/messages",
            {**ANTHROPIC, "temperature": 0},
            {"anthropic-version": "2023-06-01"},
            lambda told: told["error"]["type"] == "timeout_error",
        ),
        (
            "/v1beta/models/demo:generateContent",
            {"contents": [{"parts": [{"text": "Hi."}]}], "generationConfig": {"temperature": 0}},
            {},
            lambda told: told["error"]["status"] == "DEADLINE_EXCEEDED",
        ),
    ],
)
async def test_only_if_cached_is_a_504_in_every_api(
    path: str, body: Any, headers: dict[str, str], kind: Callable[[Any], bool]
) -> None:
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        status, told, sent = await gateway.post(path, body, headers={**headers, "Cache-Control": "only-if-cached"})
        assert (status, sent["x-should-retry"], sent["x-kvasir-cache"]) == (504, "false", "miss")
        assert kind(told)
        assert not pipeline.requests


async def test_a_request_that_the_cache_is_not_for_learns_why_when_it_wants_nothing_else() -> None:
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        sampled = {**ASK, "temperature": 1, "cache": {"only-if-cached": True}}
        status, told, sent = await gateway.post(CHAT, sampled)
        assert (status, told["error"]["code"], sent["x-kvasir-cache"]) == (504, "not_cached", "bypass; reason=sampling")


def readers(pipeline: FakePipeline) -> int:
    """Of the one generation that is in flight."""
    assert isinstance(pipeline.responses, ResponseCache)
    return pipeline.responses.stats()["waiting"]


async def said(gateway: Gateway, *, stream: bool) -> str:
    """The text of an answer."""
    if not stream:
        _, body, _ = await gateway.post(CHAT, ASK)
        return str(body["choices"][0]["message"]["content"])
    transcript = await gateway.transcript(CHAT, {**ASK, "stream": True})
    chunks = [orjson.loads(line[6:]) for line in transcript.split("\n") if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_a_hundred_identical_requests_streamed_and_not_are_one_generation() -> None:
    pipeline = remembering()
    pipeline.hold_before = asyncio.Event()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        asking = [asyncio.create_task(said(gateway, stream=number % 2 == 0)) for number in range(100)]
        await until(lambda: readers(pipeline) == 100)
        pipeline.hold_before.set()
        answers = await asyncio.gather(*asking)
        stats = pipeline.responses.stats()  # type: ignore[union-attr]
    assert set(answers) == {TEXT}
    assert len(pipeline.requests) == 1
    assert stats["outcomes"] == {"miss": 1, "shared": 99}


async def test_tenants_never_share_but_in_a_namespace_that_was_named_for_them() -> None:
    tenants = [TenantSettings(name=name, keys=(f"key-of-{name}",)) for name in ("north", "south")]
    namespaces = [NamespaceSettings(name="both", tenants=("north", "south"))]
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses, tenants=tenants, namespaces=namespaces) as gateway:

        async def outcome(tenant: str, **headers: str) -> tuple[str, str]:
            given = {"Authorization": f"Bearer key-of-{tenant}", **headers}
            _, _, told = await gateway.post(CHAT, ASK, headers=given)
            return told["x-kvasir-cache"], told["x-kvasir-cache-key"]

        (north, one), (south, other) = await outcome("north"), await outcome("south")
        assert (north, south) == ("miss", "miss")
        assert one != other
        shared = {"x-kvasir-namespace": "both"}
        assert [(await outcome(tenant, **shared))[0] for tenant in ("north", "south")] == ["miss", "exact"]
        assert (await outcome("south"))[0] == "exact"


async def test_answers_that_failed_are_asked_for_again() -> None:
    pipeline = remembering()
    pipeline.fails_after = EngineLostError("lost")
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        assert (await gateway.post(CHAT, ASK))[0] == 502
        transcript = await gateway.transcript(CHAT, {**ASK, "stream": True})
        assert '"error"' in transcript
        pipeline.fails_after = None
        assert (await gateway.post(CHAT, ASK))[2]["x-kvasir-cache"] == "miss"
    assert len(pipeline.requests) == 3


async def test_calls_of_tools_come_again_where_that_is_allowed() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    calls = [CallDelta(0, "look", '{"a":'), CallDelta(0, "", "1}")]
    pipeline = FakePipeline(calls, reason="tool_calls", responses=response_cache(tool_calls=True))
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        told = [await gateway.post(CHAT, {**ASK, "tools": tools}) for _ in range(2)]
    assert [headers["x-kvasir-cache"] for _, _, headers in told] == ["miss", "exact"]
    first, second = (body["choices"][0]["message"]["tool_calls"][0] for _, body, _ in told)
    assert first["function"] == second["function"]
    assert first["id"] != second["id"]


async def test_several_answers_are_several_entries_and_all_of_them_come_again() -> None:
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        told = [await gateway.post(CHAT, {**ASK, "n": 3}) for _ in range(2)]
        assert [headers["x-kvasir-cache"] for _, _, headers in told] == ["miss", "exact"]
        assert [len(body["choices"]) for _, body, _ in told] == [3, 3]
        assert told[1][1]["usage"]["prompt_tokens"] == 40
        assert (await gateway.post(CHAT, ASK))[2]["x-kvasir-cache"] == "exact"


async def test_two_gateways_share_over_redis_and_without_it_are_cold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisProcess(tmp_path) as process:
        redis = connect(process.url, 1.0)
        shared = [RedisEntries(RedisCalls(redis, 1.0), ResponseCacheSettings(), time.time) for _ in range(2)]
        one, two = (FakePipeline(PIECES, responses=response_cache(entries)) for entries in shared)
        async with running(one) as first, running(two) as second:
            await first.post(CHAT, ASK)
            await until(lambda: kept(shared[0]))
            _, _, headers = await second.post(CHAT, ASK)
            assert (headers["x-kvasir-cache"], len(two.requests)) == ("exact", 0)
            process.kill()
            for gateway in (first, second):
                assert (await gateway.post(CHAT, ASK))[2]["x-kvasir-cache"] == "exact"  # from memory
                status, _, headers = await gateway.post(CHAT, {**ASK, "seed": 1})
                assert (status, headers["x-kvasir-cache"]) == (200, "miss")
        await redis.aclose()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2  # one of each


async def kept(entries: RedisEntries) -> bool:
    return bool(await entries.owners())


async def test_the_operator_sees_what_it_did() -> None:
    pipeline = remembering()
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        for body in (ASK, ASK, {**ASK, "temperature": 1}):
            await gateway.post(CHAT, body)
        metrics = (await gateway.get("/metrics"))[1]
        stats = (await gateway.session.get(gateway.url + "/admin/stats")).json
        told = await stats()
    for line in (
        'kvasir_response_cache_answers_total{model="demo",outcome="exact",tenant="anonymous"} 1.0',
        'kvasir_response_cache_bypassed_total{reason="sampling"} 1.0',
        'kvasir_response_cache_events_total{event="memory_hits"} 1.0',
        "kvasir_response_cache_entries 1.0",
        'kvasir_prompt_tokens_total{model="demo",tenant="anonymous"} 80.0',
    ):
        assert line in metrics
    assert told["response_cache"]["outcomes"] == {"miss": 1, "exact": 1, "bypass": 1}
    assert told["tenants"]["anonymous"]["response_hits"] == 1
