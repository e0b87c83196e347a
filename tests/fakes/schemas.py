"""JSON Schemas to constrain texts with: hard ones by hand, generated ones, and ones that are refused."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import jsonschema
from hypothesis import strategies as st

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")


def closed(**properties: Any) -> dict[str, Any]:
    """An object as the strict subset wants it."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
    for level in range(depth):
        schema = (
            closed(**{f"level_{level}": schema}) if level % 2 else {"type": "array", "items": schema, "maxItems": 2}
        )
    return schema


HARD: dict[str, Any] = {
    "recursion": {
        "$defs": {
            "node": closed(value={"type": "boolean"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
        },
        "$ref": "#/$defs/node",
    },
    "recursion through the root": closed(
        name={"enum": ["a", "b"]}, children={"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    ),
    "two that call each other": {
        "$defs": {
            "even": {"anyOf": [{"type": "null"}, closed(odd={"$ref": "#/$defs/odd"})]},
            "odd": closed(even={"$ref": "#/$defs/even"}),
        },
        "$ref": "#/$defs/odd",
    },
    "enum of every type": {"enum": ["x", 1, -2.5, True, None, ["é", {"k": []}], {"a": {"b": "c"}}, ""]},
    "a thousand strings": {"enum": [f"value {number:04}" for number in range(1000)]},
    "constants": closed(a={"const": '\t"\\\n'}, b={"const": 0}, c={"const": {"z": [1, 2, None]}}, d={"const": ""}),
    "unicode keys": closed(
        **{"é": {"type": "boolean"}, "日本": {"type": "null"}, 'a b"\\\n': {"const": 1}, "": {"const": 2}}
    ),
    "unicode values": {"enum": ["é", "日本語", "😀👍🏽", "\u2028", "Ω≈ç", "\ufeff", "\U0010ffff"]},
    "unicode pattern": {"type": "string", "pattern": "^[α-ω]{2,5}$"},
    "string of any three": {"type": "string", "minLength": 3, "maxLength": 3},
    "pattern in the middle": {"type": "string", "pattern": "[0-9]{3}", "maxLength": 9},
    "pattern and length": {"type": "string", "pattern": "^(ab|c)+$", "minLength": 4, "maxLength": 7},
    **{f"format {name}": {"type": "string", "format": name, "maxLength": 80} for name in FORMATS},
    "integer bounds": {"type": "integer", "minimum": -17, "maximum": 1203},
    "exclusive integers": {"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 2},
    "integer above": {"type": "integer", "minimum": 10**12},
    "integer of 17 digits": {"type": "integer", "minimum": 2**60, "maximum": 2**60 + 2**20},
    "any integer": {"type": "integer"},
    "number bounds": {"type": "number", "minimum": -0.5, "maximum": 2.25},
    "exclusive numbers": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "numbers next to a whole one": {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.5},
    "any number": {"type": "number"},
    "any number beside multiples": closed(a={"type": "number"}, b={"type": "integer", "multipleOf": 3600}),
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 10000},
    "multiples of a part": {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1},
    "type list": {"type": ["string", "null", "integer"], "maxLength": 4},
    "bounded array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "minItems": 2},
    "older tuple": {"type": "array", "items": [{"const": 1}, {"const": "b"}], "additionalItems": False, "minItems": 1},
    "deep nesting": nested(30),
    "optional properties": {
        "type": "object",
        "properties": {name: {"const": name} for name in "abcdef"},
        "required": ["c"],
        "additionalProperties": False,
    },
    "free keys": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    "free keys beside known ones": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"enum": ["x"]},
    },
    "keys by pattern": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "required and not described": {"type": "object", "required": ["x"], "additionalProperties": {"const": 3}},
    "wide": closed(**{f"p{number}": {"type": ["boolean", "null"]} for number in range(100)}),
    "anyOf of objects": {
        "anyOf": [
            closed(kind={"const": "a"}, n={"type": "integer"}),
            closed(kind={"const": "b"}, s={"maxLength": 3, "type": "string"}),
        ]
    },
    "oneOf of types": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "definitions of the older kind": {
        "definitions": {"n": {"type": "null"}},
        "type": "array",
        "items": {"$ref": "#/definitions/n"},
    },
    "a pointer into properties": closed(a={"enum": [1, 2]}, b={"$ref": "#/properties/a"}),
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/x",
        "title": "T",
        "description": "D",
        "type": "boolean",
        "default": 3,
        "examples": [1],
        "x-guidance": {"whitespace_flexible": True},
        "nullable": True,
    },
}

REFUSED: dict[str, tuple[Any, str]] = {
    "not": (closed(a={"not": {"type": "integer"}}), "properties.a.not"),
    "if": ({"type": "object", "if": {}, "then": {}}, "if"),
    "uniqueItems": ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "items.uniqueItems"),
    "contains": (closed(a={"anyOf": [{"type": "null"}, {"contains": {}}]}), "properties.a.anyOf[1].contains"),
    "property names": ({"$defs": {"x": {"propertyNames": {}}}, "$ref": "#/$defs/x"}, "$defs.x.propertyNames"),
    "look-ahead": (closed(a={"type": "string", "pattern": "^(?=a)b"}), "properties.a"),
    "bad pattern": (closed(a=closed(b={"type": "string", "pattern": "("})), "properties.a.properties.b"),
    "unknown format": (closed(a={"type": "string", "format": "colour"}), "properties.a"),
    "unknown type": (closed(a={"type": "text"}), "properties.a"),
    "no such definition": (closed(a={"$ref": "#/$defs/none"}), "properties.a"),
    "a reference elsewhere": (closed(a={"$ref": "https://example.com/schema"}), "properties.a"),
    "a definition that is only itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$defs.a"),
    "contradicting bounds": (closed(a={"type": "integer", "minimum": 5, "maximum": 3}), "properties.a"),
    "a bound that is not exact": (closed(a={"type": "integer", "maximum": 2**53 + 1}), "properties.a.maximum"),
    "an object that requires itself": (closed(x={"$ref": "#"}), "properties.x"),
    "an array of itself": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "items"),
    "a tuple of itself": ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "prefixItems[0]"),
    "two that require each other": (
        {"$defs": {"a": closed(b={"$ref": "#/$defs/b"}), "b": closed(a={"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"},
        "$defs.a.properties.b",
    ),
    "one way that never ends": (
        {"$defs": {"a": closed(a={"$ref": "#/$defs/a"})}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]},
        "$defs.a.properties.a",
    ),
    "a difference of classes": (closed(a={"type": "string", "pattern": "^[a--b]$"}), "properties.a.pattern"),
    "an empty class": (closed(a={"type": "string", "pattern": "^[]a]$"}), "properties.a.pattern"),
    "keys by one pattern twice": ({"patternProperties": {"[&]": {}, r"[\&]": {}}}, "patternProperties"),
    "an empty class of keys": ({"patternProperties": {"[^]": {}}}, "patternProperties"),
    "negative multiples": (closed(a={"type": "number", "multipleOf": -2}), "properties.a.multipleOf"),
    "multiples of too many digits": (closed(a={"multipleOf": 86400}), "properties.a.multipleOf"),
    "a bound that is no number": (closed(a={"minimum": True}), "properties.a.minimum"),
    "an infinite bound": (closed(a={"maximum": float("inf")}), "properties.a.maximum"),
    "empty enum": (closed(a={"enum": []}), "properties.a.enum"),
    "control character": (closed(a={"enum": ["b", "\x01"]}), "properties.a.enum[1]"),
    "overlapping oneOf": (closed(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "properties.a"),
    "too many free keys": ({"type": "object", "minProperties": 2}, "minProperties"),
    "not a schema": (closed(a=3), "properties.a"),
    "properties as a list": ({"properties": []}, "properties"),
    "nothing": (False, ""),
    "too deep": (nested(70), "too deep"),
}  # fmt: skip


_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=0, max_size=6)
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**6), 10**6), _names, st.sampled_from((0.5, -1.25, 3e10))
)


