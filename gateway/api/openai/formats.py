"""What a client wants its text to be: `response_format` of the OpenAI API, and `structured_outputs` as in vLLM.

Pure. The engine compiles the grammar and says what it cannot carry out; gateway/pipeline.py makes that a 400.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final

import orjson

from gateway.api.constraints import constraint, json_object, json_schema
from gateway.api.fields import (
    Check,
    JsonSchema,
    an_array,
    an_object,
    boolean,
    closed_record,
    invalid,
    made,
    only,
    tagged,
    takes,
    text,
)
from gateway.api.openai.strict_schema import check_strict
from gateway.types import Constraint

MAX_CHOICES: Final = 1000

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_string = text()


def _check_name(name: str, path: str) -> str:
    if not _NAME.fullmatch(name):
        raise invalid(path, "1 to 64 letters, digits, '_' and '-' are expected")
    return name


def _json_schema(given: dict[str, Any], path: str) -> Constraint:
    where = f"{path}.schema"
    if given.get("strict"):
        check_strict(given.get("schema"), where)
    return json_schema(given.get("schema", {}), where)


_schema: Final[dict[str, Any]] = {
    "name": made(_string, _check_name),
    "description": _string,
    "schema": an_object,
    "strict": boolean,
}
_without_schema: Final[dict[str, Check[Constraint | None]]] = {
    "text": made(closed_record(type=_string), lambda _, path: None),
    "json_object": made(closed_record(type=_string), lambda _, path: json_object(path)),
}
response_format: Final = tagged(
    "type",
    {
        **_without_schema,
        "json_schema": made(
            closed_record(
                "json_schema", type=_string, json_schema=made(closed_record("name", **_schema), _json_schema)
            ),
            lambda given, _: given["json_schema"],
        ),
    },
)
"""None for plain text."""

text_format: Final = tagged(
    "type",
    {**_without_schema, "json_schema": made(closed_record("name", type=_string, **_schema), _json_schema)},
)
"""`text.format` of the Responses API, which is flat."""

_STRUCTURED: Final[dict[str, JsonSchema]] = {
    "json": {"type": ["object", "boolean", "string"]},
    "json_object": {"const": True},
    "regex": {"type": "string"},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": {"type": "string"},
}


@takes(
    {
        "type": "object",
        "properties": _STRUCTURED,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
)
def structured_outputs(value: Any, path: str) -> Constraint | None:
    """One of `json`, `json_object`, `regex`, `choice` and `grammar` (Lark)."""
    given = {key: item for key, item in an_object(value, path).items() if item is not None}
    only(given, _STRUCTURED, path)
    if len(given) != 1:
        raise invalid(path, "exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar' is expected")
    ((kind, item),) = given.items()
    return _structured(kind, item, f"{path}.{kind}")


def guided(kind: str) -> Check[Constraint | None]:
    """One of them as a parameter of its own, as older clients of vLLM send it."""
    return Check(partial(_structured, kind), _STRUCTURED[kind])


def _structured(kind: str, item: Any, where: str) -> Constraint | None:
    if kind == "json":
        return json_schema(orjson_loads(item, where) if type(item) is str else item, where)
    if kind == "json_object":
        return json_object(where) if boolean(item, where) else None
    if kind == "choice":
        if len(an_array(item, where)) > MAX_CHOICES:
            raise invalid(where, f"at most {MAX_CHOICES} choices are possible")
        choices = [_string(one, f"{where}[{index}]") for index, one in enumerate(item)]
        return constraint("regex", "|".join(re.escape(one) for one in choices), where)
    return constraint("regex" if kind == "regex" else "lark", _string(item, where), where)


def orjson_loads(value: str, path: str) -> Any:
    """A schema that is written as a string."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise invalid(path, f"the string is not JSON: {error}") from None
