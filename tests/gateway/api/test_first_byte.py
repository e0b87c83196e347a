"""Streams whose prompt takes long: headers and pings go out before the first token, and every SDK skips them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.api import stream
from gateway.config import ServerSettings
from gateway.errors import BadRequestError, EngineLostError
from tests.fakes.gateway import LIMIT_S, Gateway, response_cache, running
from tests.fakes.gemini import gemini
from tests.fakes.pipeline import FakePipeline
from tests.fakes.waiting import until

AT_ONCE = ServerSettings(first_byte_s=1e-6)
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
MESSAGE: Any = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
CONTENTS: Any = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
GEMINI = "/v1beta/models/demo:streamGenerateContent"
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def pipeline() -> FakePipeline:
    """An engine works on its prompts until `hold_before` is set."""
    return FakePipeline(hold_before=asyncio.Event(), has_place=True)


@asynccontextmanager
async def late(pipeline: FakePipeline, path: str, body: Any, **headers: str) -> AsyncIterator[tuple[Any, bytes]]:
    """An answer that has begun without its first token, and the first bytes of it."""
    async with (
        running(pipeline, server=AT_ONCE) as gateway,
        gateway.session.post(gateway.url + path, json=body, headers=headers) as answer,
    ):
        yield answer, await answer.content.readany()


def release(pipeline: FakePipeline) -> None:
    assert pipeline.hold_before is not None
    pipeline.hold_before.set()


@pytest.mark.parametrize(
    ("path", "body", "headers", "first"),
    [
        ("/v1/chat/completions", CHAT, {}, b": ping\n\n"),
        ("/v1/completions", {"model": "demo", "prompt": "hi", "stream": True}, {}, b": ping\n\n"),
        ("/v1/responses", {"model": "demo", "input": "hi", "stream": True}, {}, b": ping\n\n"),
        ("/v1/messages", {**MESSAGE, "stream": True}, VERSION, b'event: ping\ndata: {"type":"ping"}\n\n'),
        (f"{GEMINI}?alt=sse", CONTENTS, {}, b"\n"),
        (GEMINI, CONTENTS, {}, b"[\n"),
    ],
)
async def test_a_stream_without_its_first_token_begins_with_a_ping_to_the_letter(
    pipeline: FakePipeline, path: str, body: Any, headers: dict[str, str], first: bytes
) -> None:
    async with late(pipeline, path, body, **headers) as (answer, begun):
        while not begun.endswith(first):  # the prelude may come by itself
            begun += await answer.content.readany()
        assert answer.status == 200
        assert answer.headers["x-kvasir-engine"] == "engine-1"
        assert "x-kvasir-cached-tokens" not in answer.headers
        release(pipeline)
        rest = await answer.content.read()
        assert b"Hello" in rest
        assert b"ping" not in rest


async def test_every_sdk_reads_a_stream_that_began_with_pings(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PING_S", 0.001)
    async with running(pipeline, server=AT_ONCE) as gateway:
        client, claude, made = gateway.sdk(), gateway.anthropic(), gemini(gateway.url)

        async def chat() -> str:
            chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT)]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        async def response() -> str:
            async with client.responses.stream(model="demo", input="hi") as stream:
                return (await stream.get_final_response()).output_text

        async def message() -> str:
            async with claude.messages.stream(**MESSAGE) as stream:
                return await stream.get_final_text()

        async def content() -> str:
            stream = await made.aio.models.generate_content_stream(model="demo", contents="hi")
            return "".join([chunk.text or "" async for chunk in stream])

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            asked = [group.create_task(one) for one in (chat(), response(), message(), content())]
            await pinged(gateway, pipeline, 4)
            release(pipeline)
        await made.aio.aclose()
        made.close()
        assert [task.result() for task in asked] == ["Hello world"] * 4


async def pinged(gateway: Gateway, pipeline: FakePipeline, count: int) -> None:
    """Returns when so many requests are held, and one that came after them has had its first ping."""
    await until(lambda: len(pipeline.requests) >= count)
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as last:
        seen = b""
        while b": ping" not in seen:
            seen += await last.content.readany()


async def test_an_early_error_is_a_status_and_a_later_one_the_last_event(pipeline: FakePipeline) -> None:
    pipeline.fails_before = EngineLostError("Engine engine-1 went away.")
    async with late(pipeline, "/v1/chat/completions", CHAT) as (answer, _):
        release(pipeline)
        rest = (await answer.content.read()).decode()
        assert answer.status == 200
    assert rest.endswith(
        'data: {"error":{"message":"Engine engine-1 went away.","type":"server_error","param":null,"code":null}}\n\n'
    )
    refusing = FakePipeline(fails_before=BadRequestError("No."))
    async with running(refusing, server=AT_ONCE) as gateway, gateway.sdk() as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**CHAT)


async def test_a_request_that_waits_for_a_place_keeps_its_status(pipeline: FakePipeline) -> None:
    """Its ping is due before that of another one, which has been sent when it is refused."""
    waiting = FakePipeline(hold_before=asyncio.Event(), fails_before=BadRequestError("No."))
    async with running(waiting, server=AT_ONCE) as gateway, gateway.sdk() as client:
        async with asyncio.timeout(LIMIT_S):
            asked = asyncio.ensure_future(client.chat.completions.create(**CHAT))
            await waiting.reached.wait()
            waiting.has_place = True
            await pinged(gateway, waiting, 1)
            release(waiting)
            with pytest.raises(openai.BadRequestError):
                await asked


async def test_requests_that_share_a_generation_are_pinged_too(pipeline: FakePipeline) -> None:
    pipeline.responses = response_cache(mode="on", requests="all")
    async with running(pipeline, server=AT_ONCE) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.session.post(url, json=CHAT) as one, gateway.session.post(url, json=CHAT) as two:
            assert await one.content.readany()
            assert await two.content.readany()
            assert len(pipeline.requests) == 1
            release(pipeline)
            assert b"Hello" in await one.content.read()
            assert b"Hello" in await two.content.read()


async def test_nothing_goes_out_before_the_first_token_where_that_is_wanted(pipeline: FakePipeline) -> None:
    async with running(pipeline, server=ServerSettings(first_byte_s=0)) as gateway:
        asked = asyncio.ensure_future(gateway.transcript("/v1/chat/completions", CHAT))
        await pipeline.reached.wait()
        release(pipeline)
        assert "ping" not in await asked


async def test_a_whole_answer_is_never_begun_early(pipeline: FakePipeline) -> None:
    pipeline.fails_before = BadRequestError("No.")
    async with running(pipeline, server=AT_ONCE) as gateway, gateway.sdk() as client:
        asked = asyncio.ensure_future(client.chat.completions.create(**{**CHAT, "stream": False}))
        await pinged(gateway, pipeline, 1)
        release(pipeline)
        with pytest.raises(openai.BadRequestError):
            await asked
