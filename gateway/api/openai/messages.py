"""Chat messages of the OpenAI API into what a chat template takes: "role", "content" as a string, "tool_calls", ...

Checks every field of every message and touches no character of their contents. `developer` becomes `system`, and the
deprecated `function` forms become their `tool` forms, because chat templates know only those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import orjson

from gateway.api.body import deeper_than
from gateway.api.fields import (
    MAX_ITEMS,
    JsonSchema,
    a_list,
    an_object,
    at_most,
    check_names,
    empty_array,
    missing,
    object_schema,
    required_text,
    takes,
    text,
    wrong_type,
    wrong_value,
)
from gateway.api.openai.caching import check_breakpoint, check_control
from gateway.api.openai.custom_tools import arguments_of
from gateway.api.structure import count_structure
from gateway.errors import UnsupportedError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_ARGUMENT_DEPTH = 64  # deeper tool arguments in the history reach the template as text
MAX_ARGUMENT_VALUES = 200_000
"""In the arguments of all calls of a conversation, names and objects among them; those behind stay text, too."""
_PLAINLY_FEW = 100

_AS_THEY_ARE = ("user", "assistant", "system")

Message = dict[str, Any]

_string = text()
_media = {"image_url": "Images", "input_audio": "Audio", "file": "Files"}


def _text_content(*kinds: str) -> JsonSchema:
    """A string, or parts of these kinds."""
    parts = [
        object_schema(
            {
                "type": {"const": kind},
                kind: {"type": "string"},
                "prompt_cache_breakpoint": check_breakpoint.schema,
                "cache_control": check_control.schema,
            },
            "type",
            kind,
        )
        for kind in kinds
    ]
    several = {"type": "array", "items": {"anyOf": parts}, "minItems": 1, "maxItems": MAX_ITEMS}
    return {"anyOf": [{"type": "string"}, several]}


_text: JsonSchema = {"type": "string"}
_called_schema = object_schema({"name": _text, "arguments": _text}, "name", "arguments")
_custom_schema = object_schema({"name": _text, "input": _text}, "name", "input")
_call_schema: JsonSchema = {
    "anyOf": [
        object_schema(
            {"id": _text, "type": {"const": "function"}, "function": _called_schema}, "id", "type", "function"
        ),
        object_schema({"id": _text, "type": {"const": "custom"}, "custom": _custom_schema}, "id", "type", "custom"),
    ]
}
MESSAGE: Final[JsonSchema] = {
    "anyOf": [
        object_schema(
            {"role": {"enum": ["system", "developer", "user"]}, "content": _text_content("text"), "name": _text},
            "role",
            "content",
        ),
        object_schema(
            {
                "role": {"const": "assistant"},
                "content": _text_content("text", "refusal"),
                "name": _text,
                "refusal": _text,
                "tool_calls": {"type": "array", "items": _call_schema, "maxItems": MAX_ITEMS},
                "function_call": _called_schema,
                "reasoning_content": _text,
                "annotations": {"type": "array"},
            },
            "role",
        ),
        object_schema(
            {"role": {"const": "tool"}, "content": _text_content("text"), "tool_call_id": _text, "name": _text},
            "role",
            "content",
            "tool_call_id",
        ),
        object_schema({"role": {"const": "function"}, "content": _text_content("text"), "name": _text}, "role", "name"),
    ]
}


@takes({"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": MAX_ITEMS})
def parse_messages(value: Any, path: str) -> list[Message]:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for images, audio and files."""
    if type(value) is not list:
        raise wrong_type(path, "an array of objects", value)
    if not value:
        raise empty_array(path)
    messages = []
    for index, item in enumerate(at_most(MAX_ITEMS, value, path)):
        # Nearly all messages of a long conversation are this plain, and need nothing else looked at.
        plain = (
            type(item) is dict
            and len(item) == 2
            and item.get("role") in _AS_THEY_ARE
            and type(item.get("content")) is str
        )
        messages.append(item if plain else _message(item, f"{path}[{index}]"))
    read_arguments(messages)
    return messages


def _message(item: Any, path: str) -> Message:
    if type(item) is not dict:
        raise wrong_type(path, "an object", item)
    role = item.get("role")
    if role is None:
        raise missing(f"{path}.role")
    if type(role) is not str:
        raise wrong_type(f"{path}.role", "a string", role)
    if (parse := _BY_ROLE.get(role)) is None:
        raise wrong_value(f"{path}.role", role, ROLES)
    _check_control(item, path)
    return parse(item, path)


def _check_control(item: Message, path: str) -> None:
    """Of a message or a part; caching.py makes a breakpoint of it."""
    if item.get("cache_control") is not None:
        check_control(item["cache_control"], f"{path}.cache_control")


def _plain(item: Message, path: str) -> Message:
    role = "system" if item["role"] == "developer" else item["role"]
    if len(item) > 2:
        check_names(item, ("role", "content", "name", "cache_control"), path)
    message = {"role": role, "content": _content(item, path, role)}
    return _named(message, item, path)


