"""What hosted APIs refuse: bodies that the types of the official SDKs do not take, and what the APIs say in words.

Each check raises AssertionError, or pydantic's ValidationError, for a body that the API would answer with a 400.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from google.genai import types as google
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from pydantic import TypeAdapter

from tests.fakes.translated import check_types

Json = dict[str, Any]
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CLAUDE_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_CLAUDE_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_GEMINI_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}")
MAX_CHAT_ID, MAX_CALL_ID = 40, 64
OLDER_CLAUDE: Final = frozenset(("temperature", "top_p", "top_k"))
"""Of version 2023-06-01; the SDK's types are newer and have none."""
_CHAT: Final = TypeAdapter(CompletionCreateParamsNonStreaming), TypeAdapter(CompletionCreateParamsStreaming)
_RESPONSE: Final = TypeAdapter(ResponseCreateParamsNonStreaming), TypeAdapter(ResponseCreateParamsStreaming)
_MESSAGE: Final = TypeAdapter(MessageCreateParamsNonStreaming), TypeAdapter(MessageCreateParamsStreaming)


def check_openai(body: Json) -> None:
    check_types(_CHAT[bool(body.get("stream"))], body, extra="forbid")
    stop = body.get("stop") or []
    assert isinstance(stop, str) or len(stop) <= 4
    _named(_NAME, [tool["function"]["name"] for tool in body.get("tools", ())])
    assert body.get("tools") or "tool_choice" not in body
    unanswered: set[str] = set()
    for message in body["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] in unanswered, "a result of no call"
            unanswered.remove(message["tool_call_id"])
            continue
        assert not unanswered, "a call without its result"
        calls = message.get("tool_calls") or ()
        assert message["role"] != "assistant" or calls or isinstance(message["content"], str | list)
        unanswered = _unique([call["id"] for call in calls], MAX_CHAT_ID)
        _named(_NAME, [call["function"]["name"] for call in calls])
    assert not unanswered, "a call without its result"
    if "response_format" in body and body["response_format"]["type"] == "json_schema":
        _check_format(body["response_format"]["json_schema"])


def check_responses(body: Json) -> None:
    check_types(_RESPONSE[bool(body.get("stream"))], body, extra="forbid")
    assert body.get("max_output_tokens", 16) >= 16
    _named(_NAME, [tool["name"] for tool in body.get("tools", ())])
    items = body["input"] if isinstance(body["input"], list) else []
    calls = [item for item in items if item.get("type") == "function_call"]
    _named(_NAME, [call["name"] for call in calls])
    unanswered: set[str] = set()
    for item in items:
        if item.get("type") == "function_call":
            assert 1 <= len(item["call_id"]) <= MAX_CALL_ID
            assert item["call_id"] not in unanswered
            unanswered.add(item["call_id"])
        elif item.get("type") == "function_call_output":
            assert item["call_id"] in unanswered, "a result of no call"
            unanswered.remove(item["call_id"])
    assert not unanswered, "a call without its result"
    if body.get("text", {}).get("format", {}).get("type") == "json_schema":
        _check_format(body["text"]["format"])


def _check_format(wanted: Mapping[str, Any]) -> None:
    assert _NAME.fullmatch(wanted["name"])
    assert wanted["schema"].get("type") == "object", "the root of a schema is an object"
    if wanted.get("strict"):
        for one in _subschemas(wanted["schema"]):
            if one.get("type") == "object":
                assert one.get("additionalProperties") is False
                assert set(one.get("required", ())) == set(one.get("properties", {}))


def check_anthropic(body: Json) -> None:
    own = {name: value for name, value in body.items() if name not in OLDER_CLAUDE}
    check_types(_MESSAGE[bool(body.get("stream"))], own, extra="forbid")
    assert 0 <= body.get("temperature", 1) <= 1
    assert all(map(str.strip, body.get("stop_sequences", ())))
    _named(_CLAUDE_NAME, [tool["name"] for tool in body.get("tools", ())])
    assert len({tool["name"] for tool in body.get("tools", ())}) == len(body.get("tools", ()))
    turns = [(turn["role"], _blocks(turn["content"])) for turn in body["messages"]]
    system = _blocks(body.get("system", []))
    every = [*system, *(block for _, blocks in turns for block in blocks)]
    assert sum("cache_control" in block for block in (*body.get("tools", ()), *every)) <= 4
    assert all(block["text"].strip() for block in every if block["type"] == "text"), "a blank text"
    unanswered: set[str] = set()
    for number, (role, blocks) in enumerate(turns):
        assert blocks
        if role == "user":
            results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            assert [block["type"] for block in blocks[: len(results)]] == ["tool_result"] * len(results)
            assert sorted(results) == sorted(unanswered), "each call has its result in the next turn, and no other"
            unanswered = set()
        else:
            assert number or role == "user", "a conversation begins with the user"
            assert not unanswered, "a call without its result"
            uses = [block for block in blocks if block["type"] == "tool_use"]
            unanswered = _unique([block["id"] for block in uses])
            assert all(map(_CLAUDE_ID.fullmatch, unanswered))
            _named(_CLAUDE_NAME, [block["name"] for block in uses])
    assert not unanswered, "a call without its result"
    assert turns[-1][0] == "user" or turns[-1][1][-1]["text"] == turns[-1][1][-1]["text"].rstrip()


def check_gemini(body: Json) -> None:
    whole: Json = {
        "systemInstruction": google.Content,
        "toolConfig": google.ToolConfig,
        "generationConfig": google.GenerationConfig,
        "contents": google.Content,
        "tools": google.Tool,
    }
    for name, value in body.items():
        for one in value if isinstance(value, list) else [value]:
            whole[name].model_validate(one)
    assert len(body.get("generationConfig", {}).get("stopSequences", ())) <= 5
    declared = [one["name"] for tool in body.get("tools", ()) for one in tool.get("functionDeclarations", ())]
    _named(_GEMINI_NAME, declared)
    contents = body["contents"]
    assert contents, "no contents"
    before, waiting = "", 0
    for content in contents:
        parts, role = content["parts"], content.get("role", "user")
        assert parts
        assert role in ("user", "model")
        answered = sum("functionResponse" in part for part in parts)
        assert answered == waiting, "as many function responses as function calls"
        _named(_GEMINI_NAME, [part["functionCall"]["name"] for part in parts if "functionCall" in part])
        waiting = sum("functionCall" in part for part in parts)
        assert not waiting or before == "user", "a call comes behind a turn of the user"
        before = role
    assert not waiting, "a call without its result"


CHECKS: Final[Mapping[str, Callable[[Json], None]]] = {
    "openai": check_openai,
    "responses": check_responses,
    "anthropic": check_anthropic,
    "gemini": check_gemini,
}


def _blocks(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _named(pattern: re.Pattern[str], names: Sequence[str]) -> None:
    assert all(map(pattern.fullmatch, names)), f"a name that is none: {names}"


def _unique(ids: Sequence[str], most: int = 1 << 20) -> set[str]:
    assert len(set(ids)) == len(ids), "an id twice"
    assert all(1 <= len(one) <= most for one in ids), "an id that is too long"
    return set(ids)


def _subschemas(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from _subschemas(one)
    elif isinstance(value, list):
        for one in value:
            yield from _subschemas(one)
