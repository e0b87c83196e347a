"""Items of the Responses API: what a conversation is made of there. Checked here, and brought into the one form in
which they are kept, told and rendered: every message has a list of parts, every item an id.

An item's id begins with that of its response, so that it can be found again. Pure; prompt.py makes a prompt of items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.api.fields import (
    MAX_ITEMS,
    a_list,
    an_array,
    an_object,
    at_most,
    check_names,
    choice,
    missing,
    required_text,
    takes,
    text,
    wrong_type,
    wrong_value,
)
from gateway.api.openai.caching import check_breakpoint
from gateway.api.openai.responses.item_schemas import ITEM, check_phase, check_status
from gateway.errors import UnsupportedError

Item = dict[str, Any]

ROLES: Final = ("user", "assistant", "system", "developer")
MEDIA: Final = {"input_image": "Images", "input_file": "Files", "input_audio": "Audio"}

_string = text()
_output_status = choice("in_progress", "completed", "incomplete", "failed")
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


@takes({"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM, "maxItems": MAX_ITEMS}]})
def parse_input(value: Any, path: str) -> list[Item]:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for items that Kvasir has no use for."""
    if type(value) is str:
        return [_message({"role": "user", "content": value}, path)]
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of items", value)
    return [_item(item, f"{path}[{index}]") for index, item in enumerate(at_most(MAX_ITEMS, value, path))]


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
        part = _told if item["role"] == "assistant" else _asked  # as nearly all of a long conversation are
        return {"type": "message", "status": "completed", "role": item["role"], "content": [part(item["content"])]}
    kind = an_object(item, path).get("type")
    if kind is None:
        kind = "item_reference" if "role" not in item and "id" in item else "message"
    if type(kind) is not str:
        raise wrong_type(f"{path}.type", "a string", kind)
    if (parse := _BY_TYPE.get(kind)) is None:
        raise UnsupportedError(
            f"Unsupported item '{kind[:64]}' at '{path}': an input may have items of the types {', '.join(_BY_TYPE)}.",
            param=f"{path}.type",
        )
    return parse(item, path)


def _message(item: Item, path: str) -> Item:
    check_names(item, ("type", "id", "role", "content", "status", "phase"), path)
    role = required_text(item, "role", path)
    if role not in ROLES:
        raise wrong_value(f"{path}.role", role, ROLES)
    if item.get("content") is None:
        raise missing(f"{path}.content")
    parts = _assistant_part if role == "assistant" else _input_part
    content = item["content"]
    if type(content) is str:
        content = [_told(content) if role == "assistant" else _asked(content)]
    elif type(content) is list:
        content = [
            parts(part, f"{path}.content[{index}]") for index, part in enumerate(an_array(content, f"{path}.content"))
        ]
    else:
        raise wrong_type(f"{path}.content", "a string or an array of parts", content)
    message: Item = _common(item, path, "message") | {"role": role, "content": content}
    if item.get("phase") is not None:
        message["phase"] = check_phase(item["phase"], f"{path}.phase")
    return message


def _function_call(item: Item, path: str) -> Item:
    return _named_call(item, path, "arguments")


def _custom_tool_call(item: Item, path: str) -> Item:
    return _named_call(item, path, "input")


def _named_call(item: Item, path: str, written: str) -> Item:
    """A call of a function or a custom tool, which may be in a namespace."""
    names = ("call_id", "name", written)
    check_names(item, ("type", "id", "status", "namespace", *names), path)
    fields = {key: required_text(item, key, path) for key in names}
    if item.get("namespace") is not None:
        fields["namespace"] = _string(item["namespace"], f"{path}.namespace")
    return _common(item, path, item["type"]) | fields


def _function_call_output(item: Item, path: str) -> Item:
    check_names(item, ("type", "id", "call_id", "name", "output", "status"), path)
    output = item.get("output")
    if output is None:
        raise missing(f"{path}.output")
    if type(output) is list:
        several = at_most(MAX_ITEMS, output, f"{path}.output")
        output = [_input_part(part, f"{path}.output[{index}]") for index, part in enumerate(several)]
    elif type(output) is not str:
        raise wrong_type(f"{path}.output", "a string or an array of parts", output)
    return _common(item, path, item["type"]) | {
        "call_id": required_text(item, "call_id", path),
        "output": output,
    }


def _shell_call(item: Item, path: str) -> Item:
    """Of a local shell, or of the newer shell."""
    check_names(item, ("type", "id", "call_id", "action", "status", "environment"), path)
    key, where = "command" if item["type"] == "local_shell_call" else "commands", f"{path}.action"
    action = an_object(item.get("action"), where)
    for index, said in enumerate(a_list(action.get(key), f"{where}.{key}")):
        _string(said, f"{where}.{key}[{index}]")
    call_id = required_text(item, "id" if item.get("call_id") is None else "call_id", path)
    return _common(item, path, item["type"]) | {"call_id": call_id, "action": action}