def _assistant(item: Message, path: str) -> Message:
    if len(item) > 2:
        known = ("role", "content", "name", "tool_calls", "function_call", "refusal", "audio", "annotations")
        check_names(item, (*known, "reasoning_content", "cache_control"), path)
    calls = _tool_calls(item, path)
    refusal = item.get("refusal")
    if refusal is not None:
        _string(refusal, f"{path}.refusal")
    if item.get("audio") is not None:
        raise UnsupportedError("Earlier audio answers cannot be part of the messages.", param=f"{path}.audio")
    if item.get("content") is not None:
        content = _content(item, path, "assistant")
    elif refusal is not None or calls:
        content = refusal or ""
    else:
        raise missing(f"{path}.content")
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    if (reasoning := item.get("reasoning_content")) is not None:
        message["reasoning_content"] = _string(reasoning, f"{path}.reasoning_content")
    return _named(message, item, path)


def _tool(item: Message, path: str) -> Message:
    check_names(item, ("role", "content", "name", "tool_call_id", "cache_control"), path)
    if item.get("tool_call_id") is None:
        raise missing(f"{path}.tool_call_id")
    message = {
        "role": "tool",
        "content": _content(item, path, "tool"),
        "tool_call_id": _string(item["tool_call_id"], f"{path}.tool_call_id"),
    }
    return _named(message, item, path)


def _function(item: Message, path: str) -> Message:
    check_names(item, ("role", "content", "name", "cache_control"), path)
    if item.get("name") is None:
        raise missing(f"{path}.name")
    content = "" if item.get("content") is None else _content(item, path, "function")
    return _named({"role": "tool", "content": content}, item, path)


_BY_ROLE: dict[str, Callable[[Message, str], Message]] = {
    "system": _plain,
    "developer": _plain,
    "user": _plain,
    "assistant": _assistant,
    "tool": _tool,
    "function": _function,
}


def _content(item: Message, path: str, role: str) -> str:
    value = item.get("content")
    if type(value) is str:
        return value
    if value is None:
        raise missing(f"{path}.content")
    if type(value) is not list:
        raise wrong_type(f"{path}.content", "a string or an array of objects", value)
    if not value:
        raise empty_array(f"{path}.content")
    parts = enumerate(at_most(MAX_ITEMS, value, f"{path}.content"))
    return "".join([_part(part, f"{path}.content[{index}]", role) for index, part in parts])


def _part(part: Any, path: str, role: str) -> str:
    kind = required_text(an_object(part, path), "type", path)
    if role == "user" and kind in _media:
        raise UnsupportedError(f"{_media[kind]} are not supported by this model.", param=f"{path}.type")
    allowed = ("text", "refusal") if role == "assistant" else ("text",)
    if kind not in allowed:
        raise wrong_value(f"{path}.type", kind, allowed)
    check_names(part, ("type", kind, "prompt_cache_breakpoint", "cache_control"), path)
    if part.get("prompt_cache_breakpoint") is not None:
        check_breakpoint(part["prompt_cache_breakpoint"], f"{path}.prompt_cache_breakpoint")
    _check_control(part, path)
    if part.get(kind) is None:
        raise missing(f"{path}.{kind}")
    said: str = _string(part[kind], f"{path}.{kind}")
    return said


def _tool_calls(item: Message, path: str) -> list[Message]:
    calls = []
    if item.get("tool_calls") is not None:
        for index, call in enumerate(a_list(item["tool_calls"], f"{path}.tool_calls")):
            calls.append(_tool_call(call, f"{path}.tool_calls[{index}]"))
    if item.get("function_call") is not None:
        calls.append({"type": "function", "function": _called(item["function_call"], f"{path}.function_call")})
    return calls


def _tool_call(call: Any, path: str) -> Message:
    check_names(an_object(call, path), ("id", "type", "function", "custom", "index"), path)
    for key in ("id", "type"):
        required_text(call, key, path)
    kind = call["type"]
    if kind not in ("function", "custom"):
        raise wrong_value(f"{path}.type", kind, ("function", "custom"))
    if call.get(kind) is None:
        raise missing(f"{path}.{kind}")
    called = _called(call[kind], f"{path}.{kind}", "arguments" if kind == "function" else "input")
    return {"id": call["id"], "type": "function", "function": called}


def _called(called: Any, path: str, written: str = "arguments") -> Message:
    """A call, of a custom tool as well, whose `written` is its input: the model is offered it as a function. Templates
    write the arguments as JSON themselves, so they get the object where it is one."""
    check_names(an_object(called, path), ("name", written), path)
    for key in ("name", written):
        required_text(called, key, path)
    arguments = called[written] if written == "arguments" else arguments_of(called[written])
    return {"name": called["name"], "arguments": arguments}


def read_arguments(messages: Iterable[Message]) -> None:
    """Puts objects in place of the arguments of all calls that are written as one. Those behind the limit of values,
    for all calls together, stay text."""
    left = MAX_ARGUMENT_VALUES
    for message in messages:
        for call in message.get("tool_calls", ()):
            written = call["function"]["arguments"]
            left -= _num_values(written)
            if left < 0:
                return
            call["function"]["arguments"] = _call_arguments(written)


def _num_values(written: str) -> int:
    """Those of arguments, or a bound where they are few anyway."""
    return len(written) if len(written) <= _PLAINLY_FEW else sum(count_structure(written.encode()))


def _call_arguments(written: str) -> Any:
    """The object where they are one that is not too deep, else the text."""
    try:
        parsed = orjson.loads(written)
    except orjson.JSONDecodeError:
        return written
    return parsed if type(parsed) is dict and not deeper_than(parsed, MAX_ARGUMENT_DEPTH) else written


def _named(message: Message, item: Message, path: str) -> Message:
    if (name := item.get("name")) is not None:
        message["name"] = _string(name, f"{path}.name")
    return message
