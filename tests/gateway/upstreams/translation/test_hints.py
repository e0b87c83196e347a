"""Caching hints of real SDKs at upstreams of other APIs, and the usage that comes back in the client's terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from google import genai
from google.genai import errors
from google.genai import types as google
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.anthropic.accounting import cached_of
from gateway.api.gemini.response import usage_json as gemini_usage
from gateway.api.openai.response import usage_json as chat_usage
from gateway.api.openai.responses.shape import usage_json as response_usage
from gateway.config import LeaseSettings, PriceSettings
from gateway.ledger.base import Entry, Figures
from gateway.ledger.prices import Tariff, count
from gateway.types import Trace
from gateway.upstreams.apis import APIS, Counts
from tests.fakes.cached_gemini import KEY, CachedGemini, cached_gemini
from tests.fakes.gemini import gemini
from tests.fakes.hosted import CACHED_TOKENS, PROMPT_TOKENS, answers
from tests.fakes.redis_process import RedisProcess
from tests.fakes.upstream import StubUpstream, Told, upstream
from tests.fakes.whole import LIMIT_S, whole

WORDS = 5000
DOCUMENT = "word" * WORDS
"""As many tokens for the fake: long enough for any model."""
MARKED = {"type": "ephemeral"}
PRICE = {"model": "up-pro", "input": "1.25", "output": "10", "cached_read": "0.125", "storage": "4.5"}


@asynccontextmanager
async def gateway(fake: CachedGemini, redis_url: str | None = None, **sections: Any) -> AsyncIterator[str]:
    table = fake.settings().model_dump(exclude={"key"}) | {"key": KEY}
    async with whole(engines=0, redis_url=redis_url, sections={"upstreams": [table], **sections}) as running:
        yield running.url


@dataclass
class Used:
    """What a client's usage says. `plain` is what was neither read nor written."""

    read: int
    written: int
    plain: int


async def ask(
    client: str, url: str, question: str = "What?", *, key: str = "none-none", ttl: str = "5m", stream: bool = False
) -> Used:
    """A question behind a marked document, by the SDK of a client."""
    if client == "anthropic":
        return await _ask_anthropic(url, question, key, ttl, stream)
    point = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as sdk:
        usage: Any = None
        if client == "openai":
            parts: list[Any] = [{"type": "text", "text": DOCUMENT, **point}, {"type": "text", "text": question}]
            given: Any = {"model": "up-pro", "messages": [{"role": "user", "content": parts}]}
            if stream:
                given["stream_options"] = {"include_usage": True}
                async for chunk in await sdk.chat.completions.create(stream=True, **given):
                    usage = chunk.usage or usage
            else:
                usage = (await sdk.chat.completions.create(**given)).usage
            total, details = usage.prompt_tokens, usage.prompt_tokens_details
        else:
            parts = [{"type": "input_text", "text": DOCUMENT, **point}, {"type": "input_text", "text": question}]
            given = {"model": "up-pro", "input": [{"role": "user", "content": parts}], "store": False}
            if stream:
                async for event in await sdk.responses.create(stream=True, **given):
                    usage = event.response.usage if event.type == "response.completed" else usage
            else:
                usage = (await sdk.responses.create(**given)).usage
            total, details = usage.input_tokens, usage.input_tokens_details
        return Used(
            details.cached_tokens,
            details.cache_write_tokens,
            total - details.cached_tokens - details.cache_write_tokens,
        )


async def _ask_anthropic(url: str, question: str, key: str, ttl: str, stream: bool) -> Used:
    blocks: list[Any] = [
        {"type": "text", "text": DOCUMENT, "cache_control": {**MARKED, "ttl": ttl}},
        {"type": "text", "text": question},
    ]
    given: Any = {"model": "up-pro", "max_tokens": 50, "messages": [{"role": "user", "content": blocks}]}
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as sdk:
        if stream:
            async with sdk.messages.stream(**given) as events:
                usage = (await events.get_final_message()).usage
        else:
            usage = (await sdk.messages.create(**given)).usage
            assert usage.cache_creation is not None
            minutes, hour = (
                usage.cache_creation.ephemeral_5m_input_tokens,
                usage.cache_creation.ephemeral_1h_input_tokens,
            )
            assert (minutes, hour)[ttl == "5m"] == 0
            assert minutes + hour == usage.cache_creation_input_tokens
        return Used(usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0, usage.input_tokens)


