"""The values that a JSON Schema allows: numbers that come to an end, and schemas that only endless values satisfy.

A number that nothing bounds would go on for ever with a weak model, and one with many digits may be rounded across its
bound when it is read. So integers stay within 64 bits, and other numbers too, without an exponent and with few digits
behind the point.

Endless are an object that requires itself, an array of at least one of itself. Every schema gets the kinds of values
that it can have; those of recursive ones follow from each other. Growing from nothing gives the kinds of finite values,
shrinking from everything those of all values; where only the second has any, a text would never end.

Pure; engine/sampling/schema.py asks.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from engine.protocol import follow_reference

MAX_DECIMALS: Final = 8
"""Behind the point. With 9 the compiler's rounding loses many more values that are bounds or constants."""
MAX_MULTIPLE: Final = 8192
"""Digits of multipleOf, without the point: past some 9,000 the compiler has too many remainders to tell apart."""
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_LARGEST: Final = 2**63 - 1024  # the compiler's bounds are doubles, and 64-bit integers in the end
_EXACT_DIGITS: Final = 15  # that every double has
_LCM_LIMIT: Final = 2**32  # the compiler's multiples have 32 bits, and wrap around


def find_mistake(schema: dict[str, Any]) -> tuple[str, str] | None:
    """The keyword that cannot be carried out, and why."""
    for name in (*BOUNDS, "multipleOf"):
        value = schema.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return name, "should be a number"
        if isinstance(value, int) and (abs(value) > _LARGEST or int(float(value)) != value):
            return name, "integers beyond 2**53 are not exact here"
    if schema.get("multipleOf", 1) <= 0:
        return "multipleOf", "should be above 0"
    if _coefficient(schema.get("multipleOf", 1))[0] > MAX_MULTIPLE:
        return "multipleOf", f"should be at most {MAX_MULTIPLE}, or as many parts of a power of ten"
    return None


def decimals_beside(multiples: list[float]) -> int:
    """Digits behind the point that numbers may have in a document that has these multiples anywhere: the compiler may
    have to find what is a multiple of both."""
    return min((_decimals_beside(multiple) for multiple in multiples), default=MAX_DECIMALS)


def bound_numbers(schema: dict[str, Any], decimals: int) -> None:
    """Bounds what the schema says of numbers. `decimals` are those that its document allows."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    speaks = any(name in schema for name in (*BOUNDS, "multipleOf"))
    if "number" in kinds or (kinds == [None] and speaks):
        _bound_fractions(schema, decimals)
    elif "integer" not in kinds:
        return
    if "enum" not in schema and "const" not in schema:
        _close(schema)


def _bound_fractions(schema: dict[str, Any], decimals: int) -> None:
    magnitude = max((len(str(int(abs(schema[name])))) for name in BOUNDS if name in schema), default=1)
    decimals = max(0, min(decimals, _EXACT_DIGITS - magnitude))
    if "multipleOf" in schema:
        decimals = max(decimals, _coefficient(schema["multipleOf"])[1])
    else:
        decimals = _fit(decimals, [schema[name] for name in BOUNDS if name in schema])
    step = Decimal(1).scaleb(-decimals)
    _raise_minimum(schema, step)
    _lower_maximum(schema, step)
    is_single = "minimum" in schema and schema["minimum"] == schema.get("maximum")
    if "enum" not in schema and "const" not in schema and not is_single:
        schema.setdefault("multipleOf", float(step))


def _raise_minimum(schema: dict[str, Any], step: Decimal) -> None:
    """The compiler rounds bounds that have more digits, and lets exclusive integers through that the other bound begins
    with; so there is an inclusive bound instead, which has the digits."""
    for name in ("minimum", "exclusiveMinimum"):
        given = Decimal(repr(schema.get(name, 0)))
        least = given.quantize(step, ROUND_CEILING)
        if least != given or (name == "exclusiveMinimum" and name in schema and given >= 0 and given % 1 == 0):
            del schema[name]
            value = float(least if least != given else given + step)
            schema["minimum"] = max(schema.get("minimum", value), value)


def _lower_maximum(schema: dict[str, Any], step: Decimal) -> None:
    for name in ("maximum", "exclusiveMaximum"):
        given = Decimal(repr(schema.get(name, 0)))
        most = given.quantize(step, ROUND_FLOOR)
        if most != given or (name == "exclusiveMaximum" and name in schema and given <= 0 and given % 1 == 0):
            del schema[name]
            value = float(most if most != given else given - step)
            schema["maximum"] = min(schema.get("maximum", value), value)


def _close(schema: dict[str, Any]) -> None:
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = -_LARGEST
    if "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = _LARGEST


def _decimals_beside(multiple: float) -> int:
    coefficient, decimals = _coefficient(multiple)
    return min(MAX_DECIMALS, len(str(_LCM_LIMIT // coefficient)) - 1 + decimals)


def _coefficient(multiple: float) -> tuple[int, int]:
    """coefficient / 10**decimals"""
    exact = Decimal(repr(multiple)).normalize()
    decimals = max(0, -int(exact.as_tuple().exponent))
    return int(exact.scaleb(decimals)), decimals


def _fit(decimals: int, bounds: list[float]) -> int:
    """The most digits, up to these, with which the compiler finds each bound to be one of the multiples."""
    for fewer in range(decimals, 0, -1):
        step = float(Decimal(1).scaleb(-fewer))
        if all(math.ceil(value / step) * step == value == math.floor(value / step) * step for value in bounds):
            return fewer
    return decimals


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
