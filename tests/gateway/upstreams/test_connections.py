"""Connections to an upstream that does not keep to HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from packaging.requirements import Requirement
from pydantic import SecretStr

from gateway.config import UpstreamSettings
from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.connections import AT_ONCE_BYTES, MAX_FRAMING_BYTES, Connections, Response, _Protocol, read_some
from tests.fakes.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FINE, EVIL = HEAD + b"Content-Length: 4\r\n\r\nfine", HEAD + b"Content-Length: 4\r\n\r\nevil"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nfine\r\n0\r\n\r\n"
LATER = b"later"


class Server:
    """Writes the same bytes for each request; with LATER in them, what is behind it when it is told to."""

    def __init__(self, written: bytes, *, closes: bool) -> None:
        self.at_once, _, self.later = written.partition(LATER)
        self.writers: list[asyncio.StreamWriter] = []  # of each connection
        self.more = asyncio.Event()
        self.closes = closes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            while await reader.readuntil(b"{}"):
                writer.write(self.at_once)
                if self.later:
                    await self.more.wait()
                    writer.write(self.later)
                if self.closes:
                    writer.close()


@asynccontextmanager
async def serving(written: bytes, *, closes: bool = False) -> AsyncIterator[tuple[Server, Connections]]:
    server = Server(written, closes=closes)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        connections = Connections(UpstreamSettings(name="up", url=f"http://127.0.0.1:{port}", models=("m",)), None)
        yield server, connections
        await connections.close()
        for writer in server.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def asking(within_s: float = 10.0, **more: Any) -> UpstreamRequest:
    now = time.monotonic()
    return UpstreamRequest("r", Tenant("a"), "openai", "m", "/v1/x", "", (), b"{}", {}, now, now + within_s, **more)


async def ask(connections: Connections, request: UpstreamRequest | None = None, body: bytes = b"{}") -> bytes:
    request = request or asking()
    with closing(await connections.send(request, "m", body, request.deadline_s)) as response:
        return b"".join(await _rest(response))


@asynccontextmanager
async def answered(connections: Connections) -> AsyncIterator[Response]:
    async with asyncio.timeout(10):
        with closing(await connections.send(asking(), "m", b"{}", time.monotonic() + 10)) as response:
            yield response


def idle(connections: Connections) -> list[Any]:
    """Those that wait for the next request."""
    connector: Any = connections._of("online").connector
    return [protocol for waiting in connector._conns.values() for protocol, _ in waiting]


@pytest.mark.parametrize("written", [FINE + EVIL, CHUNKED + EVIL, FINE + LATER + EVIL, CHUNKED + LATER + EVIL])
async def test_what_an_upstream_sends_behind_an_answer_is_nobodys(written: bytes) -> None:
    async with serving(written) as (server, connections):
        assert await ask(connections) == b"fine"
        server.more.set()
        if server.later:
            await until(lambda: any(one.should_close for one in idle(connections)))
        assert await ask(connections) == b"fine"
        assert len(server.writers) == 2


async def test_a_connection_with_nothing_behind_its_answer_is_used_again() -> None:
    async with serving(FINE) as (server, connections):
        assert [await ask(connections) for _ in range(3)] == [b"fine"] * 3
        assert len(server.writers) == 1


def test_aiohttp_is_bounded_to_the_minor_version_whose_private_method_the_guard_overrides() -> None:
    """The tests above show that the guard is in force with the version that is installed here."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    (aiohttp_,) = [one for text in project["dependencies"] if (one := Requirement(text)).name == "aiohttp"]
    major, minor, *_ = map(int, version("aiohttp").split("."))
    assert aiohttp_.specifier.contains(f"{major}.{minor}.99")
    assert not aiohttp_.specifier.contains(f"{major}.{minor + 1}.0")


BROKEN = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FRAMINGS = [b"zz\r\n", b"-1\r\nx\r\n", b"3\r\nfineX\r\n", b"4\r\nmore\n\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\n"]


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("before", [b"", b"4\r\nfine\r\n"])
async def test_broken_chunk_framing_ends_the_read_that_waits(before: bytes, framing: bytes) -> None:
    async with serving(BROKEN + before + LATER + framing) as (server, connections), answered(connections) as response:
        if before:
            assert await read_some(response) == b"fine"
        reading = asyncio.ensure_future(_rest(response))
        await asyncio.sleep(0)  # the read waits
        server.more.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await reading


@pytest.mark.parametrize("framing", [b"4;" + b"x" * MAX_FRAMING_BYTES, b"0" * (MAX_FRAMING_BYTES + 2)])
async def test_a_chunk_header_without_an_end_closes_the_connection(framing: bytes) -> None:
    async with (
        serving(BROKEN + b"4\r\nfine\r\n" + LATER + framing) as (server, connections),
        answered(connections) as response,
    ):
        assert await read_some(response) == b"fine"
        server.more.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_some(response)


async def _rest(response: Response) -> list[bytes]:
    chunks = []
    while chunk := await read_some(response):
        chunks.append(chunk)
    return chunks


