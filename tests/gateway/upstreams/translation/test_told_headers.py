"""Limits, Retry-After and ids of translated answers, whole, streamed and refused, as each client's API has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import aiohttp
import pytest

from tests.fakes.hosted import answers, refuses
from tests.fakes.upstream import Told, upstream
from tests.fakes.whole import whole

RESET: Final = "anthropic-ratelimit-requests-reset"
TOLD: Final[Mapping[str, Mapping[str, str]]] = {
    "openai": {
        "x-request-id": "req_theirs",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "6h0m0s",
    },
    "anthropic": {
        "request-id": "req_theirs",
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
    },
    "gemini": {},
}
MESSAGES: Final = [{"role": "user", "content": "Hi"}]
ASKED: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "openai": ("/v1/chat/completions", {"model": "up-1", "messages": MESSAGES}),
    "responses": ("/v1/responses", {"model": "up-1", "input": "Hi", "store": False}),
    "anthropic": ("/v1/messages", {"model": "up-1", "messages": MESSAGES, "max_tokens": 99}),
    "gemini": ("/v1beta/models/up-1:generateContent", {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}),
}
PAIRS: Final = [
    *(("openai", "anthropic"), ("openai", "gemini"), ("responses", "anthropic"), ("anthropic", "openai")),
    *(("anthropic", "responses"), ("anthropic", "gemini"), ("gemini", "openai"), ("gemini", "anthropic")),
]


def told(dialect: str, how: str) -> Told:
    """An answer with the headers of its API."""
    headers = dict(TOLD["openai" if dialect == "responses" else dialect])
    if dialect == "anthropic":
        headers[RESET] = (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
    if how == "refused":
        return refuses(dialect, 429, "slow down", **headers, retry_after="7")
    return replace(answers(dialect, ["Hello"], stream=how == "stream"), headers=headers)


async def ask(client: str, dialect: str, how: str) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and body."""
    path, body = ASKED[client]
    if how == "stream" and client == "gemini":
        path = path.replace("generateContent", "streamGenerateContent") + "?alt=sse"
    elif how == "stream":
        body = {**body, "stream": True}
    version = {"anthropic-version": "2023-06-01"} if client == "anthropic" else {}
    api = {"dialect": "openai", "api": "responses"} if dialect == "responses" else {"dialect": dialect}
    async with upstream(told(dialect, how)) as stub:
        table = stub.settings(retries=0, **api).model_dump(exclude={"key"}) | {"key": "sk-upstream"}
        limited = {"limits": {"requests_per_minute": 7}}  # of our own, which are not told beside those
        async with (
            whole(engines=0, sections={"upstreams": [table], **limited}) as running,
            aiohttp.ClientSession() as session,
            session.post(
                running.url + path,
                json=body,
                headers=version,
            ) as answer,
        ):
            return answer.status, answer.headers.copy(), await answer.read()


@pytest.mark.parametrize("how", ["whole", "stream", "refused"])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_what_an_upstream_tells_of_its_limits_is_told_in_the_clients_form(
    client: str, dialect: str, how: str
) -> None:
    status, headers, body = await ask(client, dialect, how)
    assert status == (429 if how == "refused" else 200), body
    limits = {name.lower(): value for name, value in headers.items() if "ratelimit" in name.lower()}
    if client in ("openai", "responses"):
        if dialect == "gemini":  # has none: these are the tenant's own
            assert limits["x-ratelimit-limit-requests"] == "7"
        else:
            assert limits.pop("x-ratelimit-reset-requests").startswith(("359m", "360m0s"))
            assert limits == {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59"}
    elif client == "anthropic":
        if dialect == "gemini":
            assert limits["anthropic-ratelimit-requests-limit"] == "7"
        else:
            reset = datetime.fromisoformat(limits.pop(RESET))
            assert timedelta(hours=5) < reset - datetime.now(UTC) <= timedelta(hours=6, seconds=1)
            assert limits == {
                "anthropic-ratelimit-requests-limit": "60",
                "anthropic-ratelimit-requests-remaining": "59",
            }
    else:
        assert not limits
    own, name = headers.get("x-kvasir-request-id"), "request-id" if client == "anthropic" else "x-request-id"
    if dialect == "gemini":
        assert own is None
    else:
        assert (headers[name], bool(own and own != "req_theirs")) == ("req_theirs", True)
    assert headers.get("Retry-After") == ("7" if how == "refused" else None)
    if how == "refused" and client == "anthropic":
        assert headers[name].encode() in body


async def test_a_remembered_answer_tells_no_limits_of_an_upstream_that_was_not_asked() -> None:
    async with upstream(told("anthropic", "whole")) as stub:
        table = stub.settings(dialect="anthropic").model_dump(exclude={"key"}) | {"key": "sk-upstream"}
        cache = {"mode": "on", "requests": "all"}
        async with (
            whole(engines=0, sections={"upstreams": [table], "response_cache": cache}) as running,
            aiohttp.ClientSession() as session,
        ):
            path, body = ASKED["openai"]
            seen = []
            for _ in range(2):
                async with session.post(running.url + path, json=body) as answer:
                    seen.append(("x-ratelimit-limit-requests" in answer.headers, answer.headers["x-request-id"]))
    assert seen[0] == (True, "req_theirs")
    assert seen[1][0] is False
    assert seen[1][1] != "req_theirs"
    assert len(stub.got) == 1
