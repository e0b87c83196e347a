"""Items of the Responses API: what a conversation is made of there. Checked here, and brought into the one form in
which they are stored, returned and rendered: every message has a list of parts, every item an id.

An item's id begins with that of its response, so that it can be found again. Pure; request.py makes a prompt of items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.api.fields import (
    Check,
    an_object,
    anything,
    array_of,
    choice,
    made,
    missing,
    record,
    tagged,
    takes,
    text,
    text_or,
    wrong_type,
)
from gateway.api.openai.caching import check_breakpoint
from gateway.api.openai.media import no_media, response_media
from gateway.api.openai.responses.tools import ARGUMENTS, BUILT_IN, ITEM_TYPES, Item, tools
from gateway.errors import UnsupportedError

ROLES: Final = ("user", "assistant", "system", "developer")

_string = text()
_status = choice("in_progress", "completed", "incomplete")
_objects = array_of(an_object, what="an array of objects")
_ID: Final = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})[io][0-9a-f]{4,}")
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lso",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apo",
    "reasoning": "rs",
    "additional_tools": "at",
}


def with_ids(items: Sequence[Item], token: str) -> list[Item]:
    """Each with an id, its own where it has one. `token` is that of the response's id."""
    return [
        item if item.get("id") else {"id": item_id(item["type"], token, f"i{index:04x}"), **item}
        for index, item in enumerate(items)
    ]


def response_of(referenced: str) -> str | None:
    """The id of the response that has the item with this id; None for one that is not ours."""
    found = _ID.fullmatch(referenced)
    return f"resp_{found[1]}" if found else None


def item_id(kind: str, token: str, number: str) -> str:
    return f"{_PREFIXES[kind]}_{token}{number}"


def _item(item: Any, path: str) -> Item:
    kind = an_object(item, path).get("type")
    if kind is None:
        kind = "item_reference" if "role" not in item and "id" in item else "message"
    if type(kind) is not str:
        raise wrong_type(f"{path}.type", "a string", kind)
    if (check := _BY_TYPE.get(kind)) is None:
        raise UnsupportedError(
            f"Unsupported item '{kind[:64]}' at '{path}': an input may have items of the types {', '.join(_BY_TYPE)}.",
            param=f"{path}.type",
        )
    return check.function(item, path)


def _input_text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _kind(
    kind: str, *required: str, status: Check[str] = _status, unused: tuple[str, ...] = (), **fields: Check[Any]
) -> Check[Item]:
    """Items of this type, with the fields in the order in which they are returned."""

    def settle(given: Item, path: str) -> Item:
        item = {"id": given["id"]} if "id" in given else {}
        item |= {"type": kind, "status": given.get("status", "completed")}
        return item | {name: given[name] for name in fields if name in given}

    every = {"type": _string, "id": text(128), "status": status, **dict.fromkeys(unused, anything)}
    return made(record(*required, **every, **fields), settle)


_marks: Final[dict[str, Check[Any]]] = {"type": _string, "prompt_cache_breakpoint": check_breakpoint}
_text_part: Final = {"input_text": record("text", text=_string, **_marks)}
_instruction_part: Final = tagged("type", _text_part, no_media)
_input_part: Final = tagged("type", _text_part | response_media(**_marks), no_media)
_assistant_part: Final = tagged(
    "type",
    {
        "output_text": made(
            record("text", type=_string, text=_string, annotations=anything, logprobs=anything, parsed=anything),
            lambda part, _: _output_text(part["text"]),
        ),
        "refusal": record("refusal", type=_string, refusal=_string),
    },
)


def _message(part: Check[Item], wrap: Callable[[str], Item]) -> Check[Item]:
    several = text_or(array_of(part, 1, what="a string or an array of parts"))
    content = made(several, lambda found, _: [wrap(found)] if type(found) is str else found)
    return _kind("message", "content", role=_string, content=content, phase=choice("commentary", "final_answer"))


_instructions: Final = _message(_instruction_part, _input_text)
_of_role: Final = {
    "user": _message(_input_part, _input_text),
    "assistant": _message(_assistant_part, _output_text),
}
_messages: Final = tagged("role", {role: _of_role.get(role, _instructions) for role in ROLES})
_reference: Final = made(
    record("id", type=_string, id=_string), lambda item, _: {"type": "item_reference", "id": item["id"]}
)
_parts: Final = text_or(array_of(_input_part, what="a string or an array of parts"))
_objects_or_text: Final = text_or(array_of(an_object, what="a string"))
_failed: Final = choice("in_progress", "completed", "incomplete", "failed")


def _call(kind: str) -> Check[Item]:
    """A call of such a tool."""
    field = ARGUMENTS[kind]
    if kind not in BUILT_IN:
        fields: dict[str, Any] = {"call_id": _string, "name": _string, "namespace": _string, field: _string}
        return _kind(ITEM_TYPES[kind], "call_id", "name", field, **fields)
    schema = BUILT_IN[kind].parameters or {}
    each = array_of(_string) if kind in ("shell", "local_shell") else _string
    checks = {name: each if name in schema["required"] else anything for name in schema["properties"]}
    given = record(*schema["required"], **{"type": _string, **checks})
    fields = {"call_id": _string, field: given}
    return made(_kind(ITEM_TYPES[kind], field, unused=("environment",), **fields), _with_call_id)


def _output(kind: str) -> Check[Item]:
    """What a call of such a tool returned."""
    item_type = f"{ITEM_TYPES[kind]}_output"
    if kind not in BUILT_IN:
        return _kind(item_type, "call_id", "output", unused=("name",), call_id=_string, output=_parts)
    required = () if kind == "apply_patch" else ("output",)
    fields = {"call_id": _string, "output": _objects_or_text}
    return made(_kind(item_type, *required, status=_failed, unused=("max_output_length",), **fields), _with_call_id)


def _with_call_id(item: Item, path: str) -> Item:
    """Items of built-in tools may have it as their own id, and a patch needs no other output than its status."""
    if "call_id" not in item and "id" not in item:
        raise missing(f"{path}.call_id")
    return {**item, "call_id": item.get("call_id", item.get("id"))}


_tools: Final = record("tools", type=_string, id=text(128), role=choice("developer"), tools=tools)


@takes(_tools.schema)
def _additional_tools(item: Any, path: str) -> Item:
    """Kept as it was written: request.py reads the tools of all items together."""
    _tools(item, path)
    return {name: item[name] for name in ("id", "type", "role", "tools") if name in item}


_TAGGED: Final[dict[str, Check[Item]]] = {
    "additional_tools": _additional_tools,
    **{ITEM_TYPES[kind]: _call(kind) for kind in ITEM_TYPES},
    **{f"{ITEM_TYPES[kind]}_output": _output(kind) for kind in ITEM_TYPES},
    "reasoning": made(  # kept as it is: what another model thought is no part of a prompt here
        _kind("reasoning", summary=_objects, content=_objects, encrypted_content=_string),
        lambda item, _: {"summary": [], **item},
    ),
}
_BY_TYPE: Final = {"message": _messages, **_TAGGED, "item_reference": _reference}
_items: Final = array_of(
    Check(_item, {"anyOf": [_messages.schema, *tagged("type", _TAGGED).schema["anyOf"], _reference.schema]}),
    what="a string or an array of items",
)


@takes(text_or(_items).schema)
def parse_input(value: Any, path: str) -> list[Item]:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for items that Kvasir has no use for."""
    return [_messages({"role": "user", "content": value}, path)] if type(value) is str else _items.function(value, path)
