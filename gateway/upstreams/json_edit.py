"""Where values are in the bytes of a JSON text, so that one can be replaced and all others stay as they were written.

Only for texts that were parsed before, and found to be JSON: nothing is checked here a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import orjson

_SPACE: Final = re.compile(rb"[ \t\n\r]*")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET: Final = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[\[\]{}]', re.DOTALL)
_PLAIN: Final = re.compile(rb"[^ \t\n\r,\]}]+")


class Child(NamedTuple):
    """A value in an object or array. Its bytes are text[start:end]."""

    name: str | int
    start: int
    end: int


def root(text: bytes) -> int:
    """Where the text's value begins."""
    return _skip(text, 0)


def children(text: bytes, start: int) -> Iterator[Child]:
    """The values of the object or array that begins at `start`, in order; those of a name that is there twice, too."""
    is_object, at, index = text[start : start + 1] == b"{", _skip(text, start + 1), 0
    while text[at : at + 1] not in (b"}", b"]"):
        name: str | int = index
        if is_object:
            end = _end(text, at)
            name = orjson.loads(text[at:end])
            at = _skip(text, _skip(text, end) + 1)
        end = _end(text, at)
        yield Child(name, at, end)
        at, index = _skip(text, end), index + 1
        if text[at : at + 1] == b",":
            at = _skip(text, at + 1)


def find(text: bytes, path: Sequence[str | int]) -> Child | None:
    """The value at a path from the root. Of a name that is there twice the last, which is what a parser takes."""
    child: Child | None = None
    start = root(text)
    for name in path:
        child = None
        for one in children(text, start):
            if one.name == name:
                child = one
        if child is None:
            return None
        start = child.start
    return child


def replaced(text: bytes, child: Child, value: Any) -> bytes:
    """The text with another value there."""
    return text[: child.start] + orjson.dumps(value) + text[child.end :]


def with_member(text: bytes, start: int, name: str, value: Any) -> bytes:
    """The text with one more member, the first, of the object that begins at `start`."""
    empty = text[_skip(text, start + 1) : _skip(text, start + 1) + 1] == b"}"
    member = orjson.dumps(name) + b":" + orjson.dumps(value) + (b"" if empty else b",")
    return text[: start + 1] + member + text[start + 1 :]


def without_member(text: bytes, start: int, name: str) -> bytes:
    """The text without the members of this name of the object that begins at `start`. The others are as they were."""
    begin, kept, end = start + 1, [], start + 1
    for child in children(text, start):
        if child.name != name:
            kept.append(text[begin : child.end].strip(b" \t\r\n"))
        end = _skip(text, child.end)
        begin = end + 1  # behind the comma
    close = end if kept or end > start + 1 else _skip(text, start + 1)
    return text[: start + 1] + b",".join(kept) + text[close:]


def _skip(text: bytes, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _end(text: bytes, start: int) -> int:
    """Of the value that begins there."""
    first = text[start : start + 1]
    if first in (b"{", b"["):
        depth, at = 1, start + 1
        while depth:
            at = _after(_BRACKET, text, at)
            depth += 1 if text[at - 1 : at] in (b"{", b"[") else -1
        return at
    return _after(_STRING if first == b'"' else _PLAIN, text, start)


def _after(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "the text was parsed before"
    return found.end()
