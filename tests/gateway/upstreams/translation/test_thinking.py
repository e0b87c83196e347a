"""Two turns with tools, by the real SDKs, for every client form before every upstream form: thoughts arrive in the
client's form, and come back to the API that made them, where it wants them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fakes.hosted import SIGNATURE, THOUGHT_TOKENS, answers
from tests.fakes.thinkers import think
from tests.fakes.upstream import Got
from tests.gateway.upstreams.translation.test_matrix import PAIRS as ALL
from tests.gateway.upstreams.translation.test_matrix import gateway

PAIRS = [(client, dialect) for client, dialect in ALL if client != dialect]
CALLS = [("get_weather", {"place": "Oslo"}), ("get_weather", {"place": "Rome"})]
THOUGHT = "Hm, let me see."


def asked_to_think(dialect: str, got: Got) -> bool:
    body = got.json
    match dialect:
        case "openai":
            return bool(body.get("reasoning_effort") == "medium")
        case "responses":
            return bool(body.get("reasoning") == {"effort": "medium", "summary": "auto"})
        case "anthropic":
            return bool(body.get("thinking") == {"type": "enabled", "budget_tokens": 8192})
        case _:
            config = body["generationConfig"]["thinkingConfig"]
            said = config.get("thinkingLevel"), config.get("thinkingBudget")
            return bool(config["includeThoughts"] and said in (("MEDIUM", None), (None, 8192)))


def came_back(dialect: str, got: Got) -> list[Any]:
    """What the upstream sees of its own first answer, in order; words for what has no signature."""
    body = got.json
    match dialect:
        case "openai":
            (message,) = (one for one in body["messages"] if one["role"] == "assistant")
            extra = [call.get("extra_content") for call in message["tool_calls"]]
            return [message.get("reasoning_content"), extra]
        case "responses":
            items = [item for item in body["input"] if item.get("role") != "user" and "output" not in item]
            return [
                (item["summary"][0]["text"], item["encrypted_content"])
                if item.get("type") == "reasoning"
                else item.get("type", "message")
                for item in items
            ]
        case "anthropic":
            (turn,) = (one for one in body["messages"] if one["role"] == "assistant")
            return [
                (block["thinking"], block["signature"]) if block["type"] == "thinking" else block["type"]
                for block in turn["content"]
            ]
        case _:
            (content,) = (one for one in body["contents"] if one["role"] == "model")
            return [part.get("thoughtSignature", "none") for part in content["parts"]]


EXPECTED: dict[str, list[Any]] = {
    "openai": [THOUGHT, [{"google": {"thought_signature": SIGNATURE}}, None]],
    "responses": [(THOUGHT, SIGNATURE), "function_call", "function_call"],
    "anthropic": [(THOUGHT, SIGNATURE), "tool_use", "tool_use"],
    "gemini": [SIGNATURE, "none"],
}


def conversation(dialect: str, *, stream: bool, texts: tuple[str, ...] = ()) -> list[Any]:
    first = answers(dialect, texts, CALLS, stream=stream, thought=THOUGHT)
    return [first, answers(dialect, ["Rome."], stream=stream)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_thoughts_arrive_and_come_back_to_the_api_that_made_them(client: str, dialect: str, stream: bool) -> None:
    async with gateway(dialect, *conversation(dialect, stream=stream)) as (url, stub):
        thought = await think(client, url, stream=stream)
    assert (thought.text, thought.tokens, thought.said) == (THOUGHT, THOUGHT_TOKENS, "Rome.")
    first, second = stub.got
    assert asked_to_think(dialect, first)
    assert came_back(dialect, second) == EXPECTED[dialect]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_calls_keep_their_signatures_where_nobody_asked_for_thoughts(
    client: str, dialect: str, stream: bool
) -> None:
    """Their text is not shown; what the next turn needs is before the calls, behind any text."""
    async with gateway(dialect, *conversation(dialect, stream=stream, texts=("Wait.",))) as (url, stub):
        thought = await think(client, url, stream=stream, asks=False)
    assert (thought.text, thought.said) == ("", "Rome.")
    assert thought.kinds == {
        "openai": ["extra_content"],
        "responses": ["message", "reasoning", "function_call", "function_call"],
        "anthropic": ["text", "redacted_thinking", "tool_use", "tool_use"],
        "gemini": ["text", "call", "call"],
    }[client] + (["text"] if client == "gemini" and stream and thought.kinds[-1] == "text" else [])
    back = came_back(dialect, stub.got[1])
    if dialect == "anthropic":  # takes none back while it is not to think
        assert back == ["text", "tool_use", "tool_use"]
    elif dialect == "gemini":
        assert back == ["none", SIGNATURE, "none"]
    elif dialect == "responses":
        assert back == ["message", *EXPECTED[dialect]]
    else:
        assert back == EXPECTED[dialect]


async def test_a_remembered_answer_has_its_thoughts() -> None:
    told = answers("anthropic", ["Rome."], stream=False, thought=THOUGHT)
    cache = {"response_cache": {"mode": "on", "requests": "all"}}
    async with gateway("anthropic", told, sections=cache) as (url, stub):
        found = [await think_once(url, stream=stream) for stream in (False, True, False)]
    assert found == [(THOUGHT, "Rome.", THOUGHT_TOKENS)] * 3
    assert len(stub.got) == 1


async def think_once(url: str, *, stream: bool) -> tuple[str, str, int]:
    """Thought, answer and tokens of a chat without tools."""
    asked: dict[str, Any] = {
        "model": "up-1",
        "messages": [{"role": "user", "content": "Hi"}],
        "reasoning_effort": "low",
    }
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        if stream:
            async with sdk.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await sdk.chat.completions.create(**asked)
    message, details = answer.choices[0].message, answer.usage.completion_tokens_details
    return message.reasoning_content, message.content, details.reasoning_tokens
