"""`tools` and `tool_choice` of the Anthropic API into types.Tool and types.ToolUse. Pure.

A strict tool's schema is in the API's subset of JSON Schema, as that of `output_config.format`. Of the tools that the
client runs and whose arguments Anthropic has published (bash, the text editor, memory) a request names only the type:
the model is offered functions with those arguments, and calls of them are `tool_use` blocks like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gateway.api.anthropic.blocks import check_control
from gateway.api.anthropic.structured import MAX_OPTIONAL, read_schema
from gateway.api.fields import (
    Check,
    JsonSchema,
    an_object,
    anything,
    array_of,
    array_too_long,
    boolean,
    closed_record,
    invalid,
    made,
    object_schema,
    record,
    tagged,
    takes,
    text,
    wrong_type,
)
from gateway.api.tools import leave_out_tool
from gateway.api.unknown_fields import leave_out
from gateway.errors import UnsupportedError
from gateway.types import Tool, ToolUse

_text_schema: Final = {"type": "string"}
_integer_schema: Final = {"type": "integer"}
_range: Final = {"type": "array", "items": _integer_schema, "minItems": 2, "maxItems": 2}


class ClientTool(NamedTuple):
    description: str
    schema: dict[str, Any]


def _commands(*names: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": list(names)}, **properties},
        "required": ["command"],
    }


_EDITS: Final = {
    "path": _text_schema,
    "file_text": _text_schema,
    "old_str": _text_schema,
    "new_str": _text_schema,
    "insert_line": _integer_schema,
    "insert_text": _text_schema,
    "view_range": _range,
}

BY_PREFIX: Final = {
    "bash_": ClientTool(
        "Runs a command in a bash session on the user's machine, or restarts the session.",
        {"type": "object", "properties": {"command": _text_schema, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": ClientTool(
        "Views, creates and edits text files on the user's machine.",
        _commands("view", "create", "str_replace", "insert", "undo_edit", **_EDITS),
    ),
    "memory_": ClientTool(
        "Views and edits the files below /memories, which are kept between conversations.",
        _commands(
            "view",
            "create",
            "str_replace",
            "insert",
            "delete",
            "rename",
            **_EDITS,
            old_path=_text_schema,
            new_path=_text_schema,
        ),
    ),
}
"""By what their types begin with; a date follows."""

SERVER_TOOLS: Final = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "computer_",
    "tool_search_tool_",
    "mcp_toolset",
)
"""What types of tools begin with that Anthropic runs, or that need more than text."""


def find_client_tool(kind: str) -> ClientTool | None:
    """The tool of this type, if it is one that the client runs."""
    return next((tool for prefix, tool in BY_PREFIX.items() if kind.startswith(prefix)), None)


MAX_TOOLS: Final = 512
MAX_STRICT: Final = 20

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
            raise UnsupportedError(why, param=path, reason=why)
        return value

    return made(check, leave_out_field)


@takes({"const": "direct"})
def _caller(value: Any, path: str) -> None:
    if value != "direct":
        why = "Only the model itself calls tools."
        raise UnsupportedError(why, param=path, reason=why)


_every: Final[dict[str, Check[Any]]] = {
    "type": _string,
    "name": made(_string, _check_name),
    "strict": boolean,
    "cache_control": check_control,
    "eager_input_streaming": boolean,
    "defer_loading": _ignored("Tools cannot be loaded later: all are offered at once.", boolean),
    "input_examples": _ignored("Chat templates take no examples; put them into the description.", array_of(anything)),
    "allowed_callers": array_of(_caller),
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


@takes(
    {
        "type": "array",
        "items": {"anyOf": [_TOOL.schema, _CLIENT_TOOL.schema, _SERVER_TOOL]},
        "maxItems": MAX_TOOLS,
    }
)
def read_tools(value: Any, path: str) -> list[DefinedTool]:
    """Tools that the client runs; those that Anthropic runs are left out. Raises BadRequestError with the path of what
    is wrong, UnsupportedError for types that are not known."""
    if type(value) is not list:
        raise wrong_type(path, "an array of objects", value)
    if len(value) > MAX_TOOLS:
        raise array_too_long(path, MAX_TOOLS, len(value))
    tools: list[DefinedTool] = []
    names: set[str] = set()
    optional = 0
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        kind = an_object(item, where).get("type")
        if type(kind) is str and kind.startswith(SERVER_TOOLS):
            leave_out_tool(kind, f"{where}.type")
            continue
        defined, more = _read_tool(item, where)
        if defined.tool.name in names:
            raise invalid(f"{where}.name", "tool names must be unique")
        names.add(defined.tool.name)
        tools.append(defined)
        optional += more
    if sum(defined.tool.strict for defined in tools) > MAX_STRICT:
        raise invalid(path, f"at most {MAX_STRICT} tools may be strict")
    if optional > MAX_OPTIONAL:
        raise invalid(path, f"the strict tools have {optional} optional properties, and may have {MAX_OPTIONAL}")
    return tools


def _read_tool(item: dict[str, Any], path: str) -> tuple[DefinedTool, int]:
    """And how many properties a strict one has that are not required."""
    known = None
    if (kind := item.get("type")) not in (None, "custom"):
        known = find_client_tool(_string(kind, f"{path}.type"))
        if known is None:
            why = "Of tools with a type, only those that the client runs are known: bash, text_editor and memory."
            raise UnsupportedError(why, param=f"{path}.type", reason=why)
    given = (_TOOL if known is None else _CLIENT_TOOL)(item, path)
    where, strict, optional = f"{path}.input_schema", given.get("strict", False), 0
    schema = given["input_schema"] if known is None else known.schema
    if strict and known is None:
        schema, optional = read_schema(schema, where)
    description = given.get("description") if known is None else known.description
    tool = Tool(given["name"], description, schema, strict=strict, path=where)
    return DefinedTool(tool, path, given.get("cache_control")), optional


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


def use_of(tools: Sequence[DefinedTool], chosen: Mapping[str, Any] | None) -> ToolUse | None:
    """What an answer may do with these tools. Raises BadRequestError for a choice among tools that are not there."""
    if not tools:
        if chosen is not None and chosen["type"] in ("any", "tool"):
            raise invalid("tool_choice", "it may only be specified while providing `tools`")
        return None
    chosen = chosen or {"type": "auto"}
    if chosen["type"] == "none":
        return None
    callable_ = tuple(defined.tool for defined in tools)
    if chosen["type"] == "tool":
        callable_ = tuple(tool for tool in callable_ if tool.name == chosen["name"])
        if not callable_:
            raise invalid("tool_choice.name", f"Tool '{chosen['name'][:64]}' not found in provided tools")
    parallel = chosen["type"] != "tool" and not chosen.get("disable_parallel_tool_use", False)
    return ToolUse(callable_, "auto" if chosen["type"] == "auto" else "required", parallel)
