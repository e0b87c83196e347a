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
    choice,
    closed_schema,
    invalid,
    missing,
    only,
    takes,
    text,
)
from gateway.api.openai.strict_schema import check_strict
from gateway.types import Constraint

MAX_CHOICES: Final = 1000

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIELDS: Final = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
}
_SCHEMA_FIELDS: Final = {"name", "description", "schema", "strict"}
_string = text()


_NAMED: Final[JsonSchema] = {
    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
    "description": {"type": "string"},
    "schema": {"type": "object"},
    "strict": {"type": "boolean"},
}
_WITHOUT_SCHEMA: Final = closed_schema({"type": {"enum": ["text", "json_object"]}}, "type")


@takes(
    {
        "anyOf": [
            _WITHOUT_SCHEMA,
            closed_schema(
                {"type": {"const": "json_schema"}, "json_schema": closed_schema(_NAMED, "name")}, "type", "json_schema"
            ),
        ]
    }
)
def response_format(value: Any, path: str) -> Constraint | None:
    """None for plain text."""
    kind = choice(*_FIELDS)(an_object(value, path).get("type"), f"{path}.type")
    only(value, _FIELDS[kind], path)
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object(path)
    return _json_schema(value.get("json_schema"), f"{path}.json_schema")


@takes({"anyOf": [_WITHOUT_SCHEMA, closed_schema({"type": {"const": "json_schema"}, **_NAMED}, "type", "name")]})
def text_format(value: Any, path: str) -> Constraint | None:
    """`text.format` of the Responses API, which is flat. None for plain text."""
    kind = choice(*_FIELDS)(an_object(value, path).get("type"), f"{path}.type")
    if kind == "json_schema":
        return _json_schema({key: item for key, item in value.items() if key != "type"}, path)
    only(value, _FIELDS[kind], path)
    return json_object(path) if kind == "json_object" else None


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


def _json_schema(value: Any, path: str) -> Constraint:
    if value is None:
        raise missing(path)
    only(an_object(value, path), _SCHEMA_FIELDS, path)
    if value.get("name") is None:
        raise missing(f"{path}.name")
    name = _string(value["name"], f"{path}.name")
    if not _NAME.fullmatch(name):
        raise invalid(f"{path}.name", "1 to 64 letters, digits, '_' and '-' are expected")
    if value.get("description") is not None:
        _string(value["description"], f"{path}.description")
    schema = value.get("schema")
    where = f"{path}.schema"
    if value.get("strict") is not None and boolean(value["strict"], f"{path}.strict"):
        check_strict(schema, where)
    return json_schema({} if schema is None else an_object(schema, where), where)
