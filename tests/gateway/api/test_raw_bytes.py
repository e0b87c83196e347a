"""What is no HTTP, or hardly: whatever bytes come, the connection ends and the server goes on."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.gateway import LIMIT_S, running

LINES = st.sampled_from(
    (
        b"GET / HTTP/1.1",
        b"POST /v1/messages HTTP/1.1",
        b"GET /v1/models HTTP/0.9",
        b"GET http://elsewhere/ HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1",
        b"",
    )
)
FIELDS = st.sampled_from(
    (
        b"Host: a",
        b"Host: a\r\nHost: b",
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 99999999999999999999",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4",
        b"Transfer-Encoding: gzip",
        b"Connection: close",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Expect: 100-continue",
        b"X: " + b"y" * 9000,
        b" folded: line",
        b"no colon",
        b"\xff\xfe: \x00",
    )
)
RESTS = st.sampled_from(
    (b"", b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"5\r\nhel", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n")
)
RAW = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda line, fields, rest: b"\r\n".join([line, *fields, b"", rest]), LINES, st.lists(FIELDS, max_size=3), RESTS
    ),
)


async def exchange(port: int, sent: bytes) -> bytes:
    """Everything that comes back on a connection whose client says this and no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        writer.write_eof()
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_whatever_bytes_come_the_connection_ends_and_the_server_goes_on() -> None:
    served = running()
    with asyncio.Runner() as runner:
        gateway = runner.run(served.__aenter__())

        @settings(max_examples=150, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(sent=RAW)
        def send(sent: bytes) -> None:
            async def work() -> None:
                async with asyncio.timeout(LIMIT_S):
                    said = await exchange(gateway.port, sent)
                assert b"HTTP/1.1 5" not in said.split(b"\r\n", 1)[0]
                assert (await gateway.get("/health"))[0] == 200

            runner.run(work())

        try:
            send()
        finally:
            runner.run(served.__aexit__(None, None, None))
