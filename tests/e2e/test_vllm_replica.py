"""A real vLLM as an engine: three dialects, streams, tools, schemas, log probabilities, reuse. Slow, and skipped where
vLLM is not installed. What it says is compared with its own answers to the same token ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import pytest

from gateway.digests import derived_salt
from tests.fakes import vllm_fleet
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

pytestmark = vllm_fleet.MARKS

NAME = "demo"
BOOK = " ".join(f"In chapter {number} the traveller reaches the next town." for number in range(40))
MESSAGES: Any = [{"role": "system", "content": BOOK}, {"role": "user", "content": "What comes next?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@asynccontextmanager
async def gateway_of(url: str) -> AsyncIterator[Whole]:
    tenants = [{"name": name, "keys": [f"key-of-{name}-1"]} for name in ("a", "b")]
    replica = {"name": "real", "kind": "vllm", "url": url, "model": NAME}
    sections = {"replicas": [replica], "tenants": tenants, "response_cache": {"mode": "off"}}
    async with whole(engines=0, sections=sections) as running:
        running.gateway.attach_replicas()
        await running.gateway.registry.wait_joined()
        running.client = running.client.with_options(api_key="key-of-a-1", timeout=120)
        yield running


async def directly(url: str, ids: list[int], **more: Any) -> dict[str, Any]:
    """vLLM's own answer to the same ids, under a salt that nothing else has."""
    body = {"model": NAME, "prompt": ids, "temperature": 0, "return_token_ids": True, "cache_salt": "apart", **more}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def ids_of(url: str) -> list[int]:
    body = {"model": NAME, "messages": MESSAGES}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/tokenize", json=body) as answer:
        return list((await answer.json())["tokens"])


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


async def test_a_vllm_is_an_engine(vllms: vllm_fleet.Replicas) -> None:
    async with gateway_of(vllms.urls[0]) as running:
        await check(running, vllms.urls[0])


async def check(running: Whole, url: str) -> None:
    create = running.client.chat.completions.create
    raw = running.client.chat.completions.with_raw_response.create
    replica = running.gateway.registry.engines[0]
    memory, incarnation = running.gateway.memory, replica.hello.incarnation

    # 1. Greedy text is vLLM's own for the same ids, whole, streamed and in the other dialects.
    ids = await ids_of(url)
    own = (await directly(url, ids, max_tokens=12, logprobs=2))["choices"][0]
    first = await raw(model="demo", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2)
    answer = first.parse()
    assert answer.choices[0].message.content == own["text"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, cached(answer.usage)) == (len(ids), 0)
    assert first.headers["x-kvasir-cached-tokens"] == "0"
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert [one.logprob for one in scores.content or ()] == pytest.approx(own["logprobs"]["token_logprobs"], abs=1e-3)
    assert all(len(one.top_logprobs) == 2 for one in scores.content or ())
    stream = await create(
        model="demo",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == own["text"]
    expected = (len(ids) - 1) // vllm_fleet.BLOCK_TOKENS * vllm_fleet.BLOCK_TOKENS
    assert cached(chunks[-1].usage) == expected > 0
    headers = {"anthropic-version": "2023-06-01"}  # later ones have no temperature
    async with anthropic.AsyncAnthropic(
        base_url=running.url, api_key="key-of-a-1", max_retries=0, default_headers=headers
    ) as claude:
        message = await claude.messages.create(
            model="demo", system=BOOK, messages=[MESSAGES[1]], max_tokens=12, extra_body={"temperature": 0}
        )
        assert message.content[0].text == own["text"]  # type: ignore[union-attr]
    gemini = {
        "systemInstruction": {"parts": [{"text": BOOK}]},
        "contents": [{"role": "user", "parts": [{"text": MESSAGES[1]["content"]}]}],
        "generationConfig": {"maxOutputTokens": 12, "temperature": 0},
    }
    async with (
        aiohttp.ClientSession(headers={"x-goog-api-key": "key-of-a-1"}) as session,
        session.post(f"{running.url}/v1beta/models/demo:generateContent", json=gemini) as reply,
    ):
        assert (await reply.json())["candidates"][0]["content"]["parts"][0]["text"] == own["text"]

    # 2. The index says what will be reused, and another tenant reuses none of it.
    await until(lambda: memory.blocks(incarnation) >= expected // 16)
    again = await raw(model="demo", messages=MESSAGES, max_tokens=1)
    assert again.headers["x-kvasir-predicted-tokens"] == again.headers["x-kvasir-cached-tokens"] == str(expected)
    other = running.client.with_options(api_key="key-of-b-1")
    for reused in (0, expected):
        answer = await other.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1)
        assert cached(answer.usage) == reused

    # 3. Structured output, tools, several answers, stop strings, seeds.
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    answer = await create(model="demo", messages=MESSAGES, response_format=form, max_tokens=60)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"a"}
    answer = await create(
        model="demo",
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "look"  # type: ignore[union-attr]
    assert set(json.loads(call.function.arguments)) == {"a"}  # type: ignore[union-attr]
    answer = await create(model="demo", messages=MESSAGES, n=2, max_tokens=4, temperature=1)
    assert len(answer.choices) == 2
    stop = own["text"][4]
    answer = await create(model="demo", messages=MESSAGES, stop=[stop], max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == own["text"].split(stop)[0]
    assert answer.choices[0].finish_reason == "stop"
    seeded = [await create(model="demo", messages=MESSAGES, seed=7, max_tokens=8) for _ in range(2)]
    assert seeded[0].choices[0].message.content == seeded[1].choices[0].message.content
    await check_completions(running, url)

    # 4. The salt on the wire is the one that digests are made with.
    secret = replica.hello.namespace.salt
    assert len(derived_salt(secret, "x")) == 64
    assert replica.figures()["index"]["trust"] == "exact"


async def check_completions(running: Whole, url: str) -> None:
    """Token ids in, and log probabilities of the prompt."""
    ids = list(range(40, 60))
    own = (await directly(url, ids, max_tokens=1, prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
    completions = running.client.completions
    answer = await completions.create(model="demo", prompt=ids, max_tokens=0, echo=True, logprobs=1)
    scores = answer.choices[0].logprobs
    assert scores is not None
    theirs = [place[str(token)]["logprob"] for token, place in zip(ids, own, strict=True) if place]
    assert (scores.token_logprobs or [])[1:] == pytest.approx(theirs, abs=1e-3)
