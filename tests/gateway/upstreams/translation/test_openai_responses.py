from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as api
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from pydantic import TypeAdapter

from engine.protocol import Grammar
from gateway.errors import UnsupportedError, UpstreamRefusedError
from gateway.types import Constraint, Request, ScoredToken, Spelled, TextDelta, TextPrompt, ToolUse
from gateway.upstreams.translation.base import UNLIMITED
from gateway.upstreams.translation.openai_responses import OpenAIResponses
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

FORM = OpenAIResponses()
WHOLE = TypeAdapter(ResponseCreateParamsNonStreaming)
STREAMED = TypeAdapter(ResponseCreateParamsStreaming)
EVENT: TypeAdapter[Any] = TypeAdapter(api.ResponseStreamEvent)
ODD_ERRORS = (LookupError, TypeError, ValueError, AttributeError)


def written(request: Request) -> dict[str, Any]:
    """The body, which the SDK's own types take."""
    path, body, query = FORM.write(request, "m")
    assert (path, query, body["model"], body["store"]) == ("/v1/responses", "", "m", False)
    body = orjson.loads(orjson.dumps(body))
    check_types(STREAMED if body.get("stream") else WHOLE, body, extra="forbid")
    return body


def test_a_plain_question_is_its_items_and_nothing_else() -> None:
    body = written(chat(system("Be brief."), system("Be kind."), user("Hi")))
    items = [system("Be kind."), user("Hi")]
    assert body == {"model": "m", "store": False, "instructions": "Be brief.", "input": items}


def test_instructions_alone_are_the_input() -> None:
    assert written(chat(system("s"), system("t"))) == {
        "model": "m",
        "store": False,
        "input": [system("s"), system("t")],
    }


def test_parameters_with_values_of_their_own_are_written() -> None:
    sampling = {"temperature": 0.0, "top_p": 0.9}
    body = written(chat(sampling={**sampling, "max_tokens": 16, "logprobs": 2}, stream=True))
    assert {name: body[name] for name in sampling} == sampling
    assert (body["max_output_tokens"], body["top_logprobs"], body["stream"]) == (16, 2, True)
    assert body["include"] == ["message.output_text.logprobs"]


@pytest.mark.parametrize("asked", [0, UNLIMITED])
def test_no_limit_is_left_out(asked: int) -> None:
    assert set(written(chat(sampling={"max_tokens": asked}))) == {"model", "store", "input"}


def test_a_prompt_is_computed_without_an_answer() -> None:
    body = written(chat(sampling={"max_tokens": 0}, prewarm=True))
    assert body["prompt_cache_options"] == {"prewarm": True}
    assert "max_output_tokens" not in body


def test_results_stand_behind_their_calls_under_the_same_ids() -> None:
    calls = [call("weather", {"city": "Åre"}, "c1"), call("clock", "", None)]
    messages = [user("u"), said("", *calls), user("And?"), result("noon", None, "clock"), result("snow", "c1")]
    assert written(chat(*messages, said("Well.", call("clock", "{}", "c3")), said("")))["input"] == [
        user("u"),
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Åre"}'},
        {"type": "function_call", "call_id": "call_1_1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1_1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c1", "output": "snow"},
        user("And?"),
        said("Well."),
        {"type": "function_call", "call_id": "c3", "name": "clock", "arguments": "{}"},
        said(""),
    ]


BOTH = (WEATHER, CLOCK)
CHOICES: dict[str, tuple[ToolUse | None, Any, list[str], bool | None]] = {
    "auto": (ToolUse(BOTH), None, ["weather", "clock"], None),
    "one call at most": (ToolUse(BOTH, parallel=False), None, ["weather", "clock"], False),
    "none": (None, "none", ["weather", "clock"], None),
    "any": (ToolUse(BOTH, "required"), "required", ["weather", "clock"], None),
    "forced": (ToolUse((CLOCK,), "required"), {"type": "function", "name": "clock"}, ["weather", "clock"], None),
    "some": (ToolUse((CLOCK,)), None, ["clock"], None),
}


@pytest.mark.parametrize(("use", "choice", "names", "parallel"), CHOICES.values(), ids=CHOICES)
def test_tools_and_which_of_them_are_called(use: Any, choice: Any, names: Any, parallel: Any) -> None:
    body = written(chat(tools=BOTH, tool_use=use))
    assert body.get("tool_choice") == choice
    assert [(tool["name"], tool["strict"]) for tool in body["tools"]] == [(name, False) for name in names]
    assert body.get("parallel_tool_calls") == parallel