@st.composite
def _integers(draw: st.DrawFn) -> dict[str, Any]:
    low, high = sorted((draw(st.integers(-1000, 1000)), draw(st.integers(-1000, 1000))))
    bounds = draw(st.sampled_from(("", "minimum", "both", "exclusive")))
    schema: dict[str, Any] = {"type": "integer"}
    if bounds in ("minimum", "both"):
        schema["minimum"] = low
    if bounds == "both":
        schema["maximum"] = high
    if bounds == "exclusive":
        schema |= {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    return schema


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    """Bounds of every kind: none, one or two, whole or not, close to each other or far apart."""
    low = draw(st.integers(-400, 400)) / draw(st.sampled_from((1, 8, 10)))
    high = low + draw(st.integers(1, 800)) / draw(st.sampled_from((1, 8, 1000)))
    bounds = {
        draw(st.sampled_from(("minimum", "exclusiveMinimum"))): low,
        draw(st.sampled_from(("maximum", "exclusiveMaximum"))): high,
    }
    kept = draw(st.sets(st.sampled_from(sorted(bounds))))
    return {"type": "number"} | {name: bounds[name] for name in sorted(kept)}


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(("length", "pattern", "format")))
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": draw(st.sampled_from(("^[a-f]+$", "^\\d{2,4}$", "^(x|yz)*$", "a.?b", "^[^\\n]{3}$"))),
        }
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(FORMATS)), "maxLength": 60}
    low = draw(st.integers(0, 5))
    return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 20))}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_names, inner, max_size=5))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    extra = draw(st.sampled_from((False, {"type": "boolean"})))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    low = draw(st.integers(0, 3))
    return {"type": "array", "items": draw(inner), "minItems": low, "maxItems": low + draw(st.integers(0, 3))}


