"""JSON for server-sent events, whose clients end lines where they like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")


def json_text(text: str) -> bytes:
    """A JSON string that stays on one line for every SSE client: some end lines where Unicode does (str.splitlines)."""
    return orjson.dumps(text) if text.isascii() else json_line(text)


def json_line(value: Any) -> bytes:
    """As json_text, for any value."""
    return (
        orjson.dumps(value)
        .replace(b"\xc2\x85", rb"\u0085")
        .replace(b"\xe2\x80\xa8", rb"\u2028")
        .replace(b"\xe2\x80\xa9", rb"\u2029")
    )


def read_events(stream: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The data of each event of a complete stream, its lines joined, and the bytes that the event came as. Events
    without data are passed over."""
    begin = 0
    for end in _EVENT_END.finditer(stream):
        written, begin = stream[begin : end.end()], end.end()
        lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(written) if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines), written


COMMENT: Final = b": ping\n\n"
"""An event of nothing, which clients of server-sent events skip; those of the Gemini API do not."""


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + json_line(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + json_line(value) + b"\n\n"
