"""The subset of JSON Schema that `strict: true` promises (OpenAI, structured outputs). What is outside is a 400 here,
as it is there. Sizes are limited by what the engine compiles, not by the numbers that OpenAI has for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.api.constraints import check_size
from gateway.errors import BadRequestError

_NAMED: Final = ("properties", "$defs", "definitions")
"""Fields that have schemas by name."""

_FORBIDDEN: Final = (
    "allOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "uniqueItems",
    "contains",
    "minProperties",
    "maxProperties",
)


def check_strict(schema: Any, path: str) -> None:
    """Raises BadRequestError with the path of something that is outside of the subset."""
    if not isinstance(schema, dict):
        raise _refuse(path, "a schema is needed, and is an object")
    check_size(schema, path, "invalid_json_schema")
    if "anyOf" in schema:
        raise _refuse(path, "the root may not be anyOf")
    if schema.get("type") != "object" and "$ref" not in schema:
        raise _refuse(path, "the root has to be of type object")
    pending: list[tuple[Any, str]] = [(schema, path)]
    while pending:
        inner, where = pending.pop()
        if not isinstance(inner, dict):
            raise _refuse(where, "a schema is an object")
        for key in _FORBIDDEN:
            if key in inner:
                raise _refuse(f"{where}.{key}", f"'{key}' is not permitted")
        if inner.get("type") == "object" or "properties" in inner:
            _check_object(inner, where)
        pending += _inside(inner, where)


def _inside(schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    """Schemas right inside of this one, and their paths."""
    for key in _NAMED:
        for name, inner in _object(schema, key, path).items():
            yield inner, f"{path}.{key}.{name}"
    if "items" in schema:
        yield schema["items"], f"{path}.items"
    several = schema.get("anyOf", [])
    if not isinstance(several, list):
        raise _refuse(f"{path}.anyOf", "an array of schemas is expected")
    for index, inner in enumerate(several):
        yield inner, f"{path}.anyOf[{index}]"


def _check_object(schema: dict[str, Any], path: str) -> None:
    if schema.get("additionalProperties") is not False:
        raise _refuse(path, "'additionalProperties' has to be there and false")
    required = schema.get("required")
    there = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    for name in _object(schema, "properties", path):
        if name not in there:
            raise _refuse(f"{path}.required", f"it has to have every property; {name!r} is missing")


def _object(schema: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    named = schema.get(key, {})
    if not isinstance(named, dict):
        raise _refuse(f"{path}.{key}", "an object of schemas is expected")
    return named


def _refuse(path: str, why: str) -> BadRequestError:
    return BadRequestError(f"Invalid schema at '{path}': {why} (strict).", param=path, code="invalid_json_schema")
