"""Bodies of /v1/responses into calls."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.call import Call
from gateway.api.openai.responses.parameters import RESPONSE, TOKENS
from gateway.api.openai.responses.request import parse, shortened, to_call, turns
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Marker

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(**fields: Any) -> Call:
    asked = parse({"model": "demo", "input": "hi", **fields})
    return to_call(asked, asked.items, LeaseSettings())


def prompt(**fields: Any) -> ChatPrompt:
    (one,) = call(**fields).prompts
    assert isinstance(one, ChatPrompt)
    return one


def test_a_plain_input_has_the_defaults_of_the_api() -> None:
    plain = call()
    assert plain.prompts == (ChatPrompt([{"role": "user", "content": "hi"}]),)
    assert (plain.prompt_param, plain.stream, plain.prewarm, plain.use_cache) == ("input", False, False, True)
    assert (plain.sampling.max_tokens, plain.sampling.temperature, plain.sampling.logprobs) == (0, 1.0, None)


def test_an_input_may_be_missing_where_another_response_is_gone_on_from() -> None:
    for table in (RESPONSE, TOKENS):
        assert parse({"model": "demo", "previous_response_id": "resp_1"}, table).items == []


def test_a_conversation_that_is_too_long_begins_later_at_a_message_of_the_user() -> None:
    said = {"role": "assistant", "content": "b"}
    system = {"role": "developer", "content": "s"}
    items = parse({"model": "demo", "input": [system, user("1"), said, user("2"), said, user("3")]}).items
    assert turns(items) == [0, 1, 3, 5]
    assert [item["role"] for item in shortened(items, 3)] == ["developer", "user", "assistant", "user"]
    assert shortened(items, 0) == items
    assert turns([]) == []


def test_null_is_not_given() -> None:
    assert call(**dict.fromkeys(set(RESPONSE) - {"model", "input"})) == call()


def test_parameters_arrive() -> None:
    asked = call(
        max_output_tokens=16,
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=3,
        stop="x",
        stream=True,
        stream_options={"include_obfuscation": True},
        prompt_cache_key="k",
        cache_salt="s",
        min_tokens=16,
    )
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 0.0, 0.5, 4)
    assert (sampling.seed, sampling.min_tokens, asked.stop, asked.stream) == (3, 16, ("x",), True)
    assert (asked.cache_key, asked.cache_salt) == ("k", "s")


def test_instructions_come_first() -> None:
    assert [message["role"] for message in prompt(instructions="Be brief.").messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 20}, 20),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
    ids=str,
)
def test_log_probabilities_are_asked_for_by_name_or_number(fields: dict[str, Any], logprobs: int | None) -> None:
    assert call(**fields).sampling.logprobs == logprobs


def test_formats_are_flat() -> None:
    assert call(text={"format": {"type": "text"}, "verbosity": "low"}).constraint is None
    as_object = call(text={"format": {"type": "json_object"}}).constraint
    assert as_object is not None
    assert (as_object.grammar.kind, as_object.param) == ("json_object", "text.format")
    named = {"type": "json_schema", "name": "one", "schema": SCHEMA, "strict": True}
    schema = call(text={"format": named}).constraint
    assert schema is not None
    assert (schema.grammar.kind, schema.param) == ("json_schema", "text.format.schema")


def test_caching_is_asked_for_as_in_chats() -> None:
    part = {"type": "input_text", "text": "abc", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    marked = [{"role": "user", "content": [part, {"type": "input_text", "text": "de"}]}]
    assert prompt(input=marked).markers == (Marker(0, 3, 43200.0),)
    options = {"ttl": "30m"}
    assert prompt(input=marked, prompt_cache_options=options, instructions="i").markers == (
        Marker(1, 3, 43200.0),
        Marker(1, 5, 1800.0),
    )
    assert not call(prompt_cache_options={"mode": "explicit"}).use_cache


def test_a_prewarmed_prompt_is_computed_and_nothing_is_generated() -> None:
    warm = call(prompt_cache_options={"prewarm": True}, max_output_tokens=100, text={"format": {"type": "json_object"}})
    assert (warm.prewarm, warm.sampling.max_tokens, warm.constraint) == (True, 0, None)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "empty_array"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "empty_array"),
    ({"max_output_tokens": 15}, "max_output_tokens", "integer_below_min_value"),
    ({"max_tokens": 20}, "max_tokens", "unknown_parameter"),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        "unknown_parameter",
    ),
    ({"include": ["x"]}, "include[0]", "invalid_value"),
    ({"text": {"style": 1}}, "text.style", "unknown_parameter"),
    ({"text": {"verbosity": "none"}}, "text.verbosity", "invalid_value"),
    ({"text": {"format": {"type": "json"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "missing_required_parameter"),
    (
        {"text": {"format": {"type": "json_schema", "name": None, "schema": {}}}},
        "text.format.name",
        "missing_required_parameter",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
        "text.format.name",
        "invalid_value",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": True}}},
        "text.format.schema",
        "invalid_json_schema",
    ),
    ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name", "unknown_parameter"),
    ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos", "invalid_parameter_combination"),
    ({"max_output_tokens": 16, "min_tokens": 17}, "min_tokens", "invalid_value"),
    ({"prompt_cache_options": {"ttl": "31m"}}, "prompt_cache_options.ttl", "invalid_value"),
    ({"prompt_cache_options": {"prewarm": 1}}, "prompt_cache_options.prewarm", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_by_its_path_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        call(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)


HARMLESS: dict[str, Any] = {
    "max_tool_calls": 3,
    "prompt_cache_retention": "24h",
    "safety_identifier": "somebody",
    "tool_choice": "auto",
    "user": "somebody",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_changes_nothing(name: str) -> None:
    assert call(**{name: HARMLESS[name]}) == call()


def test_every_parameter_without_effect_is_tried_above() -> None:
    assert {name for name, parameter in RESPONSE.items() if parameter.effect == "none"} <= set(HARMLESS)


@pytest.mark.parametrize("name", [name for name, parameter in RESPONSE.items() if parameter.effect == "refused"])
def test_what_is_not_carried_out_is_refused_and_never_ignored(name: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        call(**{name: "x"})
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
