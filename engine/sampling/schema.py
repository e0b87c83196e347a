"""Prepares a JSON Schema for the grammar compiler, or says at which path it cannot be carried out.

What is left out of the output never makes it wrong: numbers without bounds stay within 64 bits, dates are days that
every calendar has, strings have one spelling. What could make the output wrong is refused: a keyword that the compiler
would have to ignore, or could only approximate. Annotations and unknown keywords, which demand nothing, are dropped.

Pure: knows nothing of tokens or models. engine/sampling/grammar.py compiles what comes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from engine.protocol import SchemaError
from engine.sampling.schema_values import bound_numbers, decimals_beside, find_endless, find_mistake

MAX_DEPTH: Final = 64
MAX_NODES: Final = 20_000
"""Schemas inside of a schema, and values of its enums."""

_SCHEMA: Final = frozenset({"additionalProperties", "items"})
_SCHEMA_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: Final = frozenset(
    (
        "type",
        "enum",
        "const",
        "$ref",
        "required",
        "format",
        "pattern",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
    )
)
_REFUSED: Final = frozenset(
    (
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
        "contentSchema",
    )
)

_DAY: Final = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE: Final = rf"[1-9][0-9]{{3}}-{_DAY}"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def parse(text: str) -> Any:
    """Raises SchemaError for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError("", f"the schema cannot be read: {error}") from None


def prepare(schema: Any) -> Any:
    """The same schema, as the compiler is to see it. Raises SchemaError."""
    document = _Preparation().rewrite(schema, "", 0)
    _bound_numbers(document)
    path = find_endless(document, list(subschemas(document)))
    if path is not None:
        raise SchemaError(path, "every value of it contains another one, so that none comes to an end")
    return document


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every schema inside of one, and itself: (path, schema), the innermost first."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            where = join(path, key)
            if key in _SCHEMA_MAPS and isinstance(value, dict):
                for name, item in value.items():
                    yield from subschemas(item, join(where, name))
            elif key in _SCHEMA_LISTS and isinstance(value, list):
                for index, item in enumerate(value):
                    yield from subschemas(item, f"{where}[{index}]")
            elif key in _SCHEMA:
                yield from subschemas(value, where)
    yield path, schema


def join(path: str, key: str) -> str:
    """The path of a key, as error messages of the HTTP API write it."""
    return f"{path}.{key}" if path else key


class _Preparation:
    def __init__(self) -> None:
        self._nodes = 0

    def rewrite(self, schema: Any, path: str, depth: int) -> Any:
        self._count(1, path)
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"schemas may be {MAX_DEPTH} levels deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(path, "a schema is an object or a boolean")
        out: dict[str, Any] = {}
        for key, value in schema.items():
            self._rewrite_key(key, value, out, path, depth)
        self._pair_items(schema, out, path, depth)
        mistake = find_mistake(out)
        if mistake is not None:
            raise SchemaError(join(path, mistake[0]), mistake[1])
        _spell_format(out)
        _check_distinct_keys(out, path)
        return out

    def _rewrite_key(self, key: str, value: Any, out: dict[str, Any], path: str, depth: int) -> None:
        where = join(path, key)
        if key in _REFUSED or (key == "uniqueItems" and value is not False):
            raise SchemaError(where, f"{key!r} is not supported")
        if key in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise SchemaError(where, "should be an object of schemas")
            rewritten = {name: self.rewrite(item, join(where, name), depth + 1) for name, item in value.items()}
            out[key] = _spell_keys(rewritten, where) if key == "patternProperties" else rewritten
        elif key in _SCHEMA_LISTS:
            if not isinstance(value, list):
                raise SchemaError(where, "should be an array of schemas")
            out[key] = [self.rewrite(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        elif key in _SCHEMA:
            if not isinstance(value, list):  # an array of them is an older spelling of prefixItems
                out[key] = self.rewrite(value, where, depth + 1)
        elif key in _VALUES:
            if key == "enum":
                self._check_enum(value, where)
            elif key == "const":
                _check_constant(value, where)
            out[key] = _spell(value, where) if key == "pattern" else value

    def _pair_items(self, schema: dict[str, Any], out: dict[str, Any], path: str, depth: int) -> None:
        """`items: [...], additionalItems` of the older drafts is `prefixItems: [...], items` of today."""
        items = schema.get("items")
        if not isinstance(items, list):
            return
        if "prefixItems" in schema:
            raise SchemaError(join(path, "items"), "should be a schema where there are prefixItems")
        where = join(path, "items")
        out["prefixItems"] = [self.rewrite(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(items)]
        out["items"] = self.rewrite(schema.get("additionalItems", True), join(path, "additionalItems"), depth + 1)

    def _check_enum(self, values: Any, path: str) -> None:
        if not isinstance(values, list) or not values:
            raise SchemaError(path, "should be an array of at least one value")
        self._count(len(values), path)
        for index, value in enumerate(values):
            _check_constant(value, f"{path}[{index}]")

    def _count(self, nodes: int, path: str) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise SchemaError(path, f"a schema may have {MAX_NODES} schemas and enum values altogether")


def _spell(pattern: Any, path: str) -> Any:
    try:
        return spell(pattern) if isinstance(pattern, str) else pattern
    except ValueError as error:
        raise SchemaError(path, str(error)) from None


def _spell_keys(schemas: dict[str, Any], path: str) -> dict[str, Any]:
    spelled = {_spell(pattern, path): item for pattern, item in schemas.items()}
    if len(spelled) < len(schemas):
        raise SchemaError(path, "has the same pattern in two spellings")
    return spelled


def _check_constant(value: Any, path: str) -> None:
    """A string has one spelling in the output, which has no `\\u` escapes; so some characters cannot be said."""
    if isinstance(value, str):
        if any((char < " " and char not in "\b\f\n\r\t") or char == "\x7f" for char in value):
            raise SchemaError(path, "control characters other than \\b \\f \\n \\r \\t are not supported")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_constant(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_constant(item, join(path, key))


def _bound_numbers(document: Any) -> None:
    """Once the whole document is known: its multiples say how many digits a number may have."""
    every = [schema for _, schema in subschemas(document) if isinstance(schema, dict)]
    decimals = decimals_beside([schema["multipleOf"] for schema in every if "multipleOf" in schema])
    for schema in every:
        bound_numbers(schema, decimals)


def _spell_format(schema: dict[str, Any]) -> None:
    """Days and times that every library can read: no 29th of February, no leap second, no year 0."""
    pattern = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern


def _check_distinct_keys(schema: dict[str, Any], path: str) -> None:
    """A grammar does not remember keys: two free ones may turn out equal, and count once."""
    least = schema.get("minProperties")
    required = schema.get("required")
    if isinstance(least, int) and least > 1 + (len(set(map(str, required))) if isinstance(required, list) else 0):
        raise SchemaError(join(path, "minProperties"), "at most one more than there are required properties")


_PIECE: Final = re.compile(r"\\.|\[\^?\]?|\]|--|.", re.DOTALL)


def spell(pattern: str) -> str:
    """The same pattern, with the characters escaped that are none to the compiler. Raises ValueError for a class that
    it could not read."""
    out: list[str] = []
    inside = False
    for piece in _PIECE.findall(pattern):
        if inside and piece == "--":
            raise ValueError(r"'--' in a class is not supported: escape it as '\-\-'")
        if not inside and piece in ("[]", "[^]"):
            raise ValueError(f"{piece!r} is not supported: a class has at least one character")
        out.append("\\" + piece if inside and piece[0] in "[&~" else piece)
        inside = (piece[0] == "\\" or piece[-1] != "]") if inside else piece[0] == "["
    return "".join(out)
