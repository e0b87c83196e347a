"""`tools`, `tool_choice` and their deprecated forms of the chat API, checked. Pure; gateway/api/tools.py is what other
dialects have in common with this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    wrong_value,
)
from gateway.api.openai.custom_tools import custom, with_grammar
from gateway.api.openai.strict_schema import check_strict
from gateway.api.tools import (
    MAX_TOOLS,
    NAME_PATTERN,
    ToolChoice,
    check_together,
    function,
    leave_out_tool,
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
_mode = choice("none", "auto", "required")

_NAMED = closed_schema({"name": {"type": "string"}}, "name")
_FUNCTION = closed_schema({"type": {"const": "function"}, "function": _NAMED}, "type", "function")
_CUSTOM = closed_schema({"type": {"const": "custom"}, "custom": _NAMED}, "type", "custom")
_ONE = {"anyOf": [_FUNCTION, _CUSTOM]}
_DECLARED: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
    "description": {"type": "string"},
    "parameters": {"type": "object", "properties": {"type": {"const": "object"}}},
}
_FORMAT = {
    "anyOf": [
        object_schema({"type": {"const": "text"}}, "type"),
        object_schema(
            {
                "type": {"const": "grammar"},
                "grammar": object_schema(
                    {"definition": {"type": "string"}, "syntax": {"enum": ["lark", "regex"]}}, "definition", "syntax"
                ),
            },
            "type",
            "grammar",
        ),
    ]
}
_KINDS = ("function", "custom")
"""Types of tools, each the name of what such a tool has inside."""


@takes(
    {
        "type": "array",
        "items": {
            "anyOf": [
                object_schema(
                    {
                        "type": {"const": "function"},
                        "function": object_schema({**_DECLARED, "strict": {"type": "boolean"}}, "name"),
                    },
                    "type",
                    "function",
                ),
                object_schema(
                    {
                        "type": {"const": "custom"},
                        "custom": object_schema(
                            {"name": _DECLARED["name"], "description": {"type": "string"}, "format": _FORMAT}, "name"
                        ),
                    },
                    "type",
                    "custom",
                ),
            ]
        },
        "maxItems": MAX_TOOLS,
    }
)
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
        if kind not in _KINDS:
            raise wrong_value(f"{where}.type", kind, _KINDS)
        check_names(item, ("type", kind), where)
        inside, where = item.get(kind), f"{where}.{kind}"
        declared.append(_function(inside, where, "strict") if kind == "function" else _custom(inside, where))
        paths.append(f"{where}.name")
    return check_together(declared, path, paths)


@takes({"type": "array", "items": object_schema(_DECLARED, "name"), "maxItems": MAX_TOOLS})
def functions(value: Any, path: str) -> tuple[Tool, ...]:
    """The deprecated form of `tools`."""
    declared = [_function(item, f"{path}[{index}]") for index, item in enumerate(a_list(value, path))]
    return check_together(declared, path, [f"{path}[{index}].name" for index in range(len(declared))])


@takes(
    {
        "anyOf": [
            _mode.schema,
            _FUNCTION,
            _CUSTOM,
            closed_schema(
                {
                    "type": {"const": "allowed_tools"},
                    "allowed_tools": closed_schema(
                        {
                            "mode": {"enum": ["auto", "required"]},
                            "tools": {"type": "array", "items": _ONE, "minItems": 1},
                        },
                        "mode",
                        "tools",
                    ),
                },
                "type",
                "allowed_tools",
            ),
        ]
    }
)
def tool_choice(value: Any, path: str) -> ToolChoice:
    """A mode, one tool by name, or some of the tools with a mode."""
    if type(value) is not dict:
        return ToolChoice(_mode(value, path))  # type: ignore[arg-type]
    kind = choice(*_KINDS, "allowed_tools")(required_text(value, "type", path), f"{path}.type")
    if kind in _KINDS:
        return ToolChoice("required", (_name(value, path),), single=True)
    only(value, ("type", "allowed_tools"), path)
    where = f"{path}.allowed_tools"
    allowed = an_object(value.get("allowed_tools"), where)
    only(allowed, ("mode", "tools"), where)
    mode = choice("auto", "required")(required_text(allowed, "mode", where), f"{where}.mode")
    listed = an_array(allowed.get("tools"), f"{where}.tools")
    return ToolChoice(mode, tuple(_name(item, f"{where}.tools[{index}]") for index, item in enumerate(listed)))  # type: ignore[arg-type]


@takes({"anyOf": [{"enum": ["none", "auto"]}, _NAMED]})
def function_call(value: Any, path: str) -> ToolChoice:
    """The deprecated form of `tool_choice`."""
    if type(value) is not dict:
        return ToolChoice(choice("none", "auto")(value, path))  # type: ignore[arg-type]
    only(value, ("name",), path)
    return ToolChoice("required", ((required_text(value, "name", path), f"{path}.name"),), single=True)


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


def _function(item: Any, path: str, *more: str) -> Tool:
    check_names(an_object(item, path), ("name", "description", "parameters", *more), path)
    name = required_text(item, "name", path)
    description, schema = item.get("description"), item.get("parameters")
    if description is not None:
        _string(description, f"{path}.description")
    strict = item.get("strict") is not None and boolean(item["strict"], f"{path}.strict")
    made = function(name, f"{path}.name", description, schema, f"{path}.parameters", strict=strict)
    if strict and schema is not None:
        check_strict(schema, f"{path}.parameters")
    return made


def _custom(item: Any, path: str) -> Tool:
    check_names(an_object(item, path), ("name", "description", "format"), path)
    name = function(required_text(item, "name", path), f"{path}.name", None, None, path, strict=False).name
    description, form = item.get("description"), item.get("format")
    if description is not None:
        _string(description, f"{path}.description")
    return custom(name, with_grammar(description, None if form is None else _grammar(form, f"{path}.format")), path)


def _grammar(form: Any, path: str) -> str | None:
    """Of the input; None where it is any text."""
    if choice("text", "grammar")(required_text(an_object(form, path), "type", path), f"{path}.type") == "text":
        return None
    where = f"{path}.grammar"
    inside = an_object(form.get("grammar"), where)
    choice("lark", "regex")(required_text(inside, "syntax", where), f"{where}.syntax")
    return required_text(inside, "definition", where)


def _name(item: Any, path: str) -> tuple[str, str]:
    """Of a tool, and where it is said."""
    kind = required_text(an_object(item, path), "type", path)
    if kind not in _KINDS:
        raise wrong_value(f"{path}.type", kind, _KINDS)
    only(item, ("type", kind), path)
    where = f"{path}.{kind}"
    only(an_object(item.get(kind), where), ("name",), where)
    return required_text(item[kind], "name", where), f"{where}.name"
