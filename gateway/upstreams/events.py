"""Server-sent events out of bytes that are cut anywhere, with the bytes that they came as.

An event ends with an empty line; lines end with LF, CR LF or CR (WHATWG HTML, 9.2.6).
"""

from __future__ import annotations

import re

_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class Events:
    """Of one stream. Joined, what `feed` and `rest` return is what was fed."""

    def __init__(self, max_bytes: int) -> None:
        """A longer event is passed over in pieces, as if it were several."""
        self._held = bytearray()
        self._max_bytes = max_bytes
        self._searched = 0  # bytes of `_held` in which no end is

    @property
    def between(self) -> bool:
        """Whether nothing of an unfinished event was fed."""
        return not self._held

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in it, whole, with the empty line behind each."""
        self._held += piece
        events: list[bytes] = []
        begin = 0
        while (end := self._find_end(begin)) is not None:
            events.append(bytes(self._held[begin:end]))
            begin = end
        del self._held[:begin]
        # An end has at most four bytes, and the last of them may be still to come.
        self._searched = max(0, len(self._held) - 4)
        if len(self._held) > self._max_bytes:
            events.append(self.rest())
        return events

    def rest(self) -> bytes:
        """What is left without an end."""
        rest = bytes(self._held)
        self._held.clear()
        self._searched = 0
        return rest

    def _find_end(self, begin: int) -> int | None:
        found = _END.search(self._held, begin or self._searched)
        if found is None:
            return None
        # A CR at the very end may be half of a CR LF: it is decided when the next byte is there.
        undecided = found.end() == len(self._held) and self._held[-1:] == b"\r"
        return None if undecided else found.end()


def data_of(event: bytes) -> bytes:
    """The data of an event, its lines joined."""
    lines = _LINE_END.split(event)
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
