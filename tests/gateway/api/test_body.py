from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdCompressor, compress
else:
    from backports.zstd import CompressionParameter, ZstdCompressor, compress

from gateway.api.body import DECODED, Decoder, deeper_than, parse_object
from gateway.config import ServerSettings
from gateway.errors import BadRequestError
from tests.fakes.gateway import LIMIT_S, Gateway, running

BODY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}]}).encode()
SMALL = ServerSettings(max_body_bytes=2000)
NESTED = st.recursive(
    st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=NESTED, limit=st.integers(0, 8))
def test_the_depth_is_what_a_recursion_would_count(value: Any, limit: int) -> None:
    assert deeper_than(value, limit) == (depth(value) > limit)


@pytest.mark.parametrize("levels", [127, 128])
def test_the_limit_itself_is_allowed(levels: int) -> None:
    parse_object(b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}")


BAD = {
    "nothing": b"",
    "a cut": b'{"a"',
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "an overflow": b'{"temperature": 1e999}',
    "a huge integer": b'{"max_tokens": ' + b"9" * 5000 + b"}",
    "bad UTF-8": b'{"model": "\xff"}',
    "a lone surrogate": rb'{"model": "\ud83d"}',
    "a reversed pair": rb'{"model": "\ude00\ud83d"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"model": "demo"}'.encode("utf-16"),
    "129 levels": b'{"a":' + b"[" * 128 + b"]" * 128 + b"}",
    "100,000 levels": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 levels, not closed": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_safe_json_is_a_bad_request(name: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_object(BAD[name])
    assert refused.value.param is None
    assert len(refused.value.message) < 300


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_object(rb'{"model": "\ud83d\ude00"}') == {"model": "\U0001f600"}


async def test_over_http_it_is_a_400_with_all_four_keys() -> None:
    async with running() as gateway:
        for name, sent in BAD.items():
            status, body, headers = await gateway.send(sent)
            assert (status, set(body["error"])) == (400, {"message", "type", "param", "code"}), name
            assert headers["x-request-id"]


def _with_window(data: bytes, log: int) -> bytes:
    """A frame whose decoder has to remember 2**log bytes."""
    compressor = ZstdCompressor(options={CompressionParameter.window_log: log})
    return compressor.compress(data) + compressor.flush()


WIDE = _with_window(BODY, 27)


async def test_compressed_bodies_are_understood() -> None:
    zipped = gzip.compress(BODY)
    bodies = {"identity": BODY, "gzip": zipped, "x-gzip": zipped, "GZIP": zipped, "deflate": zlib.compress(BODY)}
    async with running() as gateway:
        for encoding, data in {**bodies, "zstd": compress(BODY)}.items():
            assert (await gateway.send(data, **{"Content-Encoding": encoding}))[0] == 200, encoding


@pytest.mark.parametrize(
    ("encoding", "data", "expected"),
    [
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400),
        ("gzip", b"", 400),
        ("deflate", b"\x00", 400),
        ("br", BODY, 400),
        ("zstd", BODY, 400),
        ("zstd", b"", 400),
        ("zstd", compress(BODY)[:-3], 400),
        ("zstd", WIDE, 400),
        ("zstd", compress(b" " * 2001), 413),
        ("zstd", compress(b" " * 500_000_000), 413),
        ("gzip, gzip", BODY, 400),
        ("gzip", gzip.compress(b" " * 2001, mtime=0), 413),
        ("gzip", gzip.compress(b" " * 50_000_000, mtime=0), 413),
    ],
)
async def test_bad_and_exploding_compressed_bodies_are_refused(encoding: str, data: bytes, expected: int) -> None:
    server = ServerSettings(max_body_bytes=60_000) if len(data) > 2000 else SMALL
    async with running(server=server) as gateway:
        status, body, _ = await gateway.send(data, **{"Content-Encoding": encoding})
        assert (status, set(body["error"])) == (expected, {"message", "type", "param", "code"})


async def exchange(gateway: Gateway, *pieces: bytes) -> bytes:
    """Sends `pieces`, each after an answer to the one before when there is more than one; everything received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(LIMIT_S):
        received = b""
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            received += await reader.readuntil(b"\r\n\r\n")
        length = int(received.lower().split(b"content-length: ")[-1].split(b"\r\n")[0])
        received += await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()
    return received


async def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with running(server=SMALL) as gateway:
        answer = await exchange(
            gateway, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"server.max_body_bytes" in answer


async def test_a_chunked_body_is_counted_while_it_arrives() -> None:
    async def endless() -> Any:
        for _ in range(3):
            yield b"x" * 1000

    async with running(server=SMALL) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.session.post(url, data=endless()) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_a_client_that_asks_first_sends_its_body_only_when_it_is_wanted() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n"
    async with running(server=SMALL) as gateway:
        wanted = await exchange(gateway, head + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY)
        assert wanted.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
        unwanted = await exchange(gateway, head + b"Content-Length: 5000\r\n\r\n")
        assert unwanted.startswith(b"HTTP/1.1 413 ")


async def test_broken_chunked_encoding_is_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # aiohttp tells a waiting handler nothing of it; the limit on the body's arrival ends it.
    monkeypatch.setattr("gateway.api.body.TIMEOUT_S", 0.05)
    async with running() as gateway:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
        answer = await exchange(gateway, head + b"Expect: 100-continue\r\n\r\n", b"zz\r\n")
        assert b"HTTP/1.1 400 " in answer
        assert b'"param":null' in answer


async def test_a_body_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.body.TIMEOUT_S", 0.05)
    async with running() as gateway:
        answer = await exchange(
            gateway, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nConnection: close\r\n\r\n{"
        )
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"0.05 s" in answer


async def test_what_is_not_http_gets_a_400_and_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as gateway:
        assert (await exchange(gateway, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.0 400 ")
    assert "Traceback" not in caplog.text


TWICE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nUser-Agent: one-secret\r\nUser-Agent: two\r\n\r\n"


async def test_what_aiohttp_refuses_by_itself_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as gateway:
        series = 'kvasir_malformed_requests_total{reason="DuplicateHeader"}'

        async def counted() -> float:
            lines = (await gateway.get("/metrics"))[1].splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(series))

        before = await counted()
        answer = await exchange(gateway, TWICE)
        assert answer.startswith(b"HTTP/1.0 400 ")
        assert b"User-Agent" in answer
        assert await counted() == before + 1
        long = TWICE.replace(b"User-Agent: two", b"Authorization: Bearer " + b"k" * 9000)
        assert (await exchange(gateway, long)).startswith(b"HTTP/1.0 400 ")
    assert "the header User-Agent came twice" in caplog.text
    assert "LineTooLong" in caplog.text
    assert "secret" not in caplog.text
    assert "kkk" not in caplog.text


# -- decoding ---------------------------------------------------------------------------------------------------------

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": compress,
}


@pytest.mark.parametrize("encoding", DECODED)
@given(body=st.binary(max_size=300), repeat=st.integers(1, 50), cut=st.integers(1, 80), most=st.integers(1, 200))
def test_however_a_body_is_cut_it_is_decoded_within_the_limit_of_a_piece(
    encoding: str, body: bytes, repeat: int, cut: int, most: int
) -> None:
    compressed = COMPRESS[encoding](body * repeat) + b"trailing"
    decoder, decoded = Decoder(encoding), []
    for begin in range(0, len(compressed), cut):
        piece = compressed[begin : begin + cut]
        while some := decoder.decode(piece, most):
            assert len(some) <= most
            decoded.append(some)
            piece = b""
    assert decoder.eof
    assert b"".join(decoded) == body * repeat
