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
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.fields import (
    MAX_ITEMS,
    an_object,
    anything,
    at_most,
    boolean,
    invalid,
    missing,
    no_effect,
    refused,
    table,
    takes,
    text,
    used,
    wrong_value,
)
from gateway.api.gemini.proto import message, message_schema, read, repeated
from gateway.api.media import checked_type, content_of_base64, kind_of, public_url, refusal
from gateway.types import Media

Message = dict[str, Any]
ROLES: Final = ("user", "model", "function")
_AS_THEY_ARE: Final = ("user", "model")

_string = text()
_NO_MEDIA: Final = "Only text is understood by this model."
_NO_CODE: Final = "Code is not executed here."


class Function(NamedTuple):
    """A function call, or the response to one. `data` are its arguments, or what it returned, besides `media`."""

    kind: Literal["functionCall", "functionResponse"]
    name: str
    data: dict[str, Any]
    id: str | None
    media: tuple[Media, ...] = ()


class Signature(NamedTuple):
    """Of a thought, before the part that had it."""

    text: str


Part = str | Function | Media | Signature


class Content(NamedTuple):
    """One turn."""

    role: str
    parts: tuple[Part, ...]


CALL: Final = table(
    used("name", _string, "string, required", "Of the function."),
    used("args", an_object, "object", "Its arguments."),
    used("id", _string, "string", "Names the call; the response with the same one belongs to it."),
)
BLOB: Final = table(
    used("mimeType", _string, "string, required", "Its type, as `image/png`."),
    used("data", _string, "string, required", "Its bytes in base64."),
    no_effect("displayName", _string, "string", "Not kept."),
)
FILE: Final = table(
    used("fileUri", _string, "string, required", "Its URL."),
    used("mimeType", _string, "string", "Its type; without it the URL's ending says it."),
    no_effect("displayName", _string, "string", "Not kept."),
)


@takes(message_schema(BLOB))
def _blob(value: Any, path: str) -> Media:
    fields = read(value, BLOB, path)
    for name in ("mimeType", "data"):
        if not fields.get(name):
            raise missing(f"{path}.{name}")
    content = content_of_base64(fields["data"], fields["mimeType"], f"{path}.data", f"{path}.mimeType")
    return Media(kind_of(content.mime_type), path, _refusal(path), *content)


@takes(message_schema(FILE))
def _file(value: Any, path: str) -> Media:
    fields = read(value, FILE, path)
    if not fields.get("fileUri"):
        raise missing(f"{path}.fileUri")
    content = public_url(fields["fileUri"], f"{path}.fileUri")
    if not (written := fields.get("mimeType") or content.mime_type):
        raise missing(f"{path}.mimeType")
    mime_type = checked_type(written, f"{path}.mimeType")
    return Media(kind_of(mime_type), path, _refusal(path), mime_type, url=content.url)


def _refusal(path: str) -> str:
    return f"Unsupported field '{path}'. {_NO_MEDIA}"


_RESPONSE_PART: Final = table(
    used("inlineData", _blob, "object: `mimeType`, `data`", "An image or a file, for models of upstreams."),
    used("fileData", _file, "object: `fileUri`, `mimeType`", "The same by its URL."),
)


@takes(message_schema(_RESPONSE_PART))
def _response_part(value: Any, path: str) -> Media:
    fields = list(read(value, _RESPONSE_PART, path).values())
    if len(fields) != 1:
        raise invalid(path, "exactly one of inlineData, fileData is expected")
    media: Media = fields[0]
    return media


RESPONSE: Final = table(
    used("name", _string, "string, required", "Of the function."),
    used("response", an_object, "object", "What it returned; the model reads it as JSON."),
    used("id", _string, "string", "Of the call."),
    no_effect("willContinue", boolean, "boolean", "Every response is complete."),
    no_effect("scheduling", _string, "string", "Nothing is asked while a function runs."),
    used("parts", repeated(_response_part), "array", "Images and files that it returned, for models of upstreams."),
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
    used("thoughtSignature", _string, "string", "Of an upstream's model, which gets it back."),
    no_effect("partMetadata", an_object, "object", "Not kept."),
    no_effect("mediaResolution", anything, "object", "Models of upstreams look as closely as they like."),
    used(
        "inlineData",
        _blob,
        "object: `mimeType`, `data`; of `user`",
        "An image, a file or a sound, for models of upstreams; refused for others.",
    ),
    used(
        "fileData",
        _file,
        "object: `fileUri`, `mimeType`; of `user`",
        "A text that was uploaded here, which takes the place of such a part; or a public URL, for upstreams.",
    ),
    refused("videoMetadata", _NO_MEDIA),
    refused("audioTranscription", _NO_MEDIA),
    refused("executableCode", _NO_CODE),
    refused("codeExecutionResult", _NO_CODE),
    refused("toolCall", "There are no tools of the server."),
    refused("toolResponse", "There are no tools of the server."),
)
_DATA: Final = ("text", "functionCall", "functionResponse", "inlineData", "fileData")


