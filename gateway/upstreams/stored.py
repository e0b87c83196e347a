"""Answers of the Responses API that their upstream keeps: the id of one, told before the client has it.

Bytes pass as they came. A stream names its response in its first event; of a whole answer the last bytes wait until its
id was told.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import orjson

from gateway.upstreams.events import Events, data_of

_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}")


async def telling_id(
    pieces: AsyncGenerator[bytes, None], told: Callable[[str], Awaitable[None]], *, stream: bool, max_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The pieces. `told` gets the id of a response; of none whose first event, or whole answer, has more than
    `max_bytes` or cannot be read."""
    async with aclosing(pieces):
        async for piece in _stream(pieces, told, max_bytes) if stream else _whole(pieces, told, max_bytes):
            yield piece


async def _stream(
    pieces: AsyncGenerator[bytes, None], told: Callable[[str], Awaitable[None]], max_bytes: int
) -> AsyncGenerator[bytes, None]:
    events: Events | None = Events(max_bytes)
    async for piece in pieces:
        if events is not None and (whole := [data for event in events.feed(piece) if (data := data_of(event))]):
            events = None
            await _tell(whole[0], told)
        yield piece


async def _whole(
    pieces: AsyncGenerator[bytes, None], told: Callable[[str], Awaitable[None]], max_bytes: int
) -> AsyncGenerator[bytes, None]:
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
        await _tell(bytes(body), told)
    if last:
        yield last


async def _tell(written: bytes, told: Callable[[str], Awaitable[None]]) -> None:
    try:
        value: Any = orjson.loads(written)
    except orjson.JSONDecodeError:
        return
    if isinstance(value, dict) and isinstance(inside := value.get("response"), dict):
        value = inside
    response_id = value.get("id") if isinstance(value, dict) else None
    if isinstance(response_id, str) and _ID.fullmatch(response_id):
        await told(response_id)
