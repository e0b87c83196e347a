"""Which tier a request is served in, and that its answer says so in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.tiers import find_tier
from gateway.config import TenantSettings
from gateway.types import Tenant
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.pipeline import FakePipeline

TENANTS = [
    TenantSettings(name="first", keys=("sk-first-class",), priority=True, weight=2.5),
    TenantSettings(name="other", keys=("sk-other-folk",)),
]
FIRST, OTHER = "sk-first-class", "sk-other-folk"
HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


async def tell(gateway: Gateway, path: str, key: str, **more: Any) -> tuple[str, str]:
    """What the answer says, and the tier of the pipeline's request."""
    body: dict[str, Any] = {"model": "demo", "max_tokens": 5, "messages": HI}
    if path == RESPONSES:
        body = {"model": "demo", "input": "hi", "store": False}
    headers = {"Authorization": f"Bearer {key}"}
    if path == MESSAGES:
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    status, answer, _ = await gateway.post(path, body | more, headers=headers)
    assert status == 200, answer
    told = (answer["usage"] if path == MESSAGES else answer)["service_tier"]
    return told, gateway.pipeline.requests[-1].tier


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("asked", "first", "other"),
    [
        ({}, "default", "default"),
        ({"service_tier": "auto"}, "default", "default"),
        ({"service_tier": "default"}, "default", "default"),
        ({"service_tier": "scale"}, "default", "default"),
        ({"service_tier": "flex"}, "flex", "flex"),
        ({"service_tier": "priority"}, "priority", "default"),
        ({"service_tier": "fast"}, "priority", "default"),
    ],
)
async def test_openai_answers_say_the_tier_that_was_served(
    path: str, asked: dict[str, str], first: str, other: str
) -> None:
    async with running(FakePipeline(), tenants=TENANTS) as gateway:
        assert await tell(gateway, path, FIRST, **asked) == (first, first)
        assert await tell(gateway, path, OTHER, **asked) == (other, other)


async def test_anthropic_gives_priority_to_those_who_have_it_unless_they_want_the_standard_one() -> None:
    async with running(FakePipeline(), tenants=TENANTS) as gateway:
        assert await tell(gateway, MESSAGES, FIRST) == ("priority", "priority")
        assert await tell(gateway, MESSAGES, FIRST, service_tier="auto") == ("priority", "priority")
        assert await tell(gateway, MESSAGES, FIRST, service_tier="standard_only") == ("standard", "default")
        assert await tell(gateway, MESSAGES, OTHER, service_tier="auto") == ("standard", "default")


async def test_every_chunk_of_a_stream_says_the_tier() -> None:
    async with running(tenants=TENANTS) as gateway:
        asked = {"model": "demo", "messages": HI, "stream": True, "service_tier": "flex"}
        text = await gateway.transcript(CHAT, asked, headers={"Authorization": f"Bearer {OTHER}"})
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert len(chunks) > 2
    assert {chunk["service_tier"] for chunk in chunks} == {"flex"}


async def test_a_tenants_weight_goes_with_its_requests() -> None:
    pipeline = FakePipeline()
    async with running(pipeline, tenants=TENANTS) as gateway:
        for key in (FIRST, OTHER):
            await tell(gateway, CHAT, key)
    assert [request.tenant.weight for request in pipeline.requests] == [2.5, 1.0]


COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("priority", [None, 0, -3, 2**31 - 1, -(2**31) + 1])
async def test_priority_reaches_the_queue(path: str, priority: int | None) -> None:
    body = {"model": "demo", "max_tokens": 5, **({"messages": HI} if path == CHAT else {"prompt": "hi"})}
    async with running(FakePipeline()) as gateway:
        status, answer, _ = await gateway.post(path, {**body, "priority": priority, "n": 2})
        assert status == 200, answer
        assert [request.priority for request in gateway.pipeline.requests] == [priority or 0] * 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("priority", [2**31, -(2**31), 1.5, "1", True, [1]])
async def test_a_priority_that_is_none_is_refused_by_its_name(path: str, priority: Any) -> None:
    body = {"model": "demo", **({"messages": HI} if path == CHAT else {"prompt": "hi"})}
    async with running(FakePipeline()) as gateway:
        status, answer, _ = await gateway.post(path, {**body, "priority": priority})
        assert (status, answer["error"]["param"]) == (400, "priority")
        assert gateway.pipeline.requests == []


async def test_requests_that_differ_in_priority_get_one_answer_when_it_is_there() -> None:
    pipeline = FakePipeline(responses=response_cache())
    body = {"model": "demo", "messages": HI, "temperature": 0}
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        told = [(await gateway.post(CHAT, {**body, "priority": number}))[2] for number in (0, 5)]
    assert [headers["x-kvasir-cache"].partition(";")[0] for headers in told] == ["miss", "exact"]


@pytest.mark.parametrize(
    ("dialect", "said", "first", "other"),
    [
        ("openai", {}, "default", "default"),
        ("openai", {"service_tier": "flex"}, "flex", "flex"),
        ("openai", {"service_tier": "priority"}, "priority", "default"),
        ("openai", {"service_tier": "to come"}, "default", "default"),
        ("openai", {"service_tier": {"a": 1}}, "default", "default"),
        ("anthropic", {}, "priority", "default"),
        ("anthropic", {"service_tier": "standard_only"}, "default", "default"),
        ("gemini", {}, "default", "default"),
    ],
)
def test_a_body_that_nobody_checked_has_a_tier_as_well(
    dialect: str, said: dict[str, Any], first: str, other: str
) -> None:
    assert find_tier(dialect, said, Tenant("first", priority=True)) == first
    assert find_tier(dialect, said, Tenant("other")) == other
