"""Checks of single JSON values, with the messages and codes of the OpenAI API, and tables of parameters made of them.

A check takes a value and its path, and returns what the gateway works with, or raises BadRequestError whose `param` is
that path. It also says, as a JSON Schema, what it takes: /openapi.json is made of that. Knows nothing of any particular
parameter; those are in the dialects' tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import orjson

from gateway.api.unknown_fields import ignored, typo_of
from gateway.errors import BadRequestError, UnsupportedError

_T = TypeVar("_T", covariant=True)
JsonSchema = dict[str, Any]
INT64 = 2**63
_UNLIMITED = 2**31 - 1
"""A maximum that no request reaches."""
SHOWN_CHARS = 64  # of a client's own string in an error message
MAX_ITEMS = 10_000
"""Elements of an array of objects: messages, parts, blocks, items. Agents send some hundreds; each costs about ten
microseconds to check and as much to render."""
MAX_STOP_CHARS = 1024
"""Of a stop string; while text may become one it is held back."""
_NUMBER = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE]([+]?[0-9]{1,2}|-[0-9]{1,3}))?"
_LITERAL = re.compile(f"true|false|{_NUMBER}")

_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Check(Generic[_T]):
    """A check, called like the function that it is made of.

    schema  JSON Schema of what it takes; what passes the schema may still be refused, for what no schema says
    """

    function: Callable[[Any, str], _T]
    schema: JsonSchema

    def __call__(self, value: Any, path: str) -> _T:
        return self.function(value, path)


def takes(schema: JsonSchema) -> Callable[[Callable[[Any, str], _T]], Check[_T]]:
    """Makes a check of a function."""
    return lambda function: Check(function, schema)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of a request: what it may be, and what the gateway does about it.

    accepts  type and range, for the docs
    does     its meaning, or what happens instead, for the docs
    effect   "used"; "none": valid values change nothing; "left_out": not carried out, and named in the answer;
             "refused": any value but `harmless` ones is a clear 400
    """

    name: str
    check: Check[Any]
    accepts: str
    does: str
    effect: Literal["used", "none", "left_out", "refused"] = "used"
    harmless: tuple[Any, ...] = ()


Table = Mapping[str, Parameter]


def table(*parameters: Parameter) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters}


def used(name: str, check: Check[Any], accepts: str, does: str) -> Parameter:
    """`accepts` that is empty, or begins with a comma, follows what the check's schema says."""
    return Parameter(name, check, _accepts(check.schema, accepts), does)


def no_effect(name: str, check: Check[Any], accepts: str, does: str) -> Parameter:
    return Parameter(name, check, _accepts(check.schema, accepts), does, "none")


def left_out(name: str, check: Check[Any], accepts: str, does: str) -> Parameter:
    return Parameter(name, check, accepts, does, "left_out")


def refused(name: str, does: str, check: Check[Any] | None = None, accepts: str = "-", *harmless: Any) -> Parameter:
    return Parameter(name, check or anything, accepts, does, "refused", harmless)


def _accepts(schema: JsonSchema, more: str) -> str:
    """A type and its range in words, and `more` behind them."""
    if more and not more.startswith(","):
        return more
    *others, last = [f"`{one}`" for one in schema.get("enum", ("",))]
    if others:
        return f"{', '.join(others)} or {last}{more}"
    kind_text, low, high = str(schema.get("type", "")), schema.get("minimum", 0), schema.get("maximum")
    if "maxLength" in schema:
        least = schema.get("minLength")
        kind_text += f" of {f'{least} to' if least else 'up to'} {schema['maxLength']} characters"
    elif high is not None and high >= _UNLIMITED:
        kind_text += f" from {low}" if low >= 0 else ""
    elif high is not None:
        kind_text += f" {low} to {high}"
    return kind_text + more


