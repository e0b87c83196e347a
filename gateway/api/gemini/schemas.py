"""Schemas as the Gemini API writes them (a subset of OpenAPI 3.0, with types in capitals) into JSON Schema.

An object that has properties has no others, unless it says so: that is how this API generates.

Pure. What the engine does not carry out of a schema it refuses itself, with the path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.api.fields import INT64, Check, an_object, anything, boolean, invalid, number, table, takes, text, used
from gateway.api.gemini.proto import enum, given, message_schema, repeated, under, whole

MAX_DEPTH: Final = 64
_INT32: Final = 2**31
_HUGE: Final = 1.7976931348623157e308
_TYPES: Final = ("TYPE_UNSPECIFIED", "STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")
_NO_FORMATS: Final = ("enum", "float", "double", "int64", "")
"""Formats of this API that restrict nothing."""

_count = whole(0, INT64 - 1)
_bound = number(-_HUGE, _HUGE)
_FIELDS: Final[tuple[tuple[Check[Any], tuple[str, ...]], ...]] = (
    (enum(*_TYPES), ("type",)),
    (text(), ("format", "title", "description", "pattern", "ref", "$ref")),
    (boolean, ("nullable",)),
    (repeated(anything), ("enum", "anyOf")),
    (repeated(text()), ("required", "propertyOrdering")),
    (_count, ("maxItems", "minItems", "minProperties", "maxProperties", "minLength", "maxLength")),
    (_bound, ("minimum", "maximum")),
    (an_object, ("properties", "defs", "$defs")),
    (anything, ("items", "example", "default", "additionalProperties")),
)
SCHEMA: Final = table(*(used(name, check, "", "") for check, names in _FIELDS for name in names))
_AS_IT_IS: Final = (
    *("title", "description", "enum", "required", "default", "pattern", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minLength", "maxLength"),
)


@takes(message_schema(SCHEMA))
def schema(value: Any, path: str) -> dict[str, Any]:
    """A Schema as JSON Schema. Raises BadRequestError with the path of what is wrong."""
    return _convert(value, path, 0)


def _convert(value: Any, path: str, depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise invalid(path, f"schemas may be {MAX_DEPTH} levels deep")
    found = given(value, SCHEMA, path, is_open=False)
    fields = {name: SCHEMA[name].check(item, under(path, name)) for name, item in found.items()}

    def inner(item: Any, where: str) -> dict[str, Any]:
        return _convert(item, where, depth + 1)

    kind = fields.get("type", "TYPE_UNSPECIFIED").lower()
    made: dict[str, Any] = {name: fields[name] for name in _AS_IT_IS if name in fields}
    if kind != "type_unspecified":
        made["type"] = kind
    made |= _numbers(fields, kind)
    made |= _insides(fields, path, inner)
    if fields.get("nullable") and kind != "null":
        made = _or_null(made)
    return made


def _numbers(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """Bounds, and what a format says about them or about a string."""
    made: dict[str, Any] = {}
    for name in ("minimum", "maximum"):
        if name in fields:
            bound = fields[name]
            made[name] = int(bound) if kind == "integer" and abs(bound) < INT64 and bound.is_integer() else bound
    written = fields.get("format", "")
    if written == "int32":
        made = {"minimum": -_INT32, "maximum": _INT32 - 1} | made
    elif written not in _NO_FORMATS:
        made["format"] = written
    return made


def _insides(fields: dict[str, Any], path: str, inner: Callable[[Any, str], dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "items" in fields:
        made["items"] = inner(fields["items"], f"{path}.items")
    if fields.get("anyOf"):
        made["anyOf"] = [inner(item, f"{path}.anyOf[{index}]") for index, item in enumerate(fields["anyOf"])]
    if "properties" in fields:
        properties = fields["properties"]
        first = [name for name in fields.get("propertyOrdering", ()) if name in properties]
        ordered = dict.fromkeys([*first, *properties])
        made["properties"] = {name: inner(properties[name], f"{path}.properties.{name}") for name in ordered}
    more = fields.get("additionalProperties", False if fields.get("properties") else None)
    if more is not None:
        made["additionalProperties"] = more if type(more) is bool else inner(more, f"{path}.additionalProperties")
    for name in ("defs", "$defs"):
        if name in fields:
            made["$defs"] = {key: inner(item, f"{path}.{name}.{key}") for key, item in fields[name].items()}
    if (target := fields.get("ref", fields.get("$ref"))) is not None:
        made["$ref"] = target.replace("#/defs/", "#/$defs/")
    return made


def _or_null(made: dict[str, Any]) -> dict[str, Any]:
    """What a schema takes, and null."""
    if set(made) & {"anyOf", "$ref", "enum"} or "type" not in made:
        told: dict[str, Any] = {
            name: made.pop(name) for name in ("title", "description", "default", "$defs") if name in made
        }
        return {**told, "anyOf": [made, {"type": "null"}]}
    return {**made, "type": [made["type"], "null"]}