def _apply_patch_call(item: Item, path: str) -> Item:
    check_names(item, ("type", "id", "call_id", "operation", "status"), path)
    operation = an_object(item.get("operation"), f"{path}.operation")
    for key in ("type", "path"):
        required_text(operation, key, f"{path}.operation")
    return _common(item, path, item["type"]) | {
        "call_id": required_text(item, "call_id", path),
        "operation": operation,
    }


def _client_output(item: Item, path: str) -> Item:
    """What a shell or a patch said: a text, or objects that the model reads as JSON."""
    check_names(item, ("type", "id", "call_id", "output", "status", "max_output_length"), path)
    key = "id" if item.get("call_id") is None and item["type"] == "local_shell_call_output" else "call_id"
    status = "completed" if item.get("status") is None else _output_status(item["status"], f"{path}.status")
    output = item.get("output")
    if output is None and item["type"] == "apply_patch_call_output":
        output = status
    if type(output) is list:
        for index, part in enumerate(a_list(output, f"{path}.output")):
            an_object(part, f"{path}.output[{index}]")
    elif output is None or type(output) is not str:
        raise missing(f"{path}.output") if output is None else wrong_type(f"{path}.output", "a string", output)
    told = _common(item | {"status": None}, path, item["type"])
    return told | {"status": status, "call_id": required_text(item, key, path), "output": output}


def _reasoning(item: Item, path: str) -> Item:
    """Kept as it is: what another model thought is no part of a prompt here."""
    check_names(item, ("type", "id", "summary", "content", "encrypted_content", "status"), path)
    kept: Item = {"summary": []}
    for key in ("summary", "content"):
        if item.get(key) is not None:
            if type(item[key]) is not list:
                raise wrong_type(f"{path}.{key}", "an array of objects", item[key])
            several = at_most(MAX_ITEMS, item[key], f"{path}.{key}")
            kept[key] = [an_object(part, f"{path}.{key}[{index}]") for index, part in enumerate(several)]
    if item.get("encrypted_content") is not None:
        kept["encrypted_content"] = _string(item["encrypted_content"], f"{path}.encrypted_content")
    return _common(item, path, "reasoning") | kept


def _reference(item: Item, path: str) -> Item:
    check_names(item, ("type", "id"), path)
    return {"type": "item_reference", "id": required_text(item, "id", path)}


_BY_TYPE: Final[dict[str, Callable[[Item, str], Item]]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _function_call_output,
    "local_shell_call": _shell_call,
    "shell_call": _shell_call,
    "apply_patch_call": _apply_patch_call,
    "local_shell_call_output": _client_output,
    "shell_call_output": _client_output,
    "apply_patch_call_output": _client_output,
    "reasoning": _reasoning,
    "item_reference": _reference,
}


def _input_part(part: Any, path: str) -> Item:
    kind = _kind(part, path)
    if kind in MEDIA:
        raise UnsupportedError(f"{MEDIA[kind]} are not supported by this model.", param=f"{path}.type")
    if kind != "input_text":
        raise wrong_value(f"{path}.type", kind, ("input_text",))
    check_names(part, ("type", "text", "prompt_cache_breakpoint"), path)
    checked: Item = {"type": kind, "text": required_text(part, "text", path)}
    if part.get("prompt_cache_breakpoint") is not None:
        where = f"{path}.prompt_cache_breakpoint"
        checked["prompt_cache_breakpoint"] = check_breakpoint(part["prompt_cache_breakpoint"], where)
    return checked


def _assistant_part(part: Any, path: str) -> Item:
    kind = _kind(part, path)
    if kind == "refusal":
        check_names(part, ("type", "refusal"), path)
        return {"type": kind, "refusal": required_text(part, "refusal", path)}
    if kind != "output_text":
        raise wrong_value(f"{path}.type", kind, ("output_text", "refusal"))
    check_names(part, ("type", "text", "annotations", "logprobs", "parsed"), path)
    return _told(required_text(part, "text", path))


def _asked(said: str) -> Item:
    return {"type": "input_text", "text": said}


def _told(said: str) -> Item:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}


def _kind(part: Any, path: str) -> str:
    return required_text(an_object(part, path), "type", path)


def _common(item: Item, path: str, kind: str) -> Item:
    """What all items have, in the order in which they are told."""
    status = "completed" if item.get("status") is None else check_status(item["status"], f"{path}.status")
    if item.get("id") is None:
        return {"type": kind, "status": status}
    return {"id": text(128)(item["id"], f"{path}.id"), "type": kind, "status": status}
