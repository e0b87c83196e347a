"""HTTP calls to an engine beside the stream: its tokeniser, its own counters, and a purge."""

from __future__ import annotations

import asyncio
from contextlib import suppress
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
MAX_ANSWER_BYTES: Final = 1 << 20
PURGE_TIMEOUT_S: Final = PURGE_LIMIT_S + 5.0
"""Longer than an engine takes at the most."""


async def fetch_tokenizer(session: aiohttp.ClientSession, hello: Hello, timeout_s: float) -> TokenizerFiles:
    """timeout_s is between two chunks of the answer. Raises ProtocolError for files that are not those of `hello`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    async with session.get(TOKENIZER_PATH, timeout=timeout, raise_for_status=True) as response:
        body = await _read(response, MAX_TOKENIZER_BYTES)
    try:
        files = await asyncio.to_thread(lambda: TokenizerFiles.from_json(orjson.loads(body)))
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"unreadable tokeniser files: {error}") from None
    if files.fingerprint() != hello.tokenizer:
        raise ProtocolError("the tokeniser is not the one that the engine's hello announces")
    return files


async def fetch_stats(session: aiohttp.ClientSession | None, timeout_s: float) -> dict[str, Any] | None:
    """The engine's counters; None when it is unreachable (no `session`) or does not answer within timeout_s with a JSON
    object. Never raises."""
    with suppress(EngineLostError):
        return await _ask(session, "GET", STATS_PATH, timeout_s)
    return None


async def request_purge(session: aiohttp.ClientSession | None, salt_prefix: str) -> dict[str, Any]:
    """The engine's report, with `complete` (docs/engine.md). Raises EngineLostError when it is unreachable (no
    `session`), or does not answer within PURGE_TIMEOUT_S with a report."""
    report = await _ask(session, "POST", PURGE_PATH, PURGE_TIMEOUT_S, json={"salt_prefix": salt_prefix})
    if not isinstance(report.get("complete"), bool):
        raise EngineLostError("It answered with something else than a report.")
    return report


async def _ask(
    session: aiohttp.ClientSession | None, method: str, path: str, timeout_s: float, **options: Any
) -> dict[str, Any]:
    """The JSON object that it answers with. Raises EngineLostError."""
    if session is None:
        raise EngineLostError("It is unreachable.")
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.request(method, path, timeout=timeout, raise_for_status=True, **options) as response:
            answer = orjson.loads(await _read(response, MAX_ANSWER_BYTES))
    except aiohttp.ClientResponseError as error:
        raise EngineLostError(f"It answered with status {error.status}.") from None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RuntimeError) as error:  # the last: closed session
        raise EngineLostError(f"It did not answer: {error or type(error).__name__}") from None
    if not isinstance(answer, dict):
        raise EngineLostError("It answered with something else than a report.")
    return answer


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, cut off at the limit."""
    body = bytearray()
    while len(body) < limit_bytes and (chunk := await response.content.read(limit_bytes - len(body))):
        body += chunk
    return bytes(body)
