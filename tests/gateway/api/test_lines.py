"""Lines of batches: each one request of the batch lane, without an HTTP request."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import takewhile
from typing import Any

import orjson
import pytest

from engine.protocol import DIGEST_BYTES, Sampling, split_digests
from gateway.api.anthropic.handlers import endpoint_name
from gateway.api.call import Call
from gateway.api.lines import MAX_PREFIX_BYTES, Answered, LineRequest, beginning_of_body, beginning_of_call
from gateway.api.routes import RUNNER
from gateway.config import BatchSettings, NamespaceSettings
from gateway.errors import (
    DeadlineError,
    EngineFailedError,
    EngineLostError,
    EnginesDiedError,
    KvasirError,
    NoEngineError,
    OverloadedError,
    QueueFullError,
)
from gateway.queues.batch.paths import path_of
from gateway.types import ChatPrompt, Prompt, Tenant, TextPrompt, TokenPrompt, Tool, Usage
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import ENGINE, running
from tests.fakes.pipeline import FakeModels, FakePipeline

TENANT = Tenant("acme")
CHAT, MESSAGE = "/v1/chat/completions", endpoint_name("2026-10-21")
ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASKED,
    "/v1/completions": {"model": "demo", "prompt": ["a", "b"]},
    "/v1/responses": {"model": "demo", "input": "Hi"},
    endpoint_name("2023-06-01"): ASKED,
    MESSAGE: ASKED,
}


async def ask(
    url: str, body: dict[str, Any], pipeline: FakePipeline | None = None, *, namespace: str = "", **options: Any
) -> Answered:
    async with running(pipeline, **options) as gateway:
        return await gateway.app[RUNNER].answer(LineRequest(url, TENANT, body, namespace, "req_1"))


@pytest.mark.parametrize("url", BODIES)
async def test_a_line_is_answered_as_its_endpoint_answers_in_the_batch_lane(url: str) -> None:
    pipeline = FakePipeline()
    answered = await ask(url, BODIES[url], pipeline, batches=BatchSettings(line_timeout_s=5000))
    assert (answered.status, answered.retry) == (200, "no")
    num = len(pipeline.requests)
    assert replace(answered.usage, cached_tokens=0) == Usage(num * pipeline.prompt_tokens, num * 2)
    assert "Hello world" in answered.body.decode()
    for request in pipeline.requests:
        assert (request.lane, request.tenant, request.request_id) == ("batch", TENANT, "req_1")
        assert request.deadline_s - request.received_s == pytest.approx(5000)


@pytest.mark.parametrize("asked", ["flex", "priority", "auto"])
async def test_a_line_is_served_in_no_tier_of_the_online_lane(asked: str) -> None:
    pipeline = FakePipeline()
    answered = await ask(CHAT, ASKED | {"service_tier": asked}, pipeline)
    assert (json.loads(answered.body)["service_tier"], pipeline.requests[-1].tier) == ("default", "default")


async def test_a_message_of_a_batch_says_so_in_its_usage() -> None:
    assert json.loads((await ask(MESSAGE, ASKED)).body)["usage"]["service_tier"] == "batch"


async def test_a_line_may_ask_for_vectors_which_have_no_prompt() -> None:
    embedder = fake_embedder(FakeTextModel())
    (name, *_) = embedder.models()
    body = {"model": name, "input": "Hi"}
    async with running(embedder=embedder) as gateway:
        lines = gateway.app[RUNNER]
        line = LineRequest("/v1/embeddings", TENANT, body)
        answered = await lines.answer(line)
        assert answered.status == 200
        assert answered.usage == Usage(4, 0)
        assert len(json.loads(answered.body)["data"]) == 1
        assert await lines.find_beginning(line) is None


@pytest.mark.parametrize("url", BODIES)
async def test_what_a_line_begins_with_is_known_before_it_runs_and_nothing_is_asked_for_it(url: str) -> None:
    pipeline = FakePipeline()
    async with running(pipeline) as gateway:
        lines = gateway.app[RUNNER]
        beginning = await lines.find_beginning(LineRequest(url, TENANT, BODIES[url]))
        assert beginning is not None
        assert pipeline.requests == []
        assert await lines.find_beginning(LineRequest(url, TENANT, {})) is None


async def test_the_same_prompt_begins_alike_in_whatever_dialect_it_comes() -> None:
    document, ask = "A long document about rivers. " * 40, "What is a river?"
    parts = [{"type": "text", "text": ask}]
    bodies = [
        (CHAT, {"messages": [{"role": "system", "content": document}, {"role": "user", "content": ask}]}),
        (CHAT, {"messages": [{"content": document, "role": "system"}, {"role": "user", "content": parts}]}),
        (MESSAGE, {"system": document, "messages": [{"role": "user", "content": parts}], "max_tokens": 9}),
        ("/v1/responses", {"instructions": document, "input": ask}),
    ]
    async with running() as gateway:
        lines = gateway.app[RUNNER]
        found = [await lines.find_beginning(LineRequest(url, TENANT, {"model": "demo"} | body)) for url, body in bodies]
        salted = bodies[0][1] | {"model": "demo", "cache_salt": "s"}
        other = await lines.find_beginning(LineRequest(CHAT, TENANT, salted))
    digests = {beginning.digests for beginning in found if beginning is not None}
    assert len(digests) == 1
    assert len(digests.pop()) > 10 * DIGEST_BYTES
    assert other is not None
    assert found[0] is not None
    assert other.digests[:DIGEST_BYTES] != found[0].digests[:DIGEST_BYTES]


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, ASKED | {"stream": True}, "stream"),
        (CHAT, ASKED | {"temperature": "hot"}, "temperature"),
        ("/v1/responses", {"model": "demo", "input": "Hi", "background": True}, "background"),
        ("/v1/responses", {"model": "demo", "input": "Hi", "stream": True}, "stream"),
        ("/v1/completions", {"model": "demo", "prompt": "Hi", "stream": True}, "stream"),
        (MESSAGE, ASKED | {"stream": True}, "stream"),
        (MESSAGE, ASKED | {"max_tokens": 0}, "max_tokens"),
        (MESSAGE, ASKED | {"speed": "standard"}, "speed"),
        (MESSAGE, ASKED | {"temperature": 1.0}, "temperature"),
    ],
)
async def test_a_line_that_cannot_be_carried_out_gets_the_error_of_its_dialect(
    url: str, body: dict[str, Any], param: str | None
) -> None:
    answered = await ask(url, body)
    assert (answered.status, answered.retry) == (400, "no")
    told = json.loads(answered.body)
    if url == MESSAGE:
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"].startswith(f"{param}: ")
        assert told["request_id"] == "req_1"
    else:
        assert told["error"]["param"] == param


def died() -> EngineLostError:
    error = EngineLostError("is gone")
    error.died = True
    return error


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFullError("full", retry_after_s=3.0), 429, "later"),
        (NoEngineError("demo", 3.0), 503, "later"),
        (DeadlineError("waited", retry_after_s=3.0), 503, "later"),
        (DeadlineError("was answered for too long"), 503, "no"),
        (EngineFailedError("cannot"), 500, "again"),
        (EngineLostError("is gone"), 502, "again"),
        (died(), 502, "died"),
        (EnginesDiedError(), 500, "no"),
        (RuntimeError("a bug"), 500, "again"),
    ],
)
async def test_a_failure_says_whether_another_try_is_worth_it(error: Exception, status: int, retry: str) -> None:
    answered = await ask(CHAT, ASKED, FakePipeline(fails_before=error))
    assert (answered.status, answered.retry) == (status, retry)
    assert answered.retry_after_s == (3.0 if retry == "later" else None)
    message = error.message if isinstance(error, KvasirError) else "The server had an error"
    assert message in json.loads(answered.body)["error"]["message"]


async def test_a_line_runs_in_the_namespace_that_its_batch_asked_for() -> None:
    named = NamespaceSettings(name="shared", tenants=("*",))
    pipeline = FakePipeline()
    assert (await ask(CHAT, ASKED, pipeline, namespace="shared", namespaces=(named,))).status == 200
    scope = pipeline.requests[-1].scope
    assert scope is not None
    assert scope.namespace == "shared"
    assert (await ask(CHAT, ASKED, namespace="other", namespaces=(named,))).status == 403


async def test_each_line_has_its_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvasir.access"):
        await ask(CHAT, ASKED)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    for told in ("request_id=req_1", "tenant=acme", f'endpoint="{CHAT} (batch)"', "lane=batch"):
        assert told in line


async def test_a_model_that_nobody_has_yet_may_come_with_an_engine_that_has_not_said_hello() -> None:
    body = ASKED | {"model": "other"}
    async with running() as gateway:
        lines = gateway.app[RUNNER]
        line = LineRequest(CHAT, TENANT, body, request_id="req_1")
        assert (await lines.answer(line)).retry == "no"
        assert await lines.find_beginning(line) is None
        for engines in ([], [ENGINE, replace(ENGINE, state="connecting", model=None)]):
            gateway.state["engines"] = engines
            assert (await lines.answer(line)).retry == "later"
            with pytest.raises(OverloadedError):
                await lines.find_beginning(line)


async def test_a_prompt_is_asked_for_again_when_its_engines_are_back() -> None:
    async with running(models=FakeModels(away=NoEngineError("demo", 2.0))) as gateway:
        with pytest.raises(OverloadedError):
            await gateway.app[RUNNER].find_beginning(LineRequest(CHAT, TENANT, ASKED))


# -- beginnings of prompts ---------------------------------------------------------------------------------------------


def call(prompt: Prompt, **more: Any) -> Call:
    return Call("demo", (prompt,), "messages", Sampling(max_tokens=1), **more)


def test_prompts_that_begin_alike_stand_together() -> None:
    document = "A long document about rivers. " * 40

    def chat(text: str, question: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        return {"model": "up-1", "messages": messages, "temperature": 0.5}

    bodies = [chat(text, f"{number}?") for number in range(3) for text in (document, "B" + document, "C" + document)]
    beginnings = [beginning_of_body(body) for body in bodies]
    order = sorted(range(9), key=lambda index: path_of(beginnings[index].digests))
    assert [{index % 3 for index in order[start : start + 3]} for start in (0, 3, 6)] in [
        [{a}, {b}, {c}] for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    ]
    assert beginnings[0].num_tokens == pytest.approx(len(orjson.dumps(bodies[0]["messages"])) / 4, rel=0.1)


def test_what_the_system_says_is_shared_by_lines_with_other_tools_and_tools_by_those_with_other_questions() -> None:
    def chat(tool: str, question: str) -> Call:
        messages = [{"role": "system", "content": "Be brief. " * 50}, {"role": "user", "content": question}]
        return call(ChatPrompt(messages, tools=(Tool(tool, "What it does. " * 50, {}),)))

    one, same_tool, other_tool = (
        beginning_of_call(made, "").digests for made in (chat("a", "Why?"), chat("a", "How?"), chat("b", "Why?"))
    )
    assert common(one, other_tool) >= 500 // 64
    assert common(one, same_tool) >= 1200 // 64


def common(one: bytes, other: bytes) -> int:
    """Leading digests that are the same."""
    pairs = zip(split_digests(one), split_digests(other), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_texts_and_tokens_have_beginnings_of_which_no_more_is_read_than_decides() -> None:
    long = beginning_of_call(call(TextPrompt("x" * 2 * MAX_PREFIX_BYTES)), "")
    assert long.digests == beginning_of_call(call(TextPrompt("x" * 3 * MAX_PREFIX_BYTES)), "").digests
    assert long.num_tokens == 2 * MAX_PREFIX_BYTES // 4
    assert beginning_of_call(call(TokenPrompt(bytes(4 * 100))), "").num_tokens == 100
    assert beginning_of_call(call(TokenPrompt(b"")), "") == (b"", 0)