@takes(message_schema(PART))
def _part(value: Any, path: str) -> tuple[Part, ...]:
    """Nothing but the signature of a thought."""
    fields = read(value, PART, path)
    data = [name for name in _DATA if name in fields]
    if len(data) != 1:
        raise invalid(path, f"exactly one of {', '.join(_DATA)} is expected")
    signed = (Signature(fields["thoughtSignature"]),) if fields.get("thoughtSignature") else ()
    if fields.get("thought"):
        return signed
    (kind,) = data
    if kind == "text":
        return (*signed, fields["text"])
    inner = fields[kind]
    if kind == "inlineData" or kind == "fileData":
        return (*signed, inner)
    if not inner.get("name"):
        raise invalid(f"{path}.{kind}.name", "it is missing or empty")
    inside = inner.get("args" if kind == "functionCall" else "response", {})
    made = Function(kind, inner["name"], inside, inner.get("id") or None, tuple(inner.get("parts", ())))
    return (*signed, made)


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
    for index, parts in enumerate(fields["parts"]):
        last = parts[-1] if parts else None
        if isinstance(last, Function) and (last.kind == "functionCall") != (role == "model"):
            raise invalid(f"{path}.parts[{index}]", f"a content of '{role}' has no such part")
        if isinstance(last, Media) and role == "model":
            raise refusal(last)
    return Content(role, tuple(part for parts in fields["parts"] for part in parts))


@takes({"anyOf": [content.schema, {"type": "string"}]})
def instruction(value: Any, path: str) -> str:
    """A system instruction: a content of text; its role is ignored."""
    if type(value) is str:
        return value
    parts = read(value, CONTENT, path).get("parts", [])
    for index, several in enumerate(parts):
        if any(isinstance(part, Function) for part in several):
            raise invalid(f"{path}.parts[{index}]", "a system instruction is text")
        for part in several:
            if isinstance(part, Media):
                raise refusal(part)
    return "".join(part for several in parts for part in several if isinstance(part, str))


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


class Conversation(NamedTuple):
    messages: list[Message]
    media: list[Media]


def to_messages(system: str | None, turns: Iterable[Content]) -> Conversation:
    """One conversation."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    media: list[Media] = []
    calls = _Calls()
    for turn in turns:
        if turn.role == "model":
            _answer(messages, turn.parts, calls)
        else:
            _question(messages, media, turn.parts, calls)
    for one in messages:
        if type(one["content"]) is list:
            one["content"] = "".join(one["content"])
    return Conversation(messages, media)


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
    if not any(part for part in parts if not isinstance(part, Signature)):
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    message = messages[-1]
    for part in parts:
        if isinstance(part, str):
            message["content"].append(part)
        elif isinstance(part, Signature):
            begun = "tool_calls" in message or any(message["content"])
            before = len(message.get("tool_calls", ())) if begun else -1
            message.setdefault("thoughts", []).append((before, part.text))
        elif isinstance(part, Function):
            function = {"name": part.name, "arguments": part.data}
            call = {"id": calls.made(part), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _question(messages: list[Message], media: list[Media], parts: Sequence[Part], calls: _Calls) -> None:
    """Adds a turn of a user: texts and media that follow each other are one message, its texts as a list, and each
    response is one."""
    begin = len(messages)
    for part in parts:
        if isinstance(part, Signature):
            continue
        if not isinstance(part, Function):
            if len(messages) == begin or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            texts = messages[-1]["content"]
            if isinstance(part, Media):
                media.append(replace(part, message=len(messages) - 1, chars=sum(map(len, texts))))
            else:
                texts.append(part)
            continue
        tool: Message = {"role": "tool", "content": orjson.dumps(part.data).decode(), "name": part.name}
        media += [replace(one, message=len(messages), chars=len(tool["content"])) for one in part.media]
        if (name := calls.answered(part)) is not None:
            tool["tool_call_id"] = name
        messages.append(tool)
