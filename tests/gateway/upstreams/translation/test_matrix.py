"""Every client form before every upstream form, by the real SDKs: what was asked arrives, and what was answered."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.hosted import (
    ANSWER_TOKENS,
    CACHED_TOKENS,
    CLIENTS,
    PROMPT_TOKENS,
    QUESTION,
    SYSTEM,
    UPSTREAMS,
    Failed,
    Heard,
    answers,
    ask,
    refuses,
)
from tests.fakes.upstream import StubUpstream, Told, upstream
from tests.fakes.whole import whole

PAIRS = [
    (client, dialect)
    for client, dialect in itertools.product(CLIENTS, UPSTREAMS)
    if not {client, dialect} <= {"openai", "responses"} and client != dialect  # what is one dialect passes through
]
CALLS = [("get_weather", {"place": "Oslo ✓"}), ("get_weather", {"place": "Rome"})]


@asynccontextmanager
async def gateway(dialect: str, *told: Told, **options: Any) -> AsyncIterator[tuple[str, StubUpstream]]:
    async with upstream(*told) as stub:
        api = {"dialect": "openai", "api": "responses"} if dialect == "responses" else {"dialect": dialect}
        table = stub.settings(retries=0, **api, **options).model_dump(exclude={"key"})
        table |= {"key": "sk-upstream"}
        async with whole(engines=0, sections={"upstreams": [table]}) as running:
            yield running.url, stub


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_a_text_comes_through(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, answers(dialect, ["Hel", "lo ✓"], stream=stream)) as (url, stub):
        heard = await ask(client, url, stream=stream)
    assert heard == Heard("Hello ✓", [], PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS)
    (got,) = stub.got
    assert SYSTEM in got.body.decode()
    assert QUESTION in got.body.decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_calls_come_through(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, answers(dialect, ["Wait."], CALLS, stream=stream)) as (url, stub):
        heard = await ask(client, url, stream=stream, tools=True)
    assert isinstance(heard, Heard)
    assert (heard.text, heard.calls) == ("Wait.", CALLS)
    assert b"get_weather" in stub.got[0].body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_a_refusal_comes_in_the_clients_own_form(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, refuses(dialect, 429, "slow down", retry_after="7")) as (url, _):
        failed = await ask(client, url, stream=stream)
    assert isinstance(failed, Failed)
    assert failed.status == 429
    assert "slow down" in failed.message


@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_an_answer_that_breaks_off_is_none(client: str, dialect: str) -> None:
    told = answers(dialect, ["Hel", "lo"], stream=True)
    cut = Told(told.pieces[: 4 if dialect == "anthropic" else 1], media=told.media)
    async with gateway(dialect, cut) as (url, _):
        with pytest.raises(Exception, match=r"(?i)middle of its answer|upstream|response"):  # each SDK has its own
            heard = await ask(client, url, stream=True)
            assert isinstance(heard, Failed), heard
            raise RuntimeError(heard.message)
