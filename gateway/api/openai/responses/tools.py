"""`tools` and `tool_choice` of the Responses API, which are flat. gateway/api/tools.py is what all dialects have in
common. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.fields import (
    a_list,
    an_array,
    an_object,
    boolean,
    check_names,
    choice,
    closed_schema,
    object_schema,
    only,
    required_text,
    takes,
    text,
)
from gateway.api.openai.strict_schema import check_strict
from gateway.api.tools import MAX_TOOLS, NAME_PATTERN, ToolChoice, check_together, function, use_of
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import Tool, ToolUse

_string = text()
_mode = choice("none", "auto", "required")
_NAMED: Final = closed_schema({"type": {"const": "function"}, "name": {"type": "string"}}, "type", "name")


@takes(
    {
        "type": "array",
        "items": object_schema(
            {
                "type": {"const": "function"},
                "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object", "properties": {"type": {"const": "object"}}},
                "strict": {"type": "boolean"},
            },
            "type",
            "name",
        ),
        "maxItems": MAX_TOOLS,
    }
)
def tools(value: Any, path: str) -> tuple[Tool, ...]:
    """Functions; tools that OpenAI runs, and those of any other type, are refused."""
    declared = [_function(item, f"{path}[{index}]") for index, item in enumerate(a_list(value, path))]
    return check_together(declared, path, "name")


@takes(
    {
        "anyOf": [
            _mode.schema,
            _NAMED,
            closed_schema(
                {
                    "type": {"const": "allowed_tools"},
                    "mode": {"enum": ["auto", "required"]},
                    "tools": {"type": "array", "items": _NAMED, "minItems": 1},
                },
                "type",
                "mode",
                "tools",
            ),
        ]
    }
)
def tool_choice(value: Any, path: str) -> ToolChoice:
    """A mode, one function by name, or some of the tools with a mode."""
    if type(value) is not dict:
        return ToolChoice(_mode(value, path))  # type: ignore[arg-type]
    if value.get("type") != "allowed_tools":
        return ToolChoice("required", (_name(value, path),))
    only(value, ("type", "mode", "tools"), path)
    mode = choice("auto", "required")(required_text(value, "mode", path), f"{path}.mode")
    listed = an_array(value.get("tools"), f"{path}.tools")
    return ToolChoice(mode, tuple(_name(item, f"{path}.tools[{index}]") for index, item in enumerate(listed)))  # type: ignore[arg-type]


def read_tools(values: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolUse | None]:
    """The tools of a checked request, and what the answer may do with them. Raises BadRequestError for a call that has
    to be made without tools, and for a choice of one that is not there."""
    declared: tuple[Tool, ...] = values.get("tools", ())
    chosen: ToolChoice = values.get("tool_choice", ToolChoice())
    if not declared and (chosen.mode == "required" or chosen.names):
        raise BadRequestError(
            "Invalid value for 'tool_choice': it is only allowed when 'tools' are specified.",
            param="tool_choice",
            code="invalid_value",
        )
    return declared, use_of(declared, chosen, parallel=values.get("parallel_tool_calls", True))


def tool_json(tool: Tool) -> dict[str, Any]:
    """As a response tells it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _function(item: Any, path: str) -> Tool:
    if required_text(an_object(item, path), "type", path) != "function":
        raise UnsupportedError("Only functions are supported, which the client runs.", param=f"{path}.type")
    check_names(item, ("type", "name", "description", "parameters", "strict"), path)
    name = required_text(item, "name", path)
    description, schema, strict = item.get("description"), item.get("parameters"), item.get("strict")
    where = f"{path}.parameters"
    if description is not None:
        _string(description, f"{path}.description")
    if strict is not None:
        boolean(strict, f"{path}.strict")
    made = function(name, f"{path}.name", description, schema, where, strict=bool(strict))
    if strict and schema is not None:
        check_strict(schema, where)
    if strict is None and schema is not None and _is_strict(schema, where):
        return function(name, f"{path}.name", description, schema, where, strict=True)
    return made


def _is_strict(schema: Any, path: str) -> bool:
    """Functions are strict here unless they cannot be."""
    try:
        check_strict(schema, path)
    except BadRequestError:
        return False
    return True


def _name(item: Any, path: str) -> tuple[str, str]:
    """Of a function, and where it is said."""
    if required_text(an_object(item, path), "type", path) != "function":
        raise UnsupportedError("Only functions can be chosen, and `allowed_tools`.", param=f"{path}.type")
    only(item, ("type", "name"), path)
    return required_text(item, "name", path), f"{path}.name"
