"""Which schemas only endless values satisfy: an object that requires itself, an array of at least one of itself.

Every schema gets the kinds of values that it can have; those of recursive ones follow from each other. Growing from
nothing gives the kinds of finite values, shrinking from everything those of all values; where only the second has any,
a text would never end. engine/sampling/schema.py asks; pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from engine.protocol import follow_reference

Kinds = frozenset[str]
Find = Callable[[Any], Kinds]

_NONE: Final[Kinds] = frozenset()
_ALL: Final[Kinds] = frozenset(("null", "boolean", "number", "string", "array", "object"))


def find_endless(root: Any, schemas: list[tuple[str, Any]]) -> str | None:
    """Path of the first schema that nothing finite satisfies because it needs itself. `schemas` are all inside of the
    root with their paths, the root too."""
    finite = _solve(root, schemas, _NONE)
    if all(finite.values()):
        return None
    any_length = _solve(root, schemas, _ALL)
    for path, schema in schemas:
        if isinstance(schema, dict) and not finite[id(schema)] and any_length[id(schema)]:
            return path
    return None


def _solve(root: Any, schemas: list[tuple[str, Any]], start: Kinds) -> dict[int, Kinds]:
    """The kinds of every schema, by identity; each is looked at again when one that it asked for has changed."""
    waiting = deque(schema for _, schema in schemas if isinstance(schema, dict))
    kinds = {id(schema): start for schema in waiting}
    askers: defaultdict[int, dict[int, Any]] = defaultdict(dict)
    while waiting:
        schema = waiting.popleft()

        def find(other: Any, asker: Any = schema) -> Kinds:
            if id(other) not in kinds:
                return _NONE if other is False else _ALL
            askers[id(other)][id(asker)] = asker
            return kinds[id(other)]

        found = _kinds_of(schema, root, find)
        if found != kinds[id(schema)]:
            kinds[id(schema)] = found
            waiting.extend(askers[id(schema)].values())
    return kinds


def _kinds_of(schema: dict[str, Any], root: Any, find: Find) -> Kinds:
    if "enum" in schema or "const" in schema:
        return _ALL
    kinds = _ALL
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = frozenset("number" if kind == "integer" else str(kind) for kind in named)
    if "$ref" in schema:
        kinds &= find(follow_reference(root, schema["$ref"]))
    for item in schema.get("allOf", ()):
        kinds &= find(item)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            kinds &= _NONE.union(*(find(item) for item in schema[name]))
    if "object" in kinds and not all(find(item) for item in _required(schema)):
        kinds -= {"object"}
    if "array" in kinds and not all(find(item) for item in _first_items(schema)):
        kinds -= {"array"}
    return kinds


def _required(schema: dict[str, Any]) -> list[Any]:
    names, properties = schema.get("required", ()), schema.get("properties", {})
    free = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
    return [properties.get(name, free) for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _first_items(schema: dict[str, Any]) -> list[Any]:
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not isinstance(least, int):
        return []
    return [*prefix[:least], *([schema.get("items", True)] if least > len(prefix) else [])]