async def test_a_read_that_begins_after_the_connection_was_closed_fails_as_one_that_waited() -> None:
    async with (
        serving(BROKEN + b"4\r\nfine\r\n" + LATER + b"zz\r\n") as (server, connections),
        answered(connections) as response,
    ):
        assert await read_some(response) == b"fine"
        assert response.connection is not None
        assert response.connection.protocol is not None
        ended = response.connection.protocol.closed
        server.more.set()
        assert ended is not None
        await ended
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_some(response)


async def test_answers_leave_nothing_at_the_connection_that_they_came_over() -> None:
    async with serving(CHUNKED) as (server, connections):
        for _ in range(3):
            assert await ask(connections) == b"fine"
        (protocol,) = idle(connections)
        assert len(server.writers) == 1
        assert not protocol.closed._callbacks


NOT_REUSED = {
    "close": HEAD + b"Connection: close\r\nContent-Length: 4\r\n\r\nfine",
    "1.0": FINE.replace(b"1.1", b"1.0"),
    "until the end": HEAD + b"\r\nfine",
}


@pytest.mark.parametrize("kind", NOT_REUSED)
async def test_a_connection_whose_answer_ends_it_is_not_used_again(kind: str) -> None:
    async with serving(NOT_REUSED[kind], closes=kind == "until the end") as (server, connections):
        for number in range(1, 3):
            assert await ask(connections) == b"fine"
            assert not idle(connections)
            assert len(server.writers) == number


async def test_answers_that_come_before_the_answer_are_passed_over() -> None:
    async with serving(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + FINE) as (
        server,
        connections,
    ):
        assert [await ask(connections) for _ in range(2)] == [b"fine"] * 2
        assert len(server.writers) == 1


@pytest.mark.parametrize("written", [b"220 smtp.example ready\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_an_answer_that_is_no_http_fails_as_a_lost_one(written: bytes) -> None:
    async with serving(written) as (_, connections):
        with pytest.raises(aiohttp.ClientError):
            await ask(connections)
        assert not idle(connections)


async def test_a_body_that_does_not_come_in_time_is_late() -> None:
    async with serving(HEAD + b"Content-Length: 5\r\n\r\nfine" + LATER + b"!") as (_, connections):
        with pytest.raises(TimeoutError):
            await ask(connections, asking(within_s=0.2))
        assert not idle(connections)


async def test_a_request_that_is_given_up_closes_its_connection() -> None:
    async with serving(LATER + FINE) as (server, connections):
        asked = asyncio.ensure_future(ask(connections))
        await until(lambda: bool(server.writers))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        connector: Any = connections._of("online").connector
        assert not idle(connections)
        assert not connector._acquired


async def test_a_connection_on_which_the_request_is_still_being_written_is_not_used_again() -> None:
    """An upstream may refuse a long body by its headers."""
    async with serving(FINE) as (_, connections):
        assert await ask(connections) == b"fine"
        idle(connections)[0].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        assert await ask(connections, body=b"{}" + b" " * (AT_ONCE_BYTES - 2)) == b"fine"
        assert not idle(connections)


@pytest.mark.parametrize(("key", "query"), [(None, ""), ("sk-secret", "a=b%20c&d")])
async def test_a_request_is_written_as_aiohttps_client_writes_it(key: str | None, query: str) -> None:
    written: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        written.append(await reader.readuntil(b"{}"))
        writer.write(FINE)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base"
        settings = UpstreamSettings(name="up", url=url, models=("m",), headers={"X-App": SecretStr("kvasir")})
        for is_plain in (True, False):
            connections = Connections(settings, key)
            connections._is_plain = is_plain
            headers = (("content-type", "text/plain"), ("openai-beta", "one"), ("openai-beta", "two"))
            request = replace(asking(), path="/v1/models/{model}/x", query=query, headers=headers)
            assert await ask(connections, request) == b"fine"
            await connections.close()
        assert written[0] == written[1]


class Timers:
    """An event loop's clock and timers, turned by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> SimpleNamespace:
        timer = (self.now_s + delay_s, call)
        self.due.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self.due and self.due.remove(timer))

    def pass_time(self, until_s: float) -> None:
        while self.due and min(self.due)[0] <= until_s:
            timer = min(self.due)
            self.due.remove(timer)
            self.now_s = timer[0]
            timer[1]()
        self.now_s = until_s


def test_reads_share_a_timer_and_the_last_of_them_counts() -> None:
    timers = Timers()
    protocol = _Protocol(loop=cast("asyncio.AbstractEventLoop", timers))
    protocol.read_timeout = 10.0
    protocol.start_timeout()
    for read_s in (3.0, 6.0, 9.0, 15.0):
        timers.pass_time(read_s)
        protocol.start_timeout()
        assert len(timers.due) == 1
    timers.pass_time(24.9)
    assert protocol.exception() is None
    protocol.read_timeout = 4.0  # a shorter one counts at once
    protocol.start_timeout()
    timers.pass_time(28.8)
    assert protocol.exception() is None
    timers.pass_time(29.0)
    assert isinstance(protocol.exception(), aiohttp.SocketTimeoutError)
    assert not timers.due
