"""Answers of upstreams that keep something of them: its ids, told before the client has them.

Bytes pass as they came. Of a stream each event that names something is read before it goes on; of a whole answer the
last bytes wait until its ids were told.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import orjson

from gateway.upstreams.events import Events, data_of
from gateway.upstreams.stored_ids import made_ids

_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
_NAMING: Final = re.compile(rb'"(?:response\.(?:created|output_item\.added|output_item\.done)|container|audio)"')
"""In events that may name what is kept. Inside of a JSON string a quote has a backslash in front."""


async def telling_ids(
    pieces: AsyncGenerator[bytes, None], told: Callable[[str], Awaitable[None]], *, stream: bool, max_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The pieces. `told` gets each id once; none of an event, or whole answer, that has more than `max_bytes` or cannot
    be read."""
    telling = _Telling(told)
    async with aclosing(pieces):
        async for piece in _stream(pieces, telling, max_bytes) if stream else _whole(pieces, telling, max_bytes):
            yield piece


class _Telling:
    def __init__(self, told: Callable[[str], Awaitable[None]]) -> None:
        self._told = told
        self._known = set[str]()

    async def read(self, written: bytes) -> None:
        try:
            value: Any = orjson.loads(written)
        except orjson.JSONDecodeError:
            return
        for found in made_ids(value):
            if found not in self._known and _ID.fullmatch(found):
                self._known.add(found)
                await self._told(found)


async def _stream(
    pieces: AsyncGenerator[bytes, None], telling: _Telling, max_bytes: int
) -> AsyncGenerator[bytes, None]:
    events = Events(max_bytes)
    async for piece in pieces:
        for event in events.feed(piece):
            if _NAMING.search(event):
                await telling.read(data_of(event))
        yield piece


async def _whole(pieces: AsyncGenerator[bytes, None], telling: _Telling, max_bytes: int) -> AsyncGenerator[bytes, None]:
    body: bytearray | None = bytearray()
    last = b""
    async for piece in pieces:
        if last:
            yield last
        last = piece
        if body is not None:
            body += piece
            body = body if len(body) <= max_bytes else None
    if body is not None:
        await telling.read(bytes(body))
    if last:
        yield last
