from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import chat as api
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from pydantic import TypeAdapter

from engine.protocol import Grammar
from gateway.errors import UnsupportedError, UpstreamRefusedError
from gateway.types import (
    CallDelta,
    Constraint,
    Marker,
    Request,
    ScoredToken,
    Spelled,
    TextDelta,
    TextPrompt,
    Tool,
    ToolUse,
)
from gateway.upstreams.translation.base import UNLIMITED
from gateway.upstreams.translation.openai_chat import OpenAIChat
from tests.fakes.translated import (
    CLOCK,
    WEATHER,
    call,
    chat,
    check_types,
    conversations,
    read_stream,
    read_whole,
    result,
    said,
    system,
    user,
)

FORM = OpenAIChat()
WHOLE = TypeAdapter(CompletionCreateParamsNonStreaming)
STREAMED = TypeAdapter(CompletionCreateParamsStreaming)
ODD_ERRORS = (LookupError, TypeError, ValueError, AttributeError)


def written(request: Request, model: str = "m") -> dict[str, Any]:
    """The body, which the SDK's own types take."""
    path, body, query = FORM.write(request, model)
    assert (path, query, body["model"]) == ("/v1/chat/completions", "", model)
    body = orjson.loads(orjson.dumps(body))
    check_types(STREAMED if body.get("stream") else WHOLE, body, extra="forbid")
    return body


def test_a_plain_question_is_its_messages_and_nothing_else() -> None:
    messages = [system("Be brief."), user("Hi")]
    assert written(chat(*messages)) == {"model": "m", "messages": messages}


def test_a_stream_reports_its_usage() -> None:
    body = written(chat(stream=True))
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-5.6", "max_completion_tokens"),
        ("o4-mini", "max_completion_tokens"),
        ("openai/gpt-5", "max_completion_tokens"),
        ("ft:gpt-4.1:org::1", "max_completion_tokens"),
        ("gpt-oss:20b", "max_tokens"),
        ("openai/gpt-oss-120b", "max_tokens"),
        ("deepseek-chat", "max_tokens"),
        ("olmo-3", "max_tokens"),
    ],
)
def test_the_limit_has_the_name_that_the_model_takes(model: str, name: str) -> None:
    body = written(chat(sampling={"max_tokens": 7}), model)
    assert {key: value for key, value in body.items() if key.startswith("max_")} == {name: 7}


@pytest.mark.parametrize("asked", [0, UNLIMITED, UNLIMITED + 1])
def test_no_limit_is_left_out(asked: int) -> None:
    assert set(written(chat(sampling={"max_tokens": asked}))) == {"model", "messages"}


def test_parameters_with_values_of_their_own_are_written() -> None:
    sampling = {"temperature": 0.0, "top_p": 0.9, "seed": 0, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    body = written(chat(sampling={**sampling, "logit_bias": ((5, -100.0),), "logprobs": 2}, stop=("a", "b")))
    assert {name: body[name] for name in sampling} == sampling
    assert body["logit_bias"] == {"5": -100.0}
    assert body["stop"] == ["a", "b"]
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


def test_log_probabilities_of_the_tokens_alone_are_asked_for() -> None:
    body = written(chat(sampling={"logprobs": 0}))
    assert body["logprobs"] is True
    assert "top_logprobs" not in body


def test_texts_in_lists_are_joined_and_thoughts_and_marks_left_out() -> None:
    thinking = said("a") | {"reasoning_content": "hm"}
    named = user("v") | {"name": "ann"}
    body = written(chat({"role": "user", "content": ["u", "v"]}, thinking, named, markers=(Marker(0, 1, 300.0),)))
    assert body["messages"] == [user("uv"), said("a"), named]


def test_results_stand_behind_their_calls_under_the_same_ids() -> None:
    calls = [call("weather", {"city": "Åre"}, "c1"), call("clock", "", None)]
    later = said("", call("clock", '{"a": 1}', "c3"))
    messages = [user("u"), said("", *calls), user("And?"), result("noon", None, "clock"), result("snow", "c1")]
    body = written(chat(*messages, later, result("late", "c3")))
    assert body["messages"] == [
        user("u"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("weather", '{"city":"Åre"}', "c1"), call("clock", "{}", "call_1_1")],
        },
        result("noon", "call_1_1"),
        result("snow", "c1"),
        user("And?"),
        {**later, "content": None},
        result("late", "c3"),
    ]


