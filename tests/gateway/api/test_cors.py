"""Which pages of browsers may read answers, and what a preflight is told."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import ServerSettings, TenantSettings
from tests.fakes.gateway import running

ORIGIN = "https://chat.example.com"
NAMED = ServerSettings(cors_origins=(ORIGIN,))
TENANTS = (TenantSettings(name="north", keys=("north-key-1",)),)
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1beta/models/demo:generateContent", "/no"])
async def test_a_preflight_is_answered_for_every_route_without_a_key(path: str) -> None:
    async with (
        running(server=NAMED, tenants=TENANTS) as gateway,
        gateway.session.options(gateway.url + path, headers=PREFLIGHT) as answer,
    ):
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert answer.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("/v1/chat/completions", {}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
async def test_answers_errors_and_streams_may_be_read_by_pages_of_the_origin(path: str, body: Any, status: int) -> None:
    async with running(server=NAMED) as gateway:
        for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.example.com", None), ("null", None)):
            async with gateway.session.post(gateway.url + path, json=body, headers={"Origin": origin}) as answer:
                assert answer.status == status
                assert answer.headers.get("Access-Control-Allow-Origin") == allowed
                assert (answer.headers.get("Vary") == "Origin") == (allowed is not None)


async def test_a_key_that_is_missing_is_an_error_that_the_page_can_read() -> None:
    every = ServerSettings(cors_origins=("*",))
    async with running(server=every, tenants=TENANTS) as gateway:
        status, _, headers = await gateway.post("/v1/chat/completions", CHAT, headers={"Origin": ORIGIN})
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, "*")


async def test_without_origins_nothing_is_said_and_a_preflight_is_refused() -> None:
    async with running() as gateway:
        async with gateway.session.options(f"{gateway.url}/v1/chat/completions", headers=PREFLIGHT) as answer:
            assert answer.status == 405
            assert "server.cors_origins" in await answer.text()
            assert "Access-Control-Allow-Origin" not in answer.headers
        _, _, headers = await gateway.post("/v1/chat/completions", CHAT, headers={"Origin": ORIGIN})
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://example.com/path", ""])
def test_what_is_no_origin_stops_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        ServerSettings(cors_origins=(origin,))
