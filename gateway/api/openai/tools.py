"""`tools` and `tool_choice` of the chat API, and what the Responses API has in common with it. Pure.

The two write the same fields, in different places: chats in an object named after its type (`nested`), responses beside
the type (`flat`). gateway/api/tools.py is what all dialects have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import orjson

from gateway.api.fields import (
    Check,
    a_list,
    an_object,
    array_of,
    boolean,
    choice,
    closed_record,
    made,
    record,
    required_text,
    tagged,
    takes,
    text,
)
from gateway.api.openai.strict_schema import check_strict
from gateway.api.tools import (
    MAX_TOOLS,
    ToolChoice,
    check_together,
    leave_out_tool,
    mode_or,
    read_arguments,
    tool_name,
    tool_parameters,
    use_of,
)
from gateway.errors import BadRequestError
from gateway.types import Tool, ToolUse

SERVER_TOOLS: Final = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "tool_search",
)
"""What types of tools begin with that OpenAI runs, or that need more than text."""

_T = TypeVar("_T")
_string = text()
_DECLARED: Final[dict[str, Any]] = {"name": tool_name, "description": _string}


Form = Callable[..., Check[Any]]
"""Where a tagged object has its fields: `nested` or `flat`."""


def nested(
    kind: str, make: Callable[[Any, str], _T], *required: str, closed: bool = False, **fields: Check[Any]
) -> Check[_T]:
    """`{"type": kind, kind: {**fields}}`, of whose fields and path `make` makes something."""
    object_of = closed_record if closed else record
    inside = made(object_of(*required, **fields), make)
    return made(object_of(kind, type=_string, **{kind: inside}), lambda given, _: given[kind])


def flat(
    kind: str, make: Callable[[Any, str], _T], *required: str, closed: bool = False, **fields: Check[Any]
) -> Check[_T]:
    """`{"type": kind, **fields}`, of whose fields and path `make` makes something."""
    return made((closed_record if closed else record)(*required, type=_string, **fields), make)


# -- tools ------------------------------------------------------------------------------------------------------------


def read_function(given: dict[str, Any], path: str, *, strict_if_possible: bool = False) -> Tool:
    """A checked function. `strict_if_possible`: what does not say whether it is strict is, where its schema may be."""
    schema, strict, where = given.get("parameters"), given.get("strict"), f"{path}.parameters"
    if schema is not None and (strict or (strict is None and strict_if_possible)):
        try:
            check_strict(schema, where)
            strict = True
        except BadRequestError:
            if strict:
                raise
    return Tool(given["name"], given.get("description"), schema, bool(strict), where)


def read_custom(given: dict[str, Any], path: str) -> Tool:
    """A checked custom tool as the model is offered it. The grammar of its input becomes part of the description: a
    model that writes JSON cannot be held to it."""
    description, grammar = given.get("description"), given.get("format")
    if grammar is not None:
        description = f"{description or ''}\n\nThe input is a text of this grammar:\n{grammar}".strip()
    return Tool(given["name"], description, _INPUT, strict=True, path=path)


def tool_kinds(
    form: Form, function: Callable[[Any, str], _T], custom: Callable[[Any, str], _T]
) -> dict[str, Check[_T]]:
    """Tools by type; `function` and `custom` make something of their checked fields."""
    grammar = form(
        "grammar",
        lambda given, _: given["definition"],
        *("definition", "syntax"),
        definition=_string,
        syntax=choice("lark", "regex"),
    )
    any_text = made(record(type=_string), lambda _, path: None)
    input_format = tagged("type", {"text": any_text, "grammar": grammar})
    return {
        "function": form("function", function, "name", parameters=tool_parameters, strict=boolean, **_DECLARED),
        "custom": form("custom", custom, "name", format=input_format, **_DECLARED),
    }


def offered(value: Any, path: str, check: Check[_T]) -> Iterator[tuple[dict[str, Any], str, _T]]:
    """Each tool of the array with its path and what the check makes of it; those that upstream runs are left out."""
    for index, item in enumerate(a_list(value, path)):
        where = f"{path}[{index}]"
        kind = required_text(an_object(item, where), "type", where)
        environment = item.get("environment") if kind == "shell" else None
        elsewhere = type(environment) is dict and environment.get("type") != "local"
        if kind.startswith(SERVER_TOOLS) or elsewhere:
            leave_out_tool(kind, f"{where}.type")
        else:
            yield item, where, check.function(item, where)


_tool: Final = tagged("type", tool_kinds(nested, read_function, read_custom))


@takes({"type": "array", "items": _tool.schema, "maxItems": MAX_TOOLS})
def tools(value: Any, path: str) -> tuple[Tool, ...]:
    """Functions and custom tools; tools that upstream runs are left out, and those of any other type refused. An empty
    array is none."""
    found = list(offered(value, path, _tool))
    name_paths = [f"{where}.{item['type']}.name" for item, where, _ in found]
    return check_together([tool for _, _, tool in found], path, name_paths)


functions: Final = made(
    array_of(made(record("name", parameters=tool_parameters, **_DECLARED), read_function), most=MAX_TOOLS),
    lambda found, path: check_together(found, path, [f"{path}[{index}].name" for index in range(len(found))]),
)
"""The deprecated form of `tools`."""


# -- which of them ----------------------------------------------------------------------------------------------------


def _one(name: tuple[str, str], path: str) -> ToolChoice:
    return ToolChoice("required", (name,), single=True)


def choice_of(
    form: Form,
    names: Mapping[str, Check[tuple[str, str]]],
    other: Callable[[str, str], BadRequestError | None] = lambda kind, path: None,
) -> Check[ToolChoice]:
    """A mode, one tool by name, or some of the tools with a mode. `names`: by type, the name of a tool and its path;
    `other`: as that of `tagged`."""
    one = {kind: made(check, _one) for kind, check in names.items()}
    some = form(
        "allowed_tools",
        lambda given, _: ToolChoice(given["mode"], tuple(given["tools"])),
        *("mode", "tools"),
        closed=True,
        mode=choice("auto", "required"),
        tools=array_of(tagged("type", names, other), 1),
    )
    return mode_or(tagged("type", {**one, "allowed_tools": some}, other), "none", "auto", "required")


def _name(given: dict[str, Any], path: str) -> tuple[str, str]:
    return given["name"], f"{path}.name"


_NAMED: Final = {kind: nested(kind, _name, "name", closed=True, name=_string) for kind in ("function", "custom")}
tool_choice: Final = choice_of(nested, _NAMED)
function_call: Final = mode_or(made(made(closed_record("name", name=_string), _name), _one), "none", "auto")
"""The deprecated form of `tool_choice`."""


def read_tools(values: Mapping[str, Any], *, deprecated: bool = False) -> tuple[tuple[Tool, ...], ToolUse | None]:
    """The tools of a checked request, and what the answer may do with them. Raises BadRequestError for a call that has
    to be made without tools, and for a choice of one that is not there. `deprecated`: as `functions`, one at a time."""
    declared, chosen = ("functions", "function_call") if deprecated else ("tools", "tool_choice")
    found, wanted = values.get(declared, ()), values.get(chosen, ToolChoice())
    if not found and (wanted.mode == "required" or wanted.names):
        raise BadRequestError(
            f"Invalid value for '{chosen}': it is only allowed when '{declared}' are specified.",
            param=chosen,
            code="invalid_value",
        )
    parallel = not deprecated and values.get("parallel_tool_calls", True)
    return found, use_of(found, wanted, parallel=parallel)


def read_chat_tools(values: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolUse | None]:
    """As `read_tools`, in either form. Raises BadRequestError for both together."""
    if values.get("tools") and values.get("functions"):
        raise BadRequestError(
            "Setting 'tools' and 'functions' at the same time is not supported.",
            param="functions",
            code="invalid_parameter_combination",
        )
    found, deprecated = read_tools(values), read_tools(values, deprecated=True)
    return found if found[0] else deprecated


def names_a_tool(body: Mapping[str, Any]) -> bool:
    """True if a valid chat requires a call of one tool by its name."""
    chosen = body.get("tool_choice")
    return type(body.get("function_call")) is dict or (type(chosen) is dict and chosen.get("type") in _NAMED)


def custom_names(body: Mapping[str, Any]) -> frozenset[str]:
    """Of the custom tools of a valid chat."""
    return frozenset(tool["custom"]["name"] for tool in body.get("tools") or () if tool["type"] == "custom")


# -- custom tools: the input of a call is one text, not JSON ----------------------------------------------------------
#
# A model knows functions only. So a custom tool is offered as a function of one text, a call of it is written with that
# text, and such a call in a conversation is rendered as the call that the model made.

_INPUT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def arguments_of(text: str) -> str:
    """The arguments of a call with this input, as the model wrote them."""
    return orjson.dumps({"input": text}).decode()


def input_of(written: str) -> str:
    """The input of a call with these arguments, which may be cut; empty without one."""
    return as_text(read_arguments(written).get("input", ""))


def as_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if type(value) is str else orjson.dumps(value).decode()
