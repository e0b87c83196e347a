"""`tools` and `tool_choice` of the Anthropic API into types.Tool and types.ToolUse. Pure.

A strict tool's schema is in the API's subset of JSON Schema, as that of `output_config.format`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.api.anthropic import client_tools
from gateway.api.anthropic.blocks import check_control, only, read_control, required
from gateway.api.anthropic.structured import MAX_OPTIONAL, read_schema
from gateway.api.fields import (
    JsonSchema,
    an_array,
    an_object,
    array_too_long,
    boolean,
    choice,
    closed_record,
    closed_schema,
    invalid,
    missing,
    object_schema,
    takes,
    text,
    wrong_type,
)
from gateway.api.tools import leave_out_tool
from gateway.api.unknown_fields import leave_out
from gateway.errors import UnsupportedError
from gateway.types import Tool, ToolUse

MAX_TOOLS: Final = 512
MAX_STRICT: Final = 20

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_string = text()
_name_schema: Final[JsonSchema] = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_CLIENT_TOOL: Final[JsonSchema] = object_schema(
    {"type": {"type": "string", "pattern": "^(bash|text_editor|memory)_[0-9]{8}$"}, "name": _name_schema},
    "type",
    "name",
)
_SERVER_TOOL: Final[JsonSchema] = object_schema(
    {"type": {"type": "string", "pattern": f"^({'|'.join(client_tools.SERVER_TOOLS)})"}}, "type"
)
_TOOL: Final[JsonSchema] = object_schema(
    {
        "type": {"const": "custom"},
        "name": _name_schema,
        "description": {"type": "string"},
        "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}, "required": ["type"]},
        "strict": {"type": "boolean"},
        "cache_control": check_control.schema,
        "eager_input_streaming": {"type": "boolean"},
        "defer_loading": {"type": "boolean"},
        "input_examples": {"type": "array"},
        "allowed_callers": {"type": "array", "items": {"const": "direct"}},
    },
    "name",
    "input_schema",
)


@dataclass(frozen=True, slots=True)
class DefinedTool:
    """A tool as it was sent, and its cache_control."""

    tool: Tool
    path: str
    control: Mapping[str, str] | None


@takes({"type": "array", "items": {"anyOf": [_TOOL, _CLIENT_TOOL, _SERVER_TOOL]}, "maxItems": MAX_TOOLS})
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
        if type(kind) is str and kind.startswith(client_tools.SERVER_TOOLS):
            leave_out_tool(kind, f"{where}.type")
            continue
        defined, more = _read_tool(an_object(item, where), where)
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
        known = client_tools.find(_string(kind, f"{path}.type"))
        if known is None:
            why = "Of tools with a type, only those that the client runs are known: bash, text_editor and memory."
            raise UnsupportedError(why, param=f"{path}.type", reason=why)
    only(item, path, *_TOOL["properties"], *(() if known is None else ("max_characters",)))
    name = required(item, "name", path)
    if not _NAME.fullmatch(name):
        raise invalid(f"{path}.name", "1 to 128 letters, digits, '_' and '-' are expected")
    where = f"{path}.input_schema"
    if known is None:
        schema, description = _input_schema(item, path), item.get("description")
    else:
        schema, description = known.schema, known.description
    if description is not None:
        _string(description, f"{path}.description")
    strict = item.get("strict") is not None and boolean(item["strict"], f"{path}.strict")
    optional = 0
    if strict and known is None:
        schema, optional = read_schema(schema, where)
    _check_rest(item, path)
    tool = Tool(name, description, schema, strict=strict, path=where)
    return DefinedTool(tool, path, read_control(item, path)), optional


def _input_schema(item: dict[str, Any], path: str) -> dict[str, Any]:
    if item.get("input_schema") is None:
        raise missing(f"{path}.input_schema")
    schema = an_object(item["input_schema"], f"{path}.input_schema")
    if schema.get("type") != "object":
        raise invalid(f"{path}.input_schema.type", "the root has to be of type object")
    return schema


def _check_rest(item: dict[str, Any], path: str) -> None:
    if item.get("eager_input_streaming") is not None:
        boolean(item["eager_input_streaming"], f"{path}.eager_input_streaming")
    if item.get("defer_loading") is not None and boolean(item["defer_loading"], f"{path}.defer_loading"):
        _ignore(f"{path}.defer_loading", "Tools cannot be loaded later: all are offered at once.")
    if item.get("input_examples") not in (None, []):
        _ignore(f"{path}.input_examples", "Chat templates take no examples; put them into the description.")
    for index, caller in enumerate((item.get("allowed_callers") and an_array(item["allowed_callers"], path)) or ()):
        if caller != "direct":
            raise _unsupported(f"{path}.allowed_callers[{index}]", "Only the model itself calls tools.")


def _ignore(path: str, why: str) -> None:
    if not leave_out(path):
        raise _unsupported(path, why)


def _unsupported(path: str, why: str) -> UnsupportedError:
    return UnsupportedError(why, param=path, reason=why)


_parallel = {"type": _string, "disable_parallel_tool_use": boolean}
_CHOICES: Final = {
    "auto": closed_record(**_parallel),
    "any": closed_record(**_parallel),
    "tool": closed_record(**_parallel, name=_string),
    "none": closed_record(type=_string),
}


@takes(
    {
        "anyOf": [
            closed_schema(
                {"type": {"enum": ["auto", "any"]}, "disable_parallel_tool_use": {"type": "boolean"}}, "type"
            ),
            closed_schema(
                {
                    "type": {"const": "tool"},
                    "name": {"type": "string"},
                    "disable_parallel_tool_use": {"type": "boolean"},
                },
                "type",
                "name",
            ),
            closed_schema({"type": {"const": "none"}}, "type"),
        ]
    }
)
def read_choice(value: Any, path: str) -> dict[str, Any]:
    """`type`, and what belongs to it."""
    kind = an_object(value, path).get("type")
    if kind is None:
        raise missing(f"{path}.type")
    chosen: dict[str, Any] = _CHOICES[choice(*_CHOICES)(kind, f"{path}.type")](value, path)
    if kind == "tool" and "name" not in chosen:
        raise missing(f"{path}.name")
    return chosen


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
