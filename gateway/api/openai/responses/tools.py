"""Tools of the Responses API: `tools` and `tool_choice`, which are flat, and the items that calls are written as.

A model knows functions only. So each tool that the client runs is offered as a function with the arguments that its
item has, a call of it is written as that item, and such an item in a conversation is rendered as the call that the
model made. Functions and custom tools in a namespace are offered under one name made of both. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.fields import Check, anything, array_of, closed_record, made, object_schema, shown, tagged, takes, text
from gateway.api.openai.tools import (
    SERVER_TOOLS,
    arguments_of,
    as_text,
    choice_of,
    flat,
    input_of,
    offered,
    read_custom,
    read_function,
    tool_kinds,
)
from gateway.api.tools import MAX_TOOLS, check_together, read_arguments, tool_name
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import Tool

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
"""Type of a tool, which decides how its calls are written."""

Item = dict[str, Any]

_string: Final = text()
_TEXT: Final = {"type": "string"}
_TEXTS: Final = {"type": "array", "items": _TEXT}
_INTEGER: Final = {"type": "integer"}


def _built_in(name: str, description: str, required: str, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}
    return Tool(name, description, schema, strict=True)


BUILT_IN: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        _built_in(
            "local_shell",
            "Runs a command on the user's machine and returns its output.",
            "command",
            command=_TEXTS,
            timeout_ms=_INTEGER,
            working_directory=_TEXT,
            env={"type": "object", "additionalProperties": _TEXT},
            user=_TEXT,
        ),
        _built_in(
            "shell",
            "Runs shell commands on the user's machine, one after the other, and returns their output.",
            "commands",
            commands=_TEXTS,
            timeout_ms=_INTEGER,
            max_output_length=_INTEGER,
        ),
        _built_in(
            "apply_patch",
            "Creates, updates or deletes one file. The diff is in the V4A format; deleting needs none.",
            "type path",
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    )
}
"""By their type, which is their name as well."""

ARGUMENTS: Final[Mapping[str, str]] = {
    "function": "arguments",
    "custom": "input",
    "local_shell": "action",
    "shell": "action",
    "apply_patch": "operation",
}
"""Type of a tool -> the field of a call's item that has its arguments."""

_DEFAULTS: Final[Mapping[str, Item]] = {
    "local_shell": {"type": "exec", "command": [], "env": {}},
    "shell": {"commands": []},
    "apply_patch": {},
}
ITEM_TYPES: Final = {"function": "function_call", "custom": "custom_tool_call"} | {
    kind: f"{kind}_call" for kind in BUILT_IN
}
CALLS: Final = {item_type: kind for kind, item_type in ITEM_TYPES.items()}
"""Type of a call's item -> type of its tool."""

OUTPUTS: Final = frozenset(f"{item_type}_output" for item_type in CALLS)
"""Types of items."""


class Declared(NamedTuple):
    """A tool as the model is offered it, and as the client knows it."""

    tool: Tool
    kind: Kind
    name: str
    namespace: str | None = None

    @property
    def streamed(self) -> bool:
        """Whether the item of a call is sent while its arguments are written."""
        return self.kind not in BUILT_IN

    def begun(self, call_id: str) -> Item:
        """The item of a call whose arguments have not been generated yet, without an id."""
        item: Item = {"type": ITEM_TYPES[self.kind], "status": "in_progress", "call_id": call_id}
        if self.streamed:
            item |= {"name": self.name, ARGUMENTS[self.kind]: ""}
            if self.namespace is not None:
                item["namespace"] = self.namespace
        return item

    def fill(self, item: Item, written: str) -> None:
        """Puts the arguments, as far as they were generated, into the item of the call."""
        if self.kind == "function":
            item["arguments"] = written
        elif self.kind == "custom":
            item["input"] = input_of(written)
        else:
            arguments, schemas = read_arguments(written), properties_of(self.kind)
            fitting = {name: _fit(arguments[name], schemas[name]) for name in schemas if name in arguments}
            given = {name: value for name, value in fitting.items() if value is not None}
            item[ARGUMENTS[self.kind]] = {**_DEFAULTS[self.kind], **given}


def properties_of(kind: str) -> dict[str, Any]:
    schemas: dict[str, Any] = (BUILT_IN[kind].parameters or {})["properties"]
    return schemas


