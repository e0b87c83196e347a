"""Content blocks of the Anthropic API, one by one: checked, and reduced to what a chat template can be given.

Knows no turns and no order; messages.py puts the parts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.api.body import deeper_than
from gateway.api.fields import (
    Check,
    an_object,
    anything,
    array_of,
    boolean,
    choice,
    invalid,
    made,
    record,
    tagged,
    text,
    text_or,
    unsupported,
)
from gateway.api.media import Content, content_of_base64, public_url
from gateway.errors import BadRequestError
from gateway.types import Media

MAX_ARGUMENT_DEPTH: Final = 64  # deeper inputs of tools reach the template as text

_string = text()
_NO_IMAGES: Final = "Images are not supported by this model."
_NO_FILES: Final = "Only documents of plain text are supported, with a source of type text or content."
_IMAGES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
_unsupported: Final = {
    "image": _NO_IMAGES,
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
    seal     signature of a thought, or what is in place of it
    begins   whether it is the first of a message that continues the turn before it
    media    images and files in it, at their places in the text
    """

    kind: Kind
    path: str
    text: str = ""
    call: dict[str, Any] | None = None
    call_id: str = ""
    control: Mapping[str, str] | None = None
    begins: bool = False
    media: tuple[Media, ...] = ()
    seal: str = ""


class _Joined(NamedTuple):
    """What blocks inside of a block have in common."""

    text: str
    media: tuple[Media, ...] = ()


check_control = record("type", type=choice("ephemeral"), ttl=choice("5m", "1h"))
"""A cache_control, of a block or of the request."""


def blocks(least: int, *kinds: str) -> Check[list[Part]]:
    """An array of blocks of these kinds. Raises BadRequestError, and UnsupportedError for kinds that exist upstream."""
    one = tagged("type", {kind: _BLOCKS[kind] for kind in kinds}, _unsupported_kind)
    return array_of(one, least, what="a string or an array of blocks")


def _unsupported_kind(kind: str, path: str) -> BadRequestError | None:
    if kind not in _unsupported and not kind.endswith("_tool_result"):
        return None
    why = _unsupported.get(kind, "This server has no tools of its own.")
    return unsupported(path, why)


def _text(block: dict[str, Any], path: str) -> Part:
    """Nothing is done with citations."""
    content = block["text"]
    if not content:
        raise invalid(path, "text content blocks must be non-empty")
    if content.isspace():
        raise invalid(path, "text content blocks must contain non-whitespace text")
    return Part("text", path, content, control=block.get("cache_control"))


def _image(block: dict[str, Any], path: str) -> Part:
    media = Media("image", path, _NO_IMAGES, *block["source"])
    return Part("text", path, control=block.get("cache_control"), media=(media,))


def _document(block: dict[str, Any], path: str) -> Part:
    """Its title, its context and its text, one below the other; or a file in the place of the text."""
    if block.get("citations", {}).get("enabled"):
        raise unsupported(f"{path}.citations", "Citations are not supported.")
    source, control = block["source"], block.get("cache_control")
    heads = [found for name in ("title", "context") if (found := block.get(name))]
    if isinstance(source, Content):
        content = "".join(f"{head}\n" for head in heads)
        title = block.get("title", "")
        file = Media("file", f"{path}.source", _NO_FILES, *source, name=title, chars=len(content))
        return Part("text", path, content, control=control, media=(file,))
    content = "\n".join([*heads, source] if source else heads)
    if not content or content.isspace():
        raise invalid(path, "the document is empty")
    return Part("text", path, content, control=control)


def _tool_use(block: dict[str, Any], path: str) -> Part:
    """A call of an earlier answer."""
    arguments: Any = block["input"]
    if deeper_than(arguments, MAX_ARGUMENT_DEPTH):
        arguments = orjson.dumps(arguments).decode()
    call = {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}
    return Part("tool_use", path, call=call, call_id=block["id"], control=block.get("cache_control"))


def _tool_result(block: dict[str, Any], path: str) -> Part:
    """An error is marked as one in the text: templates have no other place for it."""
    found, said = block.get("content", ""), ""
    content, media = (found, ()) if isinstance(found, str) else found
    if block.get("is_error"):
        said = "Error: " if content else "Error"
    media = tuple(replace(one, chars=one.chars + len(said)) for one in media)
    control = block.get("cache_control")
    return Part("tool_result", path, said + content, call_id=block["tool_use_id"], control=control, media=media)


def _joined(parts: list[Part], path: str) -> _Joined:
    """Blocks inside of a block are cached together with what is around them."""
    media, chars = list[Media](), 0
    for part in parts:
        if part.control is not None:
            raise invalid(f"{part.path}.cache_control", "it belongs to the block around this one")
        media += [replace(one, chars=one.chars + chars) for one in part.media]
        chars += len(part.text)
    return _Joined("".join(part.text for part in parts), tuple(media))


def _bytes_of(*media_types: str) -> Check[Content]:
    return made(
        record("media_type", "data", type=_string, media_type=choice(*media_types), data=_string),
        lambda source, path: content_of_base64(source["data"], source["media_type"], f"{path}.data", path),
    )


_every: Final = {"type": _string, "cache_control": check_control}
_BLOCKS: Final[dict[str, Check[Part]]] = {
    "text": made(record("text", text=_string, citations=array_of(anything), **_every), _text),
    "tool_use": made(
        record(
            *("id", "name", "input"),
            id=_string,
            name=_string,
            input=an_object,
            caller=record(type=choice("direct")),
            **_every,
        ),
        _tool_use,
    ),
    "thinking": made(  # the signature is for the upstream that made it
        record("thinking", type=_string, thinking=_string, signature=_string),
        lambda block, path: Part("thinking", path, block["thinking"], seal=block.get("signature", "")),
    ),
    "redacted_thinking": made(
        record("data", type=_string, data=_string), lambda block, path: Part("thinking", path, seal=block["data"])
    ),
}
_elsewhere: Final = {
    "url": made(
        record("url", type=_string, url=_string), lambda source, path: public_url(source["url"], f"{path}.url")
    ),
    "file": made(record("file_id", type=_string, file_id=_string), lambda *_: Content()),
}
_BLOCKS["image"] = made(
    record("source", source=tagged("type", {"base64": _bytes_of(*_IMAGES), **_elsewhere}), **_every), _image
)
_source: Final[Check[str | Content]] = tagged(
    "type",
    {
        "text": made(
            record("media_type", "data", type=_string, media_type=choice("text/plain"), data=_string),
            lambda source, _: source["data"],
        ),
        "content": made(
            record("content", type=_string, content=text_or(made(blocks(1, "text"), lambda *of: _joined(*of).text))),
            lambda source, _: source["content"],
        ),
        "base64": _bytes_of("application/pdf"),
        **_elsewhere,
    },
)
_BLOCKS["document"] = made(
    record("source", source=_source, title=_string, context=_string, citations=record(enabled=boolean), **_every),
    _document,
)
_BLOCKS["tool_result"] = made(
    record(
        "tool_use_id",
        tool_use_id=_string,
        content=text_or(made(blocks(0, "text", "document", "image"), _joined)),
        is_error=boolean,
        **_every,
    ),
    _tool_result,
)
