"""What a text has to be: response_format, structured_outputs, and the strict subset."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar
from gateway.api.openai.request import parse_chat, parse_completion
from gateway.api.openai.strict_schema import check_strict
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import Constraint
from tests.fakes.grammars import reference_chain
from tests.fakes.schemas import closed

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": "é"}}}


def chat(**fields: Any) -> Constraint | None:
    return parse_chat({"model": "demo", "messages": MESSAGES, **fields}, LeaseSettings()).constraint


def schema_format(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def test_plain_text_asks_for_nothing() -> None:
    assert chat() is None
    assert chat(response_format={"type": "text"}) is None
    assert chat(response_format=None, structured_outputs={"json_object": False}) is None


def test_a_schema_reaches_the_engine_in_its_own_order_and_knows_its_parameter() -> None:
    constraint = chat(response_format=schema_format())
    assert constraint is not None
    assert constraint.param == "response_format.json_schema.schema"
    assert constraint.grammar.kind == "json_schema"
    assert json.loads(constraint.grammar.text) == SCHEMA
    assert constraint.grammar.text.index('"z"') < constraint.grammar.text.index('"a"')


def test_a_json_object_and_a_format_without_a_schema() -> None:
    assert chat(response_format={"type": "json_object"}) == Constraint(Grammar("json_object"), "response_format")
    nothing = chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    assert nothing == Constraint(Grammar("json_schema", "{}"), "response_format.json_schema.schema")


def test_completions_have_formats_too() -> None:
    body = {"model": "demo", "prompt": "a", "structured_outputs": {"regex": "a+"}}
    assert parse_completion(body).constraint == Constraint(Grammar("regex", "a+"), "structured_outputs.regex")


def test_structured_outputs_of_every_kind() -> None:
    def grammar(**fields: Any) -> Grammar:
        constraint = chat(structured_outputs=fields)
        assert constraint is not None
        return constraint.grammar

    assert grammar(json=SCHEMA) == grammar(json=json.dumps(SCHEMA))
    assert grammar(json=True) == Grammar("json_schema", "true")
    assert grammar(json_object=True) == Grammar("json_object")
    assert grammar(grammar="start: X") == Grammar("lark", "start: X")
    pattern = grammar(choice=["a.b", "c|d", "(e"]).text
    assert all(re.fullmatch(pattern, one) for one in ("a.b", "c|d", "(e"))
    assert not re.fullmatch(pattern, "axb")


WRONG = [
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "unknown_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    ({"response_format": schema_format(name=None)}, "response_format.json_schema.name", "missing_required_parameter"),
    ({"response_format": schema_format(name="")}, "response_format.json_schema.name", "invalid_value"),
    ({"response_format": schema_format(name="a b")}, "response_format.json_schema.name", "invalid_value"),
    ({"response_format": schema_format(name=3)}, "response_format.json_schema.name", "invalid_type"),
    ({"response_format": schema_format(strict="yes")}, "response_format.json_schema.strict", "invalid_type"),
    ({"response_format": schema_format(description=1)}, "response_format.json_schema.description", "invalid_type"),
    ({"response_format": schema_format([])}, "response_format.json_schema.schema", "invalid_type"),
    ({"response_format": schema_format(more=1)}, "response_format.json_schema.more", "unknown_parameter"),
    (
        {"response_format": schema_format({"enum": ["x" * MAX_GRAMMAR_BYTES]})},
        "response_format.json_schema.schema",
        "string_above_max_length",
    ),
    (
        {"response_format": schema_format(strict=True)},
        "response_format.json_schema.schema",
        "invalid_json_schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "invalid_type"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "invalid_type"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty_array"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "invalid_type"),
    ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice", "array_above_max_length"),
    ({"structured_outputs": {"words": ["a"]}}, "structured_outputs.words", "unknown_parameter"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "invalid_parameter_combination",
    ),
    (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos",
        "invalid_parameter_combination",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_by_its_path_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_what_the_strict_subset_has_is_accepted() -> None:
    check_strict(closed(), "s")
    check_strict(
        {
            **closed(
                a={"type": ["string", "null"], "pattern": "^a"},
                b={"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
                c={"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]},
            ),
            "$defs": {"d": closed(e={"const": 1})},
        },
        "s",
    )


OUTSIDE = [
    (None, "s"),
    ({"type": "array", "items": {}}, "s"),
    ({"anyOf": [closed()]}, "s"),
    ({"type": "object", "properties": {}}, "s"),
    ({**closed(a={}), "required": []}, "s.required"),
    ({**closed(a={}), "required": "a"}, "s.required"),
    (closed(a={"type": "object"}), "s.properties.a"),
    (closed(a={"items": closed(b=3)}), "s.properties.a.items.properties.b"),
    (closed(a={"anyOf": [{}, {"not": {}}]}), "s.properties.a.anyOf[1].not"),
    (closed(a={"anyOf": {}}), "s.properties.a.anyOf"),
    (closed(a={"allOf": []}), "s.properties.a.allOf"),
    ({**closed(), "$defs": {"d": {"uniqueItems": True}}}, "s.$defs.d.uniqueItems"),
    ({**closed(), "$defs": []}, "s.$defs"),
    (closed(**{f"p{number}": {} for number in range(5001)}), "s.properties"),
]


@pytest.mark.parametrize(("schema", "path"), OUTSIDE, ids=lambda value: str(value)[:40])
def test_what_is_outside_of_the_strict_subset_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        check_strict(schema, "s")
    assert (refused.value.param, refused.value.code) == (path, "invalid_json_schema")


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_that_is_too_deep_or_refers_on_too_often_is_refused_before_it_is_walked_through(strict: bool) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"anyOf": [deep]}
    for schema in (closed(a=deep), json.loads(reference_chain(1_500).text) | closed()):
        with pytest.raises(BadRequestError, match=r"160 levels|256 times"):
            chat(response_format=schema_format(schema, strict=strict))
