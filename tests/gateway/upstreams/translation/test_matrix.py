"""Every client form before every upstream form, by the real SDKs: what was asked arrives, and what was answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from google.genai import types as google

from tests.fakes.gemini import gemini
from tests.fakes.hosted import (
    ANSWER_TOKENS,
    CACHED_TOKENS,
    CLIENTS,
    PROMPT_TOKENS,
    QUESTION,
    SYSTEM,
    UPSTREAMS,
    Failed,
    Heard,
    answers,
    ask,
    refuses,
)
from tests.fakes.upstream import StubUpstream, Told, upstream
from tests.fakes.whole import whole

PAIRS = [
    (client, dialect)
    for client, dialect in itertools.product(CLIENTS, UPSTREAMS)
    if not {client, dialect} <= {"openai", "responses"} and client != dialect  # what is one dialect passes through
]
CALLS = [("get_weather", {"place": "Oslo ✓"}), ("get_weather", {"place": "Rome"})]


@asynccontextmanager
async def gateway(
    dialect: str, *told: Told, sections: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> AsyncIterator[tuple[str, StubUpstream]]:
    async with upstream(*told) as stub:
        api = {"dialect": "openai", "api": "responses"} if dialect == "responses" else {"dialect": dialect}
        table = stub.settings(retries=0, **api, **options).model_dump(exclude={"key"})
        table |= {"key": "sk-upstream"}
        async with whole(engines=0, sections={"upstreams": [table], **sections}) as running:
            yield running.url, stub


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_a_text_comes_through(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, answers(dialect, ["Hel", "lo ✓"], stream=stream)) as (url, stub):
        heard = await ask(client, url, stream=stream)
    assert heard == Heard("Hello ✓", [], PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS)
    (got,) = stub.got
    assert SYSTEM in got.body.decode()
    assert QUESTION in got.body.decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_calls_come_through(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, answers(dialect, ["Wait."], CALLS, stream=stream)) as (url, stub):
        heard = await ask(client, url, stream=stream, tools=True)
    assert isinstance(heard, Heard)
    assert (heard.text, heard.calls) == ("Wait.", CALLS)
    assert b"get_weather" in stub.got[0].body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_a_refusal_comes_in_the_clients_own_form(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, refuses(dialect, 429, "slow down", retry_after="7")) as (url, _):
        failed = await ask(client, url, stream=stream)
    assert isinstance(failed, Failed)
    assert failed.status == 429
    assert "slow down" in failed.message


@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_an_answer_that_breaks_off_is_none(client: str, dialect: str) -> None:
    told = answers(dialect, ["Hel", "lo"], stream=True)
    cut = Told(told.pieces[: 4 if dialect == "anthropic" else 1], media=told.media)
    async with gateway(dialect, cut) as (url, _):
        with pytest.raises(Exception, match=r"(?i)middle of its answer|upstream|response"):  # each SDK has its own
            heard = await ask(client, url, stream=True)
            assert isinstance(heard, Failed), heard
            raise RuntimeError(heard.message)


async def test_a_client_that_leaves_ends_the_request_at_the_upstream() -> None:
    for dialect in UPSTREAMS:
        told = answers(dialect, ["Hel", "lo"], stream=True)
        stalls = Told(told.pieces[:-2], media=told.media, then="stall")
        client = "gemini" if dialect == "anthropic" else "anthropic"
        async with gateway(dialect, stalls) as (url, stub):
            asking = asyncio.ensure_future(ask(client, url, stream=True))
            await stub.reached.wait()
            asking.cancel()
            await stub.left.wait()
            with pytest.raises(asyncio.CancelledError):
                await asking


async def test_an_answer_is_remembered_for_clients_of_every_form() -> None:
    told = answers("anthropic", ["Hello ✓"], stream=False)
    cache = {"mode": "on", "requests": "all"}
    async with gateway("anthropic", told, sections={"response_cache": cache}) as (url, stub):
        for client in ("openai", "gemini", "responses", "openai"):
            heard = await ask(client, url, stream=False)
            assert isinstance(heard, Heard)
            assert heard.text == "Hello ✓"
    assert len(stub.got) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_api_lacks_is_refused_or_left_out_and_named(stream: bool) -> None:
    body = {"model": "up-1", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, "seed": 7, "n": 1}
    told = answers("anthropic", ["Hello"], stream=stream)
    for lossy, status in (("refuse", 400), ("drop", 200)):
        async with (
            gateway("anthropic", told, lossy=lossy) as (url, stub),
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=body) as answer,
        ):
            text = await answer.text()
            assert answer.status == status
            if status == 200:
                assert answer.headers["x-kvasir-dropped"] == "seed"
                assert "seed" not in stub.got[0].json
            else:
                assert orjson.loads(text)["error"]["param"] == "seed"
                assert not stub.got


@pytest.mark.parametrize("dialect", UPSTREAMS)
async def test_a_schema_arrives(dialect: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schema |= {"additionalProperties": False}
    told = answers(dialect, ['{"city":"Oslo"}'], stream=False)
    async with gateway(dialect, told) as (url, stub):
        if dialect in ("openai", "responses"):
            config = google.GenerateContentConfig(response_mime_type="application/json", response_json_schema=schema)
            answer = await gemini(url).aio.models.generate_content(model="up-1", contents="Hi", config=config)
            text = answer.text
        else:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
                form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
                chat = await sdk.chat.completions.create(
                    model="up-1", messages=[{"role": "user", "content": "Hi"}], response_format=form
                )
                text = chat.choices[0].message.content
    assert text == '{"city":"Oslo"}'
    assert '"city"' in stub.got[0].body.decode()
