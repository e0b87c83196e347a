"""Limits of tenants at the HTTP side: who is refused, how each API says so, and what every answer tells of them."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from collections.abc import Mapping
from typing import Any

import anthropic
import openai
import pytest
from google.genai import errors as gemini_errors
from redis.asyncio import Redis

from gateway.api.lines import LineRequest
from gateway.api.openai.request import parse_chat, parse_completion
from gateway.api.routes import RUNNER
from gateway.api.tenants import IMAGE_TOKENS, need_of
from gateway.config import LeaseSettings, LimitSettings, PriceSettings, ServerSettings, TenantSettings
from gateway.errors import QueueFullError
from gateway.storage.redis_calls import connect
from gateway.types import Need, Tenant
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import LIMIT_S, Gateway, response_cache, running
from tests.fakes.gemini import gemini
from tests.fakes.limits import Clock, tenant_limits
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
MESSAGE_HEADERS = {"anthropic-version": "2023-06-01"}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
NORTH = TenantSettings(name="north", keys=("key-of-north",), requests_per_minute=2)
SOUTH = TenantSettings(name="south", keys=("key-of-south",))
GENERATE, COUNT = "/v1beta/models/demo:generateContent", "/v1beta/models/demo:countTokens"

ASKED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat": ("/v1/chat/completions", CHAT, {}),
    "completion": ("/v1/completions", {"model": "demo", "prompt": "a"}, {}),
    "response": ("/v1/responses", {"model": "demo", "input": "hi"}, {}),
    "background response": ("/v1/responses", {"model": "demo", "input": "hi", "background": True}, {}),
    "input tokens": ("/v1/responses/input_tokens", {"model": "demo", "input": "hi"}, {}),
    "embedding": ("/v1/embeddings", {"model": "all-MiniLM-L6-v2", "input": "A"}, {}),
    "message": ("/v1/messages", CHAT, MESSAGE_HEADERS),
    "tokens of a message": ("/v1/messages/count_tokens", {**CHAT, "max_tokens": None}, MESSAGE_HEADERS),
    "content": (GENERATE, CONTENTS, {}),
    "tokens of a content": (COUNT, CONTENTS, {}),
    "cached content": ("/v1beta/cachedContents", {"model": "models/demo", **CONTENTS}, {}),
}
del ASKED["tokens of a message"][1]["max_tokens"]
ONLY_COUNTED = ("input tokens", "tokens of a message", "tokens of a content")


async def ask(gateway: Gateway, kind: str = "chat", key: str = "", **more: Any) -> tuple[int, Any, Mapping[str, str]]:
    path, body, headers = ASKED[kind]
    return await gateway.post(path, body | more, headers={**headers, **({"x-api-key": key} if key else {})})


async def settled(gateway: Gateway) -> None:
    """Returns when what was not used has gone back."""
    await gateway.limits.close()


# -- who is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ASKED)
async def test_every_route_that_computes_counts_as_a_request(kind: str) -> None:
    embedder = fake_embedder(FakeTextModel())
    async with running(limited=LimitSettings(requests_per_minute=1), embedder=embedder) as gateway:
        assert (await ask(gateway, kind))[0] == 200
        status, _, headers = await ask(gateway, kind)
    assert status == 429
    assert 59_000 < int(headers["retry-after-ms"]) <= 60_000
    assert (headers["Retry-After"], headers["x-should-retry"]) == ("60", "true")


@pytest.mark.parametrize("kind", ASKED)
async def test_every_route_that_computes_uses_tokens_but_those_that_count_them(kind: str) -> None:
    embedder = fake_embedder(FakeTextModel())
    limits = tenant_limits(Clock(), tokens_per_minute=1000)
    async with running(limits=limits, embedder=embedder) as gateway:
        assert (await ask(gateway, kind))[0] == 200
        await until(lambda: not gateway.pipeline.open)
        await settled(gateway)
        _, _, headers = await ask(gateway, "input tokens")
        used = 1000 - int(headers["x-ratelimit-remaining-tokens"])
    if kind in ONLY_COUNTED:
        assert used == 0
    elif kind == "embedding":
        assert used == 3
    else:
        assert used == (8 if kind == "cached content" else 10)  # 40 of the prompt, 32 of them cached, 2 answered


async def test_a_tenant_has_its_own_limit_and_one_without_any_has_none() -> None:
    async with running(tenants=(NORTH, SOUTH)) as gateway:
        statuses = [(await ask(gateway, key="key-of-north"))[0] for _ in range(3)]
        assert statuses == [200, 200, 429]
        for _ in range(5):
            assert (await ask(gateway, key="key-of-south"))[0] == 200


async def test_what_only_asks_what_there_is_is_not_limited() -> None:
    async with running(limited=LimitSettings(requests_per_minute=1)) as gateway:
        for _ in range(3):
            assert (await gateway.get("/v1/models"))[0] == 200
        assert (await ask(gateway))[0] == 200


async def test_a_wrong_request_uses_nothing_and_one_that_fails_is_a_request() -> None:
    pipeline = FakePipeline(fails_before=QueueFullError("full", retry_after_s=1))
    limits = tenant_limits(Clock(), requests_per_minute=2, tokens_per_minute=1000)
    async with running(pipeline, limits=limits) as gateway:
        assert (await ask(gateway, temperature="hot"))[0] == 400
        status, _, headers = await ask(gateway)
        assert (status, headers["x-ratelimit-remaining-requests"]) == (429, "1")
        await settled(gateway)
        _, _, headers = await ask(gateway, "input tokens")
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("0", "1000")


async def test_an_answer_that_is_remembered_is_a_request_and_uses_no_tokens() -> None:
    limits = tenant_limits(Clock(), requests_per_minute=60, tokens_per_minute=1000)
    async with running(FakePipeline(responses=response_cache()), limits=limits) as gateway:
        for _ in range(3):
            assert (await ask(gateway, temperature=0))[0] == 200
            await settled(gateway)
        _, _, headers = await ask(gateway, "input tokens")
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("56", "990")


async def test_lines_of_a_batch_are_under_no_limit_per_minute() -> None:
    async with running(limited=LimitSettings(requests_per_minute=1, max_in_flight=1, tokens_per_minute=1)) as gateway:
        line = LineRequest("/v1/chat/completions", Tenant("anonymous"), CHAT)
        answers = [await gateway.app[RUNNER].answer(line) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]


# -- what is set aside ------------------------------------------------------------------------------------------------


def chat(**options: Any) -> Need:
    call = parse_chat({"model": "demo", "messages": [{"role": "user", "content": "x" * 100}], **options}, LEASES)
    return need_of(call, 160, 8192)


LEASES = LeaseSettings()


def test_four_bytes_are_taken_for_a_token_and_an_answer_for_as_long_as_it_may_be() -> None:
    assert chat() == Need(40, None, 1)
    assert chat(max_tokens=70) == Need(40, 70, 1)
    assert chat(max_tokens=70, n=3) == Need(40, 70, 3)
    assert chat(max_completion_tokens=10**6) == Need(40, 8192, 1)


def test_an_image_counts_the_same_whatever_its_bytes() -> None:
    for num_bytes in (3, 30_000):
        url = f"data:image/png;base64,{base64.b64encode(bytes(num_bytes)).decode()}"
        parts = [{"type": "text", "text": "x" * 100}, {"type": "image_url", "image_url": {"url": url}}]
        call = parse_chat({"model": "demo", "messages": [{"role": "user", "content": parts}]}, LEASES)
        assert need_of(call, 160 + len(url), 8192).input_tokens == IMAGE_TOKENS + -(-(160 + len(url[:22])) // 4)


def test_prompts_that_come_as_tokens_are_counted() -> None:
    prompts = [[1, 2, 3], [4] * 7]
    call = parse_completion({"model": "demo", "prompt": prompts, "max_tokens": 5, "best_of": 2})
    assert need_of(call, 9000, 8192) == Need(10, 5, 4)


def test_a_prompt_that_is_longer_than_its_request_counts_by_its_characters() -> None:
    call = parse_completion({"model": "demo", "prompt": "y" * 401})
    assert need_of(call, 40, 8192).input_tokens == 101


async def test_a_compressed_request_counts_by_what_it_says() -> None:
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 8000}]}).encode()
    limits = tenant_limits(Clock(), tokens_per_minute=5000)
    async with running(limits=limits) as gateway:
        status, _, headers = await gateway.send(gzip.compress(body), **{"Content-Encoding": "gzip"})
    assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, str(5000 - -(-len(body) // 4) - 10))


# -- how each API says so ---------------------------------------------------------------------------------------------

FULL = LimitSettings(tokens_per_minute=60, count_cached_tokens=True)
USED = FakePipeline(prompt_tokens=58)


async def test_the_openai_sdk_is_told_as_upstream_tells_it() -> None:
    async with running(USED, limited=FULL) as gateway, gateway.sdk() as client:
        await client.chat.completions.create(**CHAT)
        await settled(gateway)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**CHAT)
    error, headers = refused.value, refused.value.response.headers
    assert (error.code, error.type, error.param) == ("rate_limit_exceeded", "tokens", None)
    assert re.search(
        r"^Rate limit reached for anonymous on tokens per min \(TPM\): Limit 60, Used \d\d, Requested 29\. "
        r"Please try again in [\d.]+s\.$",
        error.body["message"],  # type: ignore[index]
    )
    assert headers["x-ratelimit-limit-tokens"] == "60"
    assert int(headers["x-ratelimit-remaining-tokens"]) <= 1
    assert re.fullmatch(r"(1m0s|5\ds)", headers["x-ratelimit-reset-tokens"])


async def test_the_anthropic_sdk_is_told_as_upstream_tells_it() -> None:
    limited = LimitSettings(input_tokens_per_minute=60, output_tokens_per_minute=30, tokens_per_minute=1000)
    async with running(FakePipeline(prompt_tokens=58, cached_tokens=0), limited=limited) as gateway:
        client = gateway.anthropic()
        message = await client.messages.with_raw_response.create(**CHAT)
        assert message.headers["anthropic-ratelimit-tokens-limit"] == "1000"
        assert message.headers["anthropic-ratelimit-output-tokens-remaining"] == "20"
        await settled(gateway)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**CHAT)
    body, headers = refused.value.body, refused.value.response.headers
    assert body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    assert "input tokens per min (ITPM): Limit 60" in body["error"]["message"]  # type: ignore[index]
    for kind, limit in (("tokens", "1000"), ("input-tokens", "60"), ("output-tokens", "30")):
        assert headers[f"anthropic-ratelimit-{kind}-limit"] == limit
        assert int(headers[f"anthropic-ratelimit-{kind}-remaining"]) < int(limit)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", headers[f"anthropic-ratelimit-{kind}-reset"])


async def test_the_gemini_sdk_is_told_as_upstream_tells_it() -> None:
    async with running(limited=LimitSettings(requests_per_minute=1)) as gateway:
        client = gemini(gateway.url)
        try:
            await client.aio.models.generate_content(model="demo", contents="hi")
            with pytest.raises(gemini_errors.ClientError) as refused:
                await client.aio.models.generate_content(model="demo", contents="hi")
        finally:
            await client.aio.aclose()
            client.close()
    assert (refused.value.code, refused.value.status) == (429, "RESOURCE_EXHAUSTED")
    (detail,) = refused.value.details["error"]["details"]
    assert detail["@type"] == "type.googleapis.com/google.rpc.RetryInfo"
    assert re.fullmatch(r"([3-5]\d|60)(\.\d+)?s", detail["retryDelay"])  # of a minute, less what the test took


async def test_a_stream_is_refused_before_it_begins() -> None:
    async with running(limited=LimitSettings(requests_per_minute=1)) as gateway:
        await gateway.transcript("/v1/chat/completions", {**CHAT, "stream": True})
        status, body, headers = await ask(gateway, stream=True)
    assert (status, body["error"]["type"]) == (429, "requests")
    assert headers["Content-Type"].startswith("application/json")


async def test_the_sdks_try_again_when_they_are_told_to_and_are_let_in() -> None:
    limited = LimitSettings(tokens_per_minute=60_000, count_cached_tokens=True)
    async with running(FakePipeline(prompt_tokens=59_990), limited=limited) as gateway:
        async with gateway.sdk(max_retries=2) as client:
            await client.chat.completions.create(**CHAT)
            await settled(gateway)
            answer = await client.chat.completions.create(**{**CHAT, "max_tokens": 200})
            assert answer.choices[0].message.content == "Hello world"
        assert gateway.limits.figures()["tenants"]["anonymous"]["refused"] == {"tokens": 1}
        assert len(gateway.pipeline.requests) == 2


async def test_a_request_that_would_never_fit_is_refused_for_good_and_the_sdks_do_not_try_again() -> None:
    async with running(limited=LimitSettings(output_tokens_per_minute=50)) as gateway:
        for client in (gateway.sdk(max_retries=5), gateway.anthropic(max_retries=5)):
            with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as refused:
                await (
                    client.chat.completions.create(**{**CHAT, "max_tokens": 51})
                    if isinstance(client, openai.AsyncOpenAI)
                    else client.messages.create(**{**CHAT, "max_tokens": 51})
                )
            headers = refused.value.response.headers
            assert "Request too large for output tokens per min (OTPM): Limit 50, Requested 51." in str(refused.value)
            assert headers["x-should-retry"] == "false"
            assert "retry-after" not in headers
        assert gateway.limits.figures()["tenants"]["anonymous"]["refused"] == {"output_tokens": 2}


# -- what every answer tells ------------------------------------------------------------------------------------------


async def test_every_answer_tells_of_the_limits_that_there_are() -> None:
    limits = tenant_limits(Clock(), requests_per_minute=6, tokens_per_minute=1200)
    async with running(limits=limits) as gateway:
        _, _, headers = await ask(gateway)
        assert headers["x-ratelimit-limit-requests"] == "6"
        assert headers["x-ratelimit-remaining-requests"] == "5"
        assert headers["x-ratelimit-reset-requests"] == "10s"
        assert headers["x-ratelimit-limit-tokens"] == "1200"
        assert headers["x-ratelimit-remaining-tokens"] == "1169"  # 82 bytes, and an answer of 10
        assert headers["x-ratelimit-reset-tokens"] == "2s"
        _, _, listed = await gateway.get("/v1/models")
        assert listed["x-ratelimit-remaining-requests"] == "5"


async def test_operators_see_limits_and_who_was_refused() -> None:
    async with running(tenants=(NORTH, SOUTH), limited=LimitSettings(max_in_flight=9)) as gateway:
        for _ in range(3):
            await ask(gateway, key="key-of-north")
        _, metrics, _ = await gateway.get("/metrics")
        told = gateway.limits.figures()
    assert 'kvasir_limited_requests_total{limit="requests",tenant="north"} 1.0' in metrics
    assert "kvasir_redis_outages_total 0.0" in metrics
    assert told["tenants"]["north"]["requests"]["remaining"] == 0
    assert told["tenants"]["south"] == {"in_flight": {"limit": 9, "of_this_gateway": 0}, "refused": {}}


async def test_the_statistics_show_limits() -> None:
    async with running(limited=LimitSettings(requests_per_minute=5)) as gateway:
        stats = json.loads((await gateway.get("/admin/stats"))[1])
    assert stats["limits"]["tenants"]["anonymous"]["requests"] == {"limit": 5, "remaining": 5, "reset_s": 0.0}


# -- requests in flight -----------------------------------------------------------------------------------------------


async def test_a_client_that_hangs_up_gives_its_place_back() -> None:
    pipeline = FakePipeline(hold_after=asyncio.Event())
    async with running(pipeline, limited=LimitSettings(max_in_flight=1)) as gateway, gateway.sdk() as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        await anext(aiter(stream))
        status, body, _ = await ask(gateway)
        assert (status, body["error"]["type"]) == (429, "requests")
        assert "on concurrent requests: Limit 1, Used 1, Requested 1." in body["error"]["message"]
        await stream.close()
        async with asyncio.timeout(LIMIT_S):
            await pipeline.closed.wait()
        pipeline.hold_after = None
        await until(lambda: not gateway.limits.figures()["tenants"]["anonymous"]["in_flight"]["of_this_gateway"])
        assert (await ask(gateway))[0] == 200


async def test_a_response_in_the_background_has_its_place_until_it_ends() -> None:
    pipeline = FakePipeline(hold_after=asyncio.Event())
    server = ServerSettings(shutdown_s=0)
    async with running(pipeline, limited=LimitSettings(max_in_flight=1), server=server) as gateway:
        assert (await ask(gateway, "background response"))[0] == 200
        assert (await ask(gateway))[0] == 429
        assert pipeline.hold_after is not None
        pipeline.hold_after.set()
        await until(lambda: not gateway.limits.figures()["tenants"]["anonymous"]["in_flight"]["of_this_gateway"])
        assert (await ask(gateway))[0] == 200


# -- several gateways -------------------------------------------------------------------------------------------------


async def test_gateways_on_one_redis_share_a_limit_and_one_that_is_killed_gives_its_place_back(redis_url: str) -> None:
    clock, redis = Clock(), connect(redis_url, LIMIT_S)
    held = FakePipeline(hold_before=asyncio.Event())
    try:
        first = tenant_limits(clock, redis=redis, requests_per_minute=4, max_in_flight=1)
        second = tenant_limits(clock, redis=redis, requests_per_minute=4, max_in_flight=1)
        async with running(held, limits=first) as one, running(limits=second) as other:
            asking = asyncio.ensure_future(ask(one))
            await held.reached.wait()
            assert "concurrent requests" in (await ask(other))[1]["error"]["message"]
            clock.pass_s(60)  # `first` does not renew its leases: nobody has started it, as if it was killed
            statuses = [(await ask(other))[0] for _ in range(2)]
            assert statuses == [200, 200]
            assert held.hold_before is not None
            held.hold_before.set()
            assert (await asking)[0] == 200
            _, _, headers = await ask(one)
            assert headers["x-ratelimit-remaining-requests"] == "1"
    finally:
        await redis.aclose()


async def test_redis_that_is_killed_in_between_costs_nothing(own_redis: RedisProcess) -> None:
    redis: Redis = connect(own_redis.url, 0.25)
    clock = Clock()
    limits = tenant_limits(clock, redis=redis, timeout_s=0.25, requests_per_minute=60, max_in_flight=20)
    try:
        async with running(limits=limits) as gateway:
            assert (await ask(gateway))[0] == 200
            own_redis.kill()
            for _ in range(5):
                assert (await ask(gateway))[0] == 200
            own_redis.start()
            clock.pass_s(2)
            _, _, headers = await ask(gateway)
            assert headers["x-ratelimit-remaining-requests"] == "59", "the new Redis counts again, from nothing"
    finally:
        await redis.aclose()


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "message", "content"])
async def test_a_spent_budget_is_429_in_each_dialect_until_it_starts_anew(kind: str) -> None:
    prices = (PriceSettings.model_validate({"model": "demo", "input": 1_000_000, "output": 1_000_000}),)
    tenants = (NORTH.model_copy(update={"budget": 1.0, "requests_per_minute": None}), SOUTH)
    async with running(FakePipeline(), tenants=tenants, prices=prices) as gateway:
        status, _, headers = await ask(gateway, kind, "key-of-north")
        assert (status, headers["x-kvasir-budget"].partition(";")[0]) == (200, "used=0")
        status, body, headers = await ask(gateway, kind, "key-of-north")
        assert status == 429
        assert "The budget of north for this month is spent: Limit 1, Used " in json.dumps(body)
        assert int(headers["Retry-After"]) <= 31 * 86_400
        status, _, headers = await ask(gateway, kind, "key-of-south")
        assert (status, "x-kvasir-budget" in headers) == (200, False)
        async with gateway.session.get(gateway.url + "/v1/me", headers={"x-api-key": "key-of-north"}) as answer:
            me = await answer.json()
        assert (me["budget"]["limit"], me["budget"]["left"], me["budget"]["period"]) == ("1", "0", "month")
