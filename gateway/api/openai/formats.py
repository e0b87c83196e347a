"""What a client wants its text to be: `response_format` of the OpenAI API, and `structured_outputs` as in vLLM.

Pure. The engine compiles the grammar and says what it cannot carry out; gateway/pipeline.py makes that a 400.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final

import orjson

from gateway.api.constraints import constraint, json_object, json_schema
from gateway.api.fields import Check, an_object, array_of, boolean, closed_record, invalid, made, tagged, takes, text
from gateway.api.openai.strict_schema import check_strict
from gateway.api.openai.tools import flat, nested
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
    "type", {**_without_schema, "json_schema": nested("json_schema", _json_schema, "name", closed=True, **_schema)}
)
"""None for plain text."""

text_format: Final = tagged(
    "type", {**_without_schema, "json_schema": flat("json_schema", _json_schema, "name", closed=True, **_schema)}
)
"""`text.format` of the Responses API."""


@takes({"type": ["object", "boolean", "string"]})
def _json(value: Any, path: str) -> Constraint:
    """A schema, which may be written as a string."""
    try:
        return json_schema(orjson.loads(value) if type(value) is str else value, path)
    except orjson.JSONDecodeError as error:
        raise invalid(path, f"the string is not JSON: {error}") from None


def _choice(choices: list[str], path: str) -> Constraint:
    return constraint("regex", "|".join(map(re.escape, choices)), path)


STRUCTURED: Final[dict[str, Check[Constraint | None]]] = {
    "json": _json,
    "json_object": made(boolean, lambda wanted, path: json_object(path) if wanted else None),
    "regex": made(_string, partial(constraint, "regex")),
    "choice": made(array_of(_string, 1, MAX_CHOICES), _choice),
    "grammar": made(_string, partial(constraint, "lark")),
}
"""What a text has to be, as in vLLM; older clients send each as a parameter of its own."""


def _only_one(given: dict[str, Any], path: str) -> Constraint | None:
    if len(given) != 1:
        raise invalid(path, "exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar' is expected")
    (found,) = given.values()
    wanted: Constraint | None = found
    return wanted


structured_outputs: Final = made(closed_record(**STRUCTURED), _only_one)
