"""Items, checked and brought into one form, and the messages that become of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from gateway.api.openai.caching import Point
from gateway.api.openai.responses.items import parse_input, response_of, with_ids
from gateway.api.openai.responses.request import to_messages
from gateway.errors import BadRequestError, UnsupportedError

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def user(text: str, **part: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text, **part}]}


def messages(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return to_messages(instructions, parse_input(list(items), "input")).messages


def test_a_string_is_a_message_of_the_user() -> None:
    (item,) = parse_input("hi", "input")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert parse_input([{"role": "user", "content": "hi"}], "input") == parse_input([user("hi")], "input") == [item]


def test_what_is_told_can_be_sent_again_and_stays_as_it_is() -> None:
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    said["content"] = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    once = with_ids(
        parse_input([user("x"), said, CALL, OUTPUT, {"type": "reasoning", "id": "rs_1", "summary": []}], "input"), "t"
    )
    assert with_ids(parse_input(once, "input"), "u") == once
    assert once[1] == said
    assert [item["id"] for item in once] == ["msg_ti0000", "msg_1", "fc_ti0002", "fco_ti0003", "rs_1"]


def test_a_turn_of_the_assistant_is_one_message_again() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    second = CALL | {"call_id": "c2", "name": "g", "arguments": "not JSON"}
    thought = {"type": "reasoning", "summary": []}
    turns = messages(user("x"), thought, said, CALL, second, OUTPUT, user("and?"), instructions="Be brief.")
    assert turns == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "not JSON"}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
        {"role": "user", "content": "and?"},
    ]


def test_calls_without_words_are_a_message_and_never_part_of_an_earlier_turn() -> None:
    turns = messages({"role": "assistant", "content": "a"}, CALL, OUTPUT, CALL | {"call_id": "c2"}, user("b"))
    assert [(turn["role"], len(turn.get("tool_calls", ()))) for turn in turns] == [
        ("assistant", 1),
        ("tool", 0),
        ("assistant", 1),
        ("user", 0),
    ]


def test_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    refused = [{"type": "refusal", "refusal": "No."}]
    assert messages({"role": "developer", "content": parts}, {"role": "assistant", "content": refused}) == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "No."},
    ]
    output = OUTPUT | {"output": parts}
    assert messages(CALL, output)[1]["content"] == "ab"


def test_breakpoints_are_found_where_they_were_put() -> None:
    point = {"mode": "explicit", "ttl": "1h"}
    marked = user("abc", prompt_cache_breakpoint=point)
    marked["content"].append({"type": "input_text", "text": "de", "prompt_cache_breakpoint": {"mode": "explicit"}})
    output = OUTPUT | {"output": [{"type": "input_text", "text": "r", "prompt_cache_breakpoint": point}]}
    items = parse_input([user("old"), marked, CALL, output], "input")
    assert to_messages("i", items, new=1).found.points == [
        Point(2, 3, "1h", "input[0].content[0].prompt_cache_breakpoint.ttl"),
        Point(2, 5, None, "input[0].content[1].prompt_cache_breakpoint.ttl"),
        Point(4, 1, "1h", "input[2].output[0].prompt_cache_breakpoint.ttl"),
    ]


def test_items_that_are_taken_are_in_the_schema() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{}], "encrypted_content": "x", "status": None}
    items = [user("x", prompt_cache_breakpoint={"mode": "explicit"}), said, CALL, OUTPUT, thought]
    items += [{"id": "msg_1"}, {"type": "item_reference", "id": "msg_2"}]
    schema = jsonschema.Draft202012Validator(parse_input.schema)
    for value in ("hi", [], items, with_ids(parse_input(items[:5], "input"), "t")):
        parse_input(value, "input")
        schema.validate(value)


WRONG: list[tuple[Any, str, str]] = [
    (5, "input", "invalid_type"),
    (["hi"], "input[0]", "invalid_type"),
    ([{"content": "x"}], "input[0].role", "missing_required_parameter"),
    ([{"role": "tool", "content": "x"}], "input[0].role", "invalid_value"),
    ([{"role": 1, "content": "x"}], "input[0].role", "invalid_type"),
    ([{"role": "user"}], "input[0].content", "missing_required_parameter"),
    ([{"role": "user", "content": 1}], "input[0].content", "invalid_type"),
    ([{"role": "user", "content": []}], "input[0].content", "empty_array"),
    ([{"role": "user", "content": [{"text": "x"}]}], "input[0].content[0].type", "missing_required_parameter"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "input[0].content[0].type", "invalid_value"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "missing_required_parameter"),
    ([user("x", extra=1)], "input[0].content[0].extra", "unknown_parameter"),
    (
        [user("x", prompt_cache_breakpoint={"mode": "implicit"})],
        "input[0].content[0].prompt_cache_breakpoint.mode",
        "invalid_value",
    ),
    (
        [{"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}],
        "input[0].content[0].type",
        "invalid_value",
    ),
    ([{"role": "user", "content": "x", "name": "n"}], "input[0].name", "unknown_parameter"),
    ([{"role": "user", "content": "x", "status": "done"}], "input[0].status", "invalid_value"),
    ([{"role": "user", "content": "x", "id": "i" * 129}], "input[0].id", "string_above_max_length"),
    ([{"type": 5}], "input[0].type", "invalid_type"),
    ([CALL | {"name": None}], "input[0].name", "missing_required_parameter"),
    ([CALL | {"arguments": {}}], "input[0].arguments", "invalid_type"),
    ([OUTPUT | {"output": None}], "input[0].output", "missing_required_parameter"),
    ([OUTPUT | {"output": 5}], "input[0].output", "invalid_type"),
    ([{"type": "reasoning", "summary": "x"}], "input[0].summary", "invalid_type"),
    ([{"type": "reasoning", "summary": [1]}], "input[0].summary[0]", "invalid_type"),
]


@pytest.mark.parametrize(("value", "param", "code"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named_by_its_path(value: Any, param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_input(value, "input")
    assert (refused.value.param, refused.value.code) == (param, code)


def test_an_item_tells_of_which_response_it_is() -> None:
    token = "0123456789abcdef" * 2
    (item,) = with_ids(parse_input("hi", "input"), token)
    assert response_of(item["id"]) == f"resp_{token}"
    assert [response_of(other) for other in ("msg_1", "", f"msg_{token}", f"resp_{token}")] == [None] * 4


def test_an_output_needs_its_call() -> None:
    with pytest.raises(BadRequestError, match="No tool call found") as refused:
        to_messages(None, parse_input([user("old"), OUTPUT], "input"), new=1)
    assert refused.value.param == "input[0].call_id"


def test_the_output_of_a_local_shell_may_be_objects() -> None:
    call = {"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}}
    output = {"type": "local_shell_call_output", "call_id": "c1", "output": [{"stdout": "a"}]}
    assert messages(call, output)[1]["content"] == '[{"stdout":"a"}]'


@pytest.mark.parametrize(
    ("role", "kind"), [("user", "input_audio"), ("system", "input_image"), ("developer", "input_file")]
)
def test_instructions_have_no_media_and_users_no_sounds(role: str, kind: str) -> None:
    with pytest.raises(UnsupportedError, match="not supported by this model") as refused:
        parse_input([{"role": role, "content": [{"type": kind}]}], "input")
    assert refused.value.param == "input[0].content[0].type"


def test_items_of_tools_that_are_run_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="web_search_call") as refused:
        parse_input([{"type": "web_search_call", "id": "ws_1"}], "input")
    assert refused.value.param == "input[0].type"