BOTH = (WEATHER, CLOCK)
FORCED = {"type": "function", "function": {"name": "clock"}}
CHOICES: dict[str, tuple[ToolUse | None, Any, list[str], bool | None]] = {
    "auto": (ToolUse(BOTH), None, ["weather", "clock"], None),
    "one call at most": (ToolUse(BOTH, parallel=False), None, ["weather", "clock"], False),
    "none": (None, "none", ["weather", "clock"], None),
    "any": (ToolUse(BOTH, "required"), "required", ["weather", "clock"], None),
    "forced": (ToolUse((CLOCK,), "required"), FORCED, ["weather", "clock"], None),
    "some": (ToolUse((CLOCK,)), None, ["clock"], None),
}


@pytest.mark.parametrize(("use", "choice", "names", "parallel"), CHOICES.values(), ids=CHOICES)
def test_tools_and_which_of_them_are_called(use: Any, choice: Any, names: Any, parallel: Any) -> None:
    body = written(chat(tools=BOTH, tool_use=use))
    assert body.get("tool_choice") == choice
    assert [tool["function"]["name"] for tool in body["tools"]] == names
    assert body.get("parallel_tool_calls") == parallel


def test_a_tool_has_a_schema_of_an_object() -> None:
    tools = (Tool("a", None, {"properties": {"x": {}}}, strict=True), Tool("b", "B"))
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert [tool["function"] for tool in written(chat(tools=tools, tool_use=ToolUse(tools)))["tools"]] == [
        {"name": "a", "parameters": {"type": "object", "properties": {"x": {}}}, "strict": True},
        {"name": "b", "parameters": closed, "description": "B"},
    ]


def closed(**fields: Any) -> dict[str, Any]:
    properties = {"x": {"type": ["string", "null"]}}
    made = {"type": "object", "properties": properties, "required": ["x"], "additionalProperties": False}
    return made | fields


