"""The subset of JSON Schema that `strict: true` promises (OpenAI, structured outputs). What is outside is a 400 here,
as it is there. What a schema means is the engine's; this looks at its shape and size alone.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.api.constraints import check_size
from gateway.errors import BadRequestError

MAX_LEVELS: Final = 10
MAX_ENUM_VALUES: Final = 1_000
MAX_CHARS: Final = 120_000
"""Of all names of properties and definitions, enum values and constants."""

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
    """Raises BadRequestError with the path of the first thing that is outside of the subset."""
    if not isinstance(schema, dict):
        raise _refuse(path, "a schema is needed, and is an object")
    check_size(schema, path, "invalid_json_schema")
    if "anyOf" in schema:
        raise _refuse(path, "the root may not be anyOf")
    if schema.get("type") != "object" and "$ref" not in schema:
        raise _refuse(path, "the root has to be of type object")
    _Check().look(schema, path, 1)


class _Check:
    """Counts on its way through one schema."""

    def __init__(self) -> None:
        self._values = 0
        self._chars = 0

    def look(self, schema: Any, path: str, level: int) -> None:
        if not isinstance(schema, dict):
            raise _refuse(path, "a schema is an object")
        if level > MAX_LEVELS:
            raise _refuse(path, f"schemas may be {MAX_LEVELS} levels deep")
        for key in _FORBIDDEN:
            if key in schema:
                raise _refuse(f"{path}.{key}", f"'{key}' is not permitted")
        self._count_values(schema, path)
        if schema.get("type") == "object" or "properties" in schema:
            self._look_at_object(schema, path, level)
        for key in ("$defs", "definitions"):
            for name, inner in self._named(schema, key, path):
                self.look(inner, f"{path}.{key}.{name}", level)  # a definition is as deep as where it is used
        if "items" in schema:
            self.look(schema["items"], f"{path}.items", level + 1)
        several = schema.get("anyOf", [])
        if not isinstance(several, list):
            raise _refuse(f"{path}.anyOf", "an array of schemas is expected")
        for index, inner in enumerate(several):
            self.look(inner, f"{path}.anyOf[{index}]", level)

    def _look_at_object(self, schema: dict[str, Any], path: str, level: int) -> None:
        if schema.get("additionalProperties") is not False:
            raise _refuse(path, "'additionalProperties' has to be there and false")
        properties = self._named(schema, "properties", path)
        required = schema.get("required", [])
        missing = [name for name, _ in properties if not isinstance(required, list) or name not in required]
        if missing:
            raise _refuse(f"{path}.required", f"it has to have every property; {missing[0]!r} is missing")
        for name, inner in properties:
            self.look(inner, f"{path}.properties.{name}", level + 1)

    def _named(self, schema: dict[str, Any], key: str, path: str) -> list[tuple[str, Any]]:
        named = schema.get(key, {})
        if not isinstance(named, dict):
            raise _refuse(f"{path}.{key}", "an object of schemas is expected")
        self._count_chars(sum(map(len, named)), path)
        return list(named.items())

    def _count_values(self, schema: dict[str, Any], path: str) -> None:
        values = schema.get("enum", [])
        values = values if isinstance(values, list) else []
        self._values += len(values)
        if self._values > MAX_ENUM_VALUES:
            raise _refuse(f"{path}.enum", f"a schema may have {MAX_ENUM_VALUES} enum values altogether")
        constants = [*values, schema.get("const")]
        self._count_chars(sum(len(value) for value in constants if isinstance(value, str)), path)

    def _count_chars(self, chars: int, path: str) -> None:
        self._chars += chars
        if self._chars > MAX_CHARS:
            raise _refuse(path, f"names and values of a schema may be {MAX_CHARS} characters long altogether")


def _refuse(path: str, why: str) -> BadRequestError:
    return BadRequestError(f"Invalid schema at '{path}': {why} (strict).", param=path, code="invalid_json_schema")