def test_structured_output_is_a_format_of_the_text() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    constraint = Constraint(Grammar("json_schema", orjson.dumps(schema).decode()), "text.format")
    expected = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    assert written(chat(constraint=constraint))["text"] == {"format": expected}
    anything = Constraint(Grammar("json_object"), "text.format")
    assert written(chat(constraint=anything))["text"] == {"format": {"type": "json_object"}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"sampling": {"seed": 1}}, "seed"),
    "few tokens": ({"sampling": {"max_tokens": 15}}, "max_tokens"),
    "stop": ({"stop": ("a",)}, "stop"),
    "prefill": ({"continues": True}, "messages"),
    "regex": ({"constraint": Constraint(Grammar("regex", "a+"), "regex")}, "regex"),
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
    body = written(chat(*messages))
    given_items: list[tuple[Any, ...]] = []
    for one in messages:
        if one["role"] == "tool":
            given_items.append(("result", one["tool_call_id"], one["content"]))
        elif one["content"]:
            given_items.append((one["role"], one["content"]))
        calls = [(each["id"], each["function"]) for each in one.get("tool_calls", ())]
        given_items += [("call", name, each["name"], each["arguments"]) for name, each in calls]
    sent: list[tuple[Any, ...]] = [("system", body["instructions"])] if "instructions" in body else []
    for item in body["input"]:
        if item.get("type") == "function_call":
            sent.append(("call", item["call_id"], item["name"], orjson.loads(item["arguments"])))
        elif item.get("type") == "function_call_output":
            sent.append(("result", item["call_id"], item["output"]))
        elif item["content"]:
            sent.append((item["role"], item["content"]))
    assert sent == given_items


# -- answers ----------------------------------------------------------------------------------------------------------


def dumped(model: Any) -> Any:
    return orjson.loads(model.model_dump_json())


def answer(*output: Any, status: str = "completed", why: str | None = None, error: Any = None) -> Any:
    fields = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": status,
        "incomplete_details": None if why is None else {"reason": why},
        "error": error,
    }
    return dumped(api.Response.model_validate(fields))


def message(*parts: Any) -> Any:
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": list(parts)}


def text_part(text: str, **fields: Any) -> Any:
    return {"type": "output_text", "text": text, "annotations": [], **fields}


def call_item(name: str, arguments: str, number: int = 1) -> Any:
    fields = {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "status": "completed"}
    return {**fields, "name": name, "arguments": arguments}


def event(kind: str, **fields: Any) -> Any:
    return dumped(EVENT.validate_python({"type": kind, "sequence_number": 0, **fields}))


def text_delta(text: str, logprobs: Any = ()) -> Any:
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return event("response.output_text.delta", delta=text, logprobs=list(logprobs), **place)


def added(index: int, item: Any) -> Any:
    return event("response.output_item.added", output_index=index, item=item)


def done(index: int, item: Any) -> Any:
    return event("response.output_item.done", output_index=index, item=item)


def arguments(index: int, text: str) -> Any:
    return event("response.function_call_arguments.delta", output_index=index, item_id="fc", delta=text)


def ended(kind: str = "completed", **fields: Any) -> Any:
    return event(f"response.{kind}", response=answer(status=kind, **fields))


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
BEGUN = event("response.created", response=answer(status="in_progress"))
STREAMS: dict[str, tuple[list[Any], Any]] = {
    "text": (
        [
            BEGUN,
            added(0, message()),
            text_delta("Hé"),
            text_delta("llo"),
            done(0, message(text_part("Héllo"))),
            ended(),
        ],
        ("Héllo", [], "stop", None),
    ),
    "refusal": (
        [event("response.refusal.delta", item_id="m", output_index=0, content_index=0, delta="No."), ended()],
        ("No.", [], "refusal", None),
    ),
    "cut by the limit": (
        [text_delta("a"), ended("incomplete", why="max_output_tokens")],
        ("a", [], "length", None),
    ),
    "filtered": ([text_delta("a"), ended("incomplete", why="content_filter")], ("a", [], "refusal", None)),
    "thoughts and unknown events": (
        [added(0, THOUGHT), done(0, THOUGHT), {"type": "response.new"}, {}, text_delta("a"), ended()],
        ("a", [], "stop", None),
    ),
    "calls": (
        [
            added(1, call_item("weather", "")),
            arguments(1, '{"city"'),
            arguments(1, ":1}"),
            done(1, call_item("weather", '{"city":1}')),
            added(2, call_item("clock", "", 2)),
            done(2, call_item("clock", "", 2)),
            ended(),
        ],
        ("", [("weather", '{"city":1}'), ("clock", "{}")], "tool_calls", None),
    ),
    "arguments at the end alone": (
        [added(0, call_item("a", "")), done(0, call_item("a", '{"x":1}')), done(1, call_item("b", "{}", 2)), ended()],
        ("", [("a", '{"x":1}'), ("b", "{}")], "tool_calls", None),
    ),
    "ends out of order": (
        [
            added(0, call_item("a", "{}")),
            added(1, call_item("b", "", 2)),
            done(0, call_item("a", "{}")),
            arguments(1, '{"y":2}'),
            ended(),
        ],
        ("", [("a", "{}"), ("b", '{"y":2}')], "tool_calls", None),
    ),
    "cut": ([BEGUN, text_delta("a")], ("a", [], None, None)),
}


@pytest.mark.parametrize(("events", "expected"), STREAMS.values(), ids=STREAMS)
def test_streams_are_read(events: list[Any], expected: Any) -> None:
    assert read_stream(FORM.reader(chat()), events) == expected