def schemas() -> st.SearchStrategy[Any]:
    """Schemas that can be satisfied, of every kind that is supported."""
    leaves = st.one_of(
        _integers(),
        _numbers(),
        _strings(),
        st.sampled_from(({"type": "boolean"}, {"type": "null"})),
        st.lists(_scalars, min_size=1, max_size=6).map(lambda values: {"enum": values}),
        _scalars.map(lambda value: {"const": value}),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _objects(inner),
            _arrays(inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
        ),
        max_leaves=8,
    )


def wild_schemas() -> st.SearchStrategy[Any]:
    """Any mixture of keywords: many cannot be satisfied, and some are refused."""
    small, bound = st.integers(0, 6), st.integers(-50, 50)
    kinds = st.sampled_from(("string", "number", "integer", "boolean", "null", "object", "array"))
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(kinds, st.lists(kinds, min_size=1, max_size=3, unique=True)),
        "enum": st.lists(_scalars, min_size=1, max_size=4),
        "const": _scalars,
        "minimum": bound,
        "exclusiveMaximum": bound,
        "multipleOf": st.sampled_from((1, 2, 3, 0.5)),
        "minLength": small,
        "maxLength": small,
        "pattern": st.sampled_from(("^a+$", "b", "^[0-9]{2}$")),
        "format": st.sampled_from((*FORMATS, "colour")),
        "minItems": small,
        "maxItems": small,
        "minProperties": small,
        "maxProperties": small,
        "required": st.lists(st.sampled_from("abc"), unique=True),
        "uniqueItems": st.booleans(),
    }
    names = st.sampled_from("abc")

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        deeper = {
            "properties": st.dictionaries(names, inner, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(("^a", "b$")), inner, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": several,
            "anyOf": several,
            "allOf": several,
            "oneOf": several,
            "not": inner,
        }
        return _some_of({**keywords, **deeper})

    return st.recursive(st.one_of(_some_of(keywords), st.booleans()), extend, max_leaves=6)


@st.composite
def _some_of(draw: st.DrawFn, keywords: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True))
    return {name: draw(keywords[name]) for name in names}


_formats = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


@_formats.checks("date-time", ValueError)
def _is_moment(value: object) -> bool:
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value) is not None


@_formats.checks("time", ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.time.fromisoformat(value) is not None


def validate(text: str, schema: Any) -> None:
    """Raises for a text that does not parse, and for one that the schema does not allow. Numbers are decimal, so that
    0.75 is a multiple of 0.25 and nothing is rounded."""
    value = json.loads(text, parse_float=Decimal)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    older = (
        isinstance(exact, dict) and "prefixItems" not in exact and "items" in exact and isinstance(exact["items"], list)
    )
    kind = jsonschema.Draft7Validator if older else jsonschema.Draft202012Validator
    kind(exact, format_checker=_formats).validate(value)
