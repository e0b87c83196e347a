"""Chat messages of the OpenAI API into what a chat template takes: "role", "content" as a string, "tool_calls", ...

Checks every field of every message and touches no character of their contents. `developer` becomes `system`, and the
deprecated `function` forms become their `tool` forms, because chat templates know only those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import orjson

from gateway.api.body import deeper_than
from gateway.api.fields import Check, an_object, anything, array_of, made, missing, record, tagged, takes, text, text_or
from gateway.api.openai.caching import check_breakpoint, check_control
from gateway.api.openai.media import chat_media
from gateway.api.openai.tools import arguments_of
from gateway.api.structure import count_structure
from gateway.errors import UnsupportedError

MAX_ARGUMENT_DEPTH = 64  # deeper tool arguments in the history reach the template as text
MAX_ARGUMENT_VALUES = 200_000
"""In the arguments of all calls of a conversation, names and objects among them; those behind stay text, too."""
_FEW = 100  # characters of arguments whose values need no counting

_AS_THEY_ARE = ("user", "assistant", "system")

Message = dict[str, Any]

_string = text()


def _content(*kinds: str, user: bool = False) -> Check[str | list[dict[str, Any]]]:
    """A string, or parts of these kinds, which caching.py joins."""
    marks = {"type": _string, "prompt_cache_breakpoint": check_breakpoint, "cache_control": check_control}
    parts = {kind: record(kind, **{kind: _string}, **marks) for kind in kinds}
    part = tagged("type", parts | chat_media(**marks) if user else parts)
    return text_or(array_of(part, 1, what="a string or an array of objects"))


@takes({})
def _no_audio(value: Any, path: str) -> None:
    raise UnsupportedError("Earlier audio answers cannot be part of the messages.", param=path)


def _plain(message: Message, path: str) -> Message:
    if message["role"] == "developer":
        message["role"] = "system"
    return message


def _assistant(given: Message, path: str) -> Message:
    calls = given.get("tool_calls", [])
    if "function_call" in given:
        calls.append({"type": "function", "function": given["function_call"]})
    if not calls and "content" not in given and "refusal" not in given:
        raise missing(f"{path}.content")
    message: Message = {"role": "assistant", "content": given.get("content", given.get("refusal", ""))}
    if calls:
        message["tool_calls"] = calls
    message |= {name: given[name] for name in ("reasoning_content", "name", "cache_control") if name in given}
    if thoughts := _thoughts(given, calls):
        message["thoughts"] = thoughts
    return message


def _thoughts(given: Message, calls: list[Message]) -> list[tuple[int, str]]:
    """Signatures of an earlier answer, as replies to chats have them. What is none is left out."""
    details = [one for one in given.get("reasoning_details", ()) if type(one) is dict]
    found = [(-1, one.get("data")) for one in details]
    found += [(number, call.pop("signature", None)) for number, call in enumerate(calls)]
    return [(call, signature) for call, signature in found if type(signature) is str]


def _function(given: Message, path: str) -> Message:
    return {"content": "", **given, "role": "tool"}


def _call(given: Message, path: str) -> Message:
    """A call of a tool, also of a custom tool: the model is offered it as a function."""
    call = {"id": given["id"], "type": "function", "function": given[given["type"]]}
    extra = given.get("extra_content", {}).get("google")
    if type(extra) is dict and (signature := extra.get("thought_signature")) is not None:
        call["signature"] = signature  # until the message is read, which takes it out
    return call


_called = record("name", "arguments", name=_string, arguments=_string)
_called_custom = made(
    record("name", "input", name=_string, input=_string),
    lambda given, _: {"name": given["name"], "arguments": arguments_of(given["input"])},
)
_identified = {"id": _string, "type": _string, "index": anything, "extra_content": an_object}
_tool_call = tagged(
    "type",
    {
        "function": made(record("id", "function", function=_called, **_identified), _call),
        "custom": made(record("id", "custom", custom=_called_custom, **_identified), _call),
    },
)
_every = {"role": _string, "name": _string, "cache_control": check_control}
_texts = _content("text")
_instructions = made(record("content", content=_texts, **_every), _plain)
_message = tagged(
    "role",
    {
        "system": _instructions,
        "developer": _instructions,
        "user": made(record("content", content=_content("text", user=True), **_every), _plain),
        "assistant": made(
            record(
                content=_content("text", "refusal"),
                refusal=_string,
                tool_calls=array_of(_tool_call),
                function_call=_called,
                reasoning_content=_string,
                reasoning_details=array_of(anything, what="an array of objects"),
                annotations=anything,
                audio=_no_audio,
                **_every,
            ),
            _assistant,
        ),
        "tool": made(record("content", "tool_call_id", content=_texts, tool_call_id=_string, **_every), _plain),
        "function": made(record("name", content=_texts, **_every), _function),
    },
)


def _any_message(item: Any, path: str) -> Message:
    plain = (  # as nearly all messages of a long conversation are: nothing else needs to be looked at
        type(item) is dict and len(item) == 2 and item.get("role") in _AS_THEY_ARE and type(item.get("content")) is str
    )
    return item if plain else _message.function(item, path)


def _with_arguments(messages: list[Message], path: str) -> list[Message]:
    read_arguments(messages)
    return messages


parse_messages: Final = made(
    array_of(Check(_any_message, _message.schema), 1, what="an array of objects"), _with_arguments
)
"""Raises BadRequestError with the path of what is wrong, UnsupportedError for what is not carried out."""


def read_arguments(messages: Iterable[Message]) -> None:
    """Puts objects in place of the arguments of all calls that are written as one. Those behind the limit of values,
    for all calls together, stay text."""
    left = MAX_ARGUMENT_VALUES
    for message in messages:
        for call in message.get("tool_calls", ()):
            written = call["function"]["arguments"]
            left -= sum(count_structure(written.encode())) if len(written) > _FEW else len(written)
            if left < 0:
                return
            call["function"]["arguments"] = _call_arguments(written)


def _call_arguments(written: str) -> Any:
    """The object where they are one that is not too deep, else the text."""
    try:
        parsed = orjson.loads(written)
    except orjson.JSONDecodeError:
        return written
    return parsed if type(parsed) is dict and not deeper_than(parsed, MAX_ARGUMENT_DEPTH) else written
