from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from anthropic import types as api
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.protocol import Grammar
from gateway.errors import BadRequestError, UnsupportedError, UpstreamRefusedError
from gateway.types import Constraint, Marker, Request, TextPrompt, Tool, ToolUse
from gateway.upstreams.translation.anthropic import AnthropicMessages
from gateway.upstreams.translation.base import UNLIMITED
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

FORM = AnthropicMessages()
WHOLE = TypeAdapter(MessageCreateParamsNonStreaming)
STREAMED = TypeAdapter(MessageCreateParamsStreaming)
HOUR = {"type": "ephemeral", "ttl": "1h"}
MINUTES = {"type": "ephemeral"}
SAMPLING = ("temperature", "top_p", "top_k")
"""Of the API's version 2023-06-01; the SDK's types are newer and have none."""


def written(request: Request) -> dict[str, Any]:
    """The body, which the SDK's own types take and the API's rules allow."""
    path, body, query = FORM.write(request, "claude")
    assert (path, query, body["model"]) == ("/v1/messages", "", "claude")
    body = orjson.loads(orjson.dumps(body))
    types = STREAMED if body.get("stream") else WHOLE
    check_types(types, {name: value for name, value in body.items() if name not in SAMPLING}, extra="forbid")
    roles = [turn["role"] for turn in body["messages"]]
    assert all(one != other for one, other in pairwise(roles))
    for turn in body["messages"]:
        kinds = [block["type"] == "tool_result" for block in turn["content"]]
        assert kinds == sorted(kinds, reverse=True)
    return body


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_a_plain_question_has_a_limit_and_nothing_else() -> None:
    assert written(chat(user("Hi"))) == {
        "model": "claude",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [text("Hi")]}],
    }


@pytest.mark.parametrize(("asked", "limit"), [(0, 4096), (UNLIMITED, 4096), (7, 7), (100_000, 100_000)])
def test_a_limit_is_always_there(asked: int, limit: int) -> None:
    assert written(chat(sampling={"max_tokens": asked}))["max_tokens"] == limit


def test_a_prompt_is_computed_without_an_answer() -> None:
    body = written(chat(sampling={"max_tokens": 0}, prewarm=True, stream=True, tools=(CLOCK,)))
    assert body["max_tokens"] == 0
    assert not {"stream", "tool_choice"} & set(body)


def test_parameters_with_values_of_their_own_are_written() -> None:
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 3}
    body = written(chat(sampling=sampling, stop=("a", "b"), stream=True))
    assert body["stream"] is True
    assert body["stop_sequences"] == ["a", "b"]
    assert {name: body[name] for name in sampling} == sampling


SYSTEM = {
    "alone, it is what is answered": ([system("s")], [], [("user", ["s"])]),
    "several": ([system("s"), system("t"), user("u")], ["s", "t"], [("user", ["u"])]),
    "later": (
        [system("s"), user("u"), said("a"), system("t"), user("v")],
        ["s"],
        [("user", ["u"]), ("assistant", ["a"]), ("user", ["t", "v"])],
    ),
    "blank texts": ([system(" "), user("\n"), user("u"), said(""), user("v")], [], [("user", ["u", "v"])]),
    "a list of texts": ([{"role": "user", "content": ["u", "v"]}], [], [("user", ["uv"])]),
    "thoughts": ([user("u"), said("a") | {"reasoning_content": "hm"}], [], [("user", ["u"]), ("assistant", ["a"])]),
}


@pytest.mark.parametrize(("messages", "instructions", "turns"), SYSTEM.values(), ids=SYSTEM)
def test_instructions_come_first_and_turns_alternate(messages: Any, instructions: Any, turns: Any) -> None:
    body = written(chat(*messages))
    assert [block["text"] for block in body.get("system", [])] == instructions
    assert [(turn["role"], [one["text"] for one in turn["content"]]) for turn in body["messages"]] == turns


FOREIGN = "call_bdd87acd3569a6759b9b59ac"
"""Of an id with characters that this API does not take."""


