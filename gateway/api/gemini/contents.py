"""Contents of the Gemini API into what a chat template takes: "role", "content" as a string, "tool_calls", ...

    user      its texts, joined, and a `tool` message for each of its function responses, in their order
    model     `assistant`: its texts, joined, and its function calls. Several in a row are one: the SDK's chats keep
              each piece of a streamed answer as a turn of its own
    function  an older name for a user that brings function responses

Touches no character of a text. Calls and responses have ids in chat templates, which this API leaves out mostly: then
they are numbered, and a response belongs to the first call of its name that has none. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.fields import (
    MAX_ITEMS,
    an_object,
    anything,
    at_most,
    boolean,
    invalid,
    no_effect,
    refused,
    table,
    takes,
    text,
    used,
    wrong_value,
)
from gateway.api.gemini.proto import message, message_schema, read, repeated

Message = dict[str, Any]
ROLES: Final = ("user", "model", "function")
_AS_THEY_ARE: Final = ("user", "model")

_string = text()
_NO_MEDIA: Final = "Only text is understood by this model."
_NO_CODE: Final = "Code is not executed here."


class Function(NamedTuple):
    """A function call, or the response to one. `data` are its arguments, or what it returned."""

    kind: Literal["functionCall", "functionResponse"]
    name: str
    data: dict[str, Any]
    id: str | None


Part = str | Function


class Content(NamedTuple):
    """One turn."""

    role: str
    parts: tuple[Part, ...]


CALL: Final = table(
    used("name", _string, "string, required", "Of the function."),
    used("args", an_object, "object", "Its arguments."),
    used("id", _string, "string", "Names the call; the response with the same one belongs to it."),
)
RESPONSE: Final = table(
    used("name", _string, "string, required", "Of the function."),
    used("response", an_object, "object", "What it returned; the model reads it as JSON."),
    used("id", _string, "string", "Of the call."),
    no_effect("willContinue", boolean, "boolean", "Every response is complete."),
    no_effect("scheduling", _string, "string", "Nothing is asked while a function runs."),
    refused("parts", _NO_MEDIA, repeated(anything), "-", []),
)
PART: Final = table(
    used("text", _string, "string", "Text."),
    used("functionCall", message(CALL), "object; of `model`", "A call that the model made: `name`, `args`, `id`."),
    used(
        "functionResponse",
        message(RESPONSE),
        "object; of `user` or `function`",
        "What a call returned: `name`, `response`, `id`.",
    ),
    used("thought", boolean, "boolean", "Such a part of an earlier answer is left out of the prompt."),
    no_effect("thoughtSignature", _string, "string", "Answers carry none."),
    no_effect("partMetadata", an_object, "object", "Not kept."),
    no_effect("mediaResolution", anything, "object", "There are no media."),
    refused("inlineData", _NO_MEDIA),
    refused(
        "fileData",
        "Its text takes the place of such a part, which has nothing else in it; other files are refused.",
        anything,
        "object: `fileUri` of a file that was uploaded here and is text",
    ),
    refused("videoMetadata", _NO_MEDIA),
    refused("audioTranscription", _NO_MEDIA),
    refused("executableCode", _NO_CODE),
    refused("codeExecutionResult", _NO_CODE),
    refused("toolCall", "There are no tools of the server."),
    refused("toolResponse", "There are no tools of the server."),
)
_DATA: Final = ("text", "functionCall", "functionResponse")


@takes(message_schema(PART))
def _part(value: Any, path: str) -> Part | None:
    """None for a thought."""
    fields = read(value, PART, path)
    data = [name for name in _DATA if name in fields]
    if len(data) != 1:
        raise invalid(path, f"exactly one of {', '.join(_DATA)} is expected")
    if fields.get("thought"):
        return None
    (kind,) = data
    if kind == "text":
        text: str = fields["text"]
        return text
    inner = fields[kind]
    if not inner.get("name"):
        raise invalid(f"{path}.{kind}.name", "it is missing or empty")
    inside = inner.get("args" if kind == "functionCall" else "response", {})
    return Function(kind, inner["name"], inside, inner.get("id") or None)


CONTENT: Final = table(
    used("role", _string, "`user`, `model` or `function`; default `user`", "Whose turn it is."),
    used("parts", repeated(_part), "array of 1 or more parts", "What is said."),
)


@takes(message_schema(CONTENT))
def content(value: Any, path: str) -> Content:
    """A turn. Raises BadRequestError for a part that its role does not have."""
    fields = read(value, CONTENT, path)
    role = fields.get("role") or "user"
    if role not in ROLES:
        raise wrong_value(f"{path}.role", role, ROLES)
    if not fields.get("parts"):
        raise invalid(f"{path}.parts", "one part or more is expected")
    for index, part in enumerate(fields["parts"]):
        if isinstance(part, Function) and (part.kind == "functionCall") != (role == "model"):
            raise invalid(f"{path}.parts[{index}]", f"a content of '{role}' has no such part")
    return Content(role, tuple(part for part in fields["parts"] if part is not None))


@takes({"anyOf": [content.schema, {"type": "string"}]})
def instruction(value: Any, path: str) -> str:
    """A system instruction: a content of text; its role is ignored."""
    if type(value) is str:
        return value
    parts = read(value, CONTENT, path).get("parts", [])
    for index, part in enumerate(parts):
        if isinstance(part, Function):
            raise invalid(f"{path}.parts[{index}]", "a system instruction is text")
    return "".join(part for part in parts if isinstance(part, str))


_several = repeated(content)


@takes(_several.schema)
def contents(value: Any, path: str) -> list[Content]:
    """A conversation."""
    if type(value) is not list:
        return _several(value, path)
    # Nearly all turns of a long conversation are one text, and need nothing else looked at.
    several = enumerate(at_most(MAX_ITEMS, value, path))
    return [_plain(item) or content(item, f"{path}[{index}]") for index, item in several]


def _plain(item: Any) -> Content | None:
    """A turn of one text and nothing else; None for any other."""
    if type(item) is dict and len(item) == 2 and item.get("role") in _AS_THEY_ARE:
        parts = item.get("parts")
        if type(parts) is list and len(parts) == 1 and type(parts[0]) is dict and len(parts[0]) == 1:
            text = parts[0].get("text")
            return Content(item["role"], (text,)) if type(text) is str else None
    return None


def to_messages(system: str | None, turns: Iterable[Content]) -> list[Message]:
    """One conversation."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    calls = _Calls()
    for turn in turns:
        (_answer if turn.role == "model" else _question)(messages, turn.parts, calls)
    for one in messages:
        if type(one["content"]) is list:
            one["content"] = "".join(one["content"])
    return messages


