"""JSON for server-sent events, whose clients end lines where they like."""

from __future__ import annotations

from typing import Any

import orjson


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


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + json_line(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + json_line(value) + b"\n\n"
