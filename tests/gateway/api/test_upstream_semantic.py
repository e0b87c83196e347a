"""The semantic cache in front of hosted APIs: the answer to a question that means the same, in each API and form; who
never gets one; and what audits, failures and wrong answers do."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.admin.accounting import audit_entry
from gateway.config import TenantSettings
from gateway.errors import EmbedderError
from gateway.responses.semantic.cache import SemanticCache
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.gemini import gemini
from tests.fakes.meanings import Meanings, semantic_cache
from tests.fakes.shelf import Shelf
from tests.fakes.upstream import (
    CHUNK,
    CONTENT,
    CONTENT_STREAM,
    MESSAGE,
    MESSAGE_STREAM,
    RESPONSE,
    RESPONSE_STREAM,
    SSE,
    USAGE,
    StubUpstream,
    Told,
    chunk,
    error,
    events,
    said,
    upstream,
)
from tests.fakes.upstream import whole_chat as whole
from tests.fakes.waiting import until

FIRST, SECOND, THIRD = "How do I reset my password?", "how can i reset my password", "how should i reset my password"
CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1beta/models/up-1:generateContent"
RESPONSES = "/v1/responses"
END = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
STREAM = Told(
    [*events(chunk("Hel"), chunk("lo"), END, {**CHUNK, "choices": [], "usage": USAGE}), b"data: [DONE]\n\n"], media=SSE
)
BARE = Told([*STREAM.pieces[:3], STREAM.pieces[4]], media=SSE)


def chat(text: str, *before: Any, **more: Any) -> dict[str, Any]:
    return {"model": "up-1", "messages": [*before, {"role": "user", "content": text}], "temperature": 0, **more}


def message(text: str, **more: Any) -> dict[str, Any]:
    return {**chat(text), "max_tokens": 9, **more}


def response(said: Any, **more: Any) -> dict[str, Any]:
    return {"model": "up-1", "input": said, "temperature": 0, "store": False, **more}


def content(text: str, **more: Any) -> dict[str, Any]:
    config = {"temperature": 0, **more.pop("config", {})}
    return {"contents": [{"role": "user", "parts": [{"text": text}]}], "generationConfig": config, **more}


@dataclass
class Front:
    """A gateway before one upstream, and its semantic cache."""

    gateway: Gateway
    stub: StubUpstream
    semantic: SemanticCache
    meanings: Meanings
    audits: list[Any]  # what each took

    async def ask(self, body: Any, path: str = CHAT, **headers: str) -> tuple[str, bytes, Any]:
        """What the cache had, the answer, and its headers."""
        gateway = self.gateway
        async with gateway.session.post(gateway.url + path, json=body, headers=headers) as answer:
            return answer.headers.get("x-kvasir-cache", ""), await answer.read(), answer.headers

    async def outcome(self, body: Any, path: str = CHAT, **headers: str) -> str:
        return (await self.ask(body, path, **headers))[0]


@asynccontextmanager
async def front(
    *answers: Told, dialect: str = "openai", chance: float = 1.0, mode: str = "on", **options: Any
) -> AsyncIterator[Front]:
    meanings = Meanings({"password?": 0.0, "reset": 5.0})
    semantic = semantic_cache(meanings, mode=mode, chance=chance, **options.pop("settings", {}))
    audits: list[Any] = []
    cache = response_cache(
        options.pop("redis", None), semantic=semantic, audited=lambda *told: audits.append(audit_entry(*told))
    )
    async with upstream(*answers) as stub:
        upstreams = [stub.settings("up-1", "up-2", dialect=dialect, retries=0, **options.pop("upstream", {}))]
        async with running(upstreams=upstreams, response_cache=cache, **options) as gateway:
            yield Front(gateway, stub, semantic, meanings, audits)
            await semantic.close()


@pytest.mark.parametrize(
    ("dialect", "path", "told", "asked"),
    [
        ("openai", CHAT, whole(), chat),
        ("openai", CHAT, STREAM, lambda text: chat(text, stream=True, stream_options={"include_usage": True})),
        ("openai", CHAT, BARE, lambda text: chat(text, stream=True)),
        (
            "openai",
            CHAT,
            whole(),
            lambda text: chat(text, {"role": "system", "content": [{"type": "text", "text": "b"}]}),
        ),
        ("openai", RESPONSES, RESPONSE, lambda text: response(text, instructions="Be brief.")),
        ("openai", RESPONSES, RESPONSE_STREAM, lambda text: response([{"role": "user", "content": text}], stream=True)),
        ("anthropic", MESSAGES, MESSAGE, lambda text: message(text, system="Be brief.")),
        ("anthropic", MESSAGES, MESSAGE_STREAM, lambda text: message(text, stream=True)),
        ("gemini", GENERATE, CONTENT, content),
        ("gemini", f"{GENERATE.replace(':g', ':streamG')}?alt=sse", CONTENT_STREAM, content),
    ],
)
async def test_a_question_in_other_words_gets_the_bytes_of_the_answer_that_was_given(
    dialect: str, path: str, told: Told, asked: Any
) -> None:
    async with front(told, dialect=dialect) as one:
        first, second = await one.ask(asked(FIRST), path), await one.ask(asked(SECOND), path)
        assert (first[0], second[0], len(one.stub.got)) == ("miss", "semantic", 1)
        assert first[1] == second[1] == b"".join(told.pieces)
        assert second[2]["x-kvasir-cache-key"] == first[2]["x-kvasir-cache-key"]
        assert (second[2]["x-kvasir-cache-similarity"], second[2]["Age"]) == ("0.9962", "0")
        assert "x-kvasir-engine" not in second[2]
        (space,) = one.semantic.stats()["spaces"]
        assert (space["owner"], space["model"], space["hits"]) == ("tenant:anonymous", "up-1", 1)


async def test_it_is_told_in_the_form_that_the_sdk_asks_for() -> None:
    asks: Any = {"model": "up-1", "temperature": 0}
    async with front(whole()) as one:
        sdk = one.gateway.sdk()
        first = await sdk.chat.completions.create(**asks, messages=[{"role": "user", "content": FIRST}])
        async with sdk.chat.completions.stream(
            **asks, messages=[{"role": "user", "content": SECOND}], stream_options={"include_usage": True}
        ) as stream:
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.content == first.choices[0].message.content == "Hello"
        assert (streamed.usage, len(one.stub.got)) == (first.usage, 1)
    older: Any = {"extra_headers": {"anthropic-version": "2023-06-01"}, "extra_body": {"temperature": 0}}
    async with front(MESSAGE_STREAM, dialect="anthropic") as one:
        claude, body = one.gateway.anthropic(), {"model": "up-1", "max_tokens": 9}
        async with claude.messages.stream(**body, messages=[{"role": "user", "content": FIRST}], **older) as events:  # type: ignore[arg-type]
            final = await events.get_final_message()
        told = await claude.messages.create(**body, messages=[{"role": "user", "content": SECOND}], **older)  # type: ignore[call-overload]
        assert (told.content[0].text, told.usage, len(one.stub.got)) == ("Hello", final.usage, 1)
    async with front(CONTENT, dialect="gemini") as one:
        sdk_g = gemini(one.gateway.url)
        config: Any = {"temperature": 0}
        await sdk_g.aio.models.generate_content(model="up-1", contents=FIRST, config=config)
        pieces = await sdk_g.aio.models.generate_content_stream(model="up-1", contents=SECOND, config=config)
        assert [piece.text async for piece in pieces] == ["Hello"]
        assert len(one.stub.got) == 1
        await sdk_g.aio.aclose()
        sdk_g.close()


@pytest.mark.parametrize(
    "more",
    [
        {"model": "up-2"},
        {"messages": [{"role": "system", "content": "Be rude."}, {"role": "user", "content": SECOND}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": SECOND}]}]},
        {"messages": [{"role": "user", "name": "eve", "content": SECOND}]},
        {"max_tokens": 5},
        {"temperature": 0.1, "seed": 1},
        {"x_unknown": 1},
        {"stop": ["x"]},
        {"prompt_cache_key": "k"},
        {"cache": {"namespace": "n"}},
        {"cache": {"semantic": False}},
        {"cache": {"no-cache": True}},
    ],
)
async def test_only_requests_that_differ_in_nothing_else_are_compared(more: dict[str, Any]) -> None:
    async with front(whole()) as one:
        await one.ask(chat(FIRST))
        assert await one.outcome(chat(SECOND) | more) == "miss"
        assert await one.outcome(chat(THIRD)) == "semantic"


_TOOL = {"type": "function", "function": {"name": "f"}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
_LOOKED = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {}}]}


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (chat(SECOND, tools=[_TOOL], cache={"use-cache": True}), "tools"),
        (chat(SECOND, response_format={"type": "json_object"}), "form"),
        (chat(SECOND, n=2), "form"),
        (chat(SECOND, guided_json={}), "form"),
        (chat(SECOND, logprobs=True), "form"),
        (chat(SECOND, model="up-1", temperature=0.5, seed=1), "sampling"),
        (chat(SECOND, temperature=None, seed=1), "sampling"),
        (chat(SECOND, _LOOKED, {"role": "tool", "tool_call_id": "c", "content": "x"}), "chat"),
        (chat(SECOND, {"role": "user", "content": [_IMAGE]}), "chat"),
        ({**chat(""), "messages": [{"role": "user", "content": [{"type": "text", "text": SECOND}, _IMAGE]}]}, "chat"),
        ({**chat(""), "messages": [{"role": "assistant", "content": SECOND}]}, "chat"),
        ({**chat(""), "messages": SECOND}, "chat"),
        ({**chat(""), "messages": [{"role": ["user"], "content": SECOND}]}, "chat"),
        (chat("What is the password? How do I reset it today?"), "moment"),
    ],
)
async def test_what_is_not_one_text_for_one_text_has_the_exact_cache_alone(body: dict[str, Any], outcome: str) -> None:
    async with front(whole()) as one:
        first, again = await one.ask(body), await one.ask(body)
        assert (first[0], again[0], first[1]) == ("miss", "exact", again[1])
        assert one.semantic.outcomes == {outcome: 1}
        assert one.meanings.embedded == []


@pytest.mark.parametrize(
    ("dialect", "path", "told", "body"),
    [
        ("openai", RESPONSES, RESPONSE, response(SECOND, text={"format": {"type": "json_object"}})),
        ("openai", RESPONSES, RESPONSE, response(SECOND, include=["message.output_text.logprobs"])),
        ("anthropic", MESSAGES, MESSAGE, message(SECOND, output_config={"format": {"type": "json_schema"}})),
        ("gemini", GENERATE, CONTENT, content(SECOND, config={"responseMimeType": "application/json"})),
        ("gemini", GENERATE, CONTENT, content(SECOND, config={"response_schema": {}})),
    ],
)
async def test_answers_in_a_form_are_asked_for_in_each_api(dialect: str, path: str, told: Told, body: Any) -> None:
    async with front(told, dialect=dialect) as one:
        await one.ask(body, path)
        assert one.semantic.outcomes == {"form": 1}


async def test_prompts_that_are_no_chats_are_not_compared() -> None:
    choice = {"index": 0, "text": "Hello", "finish_reason": "stop", "logprobs": None}
    told = said(
        {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    )
    async with front(told) as one:
        for text in (FIRST, SECOND):
            body = {"model": "up-1", "prompt": text, "temperature": 0}
            assert await one.outcome(body, "/v1/completions") == "miss"
        assert one.semantic.outcomes == {"chat": 2}


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        (whole(refusal="no"), "miss"),
        (whole(tool_calls=[{"id": "c"}]), "exact"),
        (whole(annotations=[{"type": "url_citation"}]), "exact"),
    ],
)
async def test_answers_that_are_more_than_a_text_are_not_given_to_others(answer: Told, again: str) -> None:
    """A refusal not even to the same question."""
    async with front(answer) as one:
        assert [await one.outcome(chat(text)) for text in (FIRST, SECOND)] == ["miss", "miss"]
        assert await one.outcome(chat(FIRST)) == again


async def test_tenants_opt_in_and_have_answers_of_their_own() -> None:
    tenants = [TenantSettings(name=name, keys=(f"key-of-{name}",)) for name in ("north", "south")]
    async with front(whole(), tenants=tenants, mode="ask") as one:
        north, south = ({"Authorization": f"Bearer key-of-{name}"} for name in ("north", "south"))
        asks = {"cache": {"semantic": True}}
        assert await one.outcome(chat(FIRST, **asks), **north) == "miss"
        assert await one.outcome(chat(SECOND), **north) == "miss"
        assert await one.outcome(chat(SECOND, **asks), **south) == "miss"
        assert await one.outcome(chat(THIRD, **asks), **south) == "semantic"
        assert await one.outcome(chat(THIRD, **asks), **north) == "semantic"


async def test_a_request_may_only_raise_the_similarity() -> None:
    async with front(whole()) as one:
        await one.ask(chat(FIRST))
        assert await one.outcome(chat(SECOND, cache={"similarity": 0.999})) == "miss"


async def test_another_upstream_for_the_model_has_other_answers() -> None:
    semantic = semantic_cache(Meanings({"password?": 0.0, "reset": 5.0}))
    cache, got = response_cache(semantic=semantic), []
    async with upstream(whole("One")) as stub, upstream(whole("Two")) as other:
        for one, text in ((stub, FIRST), (other, SECOND), (stub, THIRD)):
            async with running(upstreams=[one.settings()], response_cache=cache) as gateway:
                _, told, headers = await gateway.post(CHAT, chat(text))
                got.append((headers["x-kvasir-cache"], told["choices"][0]["message"]["content"]))
    await semantic.close()
    assert got == [("miss", "One"), ("miss", "Two"), ("semantic", "One")]


async def test_a_beta_of_an_api_is_another_situation() -> None:
    async with front(MESSAGE, dialect="anthropic") as one:
        await one.ask(message(FIRST), MESSAGES)
        assert await one.outcome(message(SECOND), MESSAGES, **{"anthropic-beta": "thinking-2027"}) == "miss"
        assert await one.outcome(message(THIRD), MESSAGES) == "semantic"


# -- audits -----------------------------------------------------------------------------------------------------------


async def test_an_audit_asks_the_upstream_once_more_off_the_path_and_not_in_the_name_of_the_request() -> None:
    headers = {"idempotency-key": "i-1", "x-stainless-lang": "python"}
    async with front(whole(), chance=0.0) as one:
        await one.ask(chat(FIRST))
        assert await one.outcome(chat(SECOND), **headers) == "semantic"
        await until(lambda: one.semantic.events["audited"] == 1)
        _, audit = one.stub.got
        assert (audit.path, audit.json) == (CHAT, chat(SECOND))
        assert "idempotency-key" not in audit.headers
        assert audit.headers["x-stainless-lang"] == "python"
        (entry,) = one.audits
        assert (entry.tenant, entry.model, entry.lane, entry.by_upstream) == ("anonymous", "up-1", "audit", True)
        assert (entry.prompt_tokens, entry.completion_tokens) == (100, 7)
        assert await one.outcome(chat(THIRD)) == "semantic"


@pytest.mark.parametrize("stream", [{}, {"stream": True}])
async def test_an_answer_that_an_audit_finds_wrong_is_not_given_again_and_closes_the_budget(stream: Any) -> None:
    def told(text: str) -> Told:
        if not stream:
            return whole(text)
        return Told([*events(chunk(text), END), b"data: [DONE]\n\n"], media=SSE)

    async with front(told("Yes."), told("No."), told("No."), chance=0.0) as one:
        await one.ask(chat(FIRST, **stream))
        assert await one.outcome(chat(SECOND, **stream)) == "semantic"
        await until(lambda: one.semantic.events["audited"] == 1)
        again = await one.ask(chat(SECOND, **stream))
        assert (again[0], again[1]) == ("miss", b"".join(told("No.").pieces))
        assert await one.outcome(chat(THIRD, **stream)) == "miss"
        (space,) = one.semantic.stats()["spaces"]
        assert (space["quarantined"], space["wrong_share"], space["closed"]) == (1, 1.0, True)


async def test_who_wants_nothing_to_be_asked_gets_what_means_the_same_without_an_audit() -> None:
    only = {"Cache-Control": "only-if-cached"}
    async with front(whole(), chance=0.0) as one:
        await one.ask(chat(FIRST))
        assert await one.outcome(chat(SECOND), **only) == "semantic"
        status, told, _ = await one.gateway.post(CHAT, chat("How do I boil an egg?"), headers=only)
        assert (status, told["error"]["code"]) == (504, "not_cached")
        assert one.semantic.events["audited"] == 0
        assert len(one.stub.got) == 1


async def test_what_cannot_be_audited_is_answered_afresh() -> None:
    async with front(whole(), chance=0.0, settings={"max_audits": 0}) as one:
        await one.ask(chat(FIRST))
        assert await one.outcome(chat(SECOND)) == "miss"
        assert one.semantic.outcomes["unaudited"] == 1


@pytest.mark.parametrize(
    "told", [error(500), error(400), Told([b"no json"]), Told([b"{"], then="cut"), whole("Hello" + " " * (1 << 20))]
)
async def test_an_audit_that_fails_is_counted_and_blames_nobody(told: Told) -> None:
    async with front(whole(), told, chance=0.0) as one:
        await one.ask(chat(FIRST))
        assert await one.outcome(chat(SECOND)) == "semantic"
        await until(lambda: one.semantic.events["audits_lost"] == 1)
        (space,) = one.semantic.stats()["spaces"]
        assert (space["audits"], space["closed"]) == (0, False)


async def test_an_answer_that_is_not_to_be_kept_may_be_found_and_teaches_nobody() -> None:
    no_store = {"Cache-Control": "no-store"}
    async with front(whole()) as one:
        assert await one.outcome(chat(FIRST), **no_store) == "miss"
        assert await one.outcome(chat(SECOND)) == "miss"
        assert await one.outcome(chat(THIRD), **no_store) == "semantic"


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_an_embedder_that_fails_leaves_the_exact_cache(caplog: pytest.LogCaptureFixture) -> None:
    async with front(whole()) as one:
        one.meanings.error = EmbedderError("The texts could not be embedded.")
        with caplog.at_level(logging.WARNING):
            assert [await one.outcome(chat(text)) for text in (FIRST, SECOND, FIRST)] == ["miss", "miss", "exact"]
        assert len([record for record in caplog.records if "semantic" in record.message]) == 1


async def test_while_redis_is_away_the_memory_of_the_gateway_is_asked() -> None:
    shelf = Shelf()
    shelf.down = True
    async with front(whole(), redis=shelf) as one:
        assert [await one.outcome(chat(text)) for text in (FIRST, SECOND)] == ["miss", "semantic"]


async def test_an_upstream_that_fails_teaches_nothing_and_its_error_is_told() -> None:
    async with front(error(500), whole()) as one:
        status, told, headers = await one.gateway.post(CHAT, chat(FIRST))
        assert (status, told["error"]["code"], headers["x-kvasir-cache"]) == (500, "c", "miss")
        assert await one.outcome(chat(SECOND)) == "miss"
        assert await one.outcome(chat(THIRD)) == "semantic"
