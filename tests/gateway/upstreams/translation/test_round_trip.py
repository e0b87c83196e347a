"""Conversations and answers there and back, for every form of an upstream: what it is sent passes the SDK's types and
the API's rules, and says what the conversation said when the gateway's own dialect reads it again; what it answers,
made of the SDK's models and cut anywhere, is heard with every text, call and token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.types import CallDelta, ChatPrompt, TextDelta, Tool, ToolUse, UpstreamAnswer
from gateway.upstreams.metering import Meter
from gateway.upstreams.translation.stage import _Read
from tests.fakes.api_rules import CHECKS
from tests.fakes.client_fields import CLIENTS, request_of
from tests.fakes.hosted import ANSWER_TOKENS, CACHED_TOKENS, PROMPT_TOKENS, answers
from tests.fakes.translated import answer_calls, chat, long_conversations, tool_sets

EVERYDAY, MANY = 60, 2_000
Message = dict[str, Any]


class Turn:
    """All that one side says before the other does."""

    def __init__(self, is_model: bool) -> None:
        self.is_model = is_model
        self.text = ""
        self.calls: list[tuple[str, Any]] = []
        self.results: list[tuple[str, Any]] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turn) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{'model' if self.is_model else 'user'}{(self.text, self.calls, self.results)}"


def turns_of(
    messages: Sequence[Message], text_of: Callable[[str], str], result_of: Callable[[str], Any]
) -> tuple[str, list[Turn]]:
    """Instructions before all others, and what the sides say in turn. `text_of` is what an API keeps of a text,
    `result_of` what it makes of a result."""
    instructions = ""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for message in messages:
        text = text_of(message.get("content") or "")
        if message["role"] == "system" and not turns:
            instructions += text
            continue
        turn = Turn(message["role"] == "assistant")
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            turn.results.append((names[call_id], result_of(message.get("content") or "")))
        else:
            turn.text = text
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
            turn.calls.append((call["function"]["name"], _object(call["function"]["arguments"])))
        if turns and turns[-1].is_model == turn.is_model:
            turns[-1].text += turn.text
            turns[-1].calls += turn.calls
            turns[-1].results += turn.results
        elif turn.text or turn.calls or turn.results:
            turns.append(turn)
    return instructions, turns


def _object(arguments: Any) -> Any:
    return orjson.loads(arguments) if isinstance(arguments, str) else arguments


def _output(text: str) -> Any:
    """A result is an object there, and a text that is none is one in it."""
    try:
        found = orjson.loads(text)
    except ValueError:
        return text
    return (found["output"] if list(found) == ["output"] else found) if isinstance(found, dict) else text


def _not_blank(text: str) -> str:
    return text if text.strip() else ""


KEPT: Mapping[str, Callable[[str], str]] = {
    "openai": str,
    "responses": str,
    "anthropic": _not_blank,
    "gemini": str,
}


def check_conversation(form: str, messages: list[Message], tools: tuple[Tool, ...], use: ToolUse | None) -> None:
    sent = CLIENTS[form].write(chat(*messages, tools=tools, tool_use=use), "gpt-5.6").body
    body = orjson.loads(orjson.dumps(sent))
    CHECKS[form](body)
    request = request_of(form, body)
    assert isinstance(request.prompt, ChatPrompt)
    result_of = _output if form == "gemini" else str
    assert turns_of(request.prompt.messages, str, result_of) == turns_of(messages, KEPT[form], result_of)
    again = {tool.name: tool for tool in request.prompt.tools}
    for tool in tools if use is None else use.callable:
        found = again[tool.name]
        assert (found.description or None) == (tool.description or None)
        assert (found.parameters or {}).get("properties", {}) == (tool.parameters or {}).get("properties", {})
        assert found.strict == tool.strict or form == "gemini"  # which holds all of them, or none
    if tools:
        assert (request.tool_use is None) == (use is None)
    if use is not None and request.tool_use is not None:
        assert {tool.name for tool in request.tool_use.callable} == {tool.name for tool in use.callable}
        assert request.tool_use.mode == use.mode
        assert request.tool_use.parallel == (use.parallel or form == "gemini") or len(use.callable) == 1


def check_answer(form: str, texts: list[str], calls: list[tuple[str, dict[str, Any]]], stream: bool, cut: int) -> None:
    told = answers(form, texts, calls, stream=stream)
    body = b"".join(told.pieces)
    answer = UpstreamAnswer("up", 200, (("Content-Type", told.media),), _nothing(), "m")
    read = _Read(answer, CLIENTS[form].reader(chat()), chat())
    meter = Meter(CLIENTS[form].dialect, is_stream=stream, max_bytes=1 << 20)
    deltas = []
    for start in range(0, len(body), cut):
        chunk = meter.feed(body[start : start + cut])
        deltas += read.feed(chunk)
    deltas += read.end()
    text = "".join(one.text for one in deltas if isinstance(one, TextDelta))
    heard: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.name:
                heard.append([delta.name, ""])
            assert delta.call == len(heard) - 1
            heard[-1][1] += delta.arguments
    assert text == "".join(texts)
    assert [(name, orjson.loads(arguments)) for name, arguments in heard] == calls
    tokens = meter.tokens()
    assert tokens is not None
    assert (tokens.prompt, tokens.cached, tokens.completion) == (PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS)


async def _nothing() -> Any:
    yield b""


conversation = given(long_conversations(), tool_sets())
_chunks = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), max_size=4)
answer = given(_chunks, answer_calls(), st.booleans(), st.integers(1, 400))


@settings(max_examples=EVERYDAY)
@conversation
def test_a_conversation_keeps_what_it_says_at_every_upstream(messages: list[Message], asked: Any) -> None:
    for form in CLIENTS:
        check_conversation(form, messages, *asked)


@settings(max_examples=EVERYDAY)
@answer
def test_an_answer_of_every_upstream_is_heard(texts: list[str], calls: Any, stream: bool, cut: int) -> None:
    for form in CLIENTS:
        check_answer(form, texts, calls, stream, cut)


@pytest.mark.slow
@settings(max_examples=MANY)
@conversation
def test_many_conversations_keep_what_they_say(messages: list[Message], asked: Any) -> None:
    for form in CLIENTS:
        check_conversation(form, messages, *asked)


@pytest.mark.slow
@settings(max_examples=MANY)
@answer
def test_many_answers_are_heard(texts: list[str], calls: Any, stream: bool, cut: int) -> None:
    for form in CLIENTS:
        check_answer(form, texts, calls, stream, cut)
