"""Whatever JSON is sent, the answer is an answer or a 400 in the shape of the API, never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.anthropic.parameters import MESSAGES as TURNED_TABLE
from gateway.api.anthropic.request import parse_message
from gateway.api.call import settle
from gateway.api.openai.embeddings import EMBEDDINGS
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.openai.request import parse_chat, parse_completion
from gateway.api.openai.responses.parameters import RESPONSE
from gateway.api.openai.responses.request import parse, to_call
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import BadRequestError
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline, hello

WORDS = ["user", "assistant", "tool", "text", "type", "role", "content", "function", "name", "arguments", "id", "json"]
WORDS += ["prompt_cache_breakpoint", "mode", "ttl", "explicit", "30m"]
WORDS += [
    "input_text",
    "output_text",
    "function_call",
    "function_call_output",
    "call_id",
    "output",
    "summary",
    "json_schema",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(WORDS)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*WORDS, "tool_calls", "tool_call_id", "0", "5"]), inner, max_size=5)
    ),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "function"]) | SCALARS},
        optional=dict.fromkeys(("content", "tool_calls", "tool_call_id", "name", "function_call", "refusal"), VALUES),
    ),
    min_size=1,
    max_size=3,
)


def bodies(table: Any, prompt: st.SearchStrategy[Any], name: str) -> st.SearchStrategy[dict[str, Any]]:
    others = st.dictionaries(
        st.sampled_from(sorted(set(table) - {"model", name})) | st.text(max_size=3), VALUES, max_size=3
    )
    return st.builds(lambda rest, value: {**rest, "model": "demo", name: value}, others, prompt)


ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | SCALARS},
        optional={"role": st.sampled_from(["user", "assistant", "developer"])}
        | dict.fromkeys(("content", "call_id", "name", "arguments", "output", "id", "status", "summary"), VALUES),
    ),
    max_size=3,
)
RESPONSES = bodies(RESPONSE, ITEMS | VALUES, "input")
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "document", "tool_use", "tool_result", "thinking", "image"]) | SCALARS},
        optional=dict.fromkeys(("text", "source", "cache_control", "tool_use_id", "id", "name", "input"), VALUES),
    ),
    max_size=3,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | SCALARS,
            "content": BLOCKS | st.text(" \nab", max_size=5),
        }
    ),
    max_size=4,
)
TURNED = st.builds(lambda body, limit: {"max_tokens": limit, **body}, bodies(TURNED_TABLE, TURNS, "messages"), SCALARS)
CHATS = bodies(CHAT, MESSAGES | VALUES, "messages")
COMPLETIONS = bodies(COMPLETION, VALUES | st.lists(st.integers(0, 2000), max_size=5), "prompt")
EMBEDS = bodies(EMBEDDINGS, VALUES | st.lists(st.integers(0, 2000), max_size=5), "input").map(
    lambda body: {**body, "model": "all-MiniLM-L6-v2"}
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=CHATS)
def test_any_chat_is_a_call_or_a_bad_request(body: dict[str, Any]) -> None:
    check(lambda: settle(parse_chat(body, LeaseSettings()), hello()))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=COMPLETIONS)
def test_any_completion_is_a_call_or_a_bad_request(body: dict[str, Any]) -> None:
    check(lambda: settle(parse_completion(body), hello()))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=RESPONSES)
def test_any_response_is_a_call_or_a_bad_request(body: dict[str, Any]) -> None:
    def response() -> None:
        asked = parse(body)
        settle(to_call(asked, asked.items, LeaseSettings()), hello())

    check(response)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=TURNED)
def test_any_message_is_a_call_or_a_bad_request(body: dict[str, Any]) -> None:
    check(lambda: settle(parse_message(body, "2023-06-01", AnthropicSettings(), LeaseSettings()).call, hello()))


def check(parse: Any) -> None:
    refused = None
    try:
        parse()
    except BadRequestError as error:
        refused = error
    assert refused is None or (refused.code and refused.param is not None and len(refused.message) < 1000)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(VALUES | CHATS | COMPLETIONS | RESPONSES | EMBEDS | TURNED, min_size=10, max_size=30))
def test_over_http_any_json_gets_an_answer_in_the_shape_of_the_api(batch: list[Any]) -> None:
    async def work() -> None:
        async with running(FakePipeline(pieces=["x"]), embedder=fake_embedder(FakeTextModel())) as gateway:
            for body in batch:
                for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"):
                    async with gateway.session.post(gateway.url + path, data=json.dumps(body)) as answer:
                        text = await answer.text()
                        assert answer.status in (200, 400, 404), text
                        if answer.status != 200:
                            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
                version = {"anthropic-version": "2026-10-21"}
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    async with gateway.session.post(gateway.url + path, json=body, headers=version) as answer:
                        text = await answer.text()
                        assert answer.status in (200, 400, 404), text
                        if answer.status != 200:
                            assert set(json.loads(text)) == {"type", "error", "request_id"}
            assert gateway.pipeline.open == 0

    asyncio.run(work())
