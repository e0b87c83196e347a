"""Cached contents over a fake pipeline: resources, ends, owners, and the prompts that they become."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google.genai import errors, types

from engine.protocol import Breakpoint
from gateway.api.gemini.wire import timestamp, timestamp_s
from gateway.config import GeminiSettings, TenantSettings
from gateway.errors import NoEngineError
from gateway.types import ChatPrompt, Lease, Marker
from tests.fakes.clock import Clock
from tests.fakes.gateway import Gateway, running
from tests.fakes.gemini import gemini
from tests.fakes.pipeline import FakeModels, FakePipeline, hello
from tests.fakes.tuned import tuned

NOW_S = 1_800_000_000.25
DOCUMENT = {"role": "user", "parts": [{"text": "A long document."}]}
QUESTION = {"role": "user", "parts": [{"text": "Well?"}]}
CREATE = {"model": "models/demo", "contents": [DOCUMENT], "systemInstruction": {"parts": [{"text": "Be brief."}]}}
TOOLS = [{"functionDeclarations": [{"name": "f"}]}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A long document."}]


async def ask(gateway: Gateway, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with gateway.session.request(method, gateway.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def made(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    status, resource = await ask(gateway, "POST", "/v1/cachedContents", CREATE | fields)
    assert status == 200, resource
    told: dict[str, Any] = resource
    return told


def prompt(gateway: Gateway) -> ChatPrompt:
    found = gateway.pipeline.requests[-1].prompt
    assert isinstance(found, ChatPrompt)
    return found


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_what_is_created_is_described_and_never_told_again(version: str) -> None:
    async with running(now=Clock(NOW_S)) as gateway:
        body = CREATE | {"displayName": "Handbook", "ttl": "300s"}
        _, resource = await ask(gateway, "POST", f"/{version}/cachedContents", body)
        name = resource["name"]
        assert resource == {
            "name": name,
            "model": "models/demo",
            "displayName": "Handbook",
            "createTime": "2027-01-15T08:00:00.250000Z",
            "updateTime": "2027-01-15T08:00:00.250000Z",
            "expireTime": "2027-01-15T08:05:00.250000Z",
            "usageMetadata": {"totalTokenCount": 40},
        }
        assert name.startswith("cachedContents/")
        assert await ask(gateway, "GET", f"/{version}/{name}") == (200, resource)
        assert await ask(gateway, "GET", f"/{version}/cachedContents") == (200, {"cachedContents": [resource]})


async def test_creating_computes_the_prefix_with_a_breakpoint_at_its_end() -> None:
    async with running(now=Clock(NOW_S)) as gateway:
        await made(gateway, ttl="3.5s", tools=TOOLS)
        (request,) = gateway.pipeline.requests
        assert request.prewarm
        assert request.sampling.max_tokens == 0
        marker = Marker(1, len("A long document."), 3.5)
        found = prompt(gateway)
        assert (found.messages, found.markers) == (MESSAGES, (marker,))
        assert [tool.name for tool in found.tools] == ["f"]
        assert not found.add_generation_prompt


@pytest.mark.parametrize(
    ("lease", "state", "tokens", "header"),
    [
        (Lease(0, Breakpoint(37, 60.0)), "kept", 37, "kept; tokens=37; ttl=60"),
        (Lease(1, None), "degraded", 40, "degraded"),
    ],
)
async def test_what_became_of_the_lease_is_said(lease: Lease, state: str, tokens: int, header: str) -> None:
    async with running(FakePipeline(lease=lease), now=Clock(NOW_S)) as gateway:
        async with gateway.session.post(f"{gateway.url}/v1/cachedContents", json=CREATE) as answer:
            resource = await answer.json()
            assert answer.headers["x-kvasir-lease"] == header
        assert (resource["cacheLease"], resource["usageMetadata"]["totalTokenCount"]) == (state, tokens)
        _, later = await ask(gateway, "GET", f"/v1/{resource['name']}")
        assert "cacheLease" not in later, "nobody asked the engine"
        body = {"contents": [QUESTION], "cachedContent": resource["name"]}
        async with gateway.session.post(f"{gateway.url}/v1/models/demo:generateContent", json=body) as answer:
            assert answer.headers["x-kvasir-lease"] == header


async def test_a_request_appends_its_contents_and_sets_the_breakpoint_again() -> None:
    clock = Clock(NOW_S)
    async with running(now=clock) as gateway:
        name = (await made(gateway, ttl="60s", tools=TOOLS))["name"]
        clock.now_s += 20
        asked = {"contents": [QUESTION], "cachedContent": name}
        for verb in ("generateContent", "streamGenerateContent?alt=sse", "countTokens"):
            body = {"generateContentRequest": asked} if verb == "countTokens" else asked
            async with gateway.session.post(f"{gateway.url}/v1/models/demo:{verb}", json=body) as answer:
                assert answer.status == 200, await answer.text()
                told = await answer.text()
            found = prompt(gateway)
            assert found.messages == [*MESSAGES, {"role": "user", "content": "Well?"}]
            assert found.markers == (Marker(1, len("A long document."), 40.0),)
            assert [tool.name for tool in found.tools] == ["f"]
            assert found.add_generation_prompt
        assert json.loads(told)["cachedContentTokenCount"] == 40
        tool_use = gateway.pipeline.requests[1].tool_use
        assert tool_use is not None
        assert [tool.name for tool in tool_use.callable] == ["f"]


@pytest.mark.parametrize("field_", ["systemInstruction", "tools", "tool_config"])
async def test_what_belongs_into_the_cached_content_is_refused_beside_it(field_: str) -> None:
    async with running(now=Clock(NOW_S)) as gateway:
        name = (await made(gateway))["name"]
        given = {"systemInstruction": CREATE["systemInstruction"], "tools": TOOLS, "tool_config": {}}[field_]
        body = {"contents": [QUESTION], "cachedContent": name, field_: given}
        status, answer = await ask(gateway, "POST", "/v1/models/demo:generateContent", body)
        assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert "CachedContent can not be used" in answer["error"]["message"]


async def test_the_model_has_to_be_the_same() -> None:
    models = FakeModels([hello("demo"), hello("other")])
    async with running(models=models, now=Clock(NOW_S)) as gateway:
        name = (await made(gateway))["name"]
        body = {"contents": [QUESTION], "cachedContent": name}
        status, answer = await ask(gateway, "POST", "/v1/models/other:generateContent", body)
        assert status == 400
        assert "models/other" in answer["error"]["message"]
        assert "models/demo" in answer["error"]["message"]
        assert (await ask(gateway, "POST", "/v1/models/models/demo:generateContent", body))[0] == 200


async def test_what_has_ended_is_gone_at_once() -> None:
    clock = Clock(NOW_S)
    async with running(now=clock) as gateway:
        name = (await made(gateway, ttl="1.5s"))["name"]
        clock.now_s += 1.4
        assert (await ask(gateway, "GET", f"/v1/{name}"))[0] == 200
        clock.now_s += 0.2
        body = {"contents": [QUESTION], "cachedContent": name}
        for method, path, sent in (
            ("GET", f"/v1/{name}", None),
            ("PATCH", f"/v1/{name}", {"ttl": "60s"}),
            ("DELETE", f"/v1/{name}", None),
            ("POST", "/v1/models/demo:generateContent", body),
        ):
            status, answer = await ask(gateway, method, path, sent)
            assert (status, answer["error"]["status"]) == (404, "NOT_FOUND")
        assert await ask(gateway, "GET", "/v1/cachedContents") == (200, {"cachedContents": []})


async def test_an_end_can_be_moved_and_a_longer_one_is_leased() -> None:
    clock = Clock(NOW_S)
    async with running(now=clock) as gateway:
        name = (await made(gateway, ttl="60s"))["name"]
        clock.now_s += 10
        status, longer = await ask(gateway, "PATCH", f"/v1/{name}?updateMask=ttl", {"ttl": "600s"})
        assert (status, longer["updateTime"]) == (200, timestamp(NOW_S + 10))
        assert longer["expireTime"] == timestamp(NOW_S + 610)
        assert len(gateway.pipeline.requests) == 2
        assert gateway.pipeline.requests[-1].prewarm
        assert prompt(gateway).markers[0].ttl_s == 600
        sooner = {"expire_time": timestamp(NOW_S + 30)}
        _, shorter = await ask(gateway, "PATCH", f"/v1beta/{name}", sooner)
        assert timestamp_s(shorter["expireTime"], "") == NOW_S + 30
        assert len(gateway.pipeline.requests) == 2, "a lease cannot be made shorter"
        clock.now_s += 20
        assert (await ask(gateway, "GET", f"/v1/{name}"))[0] == 404


async def test_an_engine_that_is_away_leaves_the_end_where_it_was() -> None:
    models = FakeModels()
    async with running(models=models, now=Clock(NOW_S)) as gateway:
        resource = await made(gateway, ttl="60s")
        models.away = NoEngineError("demo", 2.0)
        status, answer = await ask(gateway, "PATCH", f"/v1/{resource['name']}", {"ttl": "600s"})
        assert (status, answer["error"]["status"]) == (503, "UNAVAILABLE")
        assert await ask(gateway, "GET", f"/v1/{resource['name']}") == (200, resource)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"ttl": "0s"}, "ttl"),
        ({"ttl": "-5s"}, "ttl"),
        ({"ttl": "0.9s"}, "ttl"),
        ({"ttl": "43201s"}, "ttl"),
        ({"ttl": "5m"}, "ttl"),
        ({"expireTime": timestamp(NOW_S - 1)}, "expireTime"),
        ({"expireTime": timestamp(NOW_S + 50_000)}, "expireTime"),
        ({"ttl": "60s", "expire_time": timestamp(NOW_S + 60)}, "expireTime"),
        ({"model": None}, "model"),
        ({"contents": [], "systemInstruction": None}, "contents"),
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]}]},
            "contents[0].parts[0].inlineData",
        ),
        ({"kmsKeyName": "k"}, "kmsKeyName"),
        ({"displayName": "x" * 129}, "displayName"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolsConfig": {}}, "toolsConfig"),
    ],
)
async def test_what_cannot_be_kept_is_refused_with_its_path(fields: Any, path: str) -> None:
    async with running(now=Clock(NOW_S)) as gateway:
        status, answer = await ask(gateway, "POST", "/v1/cachedContents", CREATE | fields)
        assert status == 400
        assert answer["error"]["details"][0]["fieldViolations"][0]["field"] == path
        assert not gateway.pipeline.requests


@pytest.mark.parametrize(
    ("query", "body", "path"),
    [
        ("", {}, "ttl"),
        ("", {"displayName": "new"}, "displayName"),
        ("", {"contents": [DOCUMENT], "ttl": "60s"}, "contents"),
        ("?updateMask=contents", {"ttl": "60s"}, "updateMask"),
        ("", {"expireTime": timestamp(NOW_S + 60), "tll": "60s"}, "tll"),
    ],
)
async def test_nothing_but_the_end_can_be_changed(query: str, body: Any, path: str) -> None:
    async with running(now=Clock(NOW_S)) as gateway:
        name = (await made(gateway))["name"]
        status, answer = await ask(gateway, "PATCH", f"/v1/{name}{query}", body)
        assert status == 400
        assert answer["error"]["details"][0]["fieldViolations"][0]["field"] == path


async def test_a_default_and_bounds_are_the_operators() -> None:
    settings = tuned(GeminiSettings, default_ttl="90s", min_ttl="30s", max_ttl="2m", min_tokens=41)
    pipeline = FakePipeline(prompt_tokens=41)
    async with running(pipeline, now=Clock(NOW_S), gemini=settings) as gateway:
        assert (await made(gateway))["expireTime"] == timestamp(NOW_S + 90)
        status, answer = await ask(gateway, "POST", "/v1/cachedContents", CREATE | {"ttl": "29s"})
        assert status == 400
        assert "30s to 120s" in answer["error"]["message"]
        pipeline.prompt_tokens = 40
        status, answer = await ask(gateway, "POST", "/v1/cachedContents", CREATE)
        assert status == 400
        assert "total_token_count=40, min_total_token_count=41" in answer["error"]["message"]


async def test_nothing_that_is_kept_or_asked_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with running(now=Clock(NOW_S)) as gateway:
        name = (await made(gateway, displayName="Handbook"))["name"]
        body = {"contents": [QUESTION], "cachedContent": name}
        assert (await ask(gateway, "POST", "/v1/models/demo:generateContent?key=a-secret-key", body))[0] == 200
    assert "generateContent" in caplog.text
    for secret in ("A long document.", "Be brief.", "Well?", "Handbook", "a-secret-key"):
        assert secret not in caplog.text


async def test_what_is_too_large_is_refused_before_it_is_computed() -> None:
    async with running(now=Clock(NOW_S), gemini=tuned(GeminiSettings, max_content_bytes=1024)) as gateway:
        long = {"contents": [{"parts": [{"text": "x" * 1024}]}]}
        status, answer = await ask(gateway, "POST", "/v1/cachedContents", CREATE | long)
        assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert "1024 are possible" in answer["error"]["message"]
        assert not gateway.pipeline.requests


async def test_past_the_limit_of_a_tenant_nothing_more_is_kept() -> None:
    async with running(now=Clock(NOW_S), gemini=tuned(GeminiSettings, max_contents=2)) as gateway:
        name = (await made(gateway))["name"]
        await made(gateway)
        status, answer = await ask(gateway, "POST", "/v1/cachedContents", CREATE)
        assert (status, answer["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
        assert await ask(gateway, "DELETE", f"/v1/{name}") == (200, {})
        await made(gateway)


async def test_what_one_tenant_keeps_no_other_one_finds() -> None:
    tenants = [TenantSettings(name=name, keys=(f"{name}-key-123",)) for name in ("north", "south")]
    north, south = ({"x-goog-api-key": f"{name}-key-123"} for name in ("north", "south"))
    async with running(tenants=tenants, now=Clock(NOW_S)) as gateway:
        assert (await ask(gateway, "POST", "/v1/cachedContents", CREATE))[0] == 401
        _, resource = await ask(gateway, "POST", "/v1/cachedContents", CREATE, **north)
        name = resource["name"]
        never = "cachedContents/" + "0" * 32
        for method, body in (("GET", None), ("PATCH", {"ttl": "60s"}), ("DELETE", None)):
            other = await ask(gateway, method, f"/v1/{name}", body, **south)
            nobody = await ask(gateway, method, f"/v1/{never}", body, **south)
            assert other[0] == 404
            assert json.dumps(other).replace(name, never) == json.dumps(nobody)
        body = {"contents": [QUESTION], "cachedContent": name}
        assert (await ask(gateway, "POST", "/v1/models/demo:generateContent", body, **south))[0] == 404
        assert (await ask(gateway, "GET", "/v1/cachedContents", **south))[1] == {"cachedContents": []}
        assert (await ask(gateway, "POST", "/v1/models/demo:generateContent", body, **north))[0] == 200


async def test_the_real_sdk_creates_lists_uses_changes_and_deletes() -> None:
    def use(url: str) -> None:
        client = gemini(url)
        try:
            config = types.CreateCachedContentConfig(
                contents="A.", system_instruction="S", ttl="300s", display_name="d"
            )
            names = [client.caches.create(model="demo", config=config).name for _ in range(5)]
            listed = list(client.caches.list(config={"page_size": 2}))
            assert {one.name for one in listed} == set(names)
            one = client.caches.get(name=names[0] or "")
            assert one.usage_metadata is not None
            assert (one.display_name, one.model, one.usage_metadata.total_token_count) == ("d", "models/demo", 40)
            assert one.expire_time is not None
            assert one.create_time is not None
            assert (one.expire_time - one.create_time).total_seconds() == 300
            changed = client.caches.update(name=names[0] or "", config={"ttl": "600s"})
            assert changed.expire_time is not None
            assert (changed.expire_time - one.create_time).total_seconds() >= 600
            answer = client.models.generate_content(model="demo", contents="Q", config={"cached_content": names[0]})
            assert answer.text == "Hello world"
            client.caches.delete(name=names[0] or "")
            with pytest.raises(errors.ClientError) as gone:
                client.caches.get(name=names[0] or "")
            assert (gone.value.code, gone.value.status) == (404, "NOT_FOUND")
        finally:
            client.close()

    async with running() as gateway:
        await asyncio.to_thread(use, gateway.url)
