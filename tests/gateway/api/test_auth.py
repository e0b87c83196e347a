from __future__ import annotations

import logging

import openai
import pytest
from aiohttp import encode_basic_auth

from gateway.config import AuthSettings, TenantSettings
from gateway.types import ANONYMOUS
from tests.fakes.gateway import running

TENANTS = (
    TenantSettings(name="north", keys=("north-key-1", "north-key-2")),
    TenantSettings(name="south", keys=("south-key-1",)),
)
ADMIN = AuthSettings(admin_keys=("admin-key-1",))
ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


async def test_without_tenants_everybody_is_one_and_needs_no_key() -> None:
    async with running() as gateway:
        assert (await gateway.post("/v1/chat/completions", ASK))[0] == 200
        assert gateway.pipeline.requests[0].tenant.name == ANONYMOUS
        assert (await gateway.get("/admin/stats"))[0] == 200


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        ("Bearer north-key-1", "north"),
        ("Bearer north-key-2", "north"),
        ("bearer south-key-1", "south"),
        ("BEARER   south-key-1", "south"),
    ],
)
async def test_each_key_belongs_to_its_tenant(header: str, tenant: str) -> None:
    async with running(tenants=TENANTS) as gateway:
        status, _, _ = await gateway.post("/v1/chat/completions", ASK, headers={"Authorization": header})
        assert status == 200
        assert gateway.pipeline.requests[0].tenant.name == tenant


@pytest.mark.parametrize(
    ("headers", "query", "tenant"),
    [
        ({"x-api-key": "north-key-1"}, "", "north"),
        ({"x-api-key": "south-key-1", "Authorization": "Bearer north-key-1"}, "", "south"),
        ({"x-goog-api-key": "north-key-1"}, "", "north"),
        ({}, "?key=south-key-1", "south"),
    ],
)
async def test_a_key_may_be_where_the_sdks_of_other_apis_put_it(
    headers: dict[str, str], query: str, tenant: str
) -> None:
    async with running(tenants=TENANTS) as gateway:
        status, _, _ = await gateway.post(f"/v1/completions{query}", {"model": "demo", "prompt": "a"}, headers=headers)
        assert status == 200
        assert gateway.pipeline.requests[0].tenant.name == tenant


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic bm9ydGgta2V5LTE=", None),
        ("north-key-1", None),
        ("Bearer north-key", "invalid_api_key"),
        ("Bearer north-key-1 x", "invalid_api_key"),
        ("Bearer \u00ff\u00fe", "invalid_api_key"),
        ("Bearer " + "x" * 5000, "invalid_api_key"),
    ],
)
async def test_a_missing_or_wrong_key_is_a_401_before_anything_else(header: str | None, code: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with running(tenants=TENANTS) as gateway:
        for path in ("/v1/chat/completions", "/v1/completions"):
            status, body, got = await gateway.post(path, ["not", "an", "object"], headers=headers)
            assert (status, body["error"]["code"], body["error"]["type"]) == (401, code, "invalid_request_error")
            assert got["x-request-id"]
            assert "north-key" not in body["error"]["message"]
        async with gateway.session.get(gateway.url + "/v1/models", headers=headers) as answer:
            assert answer.status == 401
        assert gateway.pipeline.requests == []


async def test_the_sdk_raises_its_own_exceptions() -> None:
    async with running(tenants=TENANTS, auth=ADMIN) as gateway:
        async with gateway.sdk("wrong-key-1") as client:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await client.models.list()
        assert wrong.value.code == "invalid_api_key"
        async with gateway.sdk("admin-key-1") as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.models.list()


@pytest.mark.parametrize(
    ("key", "expected"), [("admin-key-1", 200), (None, 401), ("wrong-key-1", 401), ("north-key-1", 403)]
)
async def test_admin_pages_need_an_admin_key_when_there_is_one(key: str | None, expected: int) -> None:
    async with running(tenants=TENANTS, auth=ADMIN) as gateway:
        assert (await gateway.get("/admin/stats", key))[0] == expected
    async with running(auth=ADMIN) as gateway:  # no tenants: requests stay open, the admin pages do not
        assert (await gateway.post("/v1/chat/completions", ASK))[0] == 200
        assert (await gateway.get("/admin/stats"))[0] == 401


def basic(password: str) -> dict[str, str]:
    return {"Authorization": encode_basic_auth("anybody", password)}


async def test_a_browser_reads_admin_pages_with_an_admin_key_as_password_and_changes_nothing() -> None:
    async with running(tenants=TENANTS, auth=ADMIN) as gateway:
        stats, invalidate = f"{gateway.url}/admin/stats", f"{gateway.url}/admin/cache/invalidate"
        async with gateway.session.get(stats) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"].split()[0]) == (401, "Basic")
        for password, status in (("admin-key-1", 200), ("wrong-key-1", 401), ("north-key-1", 403), ("", 401)):
            async with gateway.session.get(stats, headers=basic(password)) as answer:
                assert answer.status == status
        async with gateway.session.get(stats, headers={"Authorization": "Basic \xfc"}) as answer:
            assert answer.status == 401
        async with gateway.session.post(invalidate, json={}, headers=basic("admin-key-1")) as answer:
            assert answer.status == 401
        async with gateway.session.get(f"{gateway.url}/v1/models", headers=basic("north-key-1")) as answer:
            assert (answer.status, "WWW-Authenticate" in answer.headers) == (401, False)


async def test_admin_pages_are_closed_when_there_are_tenants_and_no_admin_key() -> None:
    async with running(tenants=TENANTS) as gateway:
        status, text, _ = await gateway.get("/admin/stats", "north-key-1")
        assert status == 403
        assert "admin_keys" in text


async def test_health_and_metrics_are_open(caplog: pytest.LogCaptureFixture) -> None:
    async with running(tenants=TENANTS, auth=ADMIN) as gateway:
        for path in ("/health", "/health/liveness", "/health/readiness", "/metrics", "/"):
            assert (await gateway.get(path))[0] == 200


async def test_no_key_reaches_a_log_or_a_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(tenants=TENANTS, auth=ADMIN) as gateway:
        for key in ("north-key-1", "admin-key-1", "wrong-key-1"):
            await gateway.post("/v1/chat/completions", ASK, headers={"Authorization": f"Bearer {key}"})
            await gateway.get("/admin/stats", key)
        assert "-key-1" not in (await gateway.get("/metrics"))[1]
    assert "-key-1" not in caplog.text
