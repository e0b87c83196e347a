"""Messages of Google's APIs in JSON: every field may be spelled in camelCase or in snake_case, null is "not given",
whole numbers may be written `3`, `3.0` or `"3"`, and a field that nobody knows is an error.

Tables of parameters (gateway/api/fields.py) say which fields a message has, by their camelCase names. Knows no message.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

from gateway.api.fields import (
    MAX_ITEMS,
    Check,
    JsonSchema,
    Table,
    an_object,
    at_most,
    choice,
    integer,
    invalid,
    or_null,
    shown,
    takes,
    wrong_type,
)
from gateway.api.unknown_fields import ignored, leave_out, typo_of
from gateway.errors import BadRequestError, UnsupportedError

_T = TypeVar("_T")
_UNDERSCORE: Final = re.compile(r"_([a-z0-9])")
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}(\.0+)?")


# -- messages ---------------------------------------------------------------------------------------------------------


def given(value: Any, fields: Table, path: str = "", *, is_open: bool = True) -> dict[str, Any]:
    """The fields that are there, unchecked, by their camelCase names. Raises BadRequestError for what is no message,
    for an unknown field that may not be ignored, and for one that is there in both spellings. `path` is empty for the
    body itself; where not `is_open`, ignoring an unknown field would change its meaning."""
    found: dict[str, Any] = {}
    for key, item in an_object(value, path or "the body").items():
        name = key if key in fields else _UNDERSCORE.sub(lambda letter: letter[1].upper(), key)
        if name not in fields:
            if not (is_open and ignored(under(path, key), name, fields, value)):
                at, meant = f" at '{path}'" if path else "", typo_of(name, fields, value)
                hint = f" Did you mean '{meant}'?" if meant else ""
                raise BadRequestError(
                    f'Invalid JSON payload received. Unknown name "{shown(key)}"{at}: Cannot find field.{hint}',
                    param=under(path, shown(key)),
                    code="unknown_parameter",
                )
            continue
        if item is None:
            continue
        if name in found:
            raise invalid(under(path, name), "it is there in two spellings")
        found[name] = item
    return found


def read(value: Any, fields: Table, path: str = "") -> dict[str, Any]:
    """The checked values of the fields that have an effect. Raises BadRequestError with the path of what is wrong,
    UnsupportedError for what is not carried out."""
    values: dict[str, Any] = {}
    for name, item in given(value, fields, path).items():
        field, where = fields[name], under(path, name)
        checked = field.check(item, where)
        if field.effect == "used":
            values[name] = checked
        elif field.effect == "left_out" and leave_out(where):
            continue
        elif field.effect in ("left_out", "refused") and checked not in field.harmless:
            raise UnsupportedError(f"Unsupported field '{where}'. {field.does}", param=where)
    return values


def message(fields: Table) -> Check[dict[str, Any]]:
    """A message inside of a message."""

    @takes(message_schema(fields))
    def check(value: Any, path: str) -> dict[str, Any]:
        return read(value, fields, path)

    return check


def message_schema(fields: Table) -> JsonSchema:
    """With the camelCase names only."""
    properties = {name: or_null(field.check.schema) for name, field in fields.items()}
    return {"type": "object", "properties": properties}


def under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- values -----------------------------------------------------------------------------------------------------------


def whole(low: int, high: int) -> Check[int]:
    """An int32 or int64 within these bounds."""
    inner = integer(low, high)

    @takes({"anyOf": [inner.schema, {"type": "string", "pattern": f"^{_WHOLE.pattern}$"}]})
    def check(value: Any, path: str) -> int:
        if type(value) is str and _WHOLE.fullmatch(value):
            value = int(value.partition(".")[0])
        elif type(value) is float and value.is_integer():
            value = int(value)
        return inner(value, path)

    return check


def enum(*names: str) -> Check[str]:
    """The name of a value, in whatever case: clients of this API are not strict about it."""
    inner = choice(*names)

    @takes({"type": "string"})
    def check(value: Any, path: str) -> str:
        return inner(value.upper() if type(value) is str and value.upper() in names else value, path)

    return check


def repeated(check_one: Check[_T], most: int = MAX_ITEMS) -> Check[list[_T]]:
    """An array, possibly empty, which is as good as none. One object may be written without the array around it, as
    the examples of this API do."""
    several: JsonSchema = {"type": "array", "items": check_one.schema, "maxItems": most}

    @takes({"anyOf": [several, {"type": "object"}]})
    def check(value: Any, path: str) -> list[_T]:
        if type(value) is dict:
            return [check_one(value, path)]
        if type(value) is not list:
            raise wrong_type(path, "an array", value)
        return [check_one(item, f"{path}[{index}]") for index, item in enumerate(at_most(most, value, path))]

    return check
