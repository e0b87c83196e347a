"""How large a schema may be, whatever it looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.protocol.schema_limits import MAX_REFERENCE_CHAIN, SchemaError, check_schema
from tests.fakes.grammars import reference_chain
from tests.fakes.schemas import HARD


def deep(levels: int, key: str = "items") -> Any:
    schema: Any = True
    for _ in range(levels):
        schema = {key: [schema] if key == "anyOf" else schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "path", "told"),
    [
        (deep(161), ".".join(["items"] * 160), "160 levels"),
        (deep(100_000), ".".join(["items"] * 160), "160 levels"),
        (deep(100_000, "anyOf"), "anyOf[0]" + ".anyOf[0]" * 79, "160 levels"),
        (json.loads(reference_chain(MAX_REFERENCE_CHAIN + 1).text), "$ref", "256 times"),
        ({"anyOf": [{"$ref": "#/a"}] * 2_001}, "anyOf[2000].$ref", "2000 references"),
        ({"properties": {str(n): {} for n in range(5_001)}}, "properties", "5000 properties"),
        ({"items": {"patternProperties": {"a" * 2_001: {}}}}, "items.patternProperties", "2000 characters"),
        ({"anyOf": [{"pattern": "a"}] * 501}, "anyOf[500].pattern", "500 patterns"),
        ({"enum": list(range(60_000))}, "", "50000 values"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_with_its_path(schema: Any, path: str, told: str) -> None:
    with pytest.raises(SchemaError, match=told) as refused:
        check_schema(schema)
    assert refused.value.path == path


@pytest.mark.parametrize("schema", [*HARD.values(), True, deep(160), json.loads(reference_chain(200).text)])
def test_what_is_within_the_limits_passes(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"items": {"$ref": "#"}}, "items.$ref"),
        ({"properties": {"a": {"items": {"$ref": "#/properties/a"}}}}, "properties.a.items.$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$defs.a.$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": True}, "$ref": "#/$defs/a"}, None),
        ({"$ref": "#/nowhere"}, None),
        (json.loads(reference_chain(100).text), None),
        ({"$ref": "#/$defs/a0", **json.loads(reference_chain(100).text)}, None),
    ],
)
def test_a_reference_that_leads_back_is_found(schema: Any, path: str | None) -> None:
    assert check_schema(schema) == path