def read(body: Mapping[str, Any], table: Table, required: tuple[str, ...]) -> dict[str, Any]:
    """The checked values of the parameters that were given. null is "not given", as everywhere in this API. Raises
    BadRequestError, also for an unknown one that may not be ignored."""
    for name in required:
        if body.get(name) is None:
            raise missing(name)
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        parameter = table.get(name)
        if parameter is None:
            unknown(name, name, table, body)
            continue
        checked = parameter.check(value, name)
        if parameter.effect == "used":
            values[name] = checked
        elif parameter.effect == "refused" and checked not in parameter.harmless:
            raise UnsupportedError(
                f"Unsupported parameter: '{name}'. {parameter.does}", param=name, reason=parameter.does
            )
    return values


def read_query(given: Mapping[str, str], table: Table) -> dict[str, Any]:
    """The checked parameters of a URL; those that are no strings have `in_url` checks. Others are not looked at: SDKs
    and proxies add their own."""
    return read({name: given[name] for name in table if name in given}, table, ())


def object_schema(properties: Mapping[str, JsonSchema], *required: str) -> JsonSchema:
    """Of an object where null is "not given". Other properties are ignored, or refused: see unknown_fields.py."""
    return {
        "type": "object",
        "properties": {name: schema if name in required else or_null(schema) for name, schema in properties.items()},
        "required": list(required),
    }


def closed_object(properties: Mapping[str, JsonSchema]) -> JsonSchema:
    """Of an object with all of these properties and no others."""
    return {**object_schema(properties, *properties), "additionalProperties": False}


