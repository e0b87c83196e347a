"""Tools that a client declares, and its choice among them, for the pipeline, from the fields of any dialect. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic_core import from_json

from gateway.api.fields import Check, an_object, array_too_long, choice, invalid, made, shown, takes, text
from gateway.api.unknown_fields import leave_out
from gateway.errors import UnsupportedError
from gateway.types import Tool, ToolUse

MAX_TOOLS: Final = 128
NAME_PATTERN: Final = "[a-zA-Z0-9_-]{1,64}"

Mode = Literal["none", "auto", "required"]

_NAME: Final = re.compile(NAME_PATTERN)


def leave_out_tool(kind: str, path: str) -> None:
    """Notes that a tool which upstream would run is not offered. Raises UnsupportedError where that may not be."""
    if not leave_out(f"tools[].{kind}"):
        raise UnsupportedError(f"Tools of the type '{shown(kind)}' are not run here.", param=path)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What an answer is to do with the tools.

    names  those that it may call, and the paths of their names; None for all of them
    single  one of them is named: it is called exactly once
    """

    mode: Mode = "auto"
    names: tuple[tuple[str, str], ...] | None = None
    single: bool = False


def _named(name: str, path: str) -> str:
    if not _NAME.fullmatch(name):
        raise invalid(path, f"'{shown(name)}' is not 1 to 64 letters, digits, '_' and '-'")
    return name


tool_name: Final = takes({"type": "string", "pattern": f"^{NAME_PATTERN}$"})(made(text(), _named).function)


@takes({"type": "object", "properties": {"type": {"const": "object"}}})
def tool_parameters(value: Any, path: str) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    if an_object(value, path).get("type", "object") != "object":
        why = "the arguments of a function are an object"
        raise invalid(f"{path}.type", why, code="invalid_function_parameters")
    return dict(value)


def read_arguments(written: str) -> dict[str, Any]:
    """The arguments of a call, which may be cut in the middle. Empty for what is no object."""
    try:
        read = from_json(written, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return read if type(read) is dict else {}


def mode_or(check: Check[ToolChoice], *modes: str) -> Check[ToolChoice]:
    """One of these modes, or an object."""
    mode = choice(*modes)

    @takes({"anyOf": [mode.schema, check.schema]})
    def check_choice(value: Any, path: str) -> ToolChoice:
        return check.function(value, path) if type(value) is dict else ToolChoice(mode(value, path))  # type: ignore[arg-type]

    return check_choice


def check_together(
    tools: Sequence[Tool], path: str, name_paths: Sequence[str], most: int = MAX_TOOLS
) -> tuple[Tool, ...]:
    """Raises BadRequestError for too many, and for two of one name. `name_paths`: where the name of each stands."""
    if len(tools) > most:
        raise array_too_long(path, most, len(tools))
    names = set[str]()
    for tool, name_path in zip(tools, name_paths, strict=True):
        if tool.name in names:
            raise invalid(name_path, f"there is another tool named '{tool.name}'")
        names.add(tool.name)
    return tuple(tools)


def use_of(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> ToolUse | None:
    """None when none may be called. Raises BadRequestError for the name of a tool that is not there."""
    if choice.mode == "none" or not tools:
        return None
    by_name = {tool.name: tool for tool in tools}
    for name, path in choice.names or ():
        if name not in by_name:
            raise invalid(path, f"there is no tool named '{shown(name)}'")
    allowed = by_name if choice.names is None else dict.fromkeys(name for name, _ in choice.names)
    return ToolUse(tuple(by_name[name] for name in allowed), choice.mode, parallel and not choice.single)
