"""The subset of JSON Schema that `strict: true` promises (OpenAI, structured outputs). What is outside is a 400 here,
as it is there. What a schema means is the engine's; this looks at its shape and size alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.api.constraints import check_size
from gateway.errors import BadRequestError

MAX_LEVELS: Final = 10
MAX_ENUM_VALUES: Final = 1_000
MAX_CHARS: Final = 120_000
"""Of all names of properties and definitions, enum values and constants."""

_NAMED: Final = ("properties", "$defs", "definitions")
"""Fields that have schemas by name."""

_Place = tuple[Any, str, int]
"""A schema, its path, and how deep it is."""

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
    num_values = num_chars = 0
    pending: list[_Place] = [(schema, path, 1)]
    while pending:
        inner, where, level = pending.pop()
        if not isinstance(inner, dict):
            raise _refuse(where, "a schema is an object")
        if level > MAX_LEVELS:
            raise _refuse(where, f"schemas may be {MAX_LEVELS} levels deep")
        for key in _FORBIDDEN:
            if key in inner:
                raise _refuse(f"{where}.{key}", f"'{key}' is not permitted")
        if inner.get("type") == "object" or "properties" in inner:
            _check_object(inner, where)
        values = inner["enum"] if isinstance(inner.get("enum"), list) else []
        names = [name for key in _NAMED for name in _object(inner, key, where)]
        num_values += len(values)
        num_chars += sum(len(one) for one in (*names, *values, inner.get("const")) if isinstance(one, str))
        if num_values > MAX_ENUM_VALUES:
            raise _refuse(f"{where}.enum", f"a schema may have {MAX_ENUM_VALUES} enum values altogether")
        if num_chars > MAX_CHARS:
            raise _refuse(where, f"names and values of a schema may be {MAX_CHARS} characters long altogether")
        pending += _inside(inner, where, level)


def _inside(schema: dict[str, Any], path: str, level: int) -> Iterator[_Place]:
    """Schemas right inside of this one. A definition is as deep as where it is used."""
    for key in _NAMED:
        for name, inner in _object(schema, key, path).items():
            yield inner, f"{path}.{key}.{name}", level + (key == "properties")
    if "items" in schema:
        yield schema["items"], f"{path}.items", level + 1
    several = schema.get("anyOf", [])
    if not isinstance(several, list):
        raise _refuse(f"{path}.anyOf", "an array of schemas is expected")
    for index, inner in enumerate(several):
        yield inner, f"{path}.anyOf[{index}]", level


def _check_object(schema: dict[str, Any], path: str) -> None:
    if schema.get("additionalProperties") is not False:
        raise _refuse(path, "'additionalProperties' has to be there and false")
    required = schema.get("required", [])
    for name in _object(schema, "properties", path):
        if not isinstance(required, list) or name not in required:
            raise _refuse(f"{path}.required", f"it has to have every property; {name!r} is missing")


def _object(schema: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    named = schema.get(key, {})
    if not isinstance(named, dict):
        raise _refuse(f"{path}.{key}", "an object of schemas is expected")
    return named


def _refuse(path: str, why: str) -> BadRequestError:
    return BadRequestError(f"Invalid schema at '{path}': {why} (strict).", param=path, code="invalid_json_schema")
