"""`tools`, `tool_choice` and their deprecated forms of the chat API, checked. Pure; gateway/api/tools.py is what other
dialects have in common with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
from pydantic_core import from_json

from gateway.api.fields import (
    Check,
    a_list,
    an_object,
    array_of,
    boolean,
    choice,
    closed_record,
    made,
    record,
    required_text,
    tagged,
    takes,
    text,
)
from gateway.api.openai.strict_schema import check_strict
from gateway.api.tools import (
    MAX_TOOLS,
    ToolChoice,
    check_together,
    leave_out_tool,
    mode_or,
    tool_name,
    tool_parameters,
    use_of,
)
from gateway.errors import BadRequestError
from gateway.types import Tool, ToolUse

SERVER_TOOLS = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "tool_search",
)
"""What types of tools begin with that OpenAI runs, or that need more than text."""

_string = text()
_KINDS = ("function", "custom")
"""Types of tools, each the name of what such a tool has inside."""


def _inside(kind: str, check: Check[Any], record: Callable[..., Check[dict[str, Any]]]) -> Check[Any]:
    """What an object of this type has inside."""
    return made(record(kind, type=_string, **{kind: check}), lambda given, _: given[kind])


# -- tools ------------------------------------------------------------------------------------------------------------


def _function(given: dict[str, Any], path: str) -> Tool:
    schema, strict = given.get("parameters"), given.get("strict", False)
    if strict and schema is not None:
        check_strict(schema, f"{path}.parameters")
    return Tool(given["name"], given.get("description"), schema, strict, f"{path}.parameters")


def _custom(given: dict[str, Any], path: str) -> Tool:
    return custom(given["name"], with_grammar(given.get("description"), given.get("format")), path)


_declared: dict[str, Any] = {"name": tool_name, "description": _string}
_grammar = record("definition", "syntax", definition=_string, syntax=choice("lark", "regex"))
_format = tagged(
    "type",
    {
        "text": made(record(type=_string), lambda _, path: None),
        "grammar": made(_inside("grammar", _grammar, record), lambda given, _: given["definition"]),
    },
)
_called = record("name", parameters=tool_parameters, strict=boolean, **_declared)
_tool = tagged(
    "type",
    {
        "function": _inside("function", made(_called, _function), record),
        "custom": _inside("custom", made(record("name", format=_format, **_declared), _custom), record),
    },
)


@takes({"type": "array", "items": _tool.schema, "maxItems": MAX_TOOLS})
def tools(value: Any, path: str) -> tuple[Tool, ...]:
    """Functions and custom tools; tools that upstream runs are left out, and those of any other type refused. An empty
    array is none."""
    declared, paths = [], []
    for index, item in enumerate(a_list(value, path)):
        where = f"{path}[{index}]"
        kind = required_text(an_object(item, where), "type", where)
        if kind.startswith(SERVER_TOOLS):
            leave_out_tool(kind, f"{where}.type")
            continue
        declared.append(_tool.function(item, where))
        paths.append(f"{where}.{kind}.name")
    return check_together(declared, path, paths)


functions = made(
    array_of(made(record("name", parameters=tool_parameters, **_declared), _function), most=MAX_TOOLS),
    lambda found, path: check_together(found, path, [f"{path}[{index}].name" for index in range(len(found))]),
)
"""The deprecated form of `tools`."""


# -- which of them ----------------------------------------------------------------------------------------------------


def _one(name: tuple[str, str], path: str) -> ToolChoice:
    return ToolChoice("required", (name,), single=True)


def _allowed(given: dict[str, Any], path: str) -> ToolChoice:
    return ToolChoice(given["mode"], tuple(given["tools"]))


_name = made(closed_record("name", name=_string), lambda given, path: (given["name"], f"{path}.name"))
_names = {kind: _inside(kind, _name, closed_record) for kind in _KINDS}
_some = closed_record("mode", "tools", mode=choice("auto", "required"), tools=array_of(tagged("type", _names), 1))
_chosen = {kind: made(check, _one) for kind, check in _names.items()}
tool_choice = mode_or(
    tagged("type", {**_chosen, "allowed_tools": _inside("allowed_tools", made(_some, _allowed), closed_record)}),
    *("none", "auto", "required"),
)
"""A mode, one tool by name, or some of the tools with a mode."""

function_call = mode_or(made(_name, _one), "none", "auto")
"""The deprecated form of `tool_choice`."""


def read_tools(values: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolUse | None]:
    """The tools of a checked chat, and what the answer may do with them. Raises BadRequestError for a call that has to
    be made without tools, for a choice of one that is not there, and for both forms together."""
    if values.get("tools") and values.get("functions"):
        raise BadRequestError(
            "Setting 'tools' and 'functions' at the same time is not supported.",
            param="functions",
            code="invalid_parameter_combination",
        )
    for declared, chosen in (("tools", "tool_choice"), ("functions", "function_call")):
        wanted = values.get(chosen, ToolChoice())
        if not values.get(declared) and (wanted.mode == "required" or wanted.names):
            raise BadRequestError(
                f"Invalid value for '{chosen}': it is only allowed when '{declared}' are specified.",
                param=chosen,
                code="invalid_value",
            )
        if values.get(declared):
            parallel = declared == "tools" and values.get("parallel_tool_calls", True)
            return values[declared], use_of(values[declared], wanted, parallel=parallel)
    return (), None


def names_a_tool(body: Mapping[str, Any]) -> bool:
    """Whether a valid chat asks for a call of one tool by its name."""
    chosen = body.get("tool_choice")
    return type(body.get("function_call")) is dict or (type(chosen) is dict and chosen.get("type") in _KINDS)


def custom_names(body: Mapping[str, Any]) -> frozenset[str]:
    """Of the custom tools of a valid chat."""
    return frozenset(tool["custom"]["name"] for tool in body.get("tools") or () if tool["type"] == "custom")


# -- custom tools: the input of a call is one text, not JSON --------------------------------------------------------
#
# A model knows functions only. So a custom tool is offered as a function of one text, a call of it is written with that
# text, and such a call in a conversation is rendered as the call that the model made.

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
