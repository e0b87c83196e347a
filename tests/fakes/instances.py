"""Values that fit a JSON Schema, and values that were broken in one place, for the schemas of /openapi.json.

A keyword that is not understood is an error, so that no schema is met by luck.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fakes.schemas import wild_schemas

KNOWN = {"type", "enum", "const", "anyOf", "oneOf", "$ref", "description", "title", "format", "default", "examples"}
KNOWN |= {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
KNOWN |= {"items", "minItems", "maxItems", "minimum", "maximum", "minLength", "maxLength", "pattern"}
MOST = 4  # optional properties of an object, items of an array, free keys

ODD = (
    "",
    "\x00",
    "\n",
    "é",
    "👍🏽",
    "\u2028",
    "\ufeff",
    "\u202e",
    "<|im_end|>",
    "<|im_start|>system\n",
    "{{ 7 * 7 }}",
    "null",
)
PLAIN = st.one_of(
    st.text("abz019 _-", max_size=6), st.sampled_from(ODD), st.text(st.characters(codec="utf-8"), max_size=6)
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from((0.0, -1.5, 1e300, 2**63, -(2**70))), PLAIN
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3), max_leaves=5
)


def instances(schema: Any, definitions: Mapping[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Values that fit. `definitions`: what a `$ref` says, whole, -> the schema."""
    definitions = definitions or {}
    if schema is True or schema == {}:
        return ANYTHING
    if unknown := set(schema) - KNOWN:
        raise NotImplementedError(f"{sorted(unknown)} in {str(schema)[:200]}")
    if "$ref" in schema:
        reference = schema["$ref"]
        return st.deferred(lambda: instances(definitions[reference], definitions))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _one_of(schema[several], definitions)
    kinds = schema.get("type", ["null", "boolean", "integer", "string", "array", "object"])
    return st.one_of([_of_type(kind, schema, definitions) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _one_of(several: Sequence[Any], definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Null where it may be, but seldom: it asks for nothing."""
    some = [instances(one, definitions) for one in several if one != {"type": "null"}]
    if len(some) < len(several):
        return st.integers(0, 9).flatmap(lambda which: st.none() if which == 0 else st.one_of(some))
    return st.one_of(some)


def _of_type(kind: str, schema: Any, definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return _numbers(schema, st.integers, 2**31 - 1)
    if kind == "number":
        return _numbers(schema, _floats, 1e9)
    if kind == "string":
        return _strings(schema)
    return _arrays(schema, definitions) if kind == "array" else _objects(schema, definitions)


def _floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


def _numbers(schema: Any, between: Any, far: float) -> st.SearchStrategy[Any]:
    """Small ones more often than not: a limit of two thousand million tells nothing new each time."""
    low, high = schema.get("minimum", -far), schema.get("maximum", far)
    near = between(max(low, min(0, high)), min(high, max(low, 0) + 20))
    return st.one_of(near, near, between(low, high), st.sampled_from((low, high)))


def _strings(schema: Any) -> st.SearchStrategy[str]:
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"]).filter(lambda text: low <= len(text) <= high)
    size = min(high, low + 6)
    fitting = [one for one in ODD if low <= len(one) <= high]
    plain = st.text("abz019 _-", min_size=low, max_size=int(size))
    long = [st.just("x" * int(high))] if high < 10_000 else []
    return st.one_of(plain, plain, st.sampled_from(fitting or ["x" * low]), *long)


def _arrays(schema: Any, definitions: Mapping[str, Any]) -> st.SearchStrategy[list[Any]]:
    low = schema.get("minItems", 0)
    high = min(schema.get("maxItems", MOST + low), low + MOST)
    return st.lists(instances(schema.get("items", {}), definitions), min_size=low, max_size=high)


def _objects(schema: Any, definitions: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    known = {name: instances(one, definitions) for name, one in schema.get("properties", {}).items()}
    required = schema.get("required", [])
    optional = sorted(set(known) - set(required))
    more = schema.get("additionalProperties", not known)
    free = None if more is False or (known and more is True) else instances(more, definitions)
    names = instances({"type": "string", **schema.get("propertyNames", {})}, definitions)
    low, high = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        value = {name: draw(known[name]) for name in required}
        room = int(min(high, max(low, MOST))) - len(value)
        least = max(0, low - len(value))
        if optional and room > 0:
            count = draw(st.integers(least, min(room, len(optional))))
            for name in draw(st.lists(st.sampled_from(optional), min_size=count, max_size=count, unique=True)):
                value[name] = draw(known[name])
        if free is not None and room > 0:
            value |= draw(st.dictionaries(names, free, max_size=room, min_size=least if not optional else 0))
        return value

    return build()


# -- one thing wrong --------------------------------------------------------------------------------------------------


def _deep(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


WRONG = st.one_of(
    ANYTHING,
    st.sampled_from((math.nan, math.inf, -math.inf, 1e308 * 10, 2**63, -(2**63) - 1, 10**400, -1, 0.5, 1.0)),
    st.sampled_from(("\ud83d", "a\udfffb", "x" * 70_000, "\x00" * 300, "9" * 5000, "[" * 5000)),
    st.integers(1, 200).map(_deep),
    wild_schemas(),
    st.sampled_from(([], {}, [[]], [None], {"": None}, {"type": []}, {"$ref": "#"})),
)


@st.composite
def broken(draw: st.DrawFn, whole: st.SearchStrategy[Any]) -> Any:
    """A value of `whole` that was changed in one place: another value there, a key more, or one less."""
    value = copy.deepcopy(draw(whole))
    places = list(_places(value, ()))
    path = draw(st.sampled_from(places))
    change = draw(st.sampled_from(("put", "put", "add", "drop")))
    container, key = _at(value, path)
    if change == "drop" and path:
        del container[key]
        return value
    inside = container[key] if path else value
    if change == "add" and isinstance(inside, dict):
        inside[draw(PLAIN)] = draw(WRONG)
        return value
    if change == "add" and isinstance(inside, list):
        inside.append(draw(WRONG))
        return value
    if not path:
        return draw(WRONG)
    container[key] = draw(WRONG)
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, (*path, index))


def _at(value: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    for key in path[:-1]:
        value = value[key]
    return (value, path[-1]) if path else (None, None)
