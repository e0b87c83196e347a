from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest

from gateway.api.gemini.schemas import schema
from gateway.errors import BadRequestError


def test_types_in_capitals_become_those_of_json_schema() -> None:
    written = {
        "type": "OBJECT",
        "title": "Recipe",
        "properties": {
            "name": {"type": "STRING", "description": "its name", "maxLength": "20"},
            "grams": {"type": "ARRAY", "items": {"type": "NUMBER"}, "minItems": "1", "max_items": 3},
            "kind": {"type": "STRING", "format": "enum", "enum": ["sweet", "salty"]},
        },
        "required": ["name"],
    }
    assert schema(written, "s") == {
        "type": "object",
        "title": "Recipe",
        "properties": {
            "name": {"type": "string", "description": "its name", "maxLength": 20},
            "grams": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
            "kind": {"type": "string", "enum": ["sweet", "salty"]},
        },
        "required": ["name"],
        "additionalProperties": False,
    }


def test_property_ordering_orders_the_properties() -> None:
    one = {"type": "STRING"}
    made = schema({"properties": {"a": one, "b": one, "c": one}, "property_ordering": ["c", "x", "a"]}, "s")
    assert list(made["properties"]) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("written", "good", "bad"),
    [
        ({"type": "STRING", "nullable": True}, ["a", None], [1]),
        ({"type": "STRING", "enum": ["a"], "nullable": True}, ["a", None], ["b", 1]),
        ({"anyOf": [{"type": "INTEGER"}, {"type": "STRING"}], "nullable": True}, [1, "a", None], [1.5]),
        ({"type": "INTEGER", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31]),
        ({"type": "INTEGER", "minimum": 2, "maximum": 5}, [2, 5], [1, 6]),
        ({"type": "INTEGER", "minimum": -1e300, "maximum": 1e19}, [5], [1e20]),  # beyond 64 bits
        ({"type": "NUMBER", "format": "double", "minimum": 0.5}, [0.5], [0.4]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "b"}]),
        ({"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}, [{}, {"a": 1}], [{"a": 1, "b": 1}]),
        ({"type": "OBJECT"}, [{}, {"a": 1}], [1]),
        ({"type": "NULL"}, [None], [0]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "BOOLEAN"}}}, [True], [1]),
        ({"ref": "#/defs/a", "defs": {"a": {"type": "BOOLEAN"}}}, [False], ["x"]),
    ],
)
def test_what_is_valid_stays_what_it_was(written: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    sent = orjson.loads(orjson.dumps(schema(written, "s")))
    validator = jsonschema.Draft202012Validator(sent)
    assert [validator.is_valid(value) for value in good] == [True] * len(good)
    assert [validator.is_valid(value) for value in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ({"type": "DATE"}, "s.type"),
        ({"properties": {"a": {"oneOf": []}}}, "s.properties.a.oneOf"),
        ({"properties": []}, "s.properties"),
        ({"items": {"minItems": -1}}, "s.items.minItems"),
        ({"anyOf": [{}, {"type": 3}]}, "s.anyOf[1].type"),
        ("STRING", "s"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_path(written: Any, path: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        schema(written, "s")
    assert refused.value.param == path


def test_a_schema_that_is_too_deep_is_refused() -> None:
    written: dict[str, Any] = {}
    for _ in range(100):
        written = {"items": written}
    with pytest.raises(BadRequestError, match="64 levels"):
        schema(written, "s")
