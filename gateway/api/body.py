"""Request bodies: bytes within the limit, decoded, and parsed into a JSON object that is safe to walk.

Everything a client can do wrong here is a BadRequestError or a BodyTooLargeError; nothing is a RecursionError, a
UnicodeDecodeError or a NaN later on. orjson refuses NaN, Infinity, numbers that overflow, invalid UTF-8 and lone
surrogates by itself.
"""

from __future__ import annotations

import asyncio
import io
import sys
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from gateway.api.bodies import BODIES, Claim
from gateway.api.long_texts import LongTexts, find_long_texts, loads
from gateway.api.record import RECORD
from gateway.api.structure import VALUE_BYTES, check_structure
from gateway.config import ServerSettings
from gateway.errors import BadRequestError, BodyTooLargeError
from gateway.tasks import off_loop, work_of

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS  # zlib finds out which of the two it is
_ZSTD_WINDOW_LOG: Final = 23  # 8 MiB of memory for one body, which RFC 8878 asks decoders to have (3.1.1.1.2)

ENCODING_UNSUPPORTED: Final = "request_body_encoding_unsupported"
ENCODING_INVALID: Final = "request_body_encoding_invalid"
DECODED_TOO_LARGE: Final = "request_body_too_large_after_decoding"
ENCODING_CODES: Final = (ENCODING_UNSUPPORTED, ENCODING_INVALID, DECODED_TOO_LARGE)
"""Codes of errors of a compressed body, by their names in the Anthropic API."""

CHUNK_BYTES: Final = 8 << 10
"""Of a body that is handled chunk by chunk, which takes milliseconds for each."""

READ_BYTES: Final = 64 << 10
"""Of a body that is collected, between two turns of the event loop."""

MAX_DEPTH: Final = 128
"""Levels of a body: no API has nearly as many, and code that walks values recursively stays far from its limit."""

TIMEOUT_S: Final = 60.0
"""For a body to arrive; a slower client would hold memory of bodies in flight."""

TEXT_SHARE: Final = 2
"""Times server.max_body_bytes that one text may take in memory. It is made in one go, which blocks the event loop."""

_BROKEN: Final = (TimeoutError, zlib.error, ZstdError, web.RequestPayloadError, BadHttpMessage)
"""Errors of a body that does not arrive whole."""

_CONTAINERS = frozenset((dict, list))

RAW: web.RequestKey[bytes] = web.RequestKey("raw", bytes)
"""The body that `read_raw` read, decoded, until passthrough.py removes it."""


class BodyLimit(NamedTuple):
    """Bytes of a decoded body, and the setting with that limit."""

    num_bytes: int
    setting: str


class Decoder:
    """Decodes one body; bytes behind its end are left out."""

    def __init__(self, encoding: str) -> None:
        self._inner: Any = zlib.decompressobj(_GZIP_OR_ZLIB)
        if encoding == "zstd":
            self._inner = ZstdDecompressor(options={DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})

    @property
    def eof(self) -> bool:
        """Whether the compressed body is complete."""
        return bool(self._inner.eof)

    def decode(self, data: bytes, most: int) -> bytes:
        """At most `most` bytes. The rest comes when it is called again, with no data."""
        if self._inner.eof:
            return b""
        return bytes(self._inner.decompress(getattr(self._inner, "unconsumed_tail", b"") + data, most))


DECODED: Final = ("gzip", "x-gzip", "deflate", "zstd")
"""Values of Content-Encoding besides `identity`."""


async def expect_continue(http: web.Request) -> None:
    """aiohttp's expect handler. Does nothing: `read_json` asks for the body once the headers were accepted."""


async def read_json(http: web.Request, server: ServerSettings) -> dict[str, Any]:
    """The body as a JSON object.

    Raises as `read_raw`, and BadRequestError for what is not a JSON object, has more values than structure.py allows,
    or is nested deeper than MAX_DEPTH. A large one is parsed in a thread.
    """
    body, record = await read_raw(http, server), http[RECORD]
    structure, long_texts = await off_loop(work_of(len(body)), lambda: (check_structure(body), find_long_texts(body)))
    if record.body is not None:
        record.body.grow_to(len(body) + VALUE_BYTES * structure.values, long_texts.num_bytes)
    record.work = structure.work(len(body))
    most = TEXT_SHARE * server.max_body_bytes
    return await off_loop(record.work, lambda: _parse(body, long_texts, most))


