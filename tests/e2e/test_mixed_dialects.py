"""Fifty apps at once, each with the SDK of another API: nothing of one shows up in another's stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import accumulate
from typing import Any, Protocol

import anthropic
import openai
import pytest
import regex
from google import genai

from tests.fakes.server import Server

STREAMS = 50
LIMIT_S = 120.0
WORDS = ("👩‍👩‍👧‍👦 Ñandú e\u0301", "🇮🇸🏳️‍🌈 Ünïcödé", "क्षि 한국어 👍🏽", "z\u0335\u0321a\u0321l\u0335go 🧑🏿‍🚀")
"""Joined emoji, flags, skin tones, combining characters: one sign is up to seven characters, each of several tokens."""
EMOJI = regex.compile(r"[\p{Extended_Pictographic}\p{Regional_Indicator}]")


class App(Protocol):
    """One app. Answers are greedy and of its own prompt, so that they can be told apart."""

    async def whole(self, number: int) -> str: ...

    def pieces(self, number: int) -> AsyncIterator[str]: ...


def question(number: int) -> str:
    return f"Guest {number}: tell me of {('Alice', 'Holmes', 'the Queen', 'Watson')[number % 4]} and number {number}."


def schema(number: int) -> dict[str, Any]:
    """A sentence that no demo model would say: it shows whose answer this is, in signs that are easily cut."""
    said = f"{number} {WORDS[number % len(WORDS)]}"
    return {
        "type": "object",
        "properties": {"said": {"const": said}, "more": {"type": "string", "maxLength": 20}},
        "required": ["said", "more"],
        "additionalProperties": False,
    }


class Chats:
    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._create: Any = client.chat.completions.create

    def _ask(self, number: int) -> dict[str, Any]:
        wanted = {"name": "saying", "strict": False, "schema": schema(number)}
        return {
            "model": "demo",
            "messages": [{"role": "user", "content": question(number)}],
            "max_tokens": 400,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": wanted},
        }

    async def whole(self, number: int) -> str:
        answer = await self._create(**self._ask(number))
        return str(answer.choices[0].message.content)

    async def pieces(self, number: int) -> AsyncIterator[str]:
        async for chunk in await self._create(**self._ask(number), stream=True):
            yield chunk.choices[0].delta.content or ""


class Completions:
    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._create: Any = client.completions.create

    def _ask(self, number: int) -> dict[str, Any]:
        return {"model": "demo", "prompt": question(number), "max_tokens": 40, "temperature": 0}

    async def whole(self, number: int) -> str:
        return str((await self._create(**self._ask(number))).choices[0].text)

    async def pieces(self, number: int) -> AsyncIterator[str]:
        async for chunk in await self._create(**self._ask(number), stream=True):
            yield chunk.choices[0].text


class Responses:
    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._create: Any = client.responses.create

    def _ask(self, number: int) -> dict[str, Any]:
        wanted = {"type": "json_schema", "name": "saying", "strict": False, "schema": schema(number)}
        return {
            "model": "demo",
            "input": question(number),
            "max_output_tokens": 400,
            "temperature": 0,
            "text": {"format": wanted},
            "store": False,
        }

    async def whole(self, number: int) -> str:
        return str((await self._create(**self._ask(number))).output_text)

    async def pieces(self, number: int) -> AsyncIterator[str]:
        async for event in await self._create(**self._ask(number), stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta


class Messages:
    def __init__(self, client: anthropic.AsyncAnthropic) -> None:
        self._create: Any = client.messages.create

    def _ask(self, number: int) -> dict[str, Any]:
        return {
            "model": "demo",
            "messages": [{"role": "user", "content": question(number)}],
            "max_tokens": 400,
            "output_config": {"format": {"type": "json_schema", "schema": unbounded(schema(number))}},
            "extra_headers": {"anthropic-version": "2023-06-01"},  # the newer one has no temperature
            "extra_body": {"temperature": 0},
        }

    async def whole(self, number: int) -> str:
        return "".join(block.text for block in (await self._create(**self._ask(number))).content)

    async def pieces(self, number: int) -> AsyncIterator[str]:
        async for event in await self._create(**self._ask(number), stream=True):
            if event.type == "content_block_delta":
                yield event.delta.text


def unbounded(wanted: dict[str, Any]) -> dict[str, Any]:
    """Without the length of a string, which this API does not let a schema bound."""
    return {**wanted, "properties": {**wanted["properties"], "more": {"enum": ["yes", "no"]}}}


class Contents:
    def __init__(self, client: genai.Client) -> None:
        self._models: Any = client.aio.models

    def _ask(self, number: int) -> dict[str, Any]:
        config = {
            "max_output_tokens": 400,
            "temperature": 0,
            "response_mime_type": "application/json",
            "response_json_schema": schema(number),
        }
        return {"model": "demo", "contents": question(number), "config": config}

    async def whole(self, number: int) -> str:
        return str((await self._models.generate_content(**self._ask(number))).text)

    async def pieces(self, number: int) -> AsyncIterator[str]:
        async for chunk in await self._models.generate_content_stream(**self._ask(number)):
            yield chunk.text or ""


async def joined(app: App, number: int) -> str:
    """Each piece by itself is text: half of a character would not encode, or come as U+FFFD. No emoji is cut."""
    pieces = [piece async for piece in app.pieces(number)]
    for piece in pieces:
        piece.encode()
        assert "\ufffd" not in piece
    text = "".join(pieces)
    cuts = set(accumulate(map(len, pieces)))
    for sign in regex.finditer(r"\X", text):
        if EMOJI.match(sign[0]):
            assert cuts.isdisjoint(range(sign.start() + 1, sign.end())), pieces
    return text


@pytest.mark.slow
async def test_fifty_streams_of_all_dialects_at_once_equal_their_whole_answers(server: Server) -> None:
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        sdk = await stack.enter_async_context(server.async_client())
        anthropics = anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0)
        await stack.enter_async_context(anthropics)
        google = genai.Client(api_key="any", http_options={"base_url": server.url})
        stack.push_async_callback(google.aio.aclose)
        stack.callback(google.close)
        apps = (Chats(sdk), Completions(sdk), Responses(sdk), Messages(anthropics), Contents(google))
        asked = [(apps[number % len(apps)], number) for number in range(STREAMS)]
        streamed = await asyncio.gather(*(joined(app, number) for app, number in asked))
        whole = await asyncio.gather(*(app.whole(number) for app, number in asked))
    assert streamed == whole
    assert len(set(streamed)) == STREAMS
    for (app, number), text in zip(asked, streamed, strict=True):
        if not isinstance(app, Completions):
            assert json.loads(text)["said"] == f"{number} {WORDS[number % len(WORDS)]}"
