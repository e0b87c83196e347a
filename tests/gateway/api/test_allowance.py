"""What a tenant may still send, in the headers of each API: of what has a limit, and of nothing else."""

from __future__ import annotations

import re

import pytest

from gateway.config import LimitSettings
from tests.fakes.gateway import running

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {**CHAT, "max_tokens": 5}
VERSION = {"anthropic-version": "2023-06-01"}


def told(headers: object) -> set[str]:
    assert hasattr(headers, "items")
    return {name.lower() for name, _ in headers.items() if "ratelimit" in name.lower()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tenant_without_limits_is_told_of_none(stream: bool) -> None:
    async with running() as gateway:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGE)):
            url = gateway.url + path
            async with gateway.session.post(url, json={**body, "stream": stream}, headers=VERSION) as answer:
                assert answer.status == 200
                assert told(answer.headers) == set()


async def test_what_has_no_limit_is_not_told_beside_what_has_one() -> None:
    async with running(limited=LimitSettings(tokens_per_minute=1000)) as gateway:
        _, _, headers = await gateway.post("/v1/chat/completions", CHAT)
        assert told(headers) == {f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")}
        _, _, headers = await gateway.post("/v1/messages", MESSAGE, headers=VERSION)
        assert told(headers) == {f"anthropic-ratelimit-tokens-{what}" for what in ("limit", "remaining", "reset")}


async def test_a_refusal_tells_it_too_and_who_is_unknown_is_told_nothing() -> None:
    async with running(limited=LimitSettings(requests_per_minute=3)) as gateway:
        status, _, headers = await gateway.post("/v1/chat/completions", {**CHAT, "model": "nobody"})
        assert (status, headers["x-ratelimit-limit-requests"]) == (404, "3")
        _, _, headers = await gateway.post("/v1/messages", MESSAGE, headers=VERSION)
        assert headers["anthropic-ratelimit-requests-limit"] == "3"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", headers["anthropic-ratelimit-requests-reset"])
        _, _, headers = await gateway.get("/health")
        assert told(headers) == set()
