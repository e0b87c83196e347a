"""Batches of both dialects for models whose upstreams speak another API, by the real SDKs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.fakes.batch_sdk import CHAT, ENDS, content, reached, row, settings, submit
from tests.fakes.hosted import ANSWER_TOKENS, CACHED_TOKENS, PROMPT_TOKENS, answers, refuses
from tests.fakes.upstream import StubUpstream, Told, upstream
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

HOSTED = {
    "openai": {"dialect": "openai"},
    "responses": {"dialect": "openai", "api": "responses"},
    "anthropic": {"dialect": "anthropic"},
    "gemini": {"dialect": "gemini"},
}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Well?"}], "max_tokens": 99}
CALLS = [("get_weather", {"place": "Oslo ✓"})]


@asynccontextmanager
async def hosted(
    redis_url: str, told: dict[str, list[Told]], **sections: Any
) -> AsyncIterator[tuple[Whole, dict[str, StubUpstream]]]:
    """A gateway before these upstreams, whose models are called as they are."""
    async with AsyncExitStack() as stack:
        stubs = {name: await stack.enter_async_context(upstream(*of_it)) for name, of_it in told.items()}
        tables = [
            stub.settings(name, name=name, retries=0, breaker_failures=100, **HOSTED[name]).model_dump(exclude={"key"})
            | {"key": "sk-upstream"}
            for name, stub in stubs.items()
        ]
        sections = {"upstreams": tables, **settings(), **sections}
        running = await stack.enter_async_context(whole(engines=0, redis_url=redis_url, sections=sections))
        yield running, stubs


def told(text: str = "Hello ✓") -> dict[str, list[Told]]:
    return {name: [answers(name, [text], CALLS, stream=False)] for name in HOSTED}


async def ledger(running: Whole) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{running.url}/admin/ledger?group_by=lane") as answer,
    ):
        (found,) = (await answer.json())["rows"]
        return dict(found)


@pytest.mark.parametrize("url", [CHAT, "/v1/responses"])
async def test_lines_of_an_openai_batch_are_answered_by_every_api(redis_url: str, url: str) -> None:
    names = ["anthropic", "gemini"]
    async with hosted(redis_url, {name: told()[name] for name in names}) as (running, stubs):
        asked = ASKED if url == CHAT else {"input": "Well?", "store": False, "max_output_tokens": 99}
        made = [await submit(running.client, row(name, {"model": name, **asked}, url), url=url) for name in names]
        found: dict[str, Any] = {}
        for one in made:
            ended = await reached(running.client, one.id, *ENDS)
            assert (ended.status, ended.request_counts and ended.request_counts.failed) == ("completed", 0)
            found |= await content(running.client, ended.output_file_id)
    assert found.keys() == set(names)
    for name in names:
        body = found[name]["response"]["body"]
        if url == CHAT:
            answer = openai.types.chat.ChatCompletion.model_validate(body)
            assert answer.choices[0].message.content == "Hello ✓"
            assert answer.choices[0].message.tool_calls
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS)
        else:
            assert openai.types.responses.Response.model_validate(body).output_text == "Hello ✓"
        assert [got.json.get("stream", False) for got in stubs[name].got] == [False]


async def test_requests_of_a_message_batch_are_answered_by_every_api_at_its_upstreams_price(redis_url: str) -> None:
    names = ["openai", "responses", "gemini"]
    prices = [{"model": "*", "input": 2, "output": 8}]
    async with hosted(redis_url, {name: told()[name] for name in names}, prices=prices) as (running, _):
        client = anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0)
        async with client:
            asked: Any = [{"custom_id": name, "params": {"model": name, **ASKED}} for name in names]
            made = await client.messages.batches.create(requests=asked)

            async def has_ended() -> bool:
                return (await client.messages.batches.retrieve(made.id)).processing_status == "ended"

            await until(has_ended)
            results = {one.custom_id: one.result async for one in await client.messages.batches.results(made.id)}
        row = await ledger(running)
    assert results.keys() == set(names)
    for result in results.values():
        assert result.type == "succeeded", result
        text, call = result.message.content
        assert (text.type == "text" and text.text, call.type) == ("Hello ✓", "tool_use")
        usage = result.message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (PROMPT_TOKENS - CACHED_TOKENS, CACHED_TOKENS)
    billed = Decimal(3 * (PROMPT_TOKENS * 2 + ANSWER_TOKENS * 8)) / 1_000_000
    assert (row["lane"], Decimal(row["used"]["cost"]["USD"])) == ("batch", billed)


REFUSALS = [(400, "too long"), (413, "too large"), (404, "no such model")]


async def test_what_an_upstream_refuses_is_the_result_of_its_line_in_the_batchs_own_form(redis_url: str) -> None:
    refused = [refuses("anthropic", status, message) for status, message in REFUSALS]
    good = answers("anthropic", ["Fine"], stream=False)
    busy = [refuses("anthropic", status, "later", retry_after_ms="20") for status in (429, 500)]
    async with hosted(redis_url, {"anthropic": [*busy, *refused, good]}, batches=one_at_a_time()) as (running, stubs):
        lines = [row(f"q{number}", {"model": "anthropic", **ASKED, "user": str(number)}) for number in range(4)]
        made = await submit(running.client, *lines, row("seed", {"model": "anthropic", **ASKED, "seed": 7}))
        ended = await reached(running.client, made.id, *ENDS)
        good_ones = await content(running.client, ended.output_file_id)
        bad_ones = await content(running.client, ended.error_file_id)
    assert len(stubs["anthropic"].got) == len(busy) + len(refused) + 1
    (body,) = [one["response"]["body"] for one in good_ones.values()]
    assert body["choices"][0]["message"]["content"] == "Fine"
    errors = {
        name: (one["response"]["status_code"], one["response"]["body"]["error"]) for name, one in bad_ones.items()
    }
    seed_status, seed = errors.pop("seed")
    assert (seed_status, seed["param"]) == (400, "seed")
    assert sorted(status for status, _ in errors.values()) == [400, 404, 413]
    for _, one in errors.values():
        assert one["type"] == "invalid_request_error"
        assert "Upstream anthropic: " in one["message"]


def one_at_a_time() -> Any:
    return settings(max_in_flight=1)["batches"]


async def test_lines_take_the_batch_slots_of_their_upstream(redis_url: str) -> None:
    async with upstream(Told(then="stall")) as stub:
        table = stub.settings("claude", dialect="anthropic", batch_slots=1).model_dump(exclude={"key"}) | {"key": "sk"}
        async with whole(engines=0, redis_url=redis_url, sections={"upstreams": [table], **settings()}) as running:
            await submit(running.client, *(row(f"q{number}", {"model": "claude", **ASKED}) for number in range(2)))
            figures = running.gateway.upstreams.figures

            def is_held() -> bool:
                own = figures()["up"]
                return (own["batch_in_flight"], own["batch_waiting"], len(stub.got)) == (1, 1, 1)

            await until(is_held)
