"""HTTP calls to an engine beside the stream: its tokeniser, its own counters, and a purge."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
import orjson

from engine.protocol import (
    PURGE_LIMIT_S,
    PURGE_PATH,
    STATS_PATH,
    TOKENIZER_PATH,
    Hello,
    ProtocolError,
    TokenizerFiles,
)
from gateway.errors import EngineLostError

MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_STATS_BYTES: Final = 1 << 20
MAX_PURGE_BYTES: Final = 1 << 20
PURGE_TIMEOUT_S: Final = PURGE_LIMIT_S + 5.0
"""Longer than an engine takes at the most."""


async def fetch_tokenizer(session: aiohttp.ClientSession, hello: Hello, timeout_s: float) -> TokenizerFiles:
    """timeout_s is between two chunks of the answer. Raises ProtocolError for files that are not those of `hello`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    async with session.get(TOKENIZER_PATH, timeout=timeout, raise_for_status=True) as response:
        body = await _read(response, MAX_TOKENIZER_BYTES)
    files = await asyncio.to_thread(_parse_tokenizer, body)
    if files.fingerprint() != hello.tokenizer:
        raise ProtocolError("the tokeniser is not the one that the engine's hello announces")
    return files


async def fetch_stats(session: aiohttp.ClientSession, timeout_s: float) -> dict[str, Any] | None:
    """The engine's counters, or None when it does not answer within timeout_s with a JSON object. Never raises."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(STATS_PATH, timeout=timeout, raise_for_status=True) as response:
            stats = orjson.loads(await _read(response, MAX_STATS_BYTES))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RuntimeError):  # the last one: a closed session
        return None
    return stats if isinstance(stats, dict) else None


async def request_purge(session: aiohttp.ClientSession | None, salt_prefix: str) -> dict[str, Any]:
    """The engine's report, with `complete` (docs/engine.md). `session` is None while the engine is away. Raises
    EngineLostError when there is no answer within PURGE_TIMEOUT_S, or none that is a report."""
    if session is None:
        raise EngineLostError("It is away.")
    try:
        timeout, body = aiohttp.ClientTimeout(total=PURGE_TIMEOUT_S), {"salt_prefix": salt_prefix}
        async with session.post(PURGE_PATH, json=body, timeout=timeout, raise_for_status=True) as response:
            report = orjson.loads(await _read(response, MAX_PURGE_BYTES))
    except aiohttp.ClientResponseError as error:
        raise EngineLostError(f"It answered with status {error.status}.") from None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RuntimeError) as error:  # as above
        raise EngineLostError(f"It did not answer: {error or type(error).__name__}") from None
    if not isinstance(report, dict) or not isinstance(report.get("complete"), bool):
        raise EngineLostError("It answered with something else than a report.")
    return report


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, cut off at the limit."""
    body = bytearray()
    while len(body) < limit_bytes and (chunk := await response.content.read(limit_bytes - len(body))):
        body += chunk
    return bytes(body)


def _parse_tokenizer(body: bytes) -> TokenizerFiles:
    try:
        data: dict[str, Any] = orjson.loads(body)
        return TokenizerFiles.from_json(data)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"unreadable tokeniser files: {error}") from None
