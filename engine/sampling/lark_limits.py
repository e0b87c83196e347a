"""How large a Lark grammar or a regular expression may be: rules, terminals and nesting, counted before the compiler
follows them. JSON Schemas have their limits in engine/protocol/schema_limits.py. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from engine.protocol import check_schema

MAX_RULES: Final = 1_000
"""A chain of 3,500 rules is too deep for the compiler's stack."""
MAX_TERMINALS: Final = 1_000
MAX_NESTING: Final = 200
"""Brackets inside of each other."""

_SAID: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')
"""Strings, regular expressions and comments."""
_DEFINITION: Final = re.compile(r"^[ \t]*[?!]{0,2}_?([A-Za-z])\w*[^:\n]*:", re.MULTILINE)
_BRACKET: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[(){}]", re.DOTALL)
_JSON: Final = re.compile(r"%(?:json|llguidance)[ \t\r\n]*")


def find_excess(lark: str) -> str | None:
    """What of a Lark grammar is beyond the limits. Raises SchemaError for a schema in it that is."""
    for found in _JSON.finditer(lark):
        check_schema(_decode_inline(lark, found.end()))
    bare = _SAID.sub("", lark)
    if _nesting(bare) > MAX_NESTING:
        return f"brackets may be nested {MAX_NESTING} levels deep"
    defined = [name.group(1).isupper() for name in _DEFINITION.finditer(bare)]
    terminals = sum(defined)
    if terminals > MAX_TERMINALS:
        return f"it has {terminals} terminals, and may have {MAX_TERMINALS}"
    if len(defined) - terminals > MAX_RULES:
        return f"it has {len(defined) - terminals} rules, and may have {MAX_RULES}"
    return None


def find_nested_too_deep(expression: str) -> str | None:
    """What of a regular expression is beyond the limits."""
    return f"groups may be nested {MAX_NESTING} levels deep" if _nesting(expression) > MAX_NESTING else None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for found in _BRACKET.finditer(text):
        if found[0] in "({":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in ")}":
            depth -= 1
    return deepest


def _decode_inline(lark: str, start: int) -> Any:
    """A schema that stands in a Lark grammar; None for what is none, of which the compiler says what it thinks."""
    try:
        return json.JSONDecoder().raw_decode(lark, start)[0]
    except (ValueError, RecursionError):
        return None
