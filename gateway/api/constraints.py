"""The form that an answer must have, for the engine, from the fields of any dialect.

Pure. The engine compiles the grammar and says what it cannot carry out; gateway/pipeline.py makes that a 400.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, SchemaError, check_schema
from gateway.api.fields import a_list, an_object, invalid
from gateway.types import Constraint


def json_object(path: str) -> Constraint:
    """Any JSON object. `path` is what asked for it, for error messages."""
    return Constraint(Grammar("json_object"), path)


def json_schema(schema: Any, path: str) -> Constraint:
    """JSON that validates. Raises BadRequestError for what is neither an object nor a boolean, and for one too long."""
    if type(schema) not in (dict, bool):
        an_object(schema, path)
    check_size(schema, path)
    return constraint("json_schema", orjson.dumps(schema).decode(), path)


def check_size(schema: Any, path: str, code: str = "invalid_grammar") -> str | None:
    """Before anything walks through a schema. Raises BadRequestError for one that is too deep, or refers on too often.
    Returns the path of a reference that leads back to where it stands: of a recursive schema."""
    try:
        recursive = check_schema(schema)
    except SchemaError as error:
        raise invalid(f"{path}.{error.path}" if error.path else path, error.reason, code=code) from None
    return f"{path}.{recursive}" if recursive is not None else None


def subschemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all that are in it, with their paths, each before those inside of it. Raises BadRequestError for
    what is neither an object nor a boolean. `check_size` comes first."""
    if type(schema) is bool:
        return
    yield path, an_object(schema, path)
    for key in ("properties", "$defs", "definitions"):
        for name, inner in an_object(schema.get(key, {}), f"{path}.{key}").items():
            yield from subschemas(inner, f"{path}.{key}.{name}")
    for key in ("anyOf", "allOf"):
        for index, inner in enumerate(a_list(schema.get(key, []), f"{path}.{key}")):
            yield from subschemas(inner, f"{path}.{key}[{index}]")
    if "items" in schema:
        yield from subschemas(schema["items"], f"{path}.items")


def constraint(kind: GrammarKind, source: str, path: str) -> Constraint:
    """Raises BadRequestError for a source longer than engines take."""
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise invalid(path, f"too long. It may be {MAX_GRAMMAR_BYTES} bytes of UTF-8", code="string_above_max_length")
    return Constraint(Grammar(kind, source), path)
