"""`tools` and `tool_choice` of the Anthropic API into types.Tool and types.ToolUse. Pure.

A strict tool's schema is in the API's subset of JSON Schema, as that of `output_config.format`. Of the tools that the
client runs and whose arguments Anthropic has published (bash, the text editor, memory) a request names only the type:
the model is offered functions with those arguments, and calls of them are `tool_use` blocks like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.api.anthropic.blocks import check_control
from gateway.api.anthropic.structured import read_schema
from gateway.api.fields import (
    Check,
    JsonSchema,
    a_list,
    an_object,
    anything,
    array_of,
    boolean,
    choice,
    closed_record,
    invalid,
    made,
    object_schema,
    record,
    tagged,
    takes,
    text,
    unsupported,
)
from gateway.api.tools import Mode, ToolChoice, check_together, leave_out_tool, use_of
from gateway.api.unknown_fields import leave_out
from gateway.types import Tool, ToolUse

_text_schema: Final = {"type": "string"}
_integer_schema: Final = {"type": "integer"}


def _commands(names: tuple[str, ...], properties: dict[str, Any]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command"]}


_EDITS: Final = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _text_schema),
    "insert_line": _integer_schema,
    "view_range": {"type": "array", "items": _integer_schema, "minItems": 2, "maxItems": 2},
}
_MOVES: Final = {"old_path": _text_schema, "new_path": _text_schema}
_CLIENT_TOOLS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "bash_": (
        {"type": "object", "properties": {"command": _text_schema, "restart": {"type": "boolean"}}},
        "Runs a command in a bash session on the user's machine, or restarts the session.",
    ),
    "text_editor_": (
        _commands(("view", "create", "str_replace", "insert", "undo_edit"), _EDITS),
        "Views, creates and edits text files on the user's machine.",
    ),
    "memory_": (
        _commands(("view", "create", "str_replace", "insert", "delete", "rename"), _EDITS | _MOVES),
        "Views and edits the files below /memories, which are kept between conversations.",
    ),
}
"""What the type begins with, which a date follows -> schema and description of the function."""

SERVER_TOOLS: Final = (
    *("web_search_", "web_fetch_", "code_execution_"),
    *("computer_", "tool_search_tool_", "mcp_toolset"),
)
"""What types of tools begin with that Anthropic runs, or that need more than text."""


MAX_TOOLS: Final = 512

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_string = text()


def _check_name(name: str, path: str) -> str:
    if not _NAME.fullmatch(name):
        raise invalid(path, "1 to 128 letters, digits, '_' and '-' are expected")
    return name


@takes({"type": "object", "properties": {"type": {"const": "object"}}, "required": ["type"]})
def _input_schema(value: Any, path: str) -> dict[str, Any]:
    if an_object(value, path).get("type") != "object":
        raise invalid(f"{path}.type", "the root has to be of type object")
    return dict(value)


def _ignored(why: str, check: Check[Any]) -> Check[Any]:
    """What is left out, where it is there."""

    def leave_out_field(value: Any, path: str) -> Any:
        if value and not leave_out(path):
            raise unsupported(path, why)
        return value

    return made(check, leave_out_field)


_every: Final[dict[str, Check[Any]]] = {
    "type": _string,
    "name": made(_string, _check_name),
    "strict": boolean,
    "cache_control": check_control,
    "eager_input_streaming": boolean,
    "defer_loading": _ignored("Tools cannot be loaded later: all are offered at once.", boolean),
    "input_examples": _ignored("Chat templates take no examples; put them into the description.", array_of(anything)),
    "allowed_callers": array_of(choice("direct")),
    "description": _string,
}
_TOOL: Final = record("name", "input_schema", input_schema=_input_schema, **_every)
_CLIENT_TOOL: Final = record("name", input_schema=anything, max_characters=anything, **_every)
_SERVER_TYPES: Final[JsonSchema] = {"type": "string", "pattern": f"^({'|'.join(SERVER_TOOLS)})"}
_SERVER_TOOL: Final[JsonSchema] = object_schema({"type": _SERVER_TYPES}, "type")


@dataclass(frozen=True, slots=True)
class DefinedTool:
    """A tool as it was sent, and its cache_control."""

    tool: Tool
    path: str
    control: Mapping[str, str] | None


_tools: Final = [_TOOL.schema, _CLIENT_TOOL.schema, _SERVER_TOOL]


@takes({"type": "array", "items": {"anyOf": _tools}, "maxItems": MAX_TOOLS})
def read_tools(value: Any, path: str) -> list[DefinedTool]:
    """Tools that the client runs; those that Anthropic runs are left out. Raises BadRequestError with the path of what
    is wrong, UnsupportedError for types that are not known."""
    tools: list[DefinedTool] = []
    for index, item in enumerate(a_list(value, path)):
        where = f"{path}[{index}]"
        kind = an_object(item, where).get("type")
        if type(kind) is str and kind.startswith(SERVER_TOOLS):
            leave_out_tool(kind, f"{where}.type")
        else:
            tools.append(_read_tool(item, where))
    check_together([one.tool for one in tools], path, [f"{one.path}.name" for one in tools], MAX_TOOLS)
    return tools


def _read_tool(item: dict[str, Any], path: str) -> DefinedTool:
    known = None
    if (kind := item.get("type")) not in (None, "custom"):
        _string(kind, f"{path}.type")
        known = next((tool for prefix, tool in _CLIENT_TOOLS.items() if kind.startswith(prefix)), None)
        if known is None:
            why = "Of tools with a type, only those that the client runs are known: bash, text_editor and memory."
            raise unsupported(f"{path}.type", why)
    given = (_TOOL if known is None else _CLIENT_TOOL)(item, path)
    where, strict = f"{path}.input_schema", given.get("strict", False)
    schema, description = known or (given["input_schema"], given.get("description"))
    if strict and known is None:
        schema = read_schema(schema, where)
    return DefinedTool(Tool(given["name"], description, schema, strict, where), path, given.get("cache_control"))


_parallel: Final = {"type": _string, "disable_parallel_tool_use": boolean}
read_choice: Final = tagged(
    "type",
    {
        "auto": closed_record(**_parallel),
        "any": closed_record(**_parallel),
        "tool": closed_record("name", name=_string, **_parallel),
        "none": closed_record(type=_string),
    },
)
"""`type`, and what belongs to it."""


_MODES: Final[Mapping[str, Mode]] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def tool_use(tools: Sequence[DefinedTool], chosen: Mapping[str, Any] | None) -> ToolUse | None:
    """What an answer may do with these tools. Raises BadRequestError for a choice among tools that are not there."""
    chosen = chosen or {"type": "auto"}
    mode = _MODES[chosen["type"]]
    if mode == "required" and not tools:
        raise invalid("tool_choice", "it may only be specified while providing `tools`")
    names = ((chosen["name"], "tool_choice.name"),) if "name" in chosen else None
    parallel = not chosen.get("disable_parallel_tool_use", False)
    return use_of([one.tool for one in tools], ToolChoice(mode, names, single=names is not None), parallel=parallel)