def _fit(value: Any, schema: dict[str, Any]) -> Any:
    """The argument of a call in the type that its schema has; None for one that cannot be."""
    match schema.get("type"):
        case "array":
            return [as_text(one) for one in (value if type(value) is list else [value])]
        case "object":
            return {name: as_text(one) for name, one in value.items()} if type(value) is dict else None
        case "integer":
            return value if type(value) is int else None
    return as_text(value)


def joined(namespace: str | None, name: str) -> str:
    """The name under which a tool is offered."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def call_of(item: Item) -> tuple[str, str]:
    """Name and arguments of a call as the model wrote it."""
    kind = CALLS[item["type"]]
    given = item[ARGUMENTS[kind]]
    if kind in BUILT_IN:
        names = (name for name in properties_of(kind) if given.get(name) not in (None, {}))
        return kind, orjson.dumps({name: given[name] for name in names}).decode()
    return joined(item.get("namespace"), item["name"]), arguments_of(given) if kind == "custom" else given


# -- tools ------------------------------------------------------------------------------------------------------------


class Tools(NamedTuple):
    """`published`: the `tools` of the response object."""

    declared: tuple[Declared, ...] = ()
    published: tuple[dict[str, Any], ...] = ()


def _function(given: dict[str, Any], path: str) -> list[Declared]:
    return [Declared(read_function(given, path, strict_if_possible=True), "function", given["name"])]


def _custom(given: dict[str, Any], path: str) -> list[Declared]:
    return [Declared(read_custom(given, path), "custom", given["name"])]


def _namespace(given: dict[str, Any], path: str) -> list[Declared]:
    space, inside = given["name"], [one for several in given["tools"] for one in several]
    return [one._replace(tool=replace(one.tool, name=joined(space, one.tool.name)), namespace=space) for one in inside]


def _client_tool(given: dict[str, Any], path: str) -> list[Declared]:
    kind = given["type"]
    return [Declared(replace(BUILT_IN[kind], path=path), kind, kind)]


def _unknown_tool(kind: str, path: str) -> BadRequestError:
    return UnsupportedError(
        f"Unsupported tool '{shown(kind)}' at '{path}': its type is none of function, custom, namespace, "
        f"{', '.join(BUILT_IN)}.",
        param=f"{path}.type",
    )


_named: Final = tool_kinds(flat, _function, _custom)
_spaced: Final[dict[str, Any]] = {"name": tool_name, "description": _string, "tools": array_of(tagged("type", _named))}
_tool: Final = tagged(
    "type",
    {
        **_named,
        "namespace": flat("namespace", _namespace, "name", "tools", **_spaced),
        **{kind: flat(kind, _client_tool, environment=anything) for kind in BUILT_IN},
    },
    _unknown_tool,
)
_other: Final = object_schema({"type": {"enum": list(SERVER_TOOLS)}}, "type")


@takes({"type": "array", "items": {"anyOf": [*_tool.schema["anyOf"], _other]}, "maxItems": MAX_TOOLS})
def tools(value: Any, path: str) -> Tools:
    """Tools that the client runs. Those that OpenAI runs are left out, those of unknown types refused."""
    found = list(offered(value, path, _tool))
    declared = [(one, f"{where}.name") for _, where, several in found for one in several]
    check_together([one.tool for one, _ in declared], path, [name_path for _, name_path in declared])
    published = [_function_json(one[0].tool) if item["type"] == "function" else item for item, _, one in found]
    return Tools(tuple(one for one, _ in declared), tuple(published))


def _function_json(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


# -- which of them ----------------------------------------------------------------------------------------------------


def _not_run_here(kind: str, path: str) -> BadRequestError:
    why = f"Only tools that the client runs can be chosen, and `allowed_tools`: '{shown(kind)}' is not run here."
    return UnsupportedError(why, param=f"{path}.type")


_by_name: Final = made(
    closed_record("name", type=_string, name=_string, namespace=_string),
    lambda given, path: (joined(given.get("namespace"), given["name"]), f"{path}.name"),
)
_by_type: Final = made(closed_record(type=_string), lambda given, path: (given["type"], f"{path}.type"))
_names: Final[dict[str, Check[tuple[str, str]]]] = {
    **dict.fromkeys(("function", "custom"), _by_name),
    **dict.fromkeys(BUILT_IN, _by_type),
}
tool_choice: Final = choice_of(flat, _names, _not_run_here)