def or_null(schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


# -- what was wrong ---------------------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """A client's string, short enough for a message."""
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def missing(path: str) -> BadRequestError:
    return BadRequestError(
        f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter", reason="Field required"
    )


def invalid(path: str, why: str, *, code: str = "invalid_value") -> BadRequestError:
    """For everything that has no function of its own here. `why` is half a sentence."""
    return BadRequestError(f"Invalid '{path}': {why}.", param=path, code=code, reason=why)


def unsupported(path: str, why: str) -> UnsupportedError:
    """For what is valid upstream and not carried out here. `why` is a sentence."""
    return UnsupportedError(why, param=path, reason=why)


def unknown_parameter(path: str, meant: str | None = None) -> BadRequestError:
    """`meant` is the known name that it looks like."""
    hint = f" Did you mean '{meant}'?" if meant else ""
    return BadRequestError(
        f"Unknown parameter: '{shown(path)}'.{hint}",
        param=shown(path),
        code="unknown_parameter",
        reason=f"Extra inputs are not permitted{f'. Did you mean {meant!r}?' if meant else ''}",
    )


def unknown(path: str, name: str, known: Collection[str], given: Collection[str]) -> None:
    """Ignores the field `name` at this path, or raises BadRequestError. `known` are those of its object, `given` all
    that the object has."""
    if not ignored(path, name, known, given):
        raise unknown_parameter(path, typo_of(name, known, given))


def wrong_type(path: str, expected: str, value: Any) -> BadRequestError:
    why = f"expected {expected}, but got {_TYPE_NAMES[type(value)]} instead"
    return BadRequestError(f"Invalid type for '{path}': {why}.", param=path, code="invalid_type", reason=why)


def wrong_value(path: str, value: Any, allowed: tuple[str, ...]) -> BadRequestError:
    listed = ", ".join(f"'{item}'" for item in allowed)
    return BadRequestError(
        f"Invalid value for '{path}': '{shown(str(value))}'. Supported values are: {listed}.",
        param=path,
        code="invalid_value",
        reason=f"'{shown(str(value))}' is not one of {listed}",
    )


def empty_array(path: str) -> BadRequestError:
    why = "empty array. Expected an array with minimum length 1, but got an empty array instead"
    return invalid(path, why, code="empty_array")


def empty_text(path: str) -> BadRequestError:
    return invalid(path, "empty string. Expected a string with minimum length 1", code="empty_string")


def array_too_long(path: str, limit: int, length: int) -> BadRequestError:
    why = f"Expected an array with maximum length {limit}, but got an array with length {length} instead"
    return invalid(path, f"array too long. {why}", code="array_above_max_length")


def too_many_properties(path: str, limit: int, number: int) -> BadRequestError:
    why = (
        f"too many properties. Expected an object with at most {limit} properties, but got an object with {number} "
        "properties instead"
    )
    return invalid(path, why, code="object_above_max_properties")


def at_most(most: int, value: list[Any], path: str) -> list[Any]:
    """The list. Raises BadRequestError for one that is longer."""
    if len(value) > most:
        raise array_too_long(path, most, len(value))
    return value


# -- the fields of an object -----------------------------------------------------------------------------------------


def required_text(item: Mapping[str, Any], key: str, path: str) -> str:
    """The string under `key`, which has to be there. `path` is the object's."""
    if item.get(key) is None:
        raise missing(f"{path}.{key}")
    return _text(item[key], f"{path}.{key}")


# -- checks -----------------------------------------------------------------------------------------------------------


@takes({"type": "boolean"})
def boolean(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise wrong_type(path, "a boolean", value)
    return value


@takes({})
def anything(value: Any, path: str) -> Any:
    return value


@takes({"type": "object"})
def an_object(value: Any, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    return value


@takes({"type": "array", "maxItems": MAX_ITEMS})
def a_list(value: Any, path: str) -> list[Any]:
    """A list of at most MAX_ITEMS, which may be empty."""
    if type(value) is not list:
        raise wrong_type(path, "an array", value)
    return at_most(MAX_ITEMS, value, path)


def integer(low: int, high: int) -> Check[int]:
    @takes({"type": "integer", "minimum": low, "maximum": high})
    def check(value: Any, path: str) -> int:
        if type(value) is float and abs(value) >= INT64:  # JSON integers past 64 bits are read as floats
            value = int(value)
        if type(value) is not int:
            raise wrong_type(path, "an integer", value)
        return int(_in_range(value, path, low, high, "integer"))

    return check


def number(low: float, high: float) -> Check[float]:
    @takes({"type": "number", "minimum": low, "maximum": high})
    def check(value: Any, path: str) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(path, "a decimal", value)
        return float(_in_range(value, path, low, high, "decimal"))

    return check


@lru_cache
def text(max_chars: int | None = None, min_chars: int = 0) -> Check[str]:
    """`min_chars` is 0 or 1."""
    schema: JsonSchema = {"type": "string"} | ({"minLength": min_chars} if min_chars else {})

    @takes(schema if max_chars is None else {**schema, "maxLength": max_chars})
    def check(value: Any, path: str) -> str:
        if type(value) is not str:
            raise wrong_type(path, "a string", value)
        if len(value) < min_chars:
            raise empty_text(path)
        if max_chars is not None and len(value) > max_chars:
            why = f"Expected a string with maximum length {max_chars}, but got a string with length {len(value)}"
            raise invalid(path, f"string too long. {why} instead", code="string_above_max_length")
        return value

    return check


def choice(*allowed: str) -> Check[str]:
    @takes({"type": "string", "enum": list(allowed)})
    def check(value: Any, path: str) -> str:
        if type(value) is not str:
            raise wrong_type(path, "a string", value)
        if value not in allowed:
            raise wrong_value(path, value, allowed)
        return value

    return check


def in_url(check: Check[_T]) -> Check[_T]:
    """The same check of an integer, a number or a boolean that is written in a URL."""

    @takes(check.schema)
    def parsed(value: Any, path: str) -> _T:
        return check(orjson.loads(value) if _LITERAL.fullmatch(value) else value, path)

    return parsed


def record(*required: str, **fields: Check[Any]) -> Check[dict[str, Any]]:
    """An object of these fields. Others are ignored, or refused."""
    return _record(required, fields, closed=False)


def closed_record(*required: str, **fields: Check[Any]) -> Check[dict[str, Any]]:
    """An object that has these fields and no others: for objects whose meaning changes with each of them."""
    return _record(required, fields, closed=True)


def _record(required: tuple[str, ...], fields: Mapping[str, Check[Any]], *, closed: bool) -> Check[dict[str, Any]]:
    schema = object_schema({name: field.schema for name, field in fields.items()}, *required)
    functions = {name: field.function for name, field in fields.items()}
    any_text = text().function  # most fields of most objects

    @takes({**schema, "additionalProperties": False} if closed else schema)
    def check(value: Any, path: str) -> dict[str, Any]:
        given = value if type(value) is dict else an_object(value, path)
        for name in required:
            if given.get(name) is None:
                raise missing(f"{path}.{name}")
        read: dict[str, Any] = {}
        for name, item in given.items():
            if item is None:
                continue
            function = functions.get(name)
            if function is any_text and type(item) is str:
                read[name] = item
            elif function is not None:
                read[name] = function(item, f"{path}.{name}")
            elif closed:
                raise unknown_parameter(f"{path}.{name}", typo_of(name, functions, given))
            else:
                unknown(f"{path}.{name}", name, functions, given)
        return read

    return check


def tagged(
    tag: str,
    kinds: Mapping[str, Check[_T]],
    other: Callable[[str, str], BadRequestError | None] = lambda kind, path: None,
) -> Check[_T]:
    """An object whose field `tag` says which of these it is. `other` makes the error of a kind that is none of them,
    from the kind and the object's path."""

    @takes({"anyOf": [_with_tag(tag, kind, check.schema) for kind, check in kinds.items()]})
    def check(value: Any, path: str) -> _T:
        kind = required_text(value if type(value) is dict else an_object(value, path), tag, path)
        if (found := kinds.get(kind)) is None:
            raise other(kind, path) or wrong_value(f"{path}.{tag}", kind, tuple(kinds))
        return found.function(value, path)

    return check


def _with_tag(tag: str, kind: str, schema: JsonSchema) -> JsonSchema:
    return {
        **schema,
        "properties": {**schema["properties"], tag: {"const": kind}},
        "required": list(dict.fromkeys([tag, *schema["required"]])),
    }


def array_of(check_one: Check[_T], least: int = 0, most: int = MAX_ITEMS, what: str = "an array") -> Check[list[_T]]:
    """An array of at least 0 or 1, and at most so many. `what` is expected, in the error of any other value."""
    function = check_one.function

    @takes({"type": "array", "items": check_one.schema, "maxItems": most} | ({"minItems": least} if least else {}))
    def check(value: Any, path: str) -> list[_T]:
        if type(value) is not list:
            raise wrong_type(path, what, value)
        if len(value) < least:
            raise empty_array(path)
        return [function(item, f"{path}[{index}]") for index, item in enumerate(at_most(most, value, path))]

    return check


def text_or(check_other: Check[_T]) -> Check[str | _T]:
    """A string, or what the check takes."""

    @takes({"anyOf": [{"type": "string"}, check_other.schema]})
    def check(value: Any, path: str) -> str | _T:
        return value if type(value) is str else check_other.function(value, path)

    return check


def made(inner: Check[Any], make: Callable[[Any, str], _T]) -> Check[_T]:
    """What `make` makes of what passes a check, and its path."""

    @takes(inner.schema)
    def check(value: Any, path: str) -> _T:
        return make(inner.function(value, path), path)

    return check


def string_map(max_pairs: int, max_key_chars: int, max_value_chars: int) -> Check[dict[str, str]]:
    check_value = text(max_value_chars)

    @takes(
        {
            "type": "object",
            "maxProperties": max_pairs,
            "propertyNames": {"maxLength": max_key_chars},
            "additionalProperties": check_value.schema,
        }
    )
    def check(value: Any, path: str) -> dict[str, str]:
        if len(an_object(value, path)) > max_pairs:
            raise too_many_properties(path, max_pairs, len(value))
        for key, item in value.items():
            if len(key) > max_key_chars:
                raise invalid(path, f"a key is longer than {max_key_chars} characters", code="string_above_max_length")
            check_value(item, f"{path}.{key}")
        return dict(value)

    return check


def _in_range(value: float, path: str, low: float, high: float, kind: str) -> float:
    if value < low:
        raise _out_of_range(value, path, low, f"{kind}_below_min_value", f"{kind} below minimum value", ">=")
    if value > high:
        raise _out_of_range(value, path, high, f"{kind}_above_max_value", f"{kind} above maximum value", "<=")
    return value


def _out_of_range(value: float, path: str, limit: float, code: str, what: str, sign: str) -> BadRequestError:
    written = f"{limit:g}" if isinstance(limit, float) else str(limit)
    return invalid(path, f"{what}. Expected a value {sign} {written}, but got {shown(str(value))} instead", code=code)


_text = text()
