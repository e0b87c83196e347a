"""Items of the Responses API: what a conversation is made of there. Checked here, and brought into the one form in
which they are kept, told and rendered: every message has a list of parts, every item an id.

An item's id begins with that of its response, so that it can be found again. Pure; prompt.py makes a prompt of items.
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
    object_schema,
    record,
    tagged,
    takes,
    text,
    text_or,
    wrong_type,
)
from gateway.api.openai.caching import check_breakpoint
from gateway.errors import BadRequestError, UnsupportedError

Item = dict[str, Any]

ROLES: Final = ("user", "assistant", "system", "developer")
MEDIA: Final = {"input_image": "Images", "input_file": "Files", "input_audio": "Audio"}

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
    if type(item) is dict and len(item) == 2 and type(item.get("content")) is str and item.get("role") in ROLES:
        part = _output_text if item["role"] == "assistant" else _input_text  # as nearly all of a long conversation are
        return {"type": "message", "status": "completed", "role": item["role"], "content": [part(item["content"])]}
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


def _no_media(kind: str, path: str) -> BadRequestError | None:
    if kind not in MEDIA:
        return None
    return UnsupportedError(f"{MEDIA[kind]} are not supported by this model.", param=f"{path}.type")


def _kind(
    kind: str, *required: str, status: Check[str] = _status, unused: tuple[str, ...] = (), **fields: Check[Any]
) -> Check[Item]:
    """Items of this type, in the order in which they are told."""

    def settle(given: Item, path: str) -> Item:
        item = {"id": given["id"]} if "id" in given else {}
        item |= {"type": kind, "status": given.get("status", "completed")}
        return item | {name: given[name] for name in fields if name in given}

    every = {"type": _string, "id": text(128), "status": status, **dict.fromkeys(unused, anything)}
    return made(record(*required, **every, **fields), settle)


def _with_call_id(item: Item, path: str) -> Item:
    """Items of shells may have it as their own id."""
    if "call_id" not in item and "id" not in item:
        raise missing(f"{path}.id")
    return {**item, "call_id": item.get("call_id", item.get("id"))}


def _patched(item: Item, path: str) -> Item:
    return {**item, "output": item.get("output", item["status"])}


def _object_with(name: str, check: Check[Any], *more: str) -> Check[Item]:
    """An object with these fields at least, as it was sent."""

    @takes(object_schema(dict.fromkeys((name, *more), check.schema), name, *more))
    def check_object(value: Any, path: str) -> Item:
        for field in (name, *more):
            if an_object(value, path).get(field) is None:
                raise missing(f"{path}.{field}")
            check(value[field], f"{path}.{field}")
        return dict(value)

    return check_object


_input_part: Final = tagged(
    "type",
    {"input_text": record("text", type=_string, text=_string, prompt_cache_breakpoint=check_breakpoint)},
    _no_media,
)
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


_users: Final = _message(_input_part, _input_text)
_messages: Final = tagged(
    "role",
    {role: _message(_assistant_part, _output_text) if role == "assistant" else _users for role in ROLES},
)
_reference: Final = made(
    record("id", type=_string, id=_string), lambda item, _: {"type": "item_reference", "id": item["id"]}
)
_named: Final[dict[str, Any]] = {"call_id": _string, "name": _string, "namespace": _string}
_parts: Final = text_or(array_of(_input_part, what="a string or an array of parts"))
_said: Final = text_or(array_of(an_object, what="a string"))
_failed: Final = choice("in_progress", "completed", "incomplete", "failed")
_limited: Final = ("max_output_length",)
_TAGGED: Final[dict[str, Check[Item]]] = {
    "function_call": _kind("function_call", "call_id", "name", "arguments", arguments=_string, **_named),
    "function_call_output": _kind(
        "function_call_output", "call_id", "output", unused=("name",), call_id=_string, output=_parts
    ),
    "custom_tool_call": _kind("custom_tool_call", "call_id", "name", "input", input=_string, **_named),
    "custom_tool_call_output": _kind(
        "custom_tool_call_output", "call_id", "output", unused=("name",), call_id=_string, output=_parts
    ),
    **{
        kind: made(
            _kind(
                kind,
                "action",
                unused=("environment",),
                call_id=_string,
                action=_object_with(key, array_of(_string)),
            ),
            _with_call_id,
        )
        for kind, key in (("local_shell_call", "command"), ("shell_call", "commands"))
    },
    "apply_patch_call": _kind(
        "apply_patch_call",
        "call_id",
        "operation",
        call_id=_string,
        operation=_object_with("type", _string, "path"),
    ),
    "local_shell_call_output": made(
        _kind("local_shell_call_output", "output", status=_failed, unused=_limited, call_id=_string, output=_said),
        _with_call_id,
    ),
    "shell_call_output": _kind(
        "shell_call_output", "call_id", "output", status=_failed, unused=_limited, call_id=_string, output=_said
    ),
    "apply_patch_call_output": made(
        _kind("apply_patch_call_output", "call_id", status=_failed, unused=_limited, call_id=_string, output=_said),
        _patched,
    ),
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
