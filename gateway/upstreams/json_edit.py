"""Where values are in the bytes of a JSON text, so that one can be replaced and all others stay as they were written.

Only for texts that were parsed before, and found to be JSON: nothing is checked here a second time.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import orjson

_SPACE: Final = re.compile(rb"[ \t\n\r]*")
_BETWEEN: Final = re.compile(rb'[^"\[\]{}]*')
_PLAIN: Final = re.compile(rb"[^ \t\n\r,\]}]*")
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_OPENING: Final = frozenset(b"{[")
_SLICE: Final = 64 << 10
"""Bytes: a fraction of a millisecond."""


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


def named_once(text: bytes, name: str) -> Child | None:
    """The member of the root with this name of ASCII letters, which a parser has found; None when there are several."""
    written = orjson.dumps(name)
    if _count(text, written) == 1 and not (_count(text, b"\\u00") and _has_escaped(text, name)):
        # No other key can be read as this name, so this is the one that a parser found.
        at = _skip(text, _skip(text, text.index(written) + len(written)) + 1)
        return Child(name, at, _end(text, at))
    found = [child for child in children(text, root(text)) if child.name == name]
    return found[0] if len(found) == 1 else None


@cache
def _escaped(name: str) -> re.Pattern[bytes]:
    """Any of its letters, escaped."""
    codes = "|".join(f"{ord(letter):02x}" for letter in set(name))
    return re.compile(rf"\\u00(?i:{codes})".encode())


def _count(text: bytes, searched: bytes) -> int:
    """Slice by slice, as `_after`."""
    more = len(searched) - 1
    return sum(text[at : at + _SLICE + more].count(searched) for at in range(0, len(text), _SLICE))


def _has_escaped(text: bytes, name: str) -> bool:
    pattern, more = _escaped(name), len("\\u00ff") - 1
    return any(pattern.search(text, at, at + _SLICE + more) for at in range(0, len(text), _SLICE))


def replaced(text: bytes, child: Child, value: Any) -> bytes:
    """The text with another value there."""
    return _spliced(text, child.start, orjson.dumps(value), child.end)


def with_member(text: bytes, start: int, name: str, value: Any) -> bytes:
    """The text with one more member, the first, of the object that begins at `start`."""
    empty = text[_skip(text, start + 1) : _skip(text, start + 1) + 1] == b"}"
    member = orjson.dumps(name) + b":" + orjson.dumps(value) + (b"" if empty else b",")
    return _spliced(text, start + 1, member, start + 1)


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


def _spliced(text: bytes, start: int, between: bytes, end: int) -> bytes:
    """The text with other bytes in the place of text[start:end]. Copied once, slice by slice."""
    whole = io.BytesIO()  # which gives its bytes away without copying them
    view = memoryview(text)
    for part in (view[:start], memoryview(between), view[end:]):
        for at in range(0, len(part), _SLICE):
            whole.write(part[at : at + _SLICE])
    return whole.getvalue()


def _skip(text: bytes, at: int) -> int:
    return _after(_SPACE, text, at)


def _end(text: bytes, start: int) -> int:
    """Of the value that begins there."""
    first = text[start]
    if first == _QUOTE:
        return _string_end(text, start)
    if first not in _OPENING:
        return _after(_PLAIN, text, start)
    depth, at = 1, start + 1
    while depth:
        at = _after(_BETWEEN, text, at)
        if text[at] == _QUOTE:
            at = _string_end(text, at)
        else:
            depth += 1 if text[at] in _OPENING else -1
            at += 1
    return at


def _string_end(text: bytes, start: int) -> int:
    """From quote to quote, which is quicker than any pattern: most of a long prompt has none."""
    end = start
    while True:
        end = text.index(b'"', end + 1)
        before = end - 1
        while text[before] == _BACKSLASH:
            before -= 1
        if (end - before) % 2:  # an even number of backslashes escape each other
            return end + 1


def _after(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Behind what matches there. Slice by slice: a pattern lets no other thread run while it is looked for."""
    while True:
        found = pattern.match(text, at, at + _SLICE)
        assert found is not None, "the text was parsed before"
        if found.end() < at + _SLICE:
            return found.end()
        at = found.end()
