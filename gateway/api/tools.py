"""Tools that a client declares, and what it wants of them, as the pipeline is told. The dialects say it in their own
words; this is where they meet. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.api.fields import array_too_long, shown, wrong_type
from gateway.api.unknown_fields import leave_out
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import Tool, ToolUse

MAX_TOOLS: Final = 128
NAME_PATTERN: Final = "[a-zA-Z0-9_-]{1,64}"

_NAME: Final = re.compile(NAME_PATTERN)


def leave_out_tool(kind: str, path: str) -> None:
    """Notes that a tool which upstream would run is not offered. Raises UnsupportedError where that may not be."""
    if not leave_out(f"tools[].{kind}"):
        raise UnsupportedError(f"Tools of the type '{shown(kind)}' are not run here.", param=path)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What an answer is to do with the tools.

    names  those that it may call, and the paths where they are said; None for all of them
    single  one of them is named: it is called exactly once
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[tuple[str, str], ...] | None = None
    single: bool = False


def function(name: str, name_path: str, description: str | None, schema: Any, path: str, *, strict: bool) -> Tool:
    """A tool whose fields have the right types. `schema` of its arguments may be None; `path` is the schema's.

    Raises BadRequestError for a name that is none, and for arguments that are no object.
    """
    if not _NAME.fullmatch(name):
        raise _invalid(name_path, f"'{shown(name)}' is not 1 to 64 letters, digits, '_' and '-'")
    if schema is not None:
        if type(schema) is not dict:
            raise wrong_type(path, "an object", schema)
        if schema.get("type", "object") != "object":
            raise _invalid(f"{path}.type", "the arguments of a function are an object", "invalid_function_parameters")
    return Tool(name, description, schema, strict, path)


def check_together(tools: Sequence[Tool], path: str, name_paths: Sequence[str]) -> tuple[Tool, ...]:
    """Raises BadRequestError for too many, and for two of one name. `name_paths`: where the name of each stands."""
    if len(tools) > MAX_TOOLS:
        raise array_too_long(path, MAX_TOOLS, len(tools))
    names = set[str]()
    for tool, name_path in zip(tools, name_paths, strict=True):
        if tool.name in names:
            raise _invalid(name_path, f"there is another tool named '{tool.name}'")
        names.add(tool.name)
    return tuple(tools)


def use_of(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> ToolUse | None:
    """None when none may be called. Raises BadRequestError for the name of a tool that is not there."""
    if choice.mode == "none" or not tools:
        return None
    by_name = {tool.name: tool for tool in tools}
    for name, path in choice.names or ():
        if name not in by_name:
            raise _invalid(path, f"there is no tool named '{shown(name)}'")
    allowed = by_name if choice.names is None else dict.fromkeys(name for name, _ in choice.names)
    return ToolUse(tuple(by_name[name] for name in allowed), choice.mode, parallel and not choice.single)


def _invalid(path: str, why: str, code: str = "invalid_value") -> BadRequestError:
    return BadRequestError(f"Invalid '{path}': {why}.", param=path, code=code)
