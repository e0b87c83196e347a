"""Custom tools of the OpenAI APIs: the input of a call is one text, not JSON.

A model knows functions only. So a custom tool is offered as a function of one text, a call of it is written with that
text, and such a call in a conversation is rendered as the call that the model made. Both APIs of OpenAI have them, each
in its own form. Pure.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from pydantic_core import from_json

from gateway.types import Tool

_INPUT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom(name: str, description: str | None, path: str) -> Tool:
    """A custom tool as the model is offered it."""
    return Tool(name, description, _INPUT, strict=True, path=path)


def with_grammar(description: str | None, grammar: str | None) -> str | None:
    """The grammar of the input becomes part of the description: a model that writes JSON cannot be held to it."""
    if grammar is None:
        return description
    return f"{description or ''}\n\nThe input is a text of this grammar:\n{grammar}".strip()


def arguments_of(text: str) -> str:
    """The arguments of a call with this input, as the model wrote them."""
    return orjson.dumps({"input": text}).decode()


def input_of(written: str) -> str:
    """The input of a call whose arguments came so far; empty without one."""
    return as_text(read_arguments(written).get("input", ""))


def read_arguments(written: str) -> dict[str, Any]:
    """Of a call, as far as they came: an answer may be cut in the middle of one. Empty for what is no object."""
    try:
        read = from_json(written, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return read if type(read) is dict else {}


def as_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if type(value) is str else orjson.dumps(value).decode()