def test_results_come_first_and_have_the_ids_of_their_calls() -> None:
    body = written(
        chat(
            user("u"),
            said("Well.", call("weather", {"city": "Åre"}, "f.weather:0"), call("clock", "{}", "c2")),
            user("And?"),
            result("noon", "c2"),
            result("snow", "f.weather:0"),
        )
    )
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": [
                text("Well."),
                {"type": "tool_use", "id": FOREIGN, "name": "weather", "input": {"city": "Åre"}},
                {"type": "tool_use", "id": "c2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c2", "content": "noon"},
                {"type": "tool_result", "tool_use_id": FOREIGN, "content": "snow"},
                text("And?"),
            ],
        },
    ]


def test_calls_without_ids_are_found_by_name() -> None:
    messages = [user("u"), said("", call("clock", "{}", None), call("weather", "no JSON", None))]
    body = written(chat(*messages, result("snow", None, "weather"), result("noon", None, "clock")))
    first, second = body["messages"][1]["content"]
    assert second["input"] == {}
    assert [one["tool_use_id"] for one in body["messages"][2]["content"]] == [second["id"], first["id"]]
    assert first["id"] != second["id"]


BOTH = (WEATHER, CLOCK)
CHOICES = {
    "auto": (ToolUse(BOTH), None),
    "one call at most": (ToolUse(BOTH, parallel=False), {"type": "auto", "disable_parallel_tool_use": True}),
    "none": (None, {"type": "none"}),
    "any": (ToolUse(BOTH, "required"), {"type": "any"}),
    "any, one call": (ToolUse(BOTH, "required", parallel=False), {"type": "any", "disable_parallel_tool_use": True}),
    "forced": (ToolUse((CLOCK,), "required"), {"type": "tool", "name": "clock"}),
    "some": (ToolUse((CLOCK,)), None),
}


@pytest.mark.parametrize(("use", "choice"), CHOICES.values(), ids=CHOICES)
def test_tools_and_which_of_them_are_called(use: ToolUse | None, choice: Any) -> None:
    body = written(chat(tools=BOTH, tool_use=use))
    assert body.get("tool_choice") == choice
    sent = {tool["name"] for tool in body["tools"]}
    assert sent == {tool.name for tool in (BOTH if use is None else use.callable)}


def test_a_tool_has_a_schema_of_an_object() -> None:
    tools = (Tool("a", None, {"properties": {"x": {}}}, strict=True), Tool("b", "B"))
    assert written(chat(tools=tools, tool_use=ToolUse(tools)))["tools"] == [
        {"name": "a", "input_schema": {"type": "object", "properties": {"x": {}}}, "strict": True},
        {"name": "b", "input_schema": {"type": "object", "properties": {}}, "description": "B"},
    ]


