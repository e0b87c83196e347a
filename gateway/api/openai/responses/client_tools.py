"""Tools of the Responses API that the client runs and whose calls are items of a type of their own.

A model knows functions only. So each of these is offered as a function with the arguments that its item has, a call of
it is written as that item, and such an item in a conversation is rendered as the call that the model made. Functions
and custom tools in a namespace are offered under one name made of both. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.openai.tools import arguments_of, as_text, input_of, read_arguments
from gateway.types import Tool

Form = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
"""How calls of a tool are written."""

Item = dict[str, Any]

_string: Final = {"type": "string"}
_strings: Final = {"type": "array", "items": _string}
_integer: Final = {"type": "integer"}


def _arguments(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


BUILT_IN: Final[Mapping[str, Tool]] = {
    "local_shell": Tool(
        "local_shell",
        "Runs a command on the user's machine and returns its output.",
        _arguments(
            "command",
            command=_strings,
            timeout_ms=_integer,
            working_directory=_string,
            env={"type": "object", "additionalProperties": _string},
            user=_string,
        ),
        strict=True,
    ),
    "shell": Tool(
        "shell",
        "Runs shell commands on the user's machine, one after the other, and returns their output.",
        _arguments("commands", commands=_strings, timeout_ms=_integer, max_output_length=_integer),
        strict=True,
    ),
    "apply_patch": Tool(
        "apply_patch",
        "Creates, updates or deletes one file. The diff is in the V4A format; deleting needs none.",
        _arguments(
            "type path",
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path=_string,
            diff=_string,
        ),
        strict=True,
    ),
}
"""By their type, which is their name as well."""

_INSIDE: Final[Mapping[str, str]] = {"local_shell": "action", "shell": "action", "apply_patch": "operation"}
CALLS: Final[Mapping[str, Form]] = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
}
_CALL_OF: Final = {form: kind for kind, form in CALLS.items()}
OUTPUTS: Final = frozenset(f"{kind}_output" for kind in CALLS)
"""Types of items."""


class Declared(NamedTuple):
    """A tool as the model is offered it, and as the client knows it."""

    tool: Tool
    form: Form = "function"
    name: str = ""
    namespace: str | None = None

    @property
    def streamed(self) -> bool:
        """Whether a call is told while its arguments are written."""
        return self.form not in _INSIDE

    def begun(self, call_id: str) -> Item:
        """The item of a call whose arguments have not come, without an id."""
        item: Item = {"type": _CALL_OF[self.form], "status": "in_progress", "call_id": call_id}
        if self.form in ("function", "custom"):
            item["name"] = self.name
            item["arguments" if self.form == "function" else "input"] = ""
            if self.namespace is not None:
                item["namespace"] = self.namespace
        return item

    def fill(self, item: Item, written: str) -> None:
        """Puts the arguments, as far as they were written, into the item of the call."""
        if self.form == "function":
            item["arguments"] = written
            return
        if self.form == "custom":
            item["input"] = input_of(written)
            return
        arguments = read_arguments(written)
        if self.form == "apply_patch":
            item["operation"] = {
                name: as_text(arguments[name]) for name in ("type", "path", "diff") if name in arguments
            }
        else:
            item["action"] = _action(self.form, arguments)


def joined(namespace: str | None, name: str) -> str:
    """The name under which a tool is offered."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def call_of(item: Item) -> tuple[str, str]:
    """Name and arguments of a call as the model wrote it."""
    form = CALLS[item["type"]]
    if form == "function":
        return joined(item.get("namespace"), item["name"]), item["arguments"]
    if form == "custom":
        return joined(item.get("namespace"), item["name"]), arguments_of(item["input"])
    inside = item[_INSIDE[form]]
    known = BUILT_IN[form].parameters or {}
    given = (name for name in known["properties"] if inside.get(name) not in (None, {}))
    return form, orjson.dumps({name: inside[name] for name in given}).decode()


def _action(form: Form, arguments: Mapping[str, Any]) -> Item:
    key = "command" if form == "local_shell" else "commands"
    commands = arguments.get(key, [])
    commands_text = [as_text(one) for one in (commands if type(commands) is list else [commands])]
    action: Item = {"type": "exec", key: commands_text, "env": {}} if form == "local_shell" else {key: commands_text}
    if form == "local_shell" and type(env := arguments.get("env")) is dict:
        action["env"] = {name: as_text(value) for name, value in env.items()}
    for name in ("timeout_ms", "max_output_length"):
        if type(arguments.get(name)) is int and (form == "shell" or name == "timeout_ms"):
            action[name] = arguments[name]
    for name in ("working_directory", "user"):
        if form == "local_shell" and type(arguments.get(name)) is str:
            action[name] = arguments[name]
    return action
