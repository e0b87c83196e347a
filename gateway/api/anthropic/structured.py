"""`output_config`: what an answer has to be. The API's subset of JSON Schema is checked here, and what is outside of it
is a 400, as it is upstream; the engine does the rest.

Required properties come before optional ones, each in the order of the schema: the engine writes properties in the
order that it is given.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from engine.protocol import follow_reference
from gateway.api.constraints import check_size, json_schema, subschemas
from gateway.api.fields import an_object, choice, closed_record, invalid, made, record

MAX_OPTIONAL: Final = 24
"""Properties of all schemas of a request that are not required."""

_FORBIDDEN: Final = (
    *("oneOf", "not", "if", "then", "else", "prefixItems", "contains", "uniqueItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)


def read_schema(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of the schema with required properties first. Raises BadRequestError with the path of what is outside of
    the subset."""
    if (recursive := check_size(schema, path)) is not None:
        raise invalid(recursive, "recursive schemas are not supported")
    read: dict[str, Any] = orjson.loads(orjson.dumps(schema))
    num_optional = 0
    for where, inner in subschemas(read, path):
        _check(inner, where, read)
        kinds = inner.get("type")
        if kinds == "object" or (type(kinds) is list and "object" in kinds) or "properties" in inner:
            num_optional += _sort_properties(inner, where)
    if num_optional > MAX_OPTIONAL:
        raise invalid(path, f"it has {num_optional} optional properties, and may have {MAX_OPTIONAL}")
    return read


check_format: Final = made(
    closed_record("type", "schema", type=choice("json_schema"), schema=an_object),
    lambda given, path: json_schema(read_schema(given["schema"], f"{path}.schema"), f"{path}.schema"),
)
check_output_config = record(effort=choice("low", "medium", "high", "xhigh", "max"), format=check_format)


def _check(schema: dict[str, Any], path: str, root: dict[str, Any]) -> None:
    for key in _FORBIDDEN:
        if key in schema:
            raise invalid(f"{path}.{key}", f"'{key}' is not supported in schemas")
    values = schema.get("enum", [])
    if type(values) is not list or any(type(value) in (dict, list) for value in values):
        raise invalid(f"{path}.enum", "an array of strings, numbers, booleans and nulls is expected")
    if schema.get("minItems") not in (None, 0, 1):
        raise invalid(f"{path}.minItems", "only 0 and 1 are supported")
    for key in ("anyOf", "allOf"):
        several = schema.get(key, [True])
        if type(several) is not list or not several:
            raise invalid(f"{path}.{key}", "an array of schemas is expected")
        if key == "allOf" and any(type(inner) is dict and "$ref" in inner for inner in several):
            raise invalid(f"{path}.allOf", "'allOf' is not supported together with '$ref'")
    reference = schema.get("$ref", "#")
    if type(reference) is not str or not reference.startswith("#"):
        raise invalid(f"{path}.$ref", "only references inside of the schema are supported")
    if follow_reference(root, reference) is None:
        raise invalid(f"{path}.$ref", f"there is nothing at {reference[:64]!r}")


def _sort_properties(schema: dict[str, Any], path: str) -> int:
    """Puts required properties first. Returns how many others there are."""
    if schema.get("additionalProperties") is not False:
        why = "for 'object' type, 'additionalProperties' must be explicitly set to false"
        raise invalid(f"{path}.additionalProperties", why)
    properties = an_object(schema.get("properties", {}), f"{path}.properties")
    required = schema.get("required", [])
    if type(required) is not list or any(type(name) is not str or name not in properties for name in required):
        raise invalid(f"{path}.required", "an array of names of properties is expected")
    order = sorted(properties, key=lambda name: name not in required)
    schema["properties"] = {name: properties[name] for name in order}
    return sum(name not in required for name in properties)
