"""Content blocks of the Anthropic API, one by one: checked, and reduced to what a chat template can be given.

Knows no turns and no order; messages.py puts the parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.body import deeper_than
from gateway.api.fields import (
    MAX_ITEMS,
    JsonSchema,
    an_array,
    an_object,
    boolean,
    check_names,
    choice,
    invalid,
    missing,
    object_schema,
    record,
    required_text,
    takes,
    text,
    wrong_type,
    wrong_value,
)
from gateway.errors import UnsupportedError

MAX_ARGUMENT_DEPTH: Final = 64  # deeper inputs of tools reach the template as text

_string = text()
_caller = record(type=choice("direct"))
_citations = record(enabled=boolean)
_unsupported: Final = {
    "image": "Images are not supported by this model.",
    "search_result": "Search results as blocks are not supported: send them as text.",
    "container_upload": "There are no containers to upload to.",
    "server_tool_use": "This server has no tools of its own.",
    "tool_reference": "Tools cannot be searched for.",
}

Kind = Literal["tool", "text", "tool_use", "tool_result", "thinking"]


class Part(NamedTuple):
    """A block of a message, checked.

    text     of a text, a document or a tool's result; what was thought
    call     of a tool_use block, as templates take it
    call_id  of a tool_use or tool_result block
    control  its cache_control
    cited    whether a text block has citations
    """

    kind: Kind
    path: str
    text: str = ""
    call: dict[str, Any] | None = None
    call_id: str = ""
    control: Mapping[str, str] | None = None
    cited: bool = False


_control = record(type=choice("ephemeral"), ttl=choice("5m", "1h"))


@takes(object_schema({"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h"]}}, "type"))
def check_control(value: Any, path: str) -> dict[str, str]:
    """A cache_control, of a block or of the request."""
    control = _control(value, path)
    if "type" not in control:
        raise missing(f"{path}.type")
    return control


def read_control(value: Any, path: str) -> dict[str, str] | None:
    """A block's cache_control, where it has one."""
    if value.get("cache_control") is None:
        return None
    return check_control(value["cache_control"], f"{path}.cache_control")


def read_block(value: Any, path: str, readers: Mapping[str, Callable[[dict[str, Any], str], Part]]) -> Part:
    """One block, of the kinds that have a reader. Raises BadRequestError, and UnsupportedError for kinds that exist."""
    kind = required_text(an_object(value, path), "type", path)
    if (reader := readers.get(kind)) is not None:
        return reader(value, path)
    if kind in _unsupported or kind.endswith("_tool_result"):
        why = _unsupported.get(kind, "This server has no tools of its own.")
        raise UnsupportedError(f"Unsupported block at '{path}': {why}", param=path, reason=why)
    raise wrong_value(f"{path}.type", kind, tuple(readers))


def plain_text(value: Any, path: str) -> Part:
    """A text block. Nothing is done with citations; who may have some is for the version of the API to say."""
    only(value, path, "text", "cache_control", "citations")
    said = required(value, "text", path)
    if not said:
        raise invalid(path, "text content blocks must be non-empty")
    if said.isspace():
        raise invalid(path, "text content blocks must contain non-whitespace text")
    if value.get("citations") is not None and type(value["citations"]) is not list:
        raise wrong_type(f"{path}.citations", "an array", value["citations"])
    return Part("text", path, said, control=read_control(value, path), cited=bool(value.get("citations")))


def document(value: Any, path: str) -> Part:
    """A document of plain text: its title, its context and its text, one below the other."""
    only(value, path, "source", "title", "context", "citations", "cache_control")
    citations = {} if value.get("citations") is None else _citations(value["citations"], f"{path}.citations")
    if citations.get("enabled"):
        why = "Citations are not supported."
        raise UnsupportedError(why, param=f"{path}.citations", reason=why)
    pieces = [_string(value[key], f"{path}.{key}") for key in ("title", "context") if value.get(key) is not None]
    pieces.append(_source(value.get("source"), f"{path}.source"))
    said = "\n".join(piece for piece in pieces if piece)
    if not said or said.isspace():
        raise invalid(path, "the document is empty")
    return Part("text", path, said, control=read_control(value, path))


def _source(value: Any, path: str) -> str:
    if value is None:
        raise missing(path)
    kind = an_object(value, path).get("type")
    if kind == "text":
        only(value, path, "media_type", "data")
        choice("text/plain")(value.get("media_type"), f"{path}.media_type")
        return required(value, "data", path)
    if kind == "content":
        only(value, path, "content")
        return _texts(value.get("content"), f"{path}.content", {"text": plain_text})
    if kind in ("base64", "url", "file"):
        why = "Only documents of plain text are supported, with a source of type text or content."
        raise UnsupportedError(why, param=path, reason=why)
    raise wrong_value(f"{path}.type", kind, ("text", "content"))