ANSWERS: dict[str, tuple[Any, Any]] = {
    "text": (answer(THOUGHT, message(text_part("a"), text_part("b"))), ("ab", [], "stop", None)),
    "refusal": (answer(message({"type": "refusal", "refusal": "No."})), ("No.", [], "refusal", None)),
    "cut": (
        answer(message(text_part("a")), status="incomplete", why="max_output_tokens"),
        ("a", [], "length", None),
    ),
    "calls": (
        answer(message(text_part("Well.")), call_item("a", '{"x":1}'), call_item("b", "", 2)),
        ("Well.", [("a", '{"x":1}'), ("b", "{}")], "tool_calls", None),
    ),
    "computed and not answered": (answer(), ("", [], "stop", None)),
    "cancelled": (answer(message(text_part("a")), status="cancelled"), ("a", [], None, None)),
}


@pytest.mark.parametrize(("given_answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_whole_answers_are_read(given_answer: Any, expected: Any) -> None:
    assert read_whole(FORM.reader(chat()), given_answer) == expected


def test_tokens_come_with_their_log_probabilities_and_places() -> None:
    top = [{"token": "c", "logprob": -2.0, "bytes": [99]}, {"token": "a", "logprob": -1.0, "bytes": [97]}]
    scores = [
        {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": top},
        {"token": "b", "logprob": -0.5, "bytes": [98], "top_logprobs": []},
    ]
    a, b, c = (Spelled(one, one.encode()) for one in "abc")
    expected = ScoredToken(a, -1.0, ((a, -1.0), (c, -2.0)), 0), ScoredToken(b, -0.5, (), 1)
    asked = chat(sampling={"logprobs": 2})
    whole = answer(message(text_part("ab", logprobs=scores)))
    assert list(FORM.reader(asked).whole(whole)) == [TextDelta("ab", expected)]
    assert list(FORM.reader(chat()).whole(whole)) == [TextDelta("ab")]
    reader = FORM.reader(asked)
    deltas = [
        delta for one, score in zip("ab", scores, strict=True) for delta in reader.event(text_delta(one, [score]))
    ]
    assert deltas == [TextDelta("a", expected[:1]), TextDelta("b", expected[1:])]


ODD: dict[str, list[Any]] = {
    "arguments of a call that has ended": [
        added(0, call_item("a", "{}")),
        added(1, call_item("b", "", 2)),
        arguments(0, "{}"),
    ],
    "arguments of no call": [arguments(0, "{}")],
    "arguments without a number": [
        {"type": "response.function_call_arguments.delta", "output_index": None, "delta": "x"}
    ],
    "two calls of one number": [added(0, call_item("a", "{}")), added(0, call_item("b", "{}"))],
    "a call without a name": [{**added(0, call_item("a", "")), "item": call_item("", "")}],
    "a number that is none": [{**added(0, call_item("a", "")), "output_index": "0"}],
    "arguments that are none": [{**added(0, call_item("a", "")), "item": call_item("a", "") | {"arguments": 5}}],
    "a text that is none": [{**text_delta("a"), "delta": 5}],
    "an end without a response": [{"type": "response.completed"}],
}


@pytest.mark.parametrize("events", ODD.values(), ids=ODD)
def test_what_is_no_answer_is_an_error(events: Any) -> None:
    reader = FORM.reader(chat())
    with pytest.raises(ODD_ERRORS):
        read_stream(reader, events)
    assert reader.reason is None


@pytest.mark.parametrize(
    "given_answer", [{}, {"output": 5}, {"output": ["x"]}, {"output": [{}]}, {"output": [message(5)]}]
)
def test_what_is_no_whole_answer_is_an_error(given_answer: Any) -> None:
    reader = FORM.reader(chat())
    with pytest.raises(ODD_ERRORS):
        read_whole(reader, given_answer)
    assert reader.reason is None


FAILED = {"code": "server_error", "message": "Too busy."}
ERRORS: dict[str, tuple[Any, int]] = {
    "event": (event("error", code="rate_limit_exceeded", message="Too busy.", param=None), 429),
    "nested": ({"type": "error", "error": {"message": "Too busy.", "type": "invalid_request_error"}}, 400),
    "failed": (ended("failed", error=FAILED), 500),
    "prompt": (ended("failed", error=FAILED | {"code": "invalid_prompt"}), 400),
}


@pytest.mark.parametrize(("failed", "status"), ERRORS.values(), ids=ERRORS)
def test_an_error_in_the_place_of_an_answer_is_told(failed: Any, status: int) -> None:
    with pytest.raises(UpstreamRefusedError, match="Too busy") as caught:
        list(FORM.reader(chat()).event(failed))
    assert caught.value.status == status


def test_a_whole_answer_that_failed_is_an_error() -> None:
    with pytest.raises(UpstreamRefusedError, match="Too busy"):
        list(FORM.reader(chat()).whole(answer(status="failed", error=FAILED)))


EVENTS = [one for events, _ in STREAMS.values() for one in events] + [one for events in ODD.values() for one in events]


@given(st.lists(st.sampled_from(EVENTS)))
def test_events_in_any_order_are_read_or_an_error(events: list[dict[str, Any]]) -> None:
    with suppress(*ODD_ERRORS):
        read_stream(FORM.reader(chat()), events)
