"""What a check says it takes, and what it takes."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.anthropic.parameters import MESSAGES as MESSAGES_OF_ANTHROPIC
from gateway.api.fields import Check, boolean, choice, integer, number, record, string_map, text
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.openai.responses.parameters import RESPONSE
from gateway.api.unknown_fields import IgnoredFields, collected
from gateway.errors import BadRequestError

CHECKS: list[Check[Any]] = [
    boolean,
    integer(-2, 5),
    number(0, 1),
    text(3),
    choice("a", "b"),
    record(a=boolean, b=integer(0, 3)),
    string_map(2, 2, 2),
    CHAT["stop"].check,
    CHAT["stop_token_ids"].check,
    CHAT["logit_bias"].check,
    CHAT["cache_salt"].check,
    RESPONSE["prompt_cache_options"].check,
    *(MESSAGES_OF_ANTHROPIC[name].check for name in ("thinking", "metadata", "cache_control", "diagnostics")),
]
LEAVES = st.none() | st.booleans() | st.integers(-5, 10) | st.floats(-2, 2) | st.text("ab01", max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text("ab01"), inner))


def takes(check: Check[Any], value: Any) -> bool:
    try:
        with collected(IgnoredFields()):
            check(value, "x")
    except BadRequestError:
        return False
    return True


@example(check=record(a=boolean), value={"b": None})
@given(check=st.sampled_from(CHECKS), value=VALUES)
def test_a_value_is_taken_when_the_schema_says_so(check: Check[Any], value: Any) -> None:
    if check.schema.get("additionalProperties") is False and isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}  # not given, whatever the key
    valid = jsonschema.Draft202012Validator(check.schema).is_valid(value)
    if isinstance(value, float) and value.is_integer() and check.schema.get("type") == "integer":
        return  # 1.0 is an integer for JSON Schema, and none for the API
    assert takes(check, value) == valid or contains_whole_float(value)


def contains_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(contains_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(contains_whole_float, value))
    return isinstance(value, float) and value.is_integer()


MESSAGES: list[Any] = [
    {"role": "system", "content": "x"},
    {"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None},
    {"role": "assistant", "content": None, "refusal": "no"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "x"},
    {"role": "function", "name": "f", "content": None},
]


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_messages_that_are_taken_are_in_the_schema(message: Any) -> None:
    check = CHAT["messages"].check
    assert takes(check, [message])
    jsonschema.Draft202012Validator(check.schema).validate([message])


@pytest.mark.parametrize(
    "parameter",
    [*CHAT.values(), *COMPLETION.values(), *RESPONSE.values(), *MESSAGES_OF_ANTHROPIC.values()],
    ids=lambda one: one.name,
)
def test_every_parameters_schema_is_one(parameter: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(parameter.check.schema)