def tool_use(value: Any, path: str) -> Part:
    """A call of an earlier answer."""
    only(value, path, "id", "name", "input", "cache_control", "caller", "toolset_name")
    call_id, name = required(value, "id", path), required(value, "name", path)
    if value.get("input") is None:
        raise missing(f"{path}.input")
    arguments: Any = an_object(value["input"], f"{path}.input")
    if deeper_than(arguments, MAX_ARGUMENT_DEPTH):
        arguments = orjson.dumps(arguments).decode()
    if value.get("caller") is not None:
        _caller(value["caller"], f"{path}.caller")
    _no_toolset(value, path)
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return Part("tool_use", path, call=call, call_id=call_id, control=read_control(value, path))


def tool_result(value: Any, path: str) -> Part:
    """What a tool said. An error is marked as one in the text: templates have no other place for it."""
    only(value, path, "tool_use_id", "content", "is_error", "cache_control", "toolset_name")
    call_id = required(value, "tool_use_id", path)
    content = value.get("content")
    said = "" if content in (None, []) else _texts(content, f"{path}.content", _IN_RESULTS)
    _no_toolset(value, path)
    if value.get("is_error") is not None and boolean(value["is_error"], f"{path}.is_error"):
        said = f"Error: {said}" if said else "Error"
    return Part("tool_result", path, said, call_id=call_id, control=read_control(value, path))


def thinking(value: Any, path: str) -> Part:
    """What an earlier answer thought. The signature is nothing that this server could check."""
    only(value, path, "thinking", "signature")
    if value.get("signature") is not None:
        _string(value["signature"], f"{path}.signature")
    return Part("thinking", path, required(value, "thinking", path))


def redacted_thinking(value: Any, path: str) -> Part:
    """What an earlier answer thought, for nobody's eyes: left out."""
    only(value, path, "data")
    required(value, "data", path)
    return Part("thinking", path)


def _texts(value: Any, path: str, readers: Mapping[str, Callable[[dict[str, Any], str], Part]]) -> str:
    """A string, or blocks inside of a block, as one text. These are cached together with what is around them."""
    if type(value) is str:
        return value
    if value is None:
        raise missing(path)
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of blocks", value)
    parts = [read_block(block, f"{path}[{index}]", readers) for index, block in enumerate(an_array(value, path))]
    for part in parts:
        if part.control is not None:
            raise invalid(f"{part.path}.cache_control", "it belongs to the block around this one")
    return "".join(part.text for part in parts)


_IN_RESULTS: Final = {"text": plain_text, "document": document}


def _no_toolset(value: dict[str, Any], path: str) -> None:
    if value.get("toolset_name") is not None:
        why = "Toolsets are not supported."
        raise UnsupportedError(why, param=f"{path}.toolset_name", reason=why)


def required(value: dict[str, Any], key: str, path: str) -> str:
    """A string that has to be there."""
    if value.get(key) is None:
        raise missing(f"{path}.{key}")
    found: str = _string(value[key], f"{path}.{key}")
    return found


def only(value: dict[str, Any], path: str, *known: str) -> None:
    """Ignores fields besides `type` and these, or raises BadRequestError."""
    check_names(value, ("type", *known), path)


# -- what all this takes ----------------------------------------------------------------------------------------------

_text: Final[JsonSchema] = {"type": "string"}
_marked: Final[JsonSchema] = {"cache_control": check_control.schema}


def _block(kind: str, fields: Mapping[str, JsonSchema], *needed: str) -> JsonSchema:
    return object_schema({"type": {"const": kind}, **fields}, "type", *needed)


def _blocks(*schemas: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": {"anyOf": list(schemas)}, "minItems": 1, "maxItems": MAX_ITEMS}


_written: Final[JsonSchema] = {"type": "string", "minLength": 1}
_inner_text: Final = _block("text", {"text": _written, "citations": {"type": "array"}}, "text")
TEXT: Final = _block("text", {"text": _written, "citations": {"type": "array"}, **_marked}, "text")
_sources: Final[JsonSchema] = {
    "anyOf": [
        _block("text", {"media_type": {"const": "text/plain"}, "data": _text}, "media_type", "data"),
        _block("content", {"content": {"anyOf": [_text, _blocks(_inner_text)]}}, "content"),
    ]
}
_document_fields: Final[JsonSchema] = {
    "source": _sources,
    "title": _text,
    "context": _text,
    "citations": {"type": "object"},
}
DOCUMENT: Final = _block("document", {**_document_fields, **_marked}, "source")
TOOL_USE: Final = _block(
    "tool_use",
    {"id": _text, "name": _text, "input": {"type": "object"}, "caller": _caller.schema, **_marked},
    "id",
    "name",
    "input",
)
_inner: Final = _blocks(_inner_text, _block("document", _document_fields, "source"))
TOOL_RESULT: Final = _block(
    "tool_result",
    {"tool_use_id": _text, "content": {"anyOf": [_text, _inner, {"type": "array", "maxItems": 0}]}}
    | {"is_error": {"type": "boolean"}, **_marked},
    "tool_use_id",
)
THINKING: Final = _block("thinking", {"thinking": _text, "signature": _text}, "thinking")
REDACTED_THINKING: Final = _block("redacted_thinking", {"data": _text}, "data")
