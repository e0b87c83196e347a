"""Answers that are written at once: what a client gets is what aiohttp would have written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.api.resend import header_lines, send

LIMIT_S = 30.0
HEADERS = {"Content-Type": "application/json", "x-same": "caf\u00e9", "x-kvasir-cache": "exact"}
MORE = {"x-request-id": "mine", "Age": "3"}
BODY = b'{"text":"caf\xc3\xa9"}'
LINES = header_lines({**HEADERS, "content-length": "7", "Connection": "close"})  # which it leaves to `send`

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def at_once(http: web.Request) -> web.StreamResponse:
    await http.read()
    return await send(http, LINES, MORE, BODY)


async def by_steps(http: web.Request) -> web.StreamResponse:
    await http.read()
    return web.Response(body=BODY, headers={**HEADERS, **MORE})


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server with this handler, for everything."""
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    try:
        async with asyncio.timeout(LIMIT_S):
            yield reader, writer
    finally:
        writer.close()
        await runner.cleanup()


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, Mapping[bytes, bytes], bytes]:
    """Status line, headers without the second in which it was written, body."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head[:-4].split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    assert len(headers) == len(lines)
    assert headers.pop(b"Date").endswith(b" GMT")
    return status, headers, await reader.readexactly(int(headers[b"Content-Length"]))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("connection", ["", "close", "keep-alive"])
async def test_status_headers_and_what_becomes_of_the_connection_are_those_of_aiohttp(
    version: str, connection: str
) -> None:
    asked = f"POST /a HTTP/{version}\r\nHost: x\r\nContent-Length: 2\r\n"
    asked += f"Connection: {connection}\r\n\r\n{{}}" if connection else "\r\n{}"
    goes_on = connection == "keep-alive" or (version == "1.1" and not connection)
    answers = []
    for handler in (at_once, by_steps):
        async with serving(handler) as (reader, writer):
            writer.write(asked.encode())
            first = await read_answer(reader)
            if goes_on:
                writer.write(asked.encode())
                assert await read_answer(reader) == first
            else:
                assert await reader.read() == b""
            answers.append(first)
    assert answers[0] == answers[1]
    assert answers[0][2] == BODY


async def test_requests_that_come_together_are_answered_one_after_the_other() -> None:
    async with serving(at_once) as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" * 5)
        answers = [await read_answer(reader) for _ in range(5)]
    assert [body for _, _, body in answers] == [BODY] * 5


async def test_a_client_that_does_not_read_holds_its_answer_back() -> None:
    large, sending = bytes(64 << 20), asyncio.get_running_loop().create_future()

    async def handler(http: web.Request) -> web.StreamResponse:
        task = asyncio.ensure_future(send(http, LINES, MORE, large))
        await asyncio.sleep(0)  # its first step
        sending.set_result(task.done())
        return await task

    async with serving(handler) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await sending is False
        assert await read_answer(reader) == (
            b"HTTP/1.1 200 OK",
            (await _headers_of(len(large))),
            large,
        )


async def _headers_of(num_bytes: int) -> Mapping[bytes, bytes]:
    async with serving(at_once) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        _, headers, _ = await read_answer(reader)
    return {**headers, b"Content-Length": str(num_bytes).encode()}


async def test_a_client_that_is_gone_is_told_as_any_other_write_would() -> None:
    told = asyncio.get_running_loop().create_future()

    async def handler(http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        http.transport.abort()
        try:
            return await send(http, LINES, MORE, BODY)
        except ConnectionResetError as error:
            told.set_result(error)
            raise

    async with serving(handler) as (_, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert isinstance(await told, ConnectionResetError)