class _Calls:
    """Gives ids to the calls and responses of one conversation that have none."""

    def __init__(self) -> None:
        self._number = 0
        # Numbers of the calls without a response, in their order; those that have one by now are taken out late.
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_function: defaultdict[str, deque[int]] = defaultdict(deque)
        self._open: dict[int, str] = {}  # number -> id

    def made(self, call: Function) -> str:
        self._number += 1
        name = call.id or f"call{self._number:05d}"  # nine characters, as the templates of Mistral want
        self._open[self._number] = name
        self._by_id[name].append(self._number)
        self._by_function[call.name].append(self._number)
        return name

    def answered(self, response: Function) -> str | None:
        calls = self._by_id[response.id] if response.id else self._by_function[response.name]
        while calls:
            if (name := self._open.pop(calls.popleft(), None)) is not None:
                return name
        return response.id


def _answer(messages: list[Message], parts: Sequence[Part], calls: _Calls) -> None:
    """Adds a turn of the model, its texts as a list; one of thoughts alone is none."""
    if not parts:
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    message = messages[-1]
    for part in parts:
        if isinstance(part, str):
            message["content"].append(part)
        else:
            function = {"name": part.name, "arguments": part.data}
            call = {"id": calls.made(part), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _question(messages: list[Message], parts: Sequence[Part], calls: _Calls) -> None:
    """Adds a turn of a user: texts that follow each other are one message, as a list, and each response is one."""
    begin = len(messages)
    for part in parts:
        if isinstance(part, str):
            if len(messages) == begin or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(part)
            continue
        tool: Message = {"role": "tool", "content": orjson.dumps(part.data).decode(), "name": part.name}
        if (name := calls.answered(part)) is not None:
            tool["tool_call_id"] = name
        messages.append(tool)
