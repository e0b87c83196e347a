"""`tools` and `tool_choice` of the Responses API, which are flat. gateway/api/tools.py is what all dialects have in
common. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway.api.fields import (
    Check,
    a_list,
    an_object,
    anything,
    array_of,
    boolean,
    choice,
    closed_record,
    made,
    missing,
    object_schema,
    record,
    required_text,
    shown,
    tagged,
    takes,
    text,
)
from gateway.api.openai.responses.client_tools import BUILT_IN, Declared, joined
from gateway.api.openai.strict_schema import check_strict
from gateway.api.openai.tools import SERVER_TOOLS, custom, with_grammar
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
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import Tool, ToolUse

_string = text()


class Tools(NamedTuple):
    """`published` is what the response says of them."""

    declared: tuple[Declared, ...] = ()
    published: tuple[dict[str, Any], ...] = ()


# -- tools ------------------------------------------------------------------------------------------------------------


def _function(given: dict[str, Any], path: str) -> list[Declared]:
    """Functions are strict here unless they cannot be."""
    schema, strict, where = given.get("parameters"), given.get("strict"), f"{path}.parameters"
    if strict and schema is not None:
        check_strict(schema, where)
    if strict is None and schema is not None:
        strict = _is_strict(schema, where)
    name = given["name"]
    return [Declared(Tool(name, given.get("description"), schema, bool(strict), where), "function", name)]


def _is_strict(schema: Any, path: str) -> bool:
    try:
        check_strict(schema, path)
    except BadRequestError:
        return False
    return True


def _custom(given: dict[str, Any], path: str) -> list[Declared]:
    described = with_grammar(given.get("description"), given.get("format"))
    return [Declared(custom(given["name"], described, path), "custom", given["name"])]


def _grammar(given: dict[str, Any], path: str) -> str | None:
    """Of a custom tool's input; None where it is any text."""
    if given.get("type") != "grammar":
        return None
    if "definition" not in given:
        raise missing(f"{path}.definition")
    return str(given["definition"])


def _namespace(given: dict[str, Any], path: str) -> list[Declared]:
    space, inside = given["name"], [one for several in given["tools"] for one in several]
    return [one._replace(tool=replace(one.tool, name=joined(space, one.tool.name)), namespace=space) for one in inside]


def _built_in(kind: str) -> Check[list[Declared]]:
    return made(
        record(type=_string, environment=anything),
        lambda _, path: [Declared(replace(BUILT_IN[kind], path=path), kind, kind)],  # type: ignore[arg-type]
    )


def _unknown_tool(kind: str, path: str) -> BadRequestError:
    return UnsupportedError(
        f"Unsupported tool '{shown(kind)}' at '{path}': its type is none of function, custom, namespace, "
        f"{', '.join(BUILT_IN)}.",
        param=f"{path}.type",
    )


_every: Final[dict[str, Any]] = {"type": _string, "name": tool_name, "description": _string}
_format: Final = made(record(type=_string, definition=_string, syntax=_string), _grammar)
_named: Final[dict[str, Check[list[Declared]]]] = {
    "function": made(record("name", parameters=tool_parameters, strict=boolean, **_every), _function),
    "custom": made(record("name", format=_format, **_every), _custom),
}
_spaced: Final = record("name", "tools", tools=array_of(tagged("type", _named)), **_every)
_tool: Final = tagged(
    "type",
    {**_named, "namespace": made(_spaced, _namespace), **{kind: _built_in(kind) for kind in BUILT_IN}},
    _unknown_tool,
)
_other: Final = object_schema({"type": {"enum": list(SERVER_TOOLS)}}, "type")


@takes({"type": "array", "items": {"anyOf": [*_tool.schema["anyOf"], _other]}, "maxItems": MAX_TOOLS})
def tools(value: Any, path: str) -> Tools:
    """Tools that the client runs. Those that OpenAI runs are left out, those of unknown types refused."""
    declared: list[Declared] = []
    published: list[dict[str, Any]] = []
    paths: list[str] = []
    for index, item in enumerate(a_list(value, path)):
        where = f"{path}[{index}]"
        kind = required_text(an_object(item, where), "type", where)
        if kind.startswith(SERVER_TOOLS) or (kind == "shell" and _elsewhere(item)):
            leave_out_tool(kind, f"{where}.type")
            continue
        found = _tool.function(item, where)
        declared += found
        paths += [f"{where}.name"] * len(found)
        published.append(tool_json(found[0].tool) if kind == "function" else item)
    check_together([one.tool for one in declared], path, paths)
    return Tools(tuple(declared), tuple(published))


def _elsewhere(item: Mapping[str, Any]) -> bool:
    """Whether a shell is not the client's own machine."""
    environment = item.get("environment")
    return type(environment) is dict and environment.get("type") != "local"


# -- which of them ----------------------------------------------------------------------------------------------------


def _name(given: dict[str, Any], path: str) -> tuple[str, str]:
    """Under which a tool is offered, and where that stands."""
    return joined(given.get("namespace"), given["name"]), f"{path}.name"


def _not_run_here(kind: str, path: str) -> BadRequestError:
    why = f"Only tools that the client runs can be chosen, and `allowed_tools`: '{shown(kind)}' is not run here."
    return UnsupportedError(why, param=f"{path}.type")


_names: Final[dict[str, Check[tuple[str, str]]]] = {
    **{
        kind: made(closed_record("name", type=_string, name=_string, namespace=_string), _name)
        for kind in ("function", "custom")
    },
    **{
        kind: made(closed_record(type=_string), lambda given, path: (given["type"], f"{path}.type"))
        for kind in BUILT_IN
    },
}
_some: Final = closed_record(
    *("mode", "tools"),
    type=_string,
    mode=choice("auto", "required"),
    tools=array_of(tagged("type", _names, _not_run_here), 1),
)
tool_choice: Final = mode_or(
    tagged(
        "type",
        {
            **{
                kind: made(check, lambda name, _: ToolChoice("required", (name,), single=True))
                for kind, check in _names.items()
            },
            "allowed_tools": made(_some, lambda given, _: ToolChoice(given["mode"], tuple(given["tools"]))),
        },
        _not_run_here,
    ),
    *("none", "auto", "required"),
)
"""A mode, one tool by name, or some of the tools with a mode."""


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
