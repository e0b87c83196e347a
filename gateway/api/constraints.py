"""What a text has to be, as the engine is told. The dialects say it in their own words; this is where they meet.

Pure. The engine compiles the grammar and says what it cannot carry out; gateway/pipeline.py makes that a 400.
"""

from __future__ import annotations

from typing import Any

import orjson

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, SchemaError, check_schema
from gateway.api.fields import an_object, invalid
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


def constraint(kind: GrammarKind, source: str, path: str) -> Constraint:
    """Raises BadRequestError for a source longer than engines take."""
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise invalid(path, f"too long. It may be {MAX_GRAMMAR_BYTES} bytes of UTF-8", code="string_above_max_length")
    return Constraint(Grammar(kind, source), path)
