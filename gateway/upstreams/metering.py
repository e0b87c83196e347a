"""Reads an answer's bytes while they pass: its usage, and the ids of stored objects. Never raises: what cannot be read
is not metered. Pure.

A stream passes in whole events, so that a broken answer can end with an error event. The usage event that only the
gateway requested is left out. All other bytes pass unchanged.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.upstreams.apis import APIS, MARKS, Counts, Tokens
from gateway.upstreams.stored import created_ids

_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_NAMING: Final = re.compile(rb'"(?:response\.(?:created|output_item\.added|output_item\.done)|container|audio)"')
"""In events that may contain ids of stored objects. Inside a JSON string a quote is escaped."""


class Events:
    """Server-sent events out of bytes that are cut anywhere, with the bytes that they came as. An event ends with an
    empty line; lines end with LF, CR LF or CR (WHATWG HTML, 9.2.6). Joined, what `feed` and `rest` return is what was
    fed."""

    def __init__(self, max_bytes: int) -> None:
        """A longer event is passed over in parts, as if it were several."""
        self._unfinished = bytearray()
        self._max_bytes = max_bytes
        self._searched = 0  # bytes of `_unfinished` in which no end is
        self.has_passed_part = False  # the beginning of an unfinished event was returned, because it is too long

    @property
    def between(self) -> bool:
        """Whether nothing of an unfinished event was fed."""
        return not self._unfinished and not self.has_passed_part

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that end in it, whole, with the empty line behind each."""
        if self.between and _is_plain(chunk) and len(chunk) <= self._max_bytes:
            if chunk.find(b"\n\n") == len(chunk) - 2:
                return [chunk]
            return [event + b"\n\n" for event in chunk[:-2].split(b"\n\n")]
        self._unfinished += chunk
        events: list[bytes] = []
        begin, has_cr = 0, self._unfinished.find(b"\r", self._searched) >= 0
        while (end := self._find_end(begin, has_cr)) is not None:
            events.append(bytes(self._unfinished[begin:end]))
            begin = end
        self.has_passed_part = self.has_passed_part and not events
        del self._unfinished[:begin]
        # An end has at most four bytes, and the last of them may be still to come.
        self._searched = max(0, len(self._unfinished) - 4)
        if len(self._unfinished) > self._max_bytes:
            events.append(self.rest())
            self.has_passed_part = True
        return events

    def rest(self) -> bytes:
        """What is left without an end."""
        rest = bytes(self._unfinished)
        self._unfinished.clear()
        self._searched = 0
        return rest

    def _find_end(self, begin: int, has_cr: bool) -> int | None:
        start = begin or self._searched
        if not has_cr:  # the pattern takes 45 ns for a byte
            end = self._unfinished.find(b"\n\n", start)
            return None if end < 0 else end + 2
        found = _EVENT_END.search(self._unfinished, start)
        if found is None:
            return None
        # A CR at the very end may be half of a CR LF: it is decided when the next byte is there.
        undecided = found.end() == len(self._unfinished) and self._unfinished[-1:] == b"\r"
        return None if undecided else found.end()


def _is_plain(chunk: bytes) -> bool:
    """Whole events whose lines end with LF, as nearly all chunks are."""
    return chunk.endswith(b"\n\n") and not chunk.endswith(b"\n\n\n") and b"\r" not in chunk


def data_of(event: bytes | bytearray) -> bytes:
    """The data of an event, its lines joined."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return bytes(event[6:-2])  # one line, as nearly all have
    lines = _LINE_END.split(event) if b"\r" in event else event.split(b"\n")  # the pattern is slow
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


class Meter:
    """Reads usage and ids of one answer."""

    def __init__(
        self, dialect: str, *, is_stream: bool, max_bytes: int, hides_usage: bool = False, finds_ids: bool = False
    ) -> None:
        """
        is_stream    the answer is server-sent events, or else JSON
        max_bytes    of a whole answer or of an event; a larger one is passed over
        hides_usage  leave out the event of a stream that has only the usage
        finds_ids    `ids` are wanted
        """
        self.ids: list[str] = []  # of stored objects, each once; the caller takes them out
        self._known_ids = set[str]()
        self._api = APIS[dialect]
        self._counts: Counts = {}
        self._events = Events(max_bytes) if is_stream else None
        self._whole = bytearray()
        self._max_bytes = max_bytes
        self._finds_ids = finds_ids
        self._hides_usage = hides_usage

    @property
    def between_events(self) -> bool:
        """Whether what passed on ends where an event does, so that one may be added."""
        return self._events is not None and not self._events.has_passed_part

    @property
    def reads_whole(self) -> bool:
        """True if ids are known only at the end."""
        return self._finds_ids and self._events is None

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes, cut anywhere. Returns what passes on now."""
        if self._events is None:
            self._add(chunk)
            return chunk
        if chunk.endswith(b"\n\n") and self._events.between and not self._is_of_interest(chunk):
            return chunk  # whole events, as nearly all chunks are, and none of them is read
        return b"".join(event for event in self._events.feed(chunk) if not (self._read(event) and self._hides_usage))

    def end(self) -> bytes:
        """The end of the answer. Returns what has not passed on."""
        if self._events is None:
            if self._whole:
                self._read(self._whole)
                self._whole.clear()
            return b""
        rest = self._events.rest()
        return b"" if rest and self._read(rest) and self._hides_usage else rest

    def tokens(self) -> Tokens | None:
        """The usage, also of an answer that broke off; None where none was reported."""
        self.end()
        return self._api.read_usage(self._counts)

    def _add(self, chunk: bytes) -> None:
        if len(self._whole) + len(chunk) <= self._max_bytes:
            self._whole += chunk
        else:
            self._whole.clear()
            self._max_bytes = 0

    def _is_of_interest(self, text: bytes | bytearray) -> bool:
        return any(map(text.__contains__, MARKS)) or (self._finds_ids and _NAMING.search(text) is not None)

    def _read(self, text: bytes | bytearray) -> bool:
        """Reads an event, or a whole answer. True for the event of the OpenAI API that has only the usage."""
        is_event = self._events is not None
        if not (self._is_of_interest(text) or (self._finds_ids and not is_event)):
            return False
        try:
            value: Any = orjson.loads(data_of(text) if is_event else text)
        except orjson.JSONDecodeError:
            return False
        self._api.note(self._counts, value)
        if self._finds_ids and (not is_event or _NAMING.search(text)):
            self._note_ids(value)
        return isinstance(value, dict) and value.get("choices") == [] and value.get("usage") is not None

    def _note_ids(self, value: Any) -> None:
        for found in created_ids(value):
            if found not in self._known_ids and _ID.fullmatch(found):
                self._known_ids.add(found)
                self.ids.append(found)
