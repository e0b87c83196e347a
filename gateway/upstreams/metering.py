"""Reads the usage out of an answer's bytes while they pass. Never changes or keeps back any of them, and never raises:
what cannot be read is not metered.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import Final

import orjson

from gateway.upstreams.events import Events, data_of
from gateway.upstreams.usage import MARKS, Said, Tokens, note, tokens

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS


class Meter:
    """Of one answer."""

    def __init__(self, dialect: str, *, media_type: str, encoding: str, max_bytes: int) -> None:
        """
        media_type  of the answer, without parameters: server-sent events, or else JSON
        encoding    its Content-Encoding; nothing is read out of one that is not known
        max_bytes   of a whole answer or of an event; a larger one is passed over
        """
        self._dialect = dialect
        self._said: Said = {}
        self._decode = _decoder(encoding, max_bytes)
        self._events = Events(max_bytes) if media_type == "text/event-stream" else None
        self._whole = bytearray()
        self._max_bytes = max_bytes

    @property
    def is_stream(self) -> bool:
        """Server-sent events."""
        return self._events is not None

    @property
    def is_plain_stream(self) -> bool:
        """Server-sent events that are not compressed."""
        return self.is_stream and self._decode is _as_it_is

    @property
    def between_events(self) -> bool:
        """Whether an event may be added here without cutting one of the upstream's in two."""
        return self._events is not None and self._events.between and self.is_plain_stream

    def feed(self, piece: bytes) -> None:
        """The next bytes, cut anywhere."""
        try:
            plain = self._decode(piece)
        except zlib.error:
            self._decode = _nothing
            return
        if self._events is not None:
            if plain.endswith(b"\n\n") and self._events.between and not _says_anything(plain):
                return  # whole events, as nearly all pieces are, and none of them is about tokens
            for event in self._events.feed(plain):
                self._read(event)
        elif len(self._whole) + len(plain) <= self._max_bytes:
            self._whole += plain
        else:
            self._whole.clear()
            self._max_bytes = 0

    def tokens(self) -> Tokens | None:
        """What was told, asked for once, at the end."""
        self._read(self._events.rest() if self._events is not None else bytes(self._whole))
        self._whole.clear()
        return tokens(self._said, self._dialect)

    def _read(self, told: bytes) -> None:
        """An event, or a whole answer."""
        if _says_anything(told):
            json = told if self._events is None else data_of(told)
            with contextlib.suppress(orjson.JSONDecodeError):
                note(self._said, orjson.loads(json), self._dialect)


def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """The beginning of a body, `max_bytes` of it at most; None for an encoding that is not known, or not what it says
    it is."""
    decode = _decoder(encoding, max_bytes)
    try:
        return None if decode is _nothing else decode(body)
    except zlib.error:
        return None


def _says_anything(told: bytes) -> bool:
    return any(mark in told for mark in MARKS)


def _decoder(encoding: str, max_bytes: int) -> Callable[[bytes], bytes]:
    if encoding in ("", "identity"):
        return _as_it_is
    if encoding in ("gzip", "x-gzip", "deflate"):
        inflate = zlib.decompressobj(_GZIP_OR_ZLIB)
        return lambda piece: inflate.decompress(piece, max_bytes)
    return _nothing


def _as_it_is(piece: bytes) -> bytes:
    return piece


def _nothing(piece: bytes) -> bytes:
    return b""