SCHEMAS: dict[str, tuple[dict[str, Any], bool]] = {
    "closed": (closed(), True),
    "nested": (
        closed(properties={"x": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, **{"$defs": {"a": closed()}}),
        True,
    ),
    "optional": (closed(required=[]), False),
    "open": (closed(additionalProperties=True), False),
    "open inside": (closed(properties={"x": {"anyOf": [{"type": "object"}]}}), False),
    "open or null": (closed(properties={"x": {"type": ["object", "null"]}}), False),
    "allOf": (closed(allOf=[]), False),
    "no object": ({"type": "array"}, False),
    "no list of names": (closed(required=5), False),
    "root of several": (closed(anyOf=[closed()]), False),
    "no schema": (closed(properties=[{}]), False),
}


@pytest.mark.parametrize(("schema", "strict"), SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_is_strict_where_it_may_be(schema: Any, strict: bool) -> None:
    constraint = Constraint(Grammar("json_schema", orjson.dumps(schema).decode()), "response_format")
    expected = {"name": "answer", "schema": schema} | ({"strict": True} if strict else {})
    assert written(chat(constraint=constraint))["response_format"] == {"type": "json_schema", "json_schema": expected}


def test_json_mode_is_asked_for() -> None:
    constraint = Constraint(Grammar("json_object"), "response_format")
    assert written(chat(constraint=constraint))["response_format"] == {"type": "json_object"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "top_k": ({"sampling": {"top_k": 5}}, "top_k"),
    "repetition_penalty": ({"sampling": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    "five stops": ({"stop": tuple("abcde")}, "stop"),
    "prewarm": ({"prewarm": True}, "max_tokens"),
    "prefill": ({"continues": True}, "messages"),
    "regex": ({"constraint": Constraint(Grammar("regex", "a+"), "regex")}, "regex"),
    "no JSON": ({"constraint": Constraint(Grammar("json_schema", "false"), "response_format")}, "response_format"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_the_api_lacks_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        FORM.write(chat(**fields), "m")
    assert caught.value.param == param


def test_a_text_that_is_continued_is_refused() -> None:
    request = chat()
    object.__setattr__(request, "prompt", TextPrompt("p"))
    with pytest.raises(UnsupportedError):
        FORM.write(request, "m")


@given(conversations())
def test_a_conversation_arrives_as_it_was(messages: list[dict[str, Any]]) -> None:
    sent = written(chat(*messages))["messages"]
    assert [one["role"] for one in sent] == [one["role"] for one in messages]
    assert [one["content"] or "" for one in sent] == [one["content"] for one in messages]
    assert [one.get("tool_call_id") for one in sent] == [one.get("tool_call_id") for one in messages]
    assert [
        (one["id"], one["function"]["name"], orjson.loads(one["function"]["arguments"]))
        for message in sent
        for one in message.get("tool_calls", ())
    ] == [
        (one["id"], one["function"]["name"], one["function"]["arguments"])
        for message in messages
        for one in message.get("tool_calls", ())
    ]


# -- answers ----------------------------------------------------------------------------------------------------------


def dumped(model: Any) -> Any:
    return orjson.loads(model.model_dump_json())


def chunk(reason: str | None = None, *, logprobs: Any = None, **delta: Any) -> Any:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    fields = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return dumped(api.ChatCompletionChunk.model_validate(fields))


def part(index: int, name: str | None = None, arguments: str | None = None, call_id: str | None = None) -> Any:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*parts: Any) -> Any:
    return chunk(tool_calls=list(parts))


def answer(reason: str = "stop", logprobs: Any = None, **message: Any) -> Any:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}}
    choice |= {"finish_reason": reason, "logprobs": logprobs}
    fields = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return dumped(api.ChatCompletion.model_validate(fields))


USAGE = {**chunk(), "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
BEGUN = chunk(role="assistant", content="")
STREAMS: dict[str, tuple[list[Any], Any]] = {
    "text": ([BEGUN, chunk(content="Hé"), chunk(content="llo"), chunk("stop"), USAGE], ("Héllo", [], "stop", None)),
    "text with its reason": ([chunk("length", content="Hi")], ("Hi", [], "length", None)),
    "refusal": ([BEGUN, chunk(refusal="No."), chunk("stop")], ("No.", [], "refusal", None)),
    "filtered": ([chunk(content="a"), chunk("content_filter")], ("a", [], "refusal", None)),
    "filtered in a call": (
        [called(part(0, "a", "{}", "c1")), chunk("content_filter")],
        ("", [("a", "{}")], "refusal", None),
    ),
    "thoughts": ([chunk(reasoning_content="hm"), chunk(content="a"), chunk("stop")], ("a", [], "stop", None)),
    "no choices": ([{"choices": None}, {"object": "x"}, chunk(content="a"), chunk("stop")], ("a", [], "stop", None)),
    "calls": (
        [
            called(part(0, "weather", "", "c1")),
            called(part(0, None, '{"city"')),
            called(part(0, None, ":1}")),
            called(part(1, "clock", "", "c2")),
            chunk("tool_calls"),
        ],
        ("", [("weather", '{"city":1}'), ("clock", "{}")], "tool_calls", None),
    ),
    "forced": ([called(part(0, "clock", "{}", "c1")), chunk("stop")], ("", [("clock", "{}")], "tool_calls", None)),
    "indexes that jump": (
        [called(part(3, "a", "{}", "c1")), called(part(7, "b", "{}", "c2")), chunk("tool_calls")],
        ("", [("a", "{}"), ("b", "{}")], "tool_calls", None),
    ),
    "one index for all": (
        [called(part(0, "a", "{}", "c1")), called(part(0, "b", "{}", "c2")), chunk("tool_calls")],
        ("", [("a", "{}"), ("b", "{}")], "tool_calls", None),
    ),
    "names and ids repeated": (
        [called(part(0, "a", "{", "c1")), called(part(0, "a", "}", "c1")), chunk("tool_calls")],
        ("", [("a", "{}")], "tool_calls", None),
    ),
    "new ids with each chunk": (
        [called(part(0, "a", "{", "x1")), called(part(0, "", "}", "x2")), chunk("tool_calls")],
        ("", [("a", "{}")], "tool_calls", None),
    ),
    "one id for all": (
        [called(part(0, "a", "{}", "c"), part(1, "a", "{}", "c")), chunk("tool_calls")],
        ("", [("a", "{}"), ("a", "{}")], "tool_calls", None),
    ),
    "cut": ([chunk(content="a")], ("a", [], None, None)),
    "broken off": ([chunk(content="a"), {"choices": [{"finish_reason": "error"}]}], ("a", [], None, None)),
    "another choice": ([{"choices": [{"index": 1, "delta": {"content": "x"}}]}, chunk("stop")], ("", [], "stop", None)),
    "no index, and an object": (
        [{"choices": [{"delta": {"tool_calls": [{"function": {"name": "a", "arguments": {"x": 1}}}]}}]}, chunk("stop")],
        ("", [("a", '{"x":1}')], "tool_calls", None),
    ),
    "parts": (
        [{"choices": [{"delta": {"content": [{"type": "thinking"}, {"type": "text", "text": "a"}]}}]}, chunk("stop")],
        ("a", [], "stop", None),
    ),
}


@pytest.mark.parametrize(("events", "expected"), STREAMS.values(), ids=STREAMS)
def test_streams_are_read(events: list[Any], expected: Any) -> None:
    assert read_stream(FORM.reader(chat()), events) == expected


CALLED = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": ""}}
ANSWERS: dict[str, tuple[Any, Any]] = {
    "text": (answer(content="Hi"), ("Hi", [], "stop", None)),
    "refusal": (answer(refusal="No."), ("No.", [], "refusal", None)),
    "length": (answer("length", content="Hi"), ("Hi", [], "length", None)),
    "calls": (
        answer("tool_calls", content="Well.", tool_calls=[CALLED, CALLED]),
        ("Well.", [("clock", "{}"), ("clock", "{}")], "tool_calls", None),
    ),
    "no end": ({"choices": [{"message": {"content": "a"}}]}, ("a", [], None, None)),
    "nothing": ({}, ("", [], None, None)),
}


@pytest.mark.parametrize(("given_answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_whole_answers_are_read(given_answer: Any, expected: Any) -> None:
    assert read_whole(FORM.reader(chat()), given_answer) == expected


def test_a_stop_string_is_named_where_the_server_does() -> None:
    events = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": one}]} for one in (5, "a")]
    for event, stop in zip(events, (None, "a"), strict=True):
        assert read_stream(FORM.reader(chat(stop=("a",))), [event])[2:] == ("stop", stop)


def scored(token: str, logprob: float, given_bytes: Any, *top: tuple[str, float]) -> Any:
    others = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in top]
    return {"token": token, "logprob": logprob, "bytes": given_bytes, "top_logprobs": others}


def test_tokens_come_with_their_log_probabilities_and_places() -> None:
    first, second = "é".encode()
    tokens = [
        scored("a", -1, [97], ("b", -2.0), ("a", -1.0), ("c", -3.0)),
        scored("\ufffd", -0.5, [first]),
        scored("\ufffd", -0.25, [second]),
        scored("<end>", 0.0, None),
    ]
    events = [
        chunk(content="a", logprobs={"content": tokens[:1], "refusal": None}),
        chunk(content="", logprobs={"content": tokens[1:2], "refusal": None}),
        chunk(content="é", logprobs={"content": [], "refusal": tokens[2:]}),
    ]
    expected = [
        ScoredToken(Spelled("a", b"a"), -1.0, ((Spelled("a", b"a"), -1.0), (Spelled("b", b"b"), -2.0)), 0),
        ScoredToken(Spelled("\ufffd", bytes([first])), -0.5, (), 1),
        ScoredToken(Spelled("\ufffd", bytes([second])), -0.25, (), 1),
        ScoredToken(Spelled("<end>", None), 0.0, (), 2),
    ]
    reader = FORM.reader(chat(sampling={"logprobs": 2}))
    deltas = [delta for event in events for delta in reader.event(event)]
    assert deltas == [
        TextDelta("a", tuple(expected[:1])),
        TextDelta("", tuple(expected[1:2])),
        TextDelta("é", tuple(expected[2:])),
    ]
    whole = answer(content="aé", logprobs={"content": tokens, "refusal": None})
    assert list(FORM.reader(chat(sampling={"logprobs": 2})).whole(whole)) == [TextDelta("aé", tuple(expected))]
    assert list(FORM.reader(chat()).whole(whole)) == [TextDelta("aé")]


def test_tokens_of_servers_that_know_no_bytes_are_text() -> None:
    reader = FORM.reader(chat(sampling={"logprobs": 0}))
    tokens = [{"token": "é", "logprob": -1}, {"token": "b", "logprob": -2, "top_logprobs": None}]
    event = {"choices": [{"delta": {"content": "éb"}, "logprobs": {"content": tokens}}]}
    (delta,) = reader.event(event)
    assert isinstance(delta, TextDelta)
    assert [(one.token.bytes, one.offset) for one in delta.scored] == [("é".encode(), 0), (b"b", 1)]


def test_tokens_of_calls_are_no_text() -> None:
    reader = FORM.reader(chat(sampling={"logprobs": 0}))
    event = called(part(0, "clock", "{}", "c1"))
    event["choices"][0]["logprobs"] = {"content": [scored("{}", -1, [123, 125])]}
    assert list(reader.event(event)) == [CallDelta(0, "clock", "{}")]


def odd(**delta: Any) -> list[Any]:
    return [{"choices": [{"index": 0, "delta": delta}]}]


def odd_token(**fields: Any) -> list[Any]:
    return [{"choices": [{"delta": {}, "logprobs": {"content": [{"token": "a", "logprob": -1, **fields}]}}]}]


ODD = {
    "a call that has ended": [
        called(part(0, "a", "{}", "c1")),
        called(part(1, "b", "{}", "c2")),
        called(part(0, None, "{}")),
    ],
    "a call that has ended, with its name": [
        called(part(0, "a", "{}", "c1")),
        called(part(1, "b", "{}", "c2")),
        called(part(0, "a", "{}", "c1")),
    ],
    "a call without a name": [called(part(0, None, "{}"))],
    "a name that is none": odd(tool_calls=[part(0) | {"function": {"name": 1}}]),
    "an index that is none": odd(tool_calls=[part(0, "a") | {"index": "0"}]),
    "arguments that are a list": odd(tool_calls=[part(0, "a") | {"function": {"name": "a", "arguments": [1]}}]),
    "a text that is none": odd(content=5),
    "calls that are none": odd(tool_calls=5),
    "choices that are none": [{"choices": 5}],
    "a choice that is none": [{"choices": ["x"]}],
    "no log probability": odd_token(logprob=None),
    "a number of bytes": odd_token(bytes=10**15),
    "bytes that are none": odd_token(bytes=[256]),
    "an error without a message": [{"error": {"code": 5}}],
}


@pytest.mark.parametrize("events", ODD.values(), ids=ODD)
def test_what_is_no_answer_is_an_error(events: Any) -> None:
    with pytest.raises(ODD_ERRORS):
        reader = FORM.reader(chat(sampling={"logprobs": 0}))
        for event in events:
            list(reader.event(event))


@pytest.mark.parametrize("given_answer", [{"choices": [{"finish_reason": "stop"}]}, {"choices": "x"}, {"choices": 5}])
def test_what_is_no_whole_answer_is_an_error(given_answer: Any) -> None:
    reader = FORM.reader(chat())
    with pytest.raises(ODD_ERRORS):
        read_whole(reader, given_answer)
    assert reader.reason is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "Too busy.", "type": "server_error", "code": "server_is_overloaded", "param": None}, 503),
        ({"message": "Too busy.", "type": "invalid_request_error", "code": None, "param": "x"}, 400),
        ({"message": "Too busy.", "type": "BadRequestError", "code": 422}, 422),
        ({"message": "Too busy.", "type": "new", "code": 200}, 500),
        ("Too busy.", 500),
    ],
)
def test_an_error_in_the_place_of_an_answer_is_told(error: Any, status: int) -> None:
    for read in (FORM.reader(chat()).event, FORM.reader(chat()).whole):
        with pytest.raises(UpstreamRefusedError, match="Too busy") as caught:
            list(read({"error": error}))
        assert caught.value.status == status


EVENTS = [one for events, _ in STREAMS.values() for one in events] + [one for events in ODD.values() for one in events]


@given(st.lists(st.sampled_from(EVENTS)))
def test_events_in_any_order_are_read_or_an_error(events: list[dict[str, Any]]) -> None:
    with suppress(*ODD_ERRORS):
        read_stream(FORM.reader(chat()), events)
