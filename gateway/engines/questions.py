"""What a gateway asks an engine beside the stream, over plain HTTP: its tokeniser, and its own counters."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp

from engine.protocol import STATS_PATH, TOKENIZER_PATH, Hello, ProtocolError, TokenizerFiles

MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_STATS_BYTES: Final = 1 << 20


async def fetch_tokenizer(session: aiohttp.ClientSession, hello: Hello, timeout_s: float) -> TokenizerFiles:
    """timeout_s is between two pieces of the answer. Raises ProtocolError for files that are not those of `hello`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    async with session.get(TOKENIZER_PATH, timeout=timeout, raise_for_status=True) as response:
        body = await _read(response, MAX_TOKENIZER_BYTES)
    files = await asyncio.to_thread(_parse_tokenizer, body)
    if files.fingerprint() != hello.tokenizer:
        raise ProtocolError("the tokeniser is not the one that the engine's hello announces")
    return files


async def fetch_stats(session: aiohttp.ClientSession, timeout_s: float) -> dict[str, Any] | None:
    """The engine's counters, or None when it does not answer within timeout_s with a JSON object. Never raises."""
    import orjson

    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(STATS_PATH, timeout=timeout, raise_for_status=True) as response:
            stats = orjson.loads(await _read(response, MAX_STATS_BYTES))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RuntimeError):  # the last one: a closed session
        return None
    return stats if isinstance(stats, dict) else None


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, cut off at the limit."""
    pieces, left = list[bytes](), limit_bytes
    while left and (piece := await response.content.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _parse_tokenizer(body: bytes) -> TokenizerFiles:
    import orjson

    try:
        data: dict[str, Any] = orjson.loads(body)
        return TokenizerFiles.from_json(data)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"unreadable tokeniser files: {error}") from None
