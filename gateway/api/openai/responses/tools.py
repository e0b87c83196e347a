"""`tools` and `tool_choice` of the Responses API, which are flat. gateway/api/tools.py is what all dialects have in
common. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway.api.fields import (
    JsonSchema,
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
    shown,
    takes,
    text,
)
from gateway.api.openai.custom_tools import custom, with_grammar
from gateway.api.openai.responses.client_tools import BUILT_IN, Declared, joined
from gateway.api.openai.strict_schema import check_strict
from gateway.api.openai.tools import SERVER_TOOLS
from gateway.api.tools import (
    MAX_TOOLS,
    NAME_PATTERN,
    ToolChoice,
    check_together,
    function,
    leave_out_tool,
    use_of,
)
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import Tool, ToolUse

_string = text()
_mode = choice("none", "auto", "required")
_NAMED: Final[JsonSchema] = {
    "anyOf": [
        closed_schema(
            {"type": {"enum": ["function", "custom"]}, "name": {"type": "string"}, "namespace": {"type": "string"}},
            "type",
            "name",
        ),
        closed_schema({"type": {"enum": list(BUILT_IN)}}, "type"),
    ]
}


_FUNCTION: Final = object_schema(
    {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object", "properties": {"type": {"const": "object"}}},
        "strict": {"type": "boolean"},
    },
    "type",
    "name",
)
_CUSTOM: Final = object_schema(
    {
        "type": {"const": "custom"},
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": {"type": "string"},
        "format": {"type": "object"},
    },
    "type",
    "name",
)
_NAMESPACE: Final = object_schema(
    {
        "type": {"const": "namespace"},
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": {"type": "string"},
        "tools": {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}, "maxItems": MAX_TOOLS},
    },
    "type",
    "name",
    "tools",
)
_OTHER: Final = object_schema({"type": {"enum": [*BUILT_IN, *SERVER_TOOLS]}}, "type")


class Tools(NamedTuple):
    """`told` is what the response says of them."""

    declared: tuple[Declared, ...] = ()
    told: tuple[dict[str, Any], ...] = ()


@takes(
    {
        "type": "array",
        "items": {"anyOf": [_FUNCTION, _CUSTOM, _NAMESPACE, _OTHER]},
        "maxItems": MAX_TOOLS,
    }
)
def tools(value: Any, path: str) -> Tools:
    """Tools that the client runs. Those that OpenAI runs are left out, those of unknown types refused."""
    declared: list[Declared] = []
    told: list[dict[str, Any]] = []
    paths: list[str] = []
    for index, item in enumerate(a_list(value, path)):
        where = f"{path}[{index}]"
        kind = required_text(an_object(item, where), "type", where)
        if kind.startswith(SERVER_TOOLS) or (kind == "shell" and _elsewhere(item)):
            leave_out_tool(kind, f"{where}.type")
            continue
        found = _namespace(item, where) if kind == "namespace" else [_declared(kind, item, where)]
        declared += found
        paths += [f"{where}.name"] * len(found)
        told.append(tool_json(found[0].tool) if kind == "function" else item)
    check_together([one.tool for one in declared], path, paths)
    return Tools(tuple(declared), tuple(told))


def _elsewhere(item: Mapping[str, Any]) -> bool:
    """Whether a shell is not the client's own machine."""
    environment = item.get("environment")
    return type(environment) is dict and environment.get("type") != "local"


def _namespace(item: Mapping[str, Any], path: str) -> list[Declared]:
    check_names(item, ("type", "name", "description", "tools"), path)
    space = _named(item, path)
    found = []
    for index, inner in enumerate(a_list(item.get("tools"), f"{path}.tools")):
        where = f"{path}.tools[{index}]"
        kind = required_text(an_object(inner, where), "type", where)
        one = _declared(choice("function", "custom")(kind, f"{where}.type"), inner, where)
        found.append(one._replace(tool=replace(one.tool, name=joined(space, one.tool.name)), namespace=space))
    return found


def _declared(kind: str, item: dict[str, Any], path: str) -> Declared:
    if kind == "function":
        tool = _function(item, path)
        return Declared(tool, "function", tool.name)
    if kind == "custom":
        check_names(item, ("type", "name", "description", "format"), path)
        return Declared(custom(name := _named(item, path), _description(item, path), path), "custom", name)
    if kind not in BUILT_IN:
        raise UnsupportedError(
            f"Unsupported tool '{shown(kind)}' at '{path}': its type is none of function, custom, namespace, "
            f"{', '.join(BUILT_IN)}.",
            param=f"{path}.type",
        )
    check_names(item, ("type", "environment"), path)
    return Declared(replace(BUILT_IN[kind], path=path), kind, kind)  # type: ignore[arg-type]


def _named(item: Mapping[str, Any], path: str) -> str:
    """The name of a tool, or of a namespace."""
    return function(required_text(item, "name", path), f"{path}.name", None, None, path, strict=False).name


def _description(item: Mapping[str, Any], path: str) -> str | None:
    """With the grammar of a custom tool's input."""
    said = None if item.get("description") is None else _string(item["description"], f"{path}.description")
    form = {} if item.get("format") is None else an_object(item["format"], f"{path}.format")
    if form.get("type") != "grammar":
        return said
    return with_grammar(said, _string(form.get("definition"), f"{path}.format.definition"))


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
    """A mode, one tool by name, or some of the tools with a mode."""
    if type(value) is not dict:
        return ToolChoice(_mode(value, path))  # type: ignore[arg-type]
    if value.get("type") != "allowed_tools":
        return ToolChoice("required", (_name(value, path),), single=True)
    only(value, ("type", "mode", "tools"), path)
    mode = choice("auto", "required")(required_text(value, "mode", path), f"{path}.mode")
    listed = an_array(value.get("tools"), f"{path}.tools")
    return ToolChoice(mode, tuple(_name(item, f"{path}.tools[{index}]") for index, item in enumerate(listed)))  # type: ignore[arg-type]


def read_tools(values: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolUse | None]:
    """The tools of a checked request, and what the answer may do with them. Raises BadRequestError for a call that has
    to be made without tools, and for a choice of one that is not there."""
    declared = tuple(one.tool for one in values.get("tools", Tools()).declared)
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
    """Under which a tool is offered, and where it is said."""
    kind = required_text(an_object(item, path), "type", path)
    if kind in BUILT_IN:
        only(item, ("type",), path)
        return kind, f"{path}.type"
    if kind not in ("function", "custom"):
        raise UnsupportedError(
            f"Only tools that the client runs can be chosen, and `allowed_tools`: '{shown(kind)}' is not run here.",
            param=f"{path}.type",
        )
    only(item, ("type", "name", "namespace"), path)
    space = None if item.get("namespace") is None else _string(item["namespace"], f"{path}.namespace")
    return joined(space, required_text(item, "name", path)), f"{path}.name"
