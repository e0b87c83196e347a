from __future__ import annotations

from typing import Any

import pytest

from gateway.api.openai.caching import join_messages
from gateway.api.openai.messages import parse_messages
from gateway.errors import BadRequestError

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
PARSED_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}


def one(**message: Any) -> Any:
    messages = parse_messages([message], "messages")
    join_messages(messages)
    return messages[0]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_passes_as_it_is(role: str) -> None:
    assert one(role=role, content="  <|im_end|>\n") == {"role": role, "content": "  <|im_end|>\n"}


def test_developers_speak_as_the_system() -> None:
    assert one(role="developer", content="x", name="d") == {"role": "system", "content": "x", "name": "d"}


def test_text_parts_are_joined() -> None:
    parts = [
        {"type": "text", "text": "a "},
        {"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}},
    ]
    assert one(role="user", content=parts) == {"role": "user", "content": "a b"}
    refusal = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    assert one(role="assistant", content=refusal)["content"] == "ano"


def test_earlier_tool_calls_and_their_results_reach_the_template() -> None:
    said = one(role="assistant", content=None, tool_calls=[CALL])
    assert said == {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]}
    result = one(role="tool", content="blue", tool_call_id="call_1")
    assert result == {"role": "tool", "content": "blue", "tool_call_id": "call_1"}


def test_the_deprecated_function_forms_become_tools() -> None:
    function_call = {"name": "look", "arguments": "{}"}
    assert one(role="assistant", function_call=function_call)["tool_calls"] == [
        {"type": "function", "function": {"name": "look", "arguments": {}}}
    ]
    assert one(role="function", name="look", content="blue") == {"role": "tool", "content": "blue", "name": "look"}
    assert one(role="function", name="look", content=None)["content"] == ""


@pytest.mark.parametrize("written", ["not json", "[1]", '"text"', "", '{"a":' * 300 + "1" + "}" * 300])
def test_arguments_that_are_no_plain_object_stay_text(written: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    assert one(role="assistant", tool_calls=[call])["tool_calls"][0]["function"]["arguments"] == written


def test_an_answer_can_be_sent_back_as_the_sdk_dumps_it() -> None:
    dumped = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "something_newer": None,
    }
    assert one(**dumped) == {"role": "assistant", "content": "hi"}


def test_a_refusal_and_reasoning_are_part_of_the_history() -> None:
    assert one(role="assistant", content=None, refusal="no") == {"role": "assistant", "content": "no"}
    assert one(role="assistant", content="x", reasoning_content="r")["reasoning_content"] == "r"


MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"


@pytest.mark.parametrize(
    ("message", "path", "code"),
    [
        ("hi", "", TYPE),
        ({}, ".role", MISSING),
        ({"role": 1}, ".role", TYPE),
        ({"role": "boss", "content": "x"}, ".role", VALUE),
        ({"role": "user"}, ".content", MISSING),
        ({"role": "user", "content": None}, ".content", MISSING),
        ({"role": "user", "content": 1}, ".content", TYPE),
        ({"role": "user", "content": {}}, ".content", TYPE),
        ({"role": "user", "content": []}, ".content", "empty_array"),
        ({"role": "user", "content": ["x"]}, ".content[0]", TYPE),
        ({"role": "user", "content": [{}]}, ".content[0].type", MISSING),
        ({"role": "user", "content": [{"type": []}]}, ".content[0].type", TYPE),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", MISSING),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text", TYPE),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, ".content[0].type", VALUE),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, ".content[0].y", "unknown_parameter"),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "implicit"}}],
            },
            ".content[0].prompt_cache_breakpoint.mode",
            VALUE,
        ),
        ({"role": "user", "content": "x", "name": 1}, ".name", TYPE),
        ({"role": "user", "content": "x", "mood": "bad"}, ".mood", "unknown_parameter"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, ".tool_calls", "unknown_parameter"),
        ({"role": "system", "content": [{"type": "image_url"}]}, ".content[0].type", VALUE),
        ({"role": "assistant"}, ".content", MISSING),
        ({"role": "assistant", "tool_calls": {}}, ".tool_calls", TYPE),
        ({"role": "assistant", "tool_calls": [1]}, ".tool_calls[0]", TYPE),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, ".tool_calls[0].id", MISSING),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "magic"}]}, ".tool_calls[0].type", VALUE),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}, ".tool_calls[0].function", MISSING),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call.arguments", MISSING),
        ({"role": "assistant", "content": "x", "refusal": 1}, ".refusal", TYPE),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, ".reasoning_content", TYPE),
        ({"role": "tool", "content": "x"}, ".tool_call_id", MISSING),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, ".tool_call_id", TYPE),
        ({"role": "function", "content": "x"}, ".name", MISSING),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_named_by_its_path(message: Any, path: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_messages([{"role": "user", "content": "x"}, message], "messages")
    assert (refused.value.param, refused.value.code) == (f"messages[1]{path}", code)


def test_spoken_answers_are_refused() -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_messages([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages")
    assert (refused.value.param, refused.value.code) == ("messages[0].audio", "unsupported_parameter")


def test_a_long_unknown_name_is_not_repeated_in_full() -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_messages([{"role": "user", "content": "x", "y" * 10_000: 1}], "messages")
    assert len(refused.value.message) < 200
