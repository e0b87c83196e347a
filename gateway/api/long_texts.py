"""Long texts of a JSON body, decoded slice by slice.

orjson holds the interpreter while it parses: 1 ms for each megabyte, and several times that where memory is new, which
every other request waits. So the inside of a long text is cut out, decoded in slices, joined, and put where it was in
what the rest of the body was parsed to. Pure, and safe in any thread.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import orjson

from gateway.errors import BadRequestError, TextTooLargeError

SLICE: Final = 64 << 10
LEAST: Final = 1 << 20
"""Bytes of a body that is cut at all."""

_ESCAPE: Final = re.compile(rb"\\u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2})\Z")
"""An escape that goes on behind the end, or the first half of a surrogate pair."""
_LONGEST_ESCAPE: Final = 12
_WIDE: Final = re.compile(rb"\\u(?!00)")
_ASTRAL: Final = re.compile(rb"\\u[dD][89abAB]")
_MANY: Final = 1024
"""Characters beside which what a str object itself takes does not count."""
_BELOW_ASTRAL = bytes(range(0xF0))


class LongTexts(NamedTuple):
    """The insides of a body's long texts.

    cuts       of each the places at which it is cut: the first, those between two slices, the last
    num_bytes  of memory that all texts of the body take once they are parsed, or less
    """

    cuts: Sequence[Sequence[int]]
    num_bytes: int


def find_long_texts(body: bytes) -> LongTexts:
    """Slice by slice, so that other threads have their turn. Says nothing of whether it is JSON."""
    if len(body) < LEAST:
        return LongTexts((), len(body) * (1 if _width(body) == 1 else 4))
    found: list[list[int]] = []
    inside, escaped, run_escaped, run = False, False, False, -1
    run_width, num_bytes = 1, 0
    for start in range(0, len(body), SLICE):
        part = body[start : start + SLICE]
        if run < 0 and inside:
            run, run_escaped, run_width = start, escaped, 1
        bare = part[escaped:]
        escaped = (len(bare) - len(bare.rstrip(b"\\"))) % 2 == 1
        quotes = bare.count(b'"')
        if quotes and b"\\" in bare:
            quotes = bare.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')
        here = _width(part)
        if quotes and run >= 0:
            num_bytes += _end_run(body, run + run_escaped, start, run_width, found)
            run = -1
        inside ^= quotes % 2 == 1
        if run >= 0:
            run_width = max(run_width, here)
        else:
            num_bytes += len(part) * here
    if run >= 0:
        num_bytes += _end_run(body, run + run_escaped, len(body), run_width, found)
    return LongTexts(found, num_bytes)


def _end_run(body: bytes, start: int, end: int, width: int, found: list[list[int]]) -> int:
    """Notes the slices of a text from `start` to `end`, if it is long. Returns the memory that they take."""
    cuts = [_good_cut(body, start, start)]
    while cuts[-1] + SLICE + _LONGEST_ESCAPE < end:
        cuts.append(_good_cut(body, cuts[-1] + SLICE, cuts[-1]))
    if len(cuts) > 1:
        found.append(cuts)
    return (end - start) * width


def _good_cut(body: bytes, at: int, after: int) -> int:
    """The first place from `at` on which is in no escape, surrogate pair or character. `after` is one before it that is
    in no escape. JSON always has one among so many."""
    for place in range(at, min(at + _LONGEST_ESCAPE, len(body))):
        before = body[after:place]
        is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2
        if not is_escaped and body[place] & 0xC0 != 0x80 and not _ESCAPE.search(body[max(0, place - 6) : place]):
            return place
    return at


def _width(part: bytes) -> int:
    """Bytes that Python needs for each character of a text with these bytes, or more."""
    escapes = b"\\" in part  # to find one byte takes a hundredth of the time that two take
    if escapes and _ASTRAL.search(part):
        return 4
    if part.isascii():
        return 2 if escapes and _WIDE.search(part) else 1
    return 4 if part.translate(None, _BELOW_ASTRAL) else 2


def _width_of_text(text: str) -> int:
    if len(text) > _MANY:
        return sys.getsizeof(text) // len(text)
    highest = max(text, default="")
    return 1 if highest <= "\xff" else 2 if highest <= "\uffff" else 4


def loads(body: bytes, long_texts: LongTexts, max_text_bytes: int) -> Any:
    """As orjson.loads. Raises TextTooLargeError for a text that takes more memory than `max_text_bytes` (one emoji
    makes it four times as large, in one go), and BadRequestError for a long text that is the name of a field."""
    if not long_texts.cuts:
        return orjson.loads(body)
    mark = secrets.token_hex(8)  # which is in no text of the client
    rest, at = [], 0
    for number, cuts in enumerate(long_texts.cuts):
        rest += [body[at : cuts[0]], f"{mark}{number:08d}".encode()]
        at = cuts[-1]
    root = [orjson.loads(b"".join([*rest, body[at:]]))]
    left = len(long_texts.cuts)
    level: list[Any] = [root]
    while level and left:  # level by level, so without recursion
        deeper: list[Any] = []
        for container in level:
            named: Iterable[tuple[Any, Any]] = container.items() if type(container) is dict else enumerate(container)
            for name, item in named:
                if type(item) is str and mark in item:
                    head, _, tail = item.partition(mark)
                    inside = _slices(body, long_texts.cuts[int(tail[:8])])
                    container[name] = _joined([head, *inside, tail[8:]], max_text_bytes)
                    left -= 1
                elif type(item) is dict or type(item) is list:
                    deeper.append(item)
        level = deeper
    if left:
        raise BadRequestError(f"The JSON body of your request has the name of a field of more than {SLICE} bytes.")
    return root[0]


def _slices(body: bytes, cuts: Sequence[int]) -> Iterator[str]:
    for start, end in pairwise(cuts):
        yield orjson.loads(b'"' + body[start:end] + b'"')


def _joined(parts: Sequence[str], max_bytes: int) -> str:
    if sum(map(len, parts)) * max(map(_width_of_text, parts)) > max_bytes:
        raise TextTooLargeError(max_bytes)
    return "".join(parts)
