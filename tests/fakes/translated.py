"""Requests for upstreams of another API, what is read of answers, and conversations for property tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.protocol import Sampling
from gateway.types import (
    CallDelta,
    ChatPrompt,
    Delta,
    FinishReason,
    Media,
    Request,
    Tenant,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolUse,
)
from gateway.upstreams.translation.base import UNLIMITED, AnswerReader

Message = dict[str, Any]

WEATHER = Tool("weather", "Of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
CLOCK = Tool("clock", "The time.")


def chat(*messages: Message, sampling: dict[str, Any] | None = None, **fields: Any) -> Request:
    """`sampling` and `fields` as in Sampling, Request and ChatPrompt."""
    of_prompt = {name: fields.pop(name) for name in ("markers", "tools", "continues", "media") if name in fields}
    return Request(
        request_id="r",
        tenant=Tenant("t"),
        model="m",
        prompt=ChatPrompt(list(messages) or [user("Hi")], **of_prompt),
        sampling=Sampling(**{"max_tokens": UNLIMITED, **(sampling or {})}),
        received_s=0.0,
        deadline_s=60.0,
        **fields,
    )


def image(chars: int, message: int = 0, **fields: Any) -> Media:
    """Behind so many characters of a message."""
    where = {} if "url" in fields else {"mime_type": "image/png", "data": "iVBO"}
    return Media(
        **{"kind": "image", "path": "p", "refusal": "r", "message": message, "chars": chars, **where, **fields}
    )


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, *calls: Message) -> Message:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def call(name: str, arguments: Any, call_id: str | None = "c1") -> Message:
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return function if call_id is None else {"id": call_id, **function}


def result(text: str, call_id: str | None = "c1", name: str | None = None) -> Message:
    fields = {"tool_call_id": call_id, "name": name}
    return {"role": "tool", "content": text} | {key: value for key, value in fields.items() if value is not None}


def heard(deltas: Iterable[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and names and arguments of the calls, which have to be in order."""
    text, calls = "", list[tuple[str, str]]()
    for delta in deltas:
        if isinstance(delta, TextDelta):
            assert delta.text
            text += delta.text
            continue
        if isinstance(delta, ThinkingDelta):
            continue
        assert isinstance(delta, CallDelta)
        if delta.name:
            assert delta.call == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return text, calls


def read_stream(
    reader: AnswerReader, events: Iterable[Any]
) -> tuple[str, list[tuple[str, str]], FinishReason | None, str | None]:
    text, calls = heard(delta for event in events for delta in reader.event(event))
    return text, calls, reader.reason, reader.stop


def read_whole(reader: AnswerReader, answer: Any) -> tuple[str, list[tuple[str, str]], FinishReason | None, str | None]:
    text, calls = heard(reader.whole(answer))
    return text, calls, reader.reason, reader.stop


def check_types(types: TypeAdapter[Any], body: Any, *, extra: Literal["forbid"] | None = None) -> None:
    """Raises ValidationError for what the types do not take, also in an Iterable, which pydantic checks late."""
    _read_all(types.validate_python(body, extra=extra))


def _read_all(value: Any) -> None:
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str):
        for one in value:
            _read_all(one)


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_names = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
_values = st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _texts, st.lists, max_leaves=4)
_arguments = st.dictionaries(_texts, _values, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Instructions, and turns of a user and an assistant who calls tools; every call has its result."""
    messages = [system(text) for text in draw(st.lists(_texts, max_size=2))]
    messages.append(user(draw(_texts)))
    number = 0
    for _ in range(draw(st.integers(0, 4))):
        calls = [
            call(draw(_names), draw(_arguments), f"c{(number := number + 1)}") for _ in range(draw(st.integers(0, 3)))
        ]
        messages.append(said(draw(_texts), *calls))
        messages += [result(draw(_texts), one["id"]) for one in draw(st.permutations(calls))]
        messages += [user(text) for text in draw(st.lists(_texts, max_size=2))]
    return messages


@st.composite
def long_conversations(draw: st.DrawFn) -> list[Message]:
    """As clients of all APIs write them: system messages anywhere, several messages of one side, empty texts, several
    calls whose results come in any order, with texts of the user before and behind them. Ids are those of the clients,
    of some length. Ends with a text of the user."""
    messages = [system(text) for text in draw(st.lists(_texts, max_size=2))]
    messages.append(user(draw(_texts) + "?"))
    number = 0
    for _ in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(1, 2))):
            number += 1
            length = draw(st.sampled_from((2, 9, 40, 41, 64, 65, 200)))
            calls = [
                call(draw(_names), draw(_arguments), f"{draw(_id_starts)}_{number}_{at}_".ljust(length, "x"))
                for at in range(draw(st.integers(0, 3)))
            ]
            messages.append(said(draw(_texts), *calls))
            if calls:
                break
        results = [result(draw(_texts), one["id"]) for one in draw(st.permutations(calls))]
        others: list[Message] = draw(st.lists(st.builds(user, _texts) | st.builds(system, _texts), max_size=2))
        before = draw(st.integers(0, len(others)))
        messages += [*others[:before], *results, *others[before:]]
    return [*messages, user(draw(_texts) + ".")]


_id_starts = st.sampled_from(("call", "toolu", "c:é", "fc|1"))
_schemas = st.sampled_from(
    (
        None,
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
    )
)


@st.composite
def tool_sets(draw: st.DrawFn) -> tuple[tuple[Tool, ...], ToolUse | None]:
    """Tools, and what may be done with them."""
    names = draw(st.lists(_names, max_size=3, unique=True))
    tools = tuple(Tool(name, draw(st.none() | st.just("It does.")), draw(_schemas)) for name in names)
    if not tools or draw(st.booleans()):
        return tools, ToolUse(tools) if tools else None
    some = tuple(draw(st.lists(st.sampled_from(tools), min_size=1, unique_by=lambda tool: tool.name)))
    modes: list[Literal["auto", "required"]] = ["auto", "required"]
    use = ToolUse(some, draw(st.sampled_from(modes)), draw(st.booleans()))
    return tools, draw(st.none() | st.just(use))


def answer_calls() -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    """Calls of an answer."""
    return st.lists(st.tuples(_names, _arguments), max_size=3)
