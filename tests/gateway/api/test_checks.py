"""What an answer has to pass under `cascade`, of every API."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.checks import Check, matches, said_in, tools_of, wanted_form
from gateway.api.routes import REPLAYS
from gateway.config import AliasSettings
from gateway.errors import CheckFailedError
from tests.fakes.hosted import answers
from tests.fakes.schemas import HARD, closed, wild_schemas

ROUTES = {
    "openai": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": ":generateContent",
}
PARAMETERS = closed(place={"type": "string"}) | {"required": ["place"]}
TOOLS: dict[str, Any] = {
    "openai": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
    "responses": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    "anthropic": [{"name": "f", "input_schema": PARAMETERS}],
    "gemini": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": PARAMETERS}]}],
}
SCHEMA = closed(n={"type": "integer"})
FORMS: dict[str, Any] = {
    "openai": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "gemini": {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}},
}


def failing(dialect: str, body: bytes, values: Any, *checks: str, stream: bool = False) -> str | None:
    """The check that an upstream's answer does not pass."""
    more: Any = {"min_mean_logprob": -1.0} if "logprob" in checks else {}
    alias = AliasSettings(name="x", targets=("a", "b"), policy="cascade", checks=checks, **more)  # type: ignore[arg-type]
    try:
        Check(alias, values, REPLAYS[ROUTES[dialect]]).check_body(body, is_stream=stream)
    except CheckFailedError as error:
        return error.check
    return None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", list(ROUTES))
def test_answers_of_every_api_are_read(dialect: str, stream: bool) -> None:
    def checked(texts: list[str], values: Any, *calls: Any) -> str | None:
        told = answers(dialect, texts, calls, stream=stream)
        return failing(dialect, b"".join(told.pieces), values, "schema", "refusal", stream=stream)

    tools, form = {"tools": TOOLS[dialect]}, FORMS[dialect]
    assert checked(["Hel", "lo"], {}) is None
    assert checked(['{"n"', ": 7}"], form) is None
    assert checked(['{"n"', ': "7"}'], form) == "schema"
    assert checked(['{"n', '": '], form) == "schema"
    assert checked([], tools, ("f", {"place": "Oslo"})) is None
    assert checked(["Wait."], {**tools, **form}, ("f", {"place": "Oslo"})) is None
    assert checked([], tools, ("f", {"place": 7})) == "schema"
    assert checked([], tools, ("g", {"place": "Oslo"})) == "schema"
    assert checked(["I'm sorry, ", "but I can't assist with that."], {}) == "refusal"
    assert checked([" "], {}) == "refusal"


@pytest.mark.parametrize(
    ("dialect", "whole"),
    [
        ("openai", {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]}),
        ("openai", {"choices": [{"message": {"content": "So"}, "finish_reason": "content_filter"}]}),
        ("responses", {"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}]}),
        ("anthropic", {"content": [{"type": "text", "text": "So"}], "stop_reason": "refusal"}),
        ("gemini", {"promptFeedback": {"blockReason": "SAFETY"}}),
        ("gemini", {"candidates": [{"finishReason": "SAFETY", "content": {"parts": [{"text": "So"}]}}]}),
    ],
)
def test_what_an_api_marks_as_refused_is_refused(dialect: str, whole: Any) -> None:
    assert failing(dialect, orjson.dumps(whole), {}, "refusal") == "refusal"


def test_a_stream_that_is_one_array_is_read() -> None:
    chunks = [{"candidates": [{"content": {"parts": [{"text": text}]}}]} for text in ('{"n', '": 7}')]
    assert failing("gemini", orjson.dumps(chunks), FORMS["gemini"], "schema") is None
    assert failing("gemini", orjson.dumps(chunks[:1]), FORMS["gemini"], "schema") == "schema"


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b"7", b'{"choices":[7]}', b'{"content":{}}', b'{"output":[{}]}'])
def test_what_is_no_answer_does_not_pass(body: bytes) -> None:
    for stream in (False, True):
        assert failing("openai", body, {}, "schema", "refusal", stream=stream) is not None


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I’m sorry, but I cannot assist with this request.", True),
        ("Sorry, I can't provide that.", True),
        ("As an AI language model, I cannot provide legal advice.", True),
        ("I am unable to comply.", True),
        ("Unfortunately, I cannot answer this.", True),
        ("I can help with that.", False),
        ("I'm sorry to hear that! Here is what you can do.", False),
        ("I can't believe how well it works: 42.", False),
        ("The error says: I'm sorry, but I can't help with that.", False),
        ("Sorry for the delay; the answer is 7.", False),
    ],
)
def test_refusals_are_told_from_other_beginnings(text: str, refused: bool) -> None:
    whole = {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}
    assert failing("anthropic", orjson.dumps(whole), {}, "refusal") == ("refusal" if refused else None)


def test_the_mean_of_the_log_probabilities_decides() -> None:
    def whole(*logprobs: float) -> bytes:
        scored = [{"token": "a", "logprob": one} for one in logprobs]
        return orjson.dumps({"choices": [{"message": {"content": "a"}, "logprobs": {"content": scored}}]})

    assert failing("openai", whole(-0.5, -1.4), {}, "logprob") is None
    assert failing("openai", whole(-0.5, -1.6), {}, "logprob") == "logprob"
    assert failing("openai", whole(), {}, "logprob") == "logprob"


def test_what_a_request_wants_is_found_and_odd_values_want_nothing() -> None:
    for dialect, tools in TOOLS.items():
        assert tools_of({"tools": tools}) == {"f": PARAMETERS}
        assert wanted_form(FORMS[dialect]) == SCHEMA
    assert wanted_form({"response_format": {"type": "json_object"}}) == {}
    assert wanted_form({"response_format": {"type": "text"}}) is None
    for odd in (7, "x", [], {}, None, [7, None, {"function": 7}]):
        assert wanted_form(dict.fromkeys(("text", "response_format", "generationConfig", "output_config"), odd)) is None
        assert tools_of({"tools": odd}) == {}
    assert said_in({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}).texts == ["a", "b"]


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.sampled_from((0.5, 2.0, "a", "b", "aa", "12")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(wild_schemas(), _values)
def test_no_value_that_a_schema_allows_fails(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(schema).is_valid(value):
        assert matches(value, schema)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("recursion", {"value": True, "next": {"value": 7, "next": None}}),
        ("two that call each other", {"even": {"odd": {"odd": None}}}),
        ("enum of every type", "y"),
        ("constants", {"a": "x", "b": 0, "c": {}, "d": ""}),
        ("type list", True),
        ("bounded array", [True, 1]),
        ("optional properties", {"a": "a"}),
        ("free keys beside known ones", {"b": "y"}),
        ("anyOf of objects", {"kind": "a", "s": "x"}),
        ("oneOf of types", "x"),
        ("allOf", {"a": 1, "b": 2}),
        ("a pointer into properties", {"a": 1, "b": 3}),
    ],
)
def test_what_structured_outputs_are_made_of_is_checked(name: str, wrong: Any) -> None:
    assert not jsonschema.Draft202012Validator(HARD[name]).is_valid(wrong)
    assert not matches(wrong, HARD[name])