async def read_raw(http: web.Request, server: ServerSettings) -> bytes:
    """The body, decoded; read once, however often it is called.

    Raises as `body_chunks`, and QueueFullError and OverloadedError where bodies in flight have no memory left
    (bodies.py).
    """
    if RAW in http:
        return http[RAW]
    record = http[RECORD]
    claim = record.body = Claim(http.app[BODIES], record.tenant or "")
    limit = BodyLimit(server.max_body_bytes, "server.max_body_bytes")
    if http.content.is_eof() and _encoding(http) == "identity":  # a small body comes together with its headers
        _check_headers(http, limit)
        try:
            body = http.content.read_nowait()
        except _BROKEN as error:
            raise _unreadable(error, TIMEOUT_S) from None
        if len(body) > limit.num_bytes:
            raise BodyTooLargeError(limit.num_bytes)
        claim.grow_to(len(body))
    else:
        whole = io.BytesIO()  # which gives its bytes away without copying them
        async with aclosing(body_chunks(http, limit, TIMEOUT_S, READ_BYTES, claim)) as chunks:
            async for chunk in chunks:
                whole.write(chunk)
        body = whole.getvalue()
    record.body_bytes = len(body)
    http[RAW] = body
    return body


async def body_chunks(
    http: web.Request, limit: BodyLimit, timeout_s: float, most: int = CHUNK_BYTES, claim: Claim | None = None
) -> AsyncGenerator[bytes]:
    """The body as it comes, decoded, in chunks of at most `most` bytes, with a turn of the event loop between two; from
    READ_BYTES on one that is not compressed comes in chunks of what aiohttp holds of it.

    Raises BodyTooLargeError, from Content-Length alone where there is one, and BadRequestError for a body that does not
    arrive. The limit also holds for what a compressed body becomes. `claim` grows before a chunk is there.
    """
    limit_bytes, setting = limit
    _check_headers(http, limit)
    if claim is not None:
        claim.grow_to(http.content_length or 0)
    ask_for_body(http)
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in _decoded_chunks(http, most):
                if (size := size + len(chunk)) > limit_bytes:
                    code = None if _encoding(http) == "identity" else DECODED_TOO_LARGE
                    raise BodyTooLargeError(limit_bytes, setting=setting, code=code)
                if claim is not None:
                    claim.grow_to(size)
                yield chunk
    except _BROKEN as error:
        raise _unreadable(error, timeout_s) from None


def _unreadable(error: Exception, timeout_s: float) -> BadRequestError:
    """For one of _BROKEN."""
    if isinstance(error, TimeoutError):
        return BadRequestError(f"The request body did not arrive within {timeout_s:g} s.")
    if isinstance(error, (zlib.error, ZstdError)):
        return BadRequestError("The request body is not compressed as it says.", code=ENCODING_INVALID)
    return BadRequestError(f"The request body cannot be read: {type(error).__name__}.")


async def _decoded_chunks(http: web.Request, most: int) -> AsyncIterator[bytes]:
    if _encoding(http) == "identity":
        read = http.content.readany if most >= READ_BYTES else partial(http.content.read, most)
        while chunk := await read():
            yield chunk
            await asyncio.sleep(0)
        return
    decoder = Decoder(_encoding(http))
    while chunk := await http.content.readany():
        while decoded := decoder.decode(chunk, most):
            yield decoded
            await asyncio.sleep(0)
            chunk = b""
    if not decoder.eof:
        raise BadRequestError("The compressed request body is cut short.", code=ENCODING_INVALID)


def ask_for_body(http: web.Request) -> None:
    """Answers `Expect: 100-continue`."""
    if http.headers.get("Expect", "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def parse_object(body: bytes, max_body_bytes: int = sys.maxsize) -> dict[str, Any]:
    """Strict JSON whose outermost value is an object. Raises BadRequestError, and TextTooLargeError."""
    check_structure(body)
    return _parse(body, find_long_texts(body), TEXT_SHARE * max_body_bytes)


def _parse(body: bytes, long_texts: LongTexts, max_text_bytes: int) -> dict[str, Any]:
    try:
        value = loads(body, long_texts, max_text_bytes)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            f"We could not parse the JSON body of your request: {error.msg} at line {error.lineno}, column "
            f"{error.colno}. The API expects a JSON object."
        ) from None
    if type(value) is not dict:
        raise BadRequestError("The request body must be a JSON object.")
    if deeper_than(value, MAX_DEPTH):
        raise BadRequestError(f"The JSON body of your request is nested deeper than {MAX_DEPTH} levels.")
    return value


def deeper_than(value: Any, levels: int) -> bool:
    """Whether containers are nested more than `levels` deep. Level by level, so without recursion."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(levels):
        if not level:
            return False
        deeper: list[Any] = []
        for container in level:
            inside: Iterable[Any] = container.values() if type(container) is dict else container
            if not _CONTAINERS.isdisjoint(map(type, inside)):
                deeper += [item for item in inside if type(item) in _CONTAINERS]
        level = deeper
    return bool(level)


def _check_headers(http: web.Request, limit: BodyLimit) -> None:
    if (http.content_length or 0) > limit.num_bytes:
        raise BodyTooLargeError(limit.num_bytes, setting=limit.setting)
    if "Content-Encoding" in http.headers and _encoding(http) not in ("identity", *DECODED):
        why = "Content-Encoding must be gzip, deflate, zstd or identity."
        raise BadRequestError(why, code=ENCODING_UNSUPPORTED)


def _encoding(http: web.Request) -> str:
    return http.headers.get("Content-Encoding", "identity").strip().lower()