@pytest.mark.parametrize("ttl", ["5m", "1h"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_turn_writes_and_the_second_reads_in_each_clients_terms(stream: bool, ttl: str) -> None:
    for client in ("anthropic", "openai", "responses"):
        async with cached_gemini() as fake, gateway(fake) as url:
            first = await ask(client, url, ttl=ttl, stream=stream)
            second = await ask(client, url, "And that?", ttl=ttl, stream=stream)
            assert first == Used(0, WORDS, fake.prompts[0] - WORDS), client
            assert second == Used(WORDS, 0, fake.prompts[1] - WORDS), client
            assert len(fake.held) == 1
            assert next(iter(fake.held.values())).body["ttl"] == {"5m": "300s", "1h": "3600s"}[ttl]


async def test_a_prefix_is_the_same_whichever_api_it_came_by() -> None:
    async with cached_gemini() as fake, gateway(fake) as url:
        used = [await ask(client, url) for client in ("anthropic", "openai", "responses")]
        assert [one.written for one in used] == [WORDS, 0, 0]
        assert fake.count("POST cachedContents") == 1


async def test_clients_of_several_apis_at_once_make_one() -> None:
    async with cached_gemini() as fake, gateway(fake) as url:
        fake.gate.clear()
        asking = [asyncio.ensure_future(ask(client, url)) for client in ("anthropic", "openai", "responses") * 2]
        async with asyncio.timeout(LIMIT_S):
            await fake.reached.wait()
        fake.gate.set()
        used = await asyncio.gather(*asking)
        assert fake.count("POST cachedContents") == 1
        assert sorted((one.read, one.written) for one in used) == [(0, WORDS)] + [(WORDS, 0)] * 5


async def test_two_tenants_make_two_and_a_namespace_one() -> None:
    tenants = [{"name": name, "keys": [f"key-of-{name}"]} for name in ("north", "south")]
    async with cached_gemini() as fake, gateway(fake, tenants=tenants) as url:
        for name in ("north", "south"):
            assert (await ask("anthropic", url, key=f"key-of-{name}")).written == WORDS
        assert len(fake.held) == 2
    shared = [{"name": "both", "tenants": ["*"], "default": True}]
    async with cached_gemini() as fake, gateway(fake, tenants=tenants, namespaces=shared) as url:
        used = [await ask("openai", url, key=f"key-of-{name}") for name in ("north", "south")]
        assert [one.written for one in used] == [WORDS, 0]


async def test_two_gateways_on_one_redis_make_one(redis_url: str) -> None:
    async with cached_gemini() as fake, AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(gateway(fake, redis_url)) for _ in range(2)]
        fake.gate.clear()
        first = asyncio.ensure_future(ask("anthropic", urls[0]))
        async with asyncio.timeout(LIMIT_S):
            await fake.reached.wait()
        second = asyncio.ensure_future(ask("openai", urls[1]))
        fake.gate.set()
        used = [await first, await second, await ask("responses", urls[1])]
        assert fake.count("POST cachedContents") == 1
        assert [(one.read, one.written) for one in used] == [(0, WORDS), (WORDS, 0), (WORDS, 0)]


async def test_a_model_of_an_upstream_is_served_while_redis_was_never_reached(own_redis: RedisProcess) -> None:
    """It may be an engine's as well then, as far as is known; the upstream has it for sure."""
    await asyncio.to_thread(own_redis.kill)
    async with cached_gemini() as fake, gateway(fake, own_redis.url) as url:
        assert (await ask("anthropic", url)).written == 0


async def test_the_ledger_says_what_hints_won() -> None:
    sections: dict[str, Any] = {"prices": [PRICE]}
    async with cached_gemini() as fake, gateway(fake, **sections) as url, aiohttp.ClientSession() as session:
        for _ in range(5):
            await ask("anthropic", url)
        async with session.get(f"{url}/admin/ledger?group_by=tenant,model") as answer:
            (row,) = (await answer.json())["rows"]
    hints, hours = row["hints"], Decimal(300) / 3600
    assert (row["model"], row["used"]["cache_write_tokens"], row["used"]["cached_tokens"]) == (
        "up-pro",
        WORDS,
        4 * WORDS,
    )
    assert hints["storage_token_s"] == 300 * WORDS
    storage = WORDS * Decimal("4.5") * hours / 10**6
    assert Decimal(hints["storage_money"]["USD"]) == storage
    won = 4 * WORDS * Decimal("1.125") / 10**6 - WORDS * Decimal("0.125") / 10**6 - storage
    assert Decimal(hints["money"]["USD"]) == won
    plain = sum(fake.prompts) - 5 * WORDS
    paid = plain * Decimal("1.25") / 10**6 + WORDS * Decimal("1.375") / 10**6 + 4 * WORDS * Decimal("0.125") / 10**6
    assert Decimal(row["used"]["cost"]["USD"]) == paid + storage + 35 * Decimal(10) / 10**6


# -- other upstreams --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def hosted(dialect: str, *told: Told, models: tuple[str, ...]) -> AsyncIterator[tuple[str, StubUpstream]]:
    async with upstream(*told) as stub:
        table = stub.settings(*models, dialect=dialect, retries=0).model_dump(exclude={"key"}) | {"key": KEY}
        async with whole(engines=0, sections={"upstreams": [table]}) as running:
            yield running.url, stub


@pytest.mark.parametrize("model", ["gpt-5.6", "gpt-4.1"])
async def test_a_marked_message_is_marked_for_openai(model: str) -> None:
    async with hosted("openai", answers("openai", ["Hi"], stream=False), models=(f"up-pro = {model}",)) as (url, stub):
        await ask("anthropic", url)
        await ask("anthropic", url, "And that?")
    first, second = (got.json for got in stub.got)
    assert first["prompt_cache_key"] == second["prompt_cache_key"]
    content = first["messages"][0]["content"]
    if model == "gpt-5.6":
        assert [part.get("prompt_cache_breakpoint") for part in content] == [{"mode": "explicit"}, None]
        assert first["prompt_cache_options"] == {"mode": "explicit"}
    else:
        assert content == f"{DOCUMENT}What?"


async def test_a_key_alone_has_what_comes_again_marked_for_anthropic() -> None:
    async with (
        hosted("anthropic", answers("anthropic", ["Hi"], stream=False), models=("up-pro",)) as (url, stub),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        for question in ("a", "b", "c"):
            messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
            options: Any = {} if question == "c" else {"prompt_cache_key": "k"}
            await sdk.chat.completions.create(model="up-pro", messages=messages, **options)
    systems = [got.json["system"] for got in stub.got]
    assert ["cache_control" in blocks[-1] for blocks in systems] == [False, True, False]


@asynccontextmanager
async def content_of(url: str, ttl: str) -> AsyncIterator[tuple[genai.client.AsyncClient, google.CachedContent]]:
    """A cached content with the document, made by the real SDK."""
    async with gemini(url).aio as sdk:
        config = google.CreateCachedContentConfig(contents=DOCUMENT, system_instruction="Be brief.", ttl=ttl)
        yield sdk, await sdk.caches.create(model="up-pro", config=config)


async def ask_with(sdk: genai.client.AsyncClient, name: str | None, question: str) -> tuple[int, int]:
    """Tokens of the prompt, and those that were cached."""
    config = google.GenerateContentConfig(cached_content=name)
    usage = (await sdk.models.generate_content(model="up-pro", contents=question, config=config)).usage_metadata
    assert usage is not None
    return usage.prompt_token_count or 0, usage.cached_content_token_count or 0


@pytest.mark.parametrize(("ttl", "marked"), [("600s", MARKED), ("3600s", {**MARKED, "ttl": "1h"})])
async def test_a_clients_cached_content_is_a_marked_prefix_at_anthropic(ttl: str, marked: Any) -> None:
    told = answers("anthropic", ["Hi"], stream=False)
    async with (
        hosted("anthropic", told, models=("up-pro",)) as (url, stub),
        content_of(url, ttl) as (sdk, content),
        aiohttp.ClientSession() as session,
    ):
        assert content.usage_metadata is not None
        assert content.usage_metadata.total_token_count == WORDS + 3  # as its letters say
        async with session.get(f"{url}/v1beta/{content.name}") as shown:
            assert (await shown.json())["tokensEstimated"] is True
        assert not stub.got
        assert await ask_with(sdk, content.name, "What?") == (PROMPT_TOKENS, CACHED_TOKENS)
        await sdk.caches.update(name=content.name or "", config=google.UpdateCachedContentConfig(ttl="7200s"))
    (got,) = stub.got
    assert got.json["system"] == [{"type": "text", "text": "Be brief."}]
    document, question = got.json["messages"][0]["content"]
    assert document == {"type": "text", "text": DOCUMENT, "cache_control": marked}
    assert question == {"type": "text", "text": "What?"}


async def test_a_clients_cached_content_is_kept_at_gemini_for_its_tenant() -> None:
    async with cached_gemini() as fake, gateway(fake) as url, content_of(url, "600s") as (sdk, content):
        prompt, cached = await ask_with(sdk, content.name, "What?")
        assert (prompt, cached) == (fake.prompts[0], 0)  # it was written
        prompt, cached = await ask_with(sdk, content.name, "And that?")
        assert (prompt, cached) == (fake.prompts[1], WORDS + 3)
        (held,) = fake.held.values()
        assert float(held.body["ttl"].removesuffix("s")) <= 600
        with pytest.raises(errors.ClientError, match="not found"):
            await ask_with(sdk, "cachedContents/" + "0" * 32, "What?")


# -- usage ------------------------------------------------------------------------------------------------------------

_counts = st.integers(0, 10**6)
_REPORTED: dict[str, Callable[[int, int, int, int], dict[str, Any]]] = {
    "openai": lambda read, write, hour, plain: {
        "prompt_tokens": read + write + hour + plain,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": write + hour},
    },
    "anthropic": lambda read, write, hour, plain: {
        "input_tokens": plain,
        "output_tokens": 1,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": write + hour,
        "cache_creation": {"ephemeral_5m_input_tokens": write, "ephemeral_1h_input_tokens": hour},
    },
    "gemini": lambda read, write, hour, plain: {
        "promptTokenCount": read + write + hour + plain,
        "candidatesTokenCount": 1,
        "cachedContentTokenCount": read + write + hour,
    },
}


@pytest.mark.parametrize("dialect", _REPORTED)
@given(_counts, _counts, _counts, _counts, st.integers(0, 2 * 10**6))
def test_usage_in_every_clients_terms_adds_up_to_the_prompt(
    dialect: str, read: int, write: int, hour: int, plain: int, created: int
) -> None:
    api, counts, trace = APIS[dialect], Counts(), Trace(by_upstream=True)
    api.note(counts, {api.usage_paths[-1][-1]: _REPORTED[dialect](read, write, hour, plain)})
    tokens = api.read_usage(counts)
    assert tokens is not None
    if dialect == "gemini":
        tokens = tokens.with_created(3600.0, created)
    trace.prompt_tokens, trace.reported_cached_tokens = tokens.prompt, tokens.cached
    trace.cache_write_tokens, trace.lease_writes = tokens.cache_write, tokens.writes
    assert tokens.prompt == read + write + hour + plain
    kept = cached_of(trace)
    assert (
        kept.read + kept.written_5m + kept.written_1h + (tokens.prompt - tokens.cached - tokens.cache_write)
        == tokens.prompt
    )
    if dialect == "anthropic":
        assert (kept.read, kept.written_5m, kept.written_1h) == (read, write, hour)
    if dialect == "gemini":
        assert (kept.read + kept.written_1h, kept.written_1h) == (
            read + write + hour,
            min(created, read + write + hour),
        )
    chat = chat_usage(trace.usage)
    details = chat["prompt_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] <= chat["prompt_tokens"] == tokens.prompt
    response = response_usage(trace.usage, LeaseSettings())
    assert (
        response["input_tokens_details"].items()
        >= {"cached_tokens": tokens.cached, "cache_write_tokens": tokens.cache_write}.items()
    )
    content = gemini_usage(trace.usage)
    assert content.get("cachedContentTokenCount", 0) == tokens.cached <= content["promptTokenCount"] == tokens.prompt
    entry = Entry("t", "m", prompt_tokens=tokens.prompt, cached_tokens=tokens.cached, writes=tokens.writes)
    priced: Figures = {}
    count(entry, Tariff.of(PriceSettings(model="m", input=Decimal(1)), 1.0), priced)
    assert priced.get("cost_nano", 0) == tokens.prompt * 1000
