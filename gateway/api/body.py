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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

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

BROKEN: Final = (zlib.error, ZstdError)
"""What `decode` raises for bytes that are not compressed as they say."""

NAMES: Final = "gzip, deflate, zstd or identity"

_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS  # zlib finds out which of the two it is
_ZSTD_WINDOW_LOG: Final = 23  # 8 MiB of memory for one body, which RFC 8878 asks decoders to have (3.1.1.1.2)

ENCODING_UNSUPPORTED: Final = "request_body_encoding_unsupported"
ENCODING_INVALID: Final = "request_body_encoding_invalid"
DECODED_TOO_LARGE: Final = "request_body_too_large_after_decoding"
ENCODING_CODES: Final = (ENCODING_UNSUPPORTED, ENCODING_INVALID, DECODED_TOO_LARGE)
"""Codes of errors of a compressed body, by their names in the Anthropic API."""

CHUNK_BYTES: Final = 8 << 10
"""Of a body that is read in pieces. Reading what is in one takes milliseconds, which others wait."""

MAX_DEPTH: Final = 128
"""Levels of a body: no API has nearly as many, and code that walks values recursively stays far from its limit."""

TIMEOUT_S: Final = 60.0
"""For a body to arrive; whoever sends slower would hold memory of bodies in flight."""

TEXT_SHARE: Final = 2
"""Times server.max_body_bytes that one text may take in memory. It is made in one go, which others wait."""

DECODED_BYTES: Final = 64 << 10
"""Of a compressed body that are decoded before others have their turn."""


class Decoder(Protocol):
    """Of one body."""

    @property
    def eof(self) -> bool:
        """Whether the compressed body is complete; what comes behind it is left out."""
        ...

    def decode(self, data: bytes, most: int) -> bytes:
        """At most `most` bytes of what was given so far. The rest comes when it is called again, with no data."""
        ...


class _Zlib:
    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    def decode(self, data: bytes, most: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, most)


class _Zstd:
    def __init__(self) -> None:
        self._zstd = ZstdDecompressor(options={DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return self._zstd.eof

    def decode(self, data: bytes, most: int) -> bytes:
        return b"" if self._zstd.eof else self._zstd.decompress(data, most)


DECODERS: Final[Mapping[str, Callable[[], Decoder]]] = {
    "gzip": _Zlib,
    "x-gzip": _Zlib,
    "deflate": _Zlib,
    "zstd": _Zstd,
}


class BodyLimit(NamedTuple):
    """Bytes of a decoded body, and the setting that says so."""

    num_bytes: int
    setting: str


_BROKEN: Final = (TimeoutError, *BROKEN, web.RequestPayloadError, BadHttpMessage)
"""What a body that does not arrive whole raises."""

_CONTAINERS = frozenset((dict, list))

RAW: web.RequestKey[bytes] = web.RequestKey("raw", bytes)
"""The body that `read_raw` read, decoded, until passthrough.py takes it away."""


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
    """The body, decoded; read once, however often it is asked for.

    Raises BodyTooLargeError from Content-Length alone where there is one, QueueFullError and OverloadedError where
    bodies in flight have no memory left (bodies.py), and BadRequestError for what does not arrive. The limits also hold
    for what a compressed body becomes.
    """
    if RAW in http:
        return http[RAW]
    record = http[RECORD]
    claim = record.body = http.app[BODIES].claim(record.tenant or "")
    try:
        _check_headers(http, server.max_body_bytes)
        if http.content.is_eof() and _encoding(http) == "identity":  # a small body comes together with its headers
            body = http.content.read_nowait()
            if len(body) > server.max_body_bytes:
                raise BodyTooLargeError(server.max_body_bytes)
            claim.grow_to(len(body))
        else:
            claim.grow_to(http.content_length or 0)
            async with asyncio.timeout(TIMEOUT_S):
                body = await _read(http, server.max_body_bytes, claim)
        record.body_bytes = len(body)
    except _BROKEN as error:
        raise _unreadable(error, f"{TIMEOUT_S:g} s") from None
    http[RAW] = body
    return body


async def body_chunks(http: web.Request, limit: BodyLimit, timeout_s: float) -> AsyncGenerator[bytes]:
    """The body chunk by chunk as it comes, decoded, for those that are too large for memory: CHUNK_BYTES each at most,
    and others have their turn between two. Raises as `read_json` does while it arrives."""
    limit_bytes, setting = limit
    try:
        _check_headers(http, limit_bytes, setting)
        _ask_for_body(http)
        size = 0
        async with asyncio.timeout(timeout_s):
            async for piece in _decoded_chunks(http, CHUNK_BYTES):
                if (size := size + len(piece)) > limit_bytes:
                    raise BodyTooLargeError(limit_bytes, setting=setting)
                yield piece
    except _BROKEN as error:
        raise _unreadable(error, "files.upload_timeout_s") from None


def _unreadable(error: Exception, timeout: str) -> BadRequestError:
    """For one of _BROKEN. `timeout` is the setting that says for how long the body was waited for."""
    if isinstance(error, TimeoutError):
        return BadRequestError(f"The request body did not arrive in time ({timeout}).")
    if isinstance(error, BROKEN):
        return BadRequestError("The request body is not compressed as it says.", code=ENCODING_INVALID)
    return BadRequestError(f"The request body cannot be read: {type(error).__name__}.")


async def _decoded_chunks(http: web.Request, most: int) -> AsyncIterator[bytes]:
    """Pieces of `most` bytes at most; others have their turn between two."""
    if _encoding(http) == "identity":
        while piece := await http.content.read(most):
            yield piece
            await asyncio.sleep(0)
        return
    decoder = DECODERS[_encoding(http)]()
    while piece := await http.content.readany():
        while not decoder.eof and (decoded := decoder.decode(piece, most)):
            yield decoded
            await asyncio.sleep(0)
            piece = b""
    if not decoder.eof:
        raise BadRequestError("The compressed request body is cut short.", code=ENCODING_INVALID)


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


def _check_headers(http: web.Request, limit_bytes: int, setting: str = "server.max_body_bytes") -> None:
    if (http.content_length or 0) > limit_bytes:
        raise BodyTooLargeError(limit_bytes, setting=setting)
    if "Content-Encoding" in http.headers and _encoding(http) not in ("identity", *DECODERS):
        why = f"Content-Encoding must be {NAMES}."
        raise BadRequestError(why, code=ENCODING_UNSUPPORTED)


def _encoding(http: web.Request) -> str:
    return http.headers.get("Content-Encoding", "identity").strip().lower()


def _ask_for_body(http: web.Request) -> None:
    if http.headers.get("Expect", "").lower() == "100-continue" and http.transport is not None:
        http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _read(http: web.Request, limit_bytes: int, claim: Claim) -> bytes:
    _ask_for_body(http)
    plain = _encoding(http) == "identity"
    body = io.BytesIO()  # which gives its bytes away without copying them
    async for piece in http.content.iter_any() if plain else _decoded_chunks(http, DECODED_BYTES):
        if body.tell() + len(piece) > limit_bytes:
            raise BodyTooLargeError(limit_bytes, code=None if plain else DECODED_TOO_LARGE)
        claim.grow_to(body.tell() + len(piece))
        body.write(piece)
    return body.getvalue()