def test_structured_output_is_a_schema() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    constraint = Constraint(Grammar("json_schema", orjson.dumps(schema).decode()), "response_format")
    assert written(chat(constraint=constraint))["output_config"] == {
        "format": {"type": "json_schema", "schema": schema}
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"sampling": {"temperature": 1.5}}, "temperature"),
    "seed": ({"sampling": {"seed": 1}}, "seed"),
    "logprobs": ({"sampling": {"logprobs": 0}}, "logprobs"),
    "blank stop": ({"stop": ("a", "\n")}, "stop"),
    "JSON mode": ({"constraint": Constraint(Grammar("json_object"), "response_format")}, "response_format"),
    "regex": ({"constraint": Constraint(Grammar("regex", "a+"), "regex")}, "regex"),
    "any JSON": ({"constraint": Constraint(Grammar("json_schema", "true"), "response_format")}, "response_format"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_the_api_lacks_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        FORM.write(chat(**fields), "claude")
    assert caught.value.param == param


def test_a_conversation_without_text_and_a_text_are_refused() -> None:
    with pytest.raises(BadRequestError) as caught:
        FORM.write(chat(user(" ")), "claude")
    assert caught.value.param == "messages"
    with pytest.raises(UnsupportedError):
        FORM.write(replace(chat(), prompt=TextPrompt("p")), "claude")


def marked(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Texts, names or ids of the marked blocks, and their marks, in the order of the prompt."""
    turns = [block for turn in body["messages"] for block in turn["content"]]
    return [
        (block.get("text") or block.get("name") or block["tool_use_id"], block["cache_control"])
        for block in [*body.get("tools", []), *body.get("system", []), *turns]
        if "cache_control" in block
    ]


CALLED = (user("u"), said("Well.", call("clock", {}, "c1"), call("clock", {}, "c2")), result("r", "c1"))
MARKS: dict[str, tuple[tuple[Any, ...], tuple[Marker, ...], list[tuple[str, Any]]]] = {
    "the end of a message": ((system("s"), user("u")), (Marker(0, 1, 300.0),), [("s", MINUTES)]),
    "inside of a text": ((user("one two"),), (Marker(0, 3, 3600.0),), [("one", HOUR)]),
    "two in a text": ((user("abc"),), (Marker(0, 1, 300.0), Marker(0, 2, 300.0)), [("a", MINUTES), ("b", MINUTES)]),
    "two in one place": ((user("ab"),), (Marker(0, 1, 300.0), Marker(0, 1, 300.0)), [("a", MINUTES)]),
    "before blanks": ((user("a  "),), (Marker(0, 1, 300.0),), [("a  ", MINUTES)]),
    "half an hour": ((user("a"),), (Marker(0, 1, 1800.0),), [("a", MINUTES)]),
    "twelve hours": ((user("a"),), (Marker(0, 1, 43200.0),), [("a", HOUR)]),
    "calls and results": (
        CALLED,
        (Marker(1, 5, 300.0), Marker(1, 0, 300.0, call=1), Marker(2, 1, 300.0)),
        [("Well.", MINUTES), ("clock", MINUTES), ("c1", MINUTES)],
    ),
    "an hour behind minutes": (
        (user("abc"),),
        (Marker(0, 1, 300.0), Marker(0, 2, 3600.0), Marker(0, 3, 300.0)),
        [("a", HOUR), ("b", HOUR), ("c", MINUTES)],
    ),
    "more than four": (
        (user("abcdef"),),
        tuple(Marker(0, chars, 300.0) for chars in range(1, 7)),
        [(letter, MINUTES) for letter in "cdef"],
    ),
    "no text": ((system(" "), user("u")), (Marker(0, 1, 300.0),), []),
}


@pytest.mark.parametrize(("messages", "markers", "expected"), MARKS.values(), ids=MARKS)
def test_breakpoints_are_marks_of_blocks(messages: Any, markers: Any, expected: Any) -> None:
    body = written(chat(*messages, markers=markers))
    assert marked(body) == expected


def test_a_breakpoint_behind_a_tool_that_is_left_out_is_behind_the_one_before() -> None:
    markers = (Marker(0, 0, 300.0, tool=1),)
    assert marked(written(chat(tools=BOTH, tool_use=ToolUse(BOTH), markers=markers))) == [("clock", MINUTES)]
    assert marked(written(chat(tools=BOTH, tool_use=ToolUse((WEATHER,)), markers=markers))) == [("weather", MINUTES)]
    none_before = (Marker(0, 0, 300.0, tool=0),)
    assert marked(written(chat(tools=BOTH, tool_use=ToolUse((CLOCK,)), markers=none_before))) == []


@given(conversations(), st.data())
def test_a_conversation_arrives_as_it_was(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    texts = [one["content"] for one in messages]
    places = st.tuples(st.integers(0, len(texts) - 1), st.integers(0, 20), st.sampled_from((300.0, 3600.0)))
    drawn = data.draw(st.lists(places, max_size=5))
    markers = tuple(Marker(at, min(chars, len(texts[at])), ttl_s) for at, chars, ttl_s in drawn)
    begin = next(at for at, one in enumerate(messages) if one["role"] != "system")
    try:
        body = written(chat(*messages, markers=markers))
    except BadRequestError:
        assert not any(text.strip() for text in texts[begin:])
        return
    blocks = [block for turn in body["messages"] for block in turn["content"]]

    for role, turns in (
        ("system", [{"role": "system", "content": body.get("system", [])}]),
        ("user", body["messages"]),
        ("assistant", body["messages"]),
    ):
        sent = [block for turn in turns if turn["role"] == role for block in turn["content"]]
        given = "".join(one["content"] for one in messages if one["role"] == role and one["content"].strip())
        assert "".join(block["text"] for block in sent if block["type"] == "text") == given
    assert [(one["id"], one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"] == [
        (one["id"], one["function"]["name"], one["function"]["arguments"])
        for message in messages
        for one in message.get("tool_calls", ())
    ]
    assert [(one["tool_use_id"], one["content"]) for one in blocks if one["type"] == "tool_result"] == [
        (one["tool_call_id"], one["content"]) for one in messages if one["role"] == "tool"
    ]
    controls = [control for _, control in marked(body)]
    assert len(controls) <= 4
    assert controls == sorted(controls, key=lambda control: "ttl" not in control)


USAGE = api.Usage(input_tokens=3, output_tokens=5)


def dumped(model: Any) -> Any:
    return orjson.loads(model.model_dump_json())


def message(*content: Any, reason: str = "end_turn", **fields: Any) -> Any:
    return dumped(
        api.Message(
            id="msg_1",
            type="message",
            role="assistant",
            model="claude",
            content=list(content),
            stop_reason=reason,  # type: ignore[arg-type]
            usage=USAGE,
            **fields,
        )
    )


def said_text(value: str) -> api.TextBlock:
    return api.TextBlock(type="text", text=value)


def used(name: str, given: Any, block_id: str = "toolu_1") -> api.ToolUseBlock:
    return api.ToolUseBlock(type="tool_use", id=block_id, name=name, input=given)


THOUGHT = api.ThinkingBlock(type="thinking", thinking="hm", signature="s")
EXPLAINED = api.RefusalStopDetails(type="refusal", explanation="It may not.")
ANSWERS: dict[str, tuple[Any, Any]] = {
    "text": (message(said_text("Hi "), said_text("you")), ("Hi you", [], "stop", None)),
    "thoughts": (message(THOUGHT, said_text("Hi")), ("Hi", [], "stop", None)),
    "calls": (
        message(said_text("Well."), used("clock", {}), used("weather", {"city": "Åre"}), reason="tool_use"),
        ("Well.", [("clock", "{}"), ("weather", '{"city":"Åre"}')], "tool_calls", None),
    ),
    "cut": (message(said_text("Hi"), reason="max_tokens"), ("Hi", [], "length", None)),
    "cut by the context": (message(reason="model_context_window_exceeded"), ("", [], "length", None)),
    "stop string": (message(said_text("a"), reason="stop_sequence", stop_sequence="b"), ("a", [], "stop", "b")),
    "refusal": (message(reason="refusal", stop_details=EXPLAINED), ("It may not.", [], "refusal", None)),
    "refusal with a text": (
        message(said_text("No."), reason="refusal", stop_details=EXPLAINED),
        ("No.", [], "refusal", None),
    ),
    "refusal without a word": (message(reason="refusal"), ("", [], "refusal", None)),
    "paused": (message(said_text("a"), reason="pause_turn"), ("a", [], "stop", None)),
}


@pytest.mark.parametrize(("answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_a_whole_answer_is_read(answer: Any, expected: Any) -> None:
    assert read_whole(FORM.reader(chat()), answer) == expected


def stream(answer: dict[str, Any], cut: int = 3) -> list[dict[str, Any]]:
    """A whole answer as the events of the SDK's own models, texts and arguments cut."""
    begun = answer | {"content": [], "stop_reason": None, "stop_sequence": None}
    events: list[Any] = [api.RawMessageStartEvent(type="message_start", message=api.Message(**begun))]
    for index, block in enumerate(answer["content"]):
        kind, deltas = block["type"], list[Any]()
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}[kind]
        whole = orjson.dumps(block["input"]).decode() if kind == "tool_use" else block[kind]
        for start in range(0, len(whole), cut):
            part = whole[start : start + cut]
            deltas.append(
                api.InputJSONDelta(type="input_json_delta", partial_json=part)
                if kind == "tool_use"
                else api.TextDelta(type="text_delta", text=part)
                if kind == "text"
                else api.ThinkingDelta(type="thinking_delta", thinking=part)
            )
        events.append(
            api.RawContentBlockStartEvent(type="content_block_start", index=index, content_block={**block, **empty})  # type: ignore[arg-type]
        )
        events += [
            api.RawContentBlockDeltaEvent(type="content_block_delta", index=index, delta=delta) for delta in deltas
        ]
        events.append(api.RawContentBlockStopEvent(type="content_block_stop", index=index))
    ended = {name: answer.get(name) for name in ("stop_reason", "stop_sequence", "stop_details")}
    usage = api.MessageDeltaUsage(output_tokens=5)
    events.append(api.RawMessageDeltaEvent(type="message_delta", delta=ended, usage=usage))  # type: ignore[arg-type]
    events.append(api.RawMessageStopEvent(type="message_stop"))
    return [dumped(event) for event in events]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_a_streamed_answer_is_read(answer: Any, expected: Any) -> None:
    events = stream(answer)
    assert read_stream(FORM.reader(chat()), events) == expected
    noise = [{"type": "ping"}, {"type": "news", "data": 1}, {}]
    assert read_stream(FORM.reader(chat()), [one for event in events for one in (*noise, event)]) == expected


def start(index: Any, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: Any, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


ENDED = {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {}}
TOOL = {"type": "tool_use", "id": "t", "name": "clock", "input": {}}


def test_a_call_without_arguments_has_an_empty_object_also_where_its_end_is_missing() -> None:
    events = [start(0, **TOOL), start(1, **TOOL | {"input": {"a": 1}}), delta(1, "input_json_delta", partial_json="")]
    expected = ("", [("clock", "{}"), ("clock", '{"a":1}')], "tool_calls", None)
    assert read_stream(FORM.reader(chat()), [*events, ENDED]) == expected


def test_tools_that_the_upstream_runs_are_passed_over() -> None:
    own = TOOL | {"type": "server_tool_use", "name": "web_search"}
    events = [start(0, **own), delta(0, "input_json_delta", partial_json='{"q":1}'), start(1, type="text", text="Hi")]
    assert read_stream(FORM.reader(chat()), events)[:2] == ("Hi", [])


def test_a_stream_without_an_end_has_no_reason() -> None:
    assert read_stream(FORM.reader(chat()), stream(ANSWERS["text"][0])[:-2])[2] is None


ODD = {
    "arguments of a call that has ended": [
        start(0, **TOOL),
        start(1, **TOOL),
        delta(0, "input_json_delta", partial_json="{}"),
    ],
    "two calls of one number": [start(0, **TOOL), start(0, **TOOL)],
    "no number": [{"type": "content_block_start", "content_block": TOOL}],
    "a number that is none": [start(None, **TOOL)],
    "a call without a name": [start(0, **TOOL | {"name": ""})],
    "a name that is none": [start(0, **TOOL | {"name": 1})],
    "input that is no object": [start(0, **TOOL | {"input": [1]})],
    "a text that is none": [delta(0, "text_delta", text=None)],
    "no delta": [{"type": "content_block_delta", "index": 0, "delta": None}],
    "no end": [{"type": "message_delta", "delta": None}],
    "an error that is none": [{"type": "error", "error": "x"}],
}


@pytest.mark.parametrize("events", ODD.values(), ids=ODD)
def test_what_is_no_answer_is_an_error(events: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        read_stream(FORM.reader(chat()), events)


@pytest.mark.parametrize(
    "answer", [{}, {"content": None}, {"content": ["x"]}, {"content": [{"type": "text"}]}, {"content": {}}]
)
def test_what_is_no_whole_answer_has_no_reason(answer: Any) -> None:
    reader = FORM.reader(chat())
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        read_whole(reader, answer)
    assert reader.reason is None


@pytest.mark.parametrize(
    ("kind", "status", "ours"),
    [
        ("overloaded_error", 529, "server_error"),
        ("rate_limit_error", 429, "requests"),
        ("invalid_request_error", 400, "invalid_request_error"),
        ("new_error", 500, "server_error"),
    ],
)
def test_an_error_in_the_place_of_an_answer_is_told(kind: str, status: int, ours: str) -> None:
    event = {"type": "error", "error": {"type": kind, "message": "Too busy."}, "request_id": "req_1"}
    api.ErrorResponse.model_validate(event | {"error": event["error"] | {"type": "api_error"}})
    for read in (FORM.reader(chat()).event, FORM.reader(chat()).whole):
        with pytest.raises(UpstreamRefusedError, match="Too busy") as caught:
            list(read(event))
        assert (caught.value.status, caught.value.type) == (status, ours)


@given(st.lists(st.sampled_from([*stream(ANSWERS["calls"][0]), *(one for odd in ODD.values() for one in odd)])))
def test_events_in_any_order_are_read_or_an_error(events: list[dict[str, Any]]) -> None:
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        read_stream(FORM.reader(chat()), events)
