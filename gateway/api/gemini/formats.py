"""What a client of the Gemini API wants its text to be: `responseMimeType` with a schema, or with an enum. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from gateway.api.constraints import constraint, json_schema
from gateway.api.fields import an_object
from gateway.errors import BadRequestError
from gateway.types import Constraint

_ANY_JSON: Final = {"anyOf": [{"type": "object"}, {"type": "array"}]}


def wanted(config: dict[str, Any], path: str) -> Constraint | None:
    """None for plain text. `config` is a checked generationConfig. Raises BadRequestError for a schema without the
    type of answer that it belongs to."""
    kind = config.get("responseMimeType", "text/plain")
    schemas = [name for name in ("responseSchema", "responseJsonSchema") if name in config]
    if len(schemas) > 1:
        where = f"{path}.responseJsonSchema"
        raise BadRequestError(f"'{where}' is there besides 'responseSchema'.", param=where)
    if kind == "text/plain":
        if schemas:
            where = f"{path}.responseMimeType"
            raise BadRequestError(f"'{where}' has to be application/json for a {schemas[0]}.", param=where)
        return None
    if kind == "text/x.enum":
        return _one_of(config, path)
    if not schemas:
        return json_schema(_ANY_JSON, f"{path}.responseMimeType")
    where = f"{path}.{schemas[0]}"
    return json_schema(an_object(config[schemas[0]], where), where)


def _one_of(config: dict[str, Any], path: str) -> Constraint:
    """One of the values of an enum, as plain text."""
    name = "responseJsonSchema" if "responseJsonSchema" in config else "responseSchema"
    found, where = config.get(name), f"{path}.{name}"
    values = found.get("enum") if type(found) is dict else None
    if type(values) is not list or not values or any(type(value) is not str for value in values):
        raise BadRequestError(f"'{where}' has to have an enum of strings for text/x.enum.", param=where)
    return constraint("regex", "|".join(re.escape(value) for value in values), where)
