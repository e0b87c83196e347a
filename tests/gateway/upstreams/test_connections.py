"""Connections to an upstream that does not keep to HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from packaging.requirements import Requirement

from gateway.config import UpstreamSettings
from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.connections import MAX_FRAMING_BYTES, Connections, _Protocol, read_some
from tests.fakes.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FINE, EVIL = HEAD + b"Content-Length: 4\r\n\r\nfine", HEAD + b"Content-Length: 4\r\n\r\nevil"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nfine\r\n0\r\n\r\n"
LATER = b"later"


class Server:
    """Writes the same bytes for each request; with LATER in them, what is behind it when it is told to."""

    def __init__(self, written: bytes) -> None:
        self.at_once, _, self.later = written.partition(LATER)
        self.writers: list[asyncio.StreamWriter] = []  # of each connection
        self.more = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"{}"):
                writer.write(self.at_once)
                if self.later:
                    await self.more.wait()
                    writer.write(self.later)


@asynccontextmanager
async def serving(written: bytes) -> AsyncIterator[tuple[Server, Connections]]:
    server = Server(written)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        connections = Connections(UpstreamSettings(name="up", url=f"http://127.0.0.1:{port}", models=("m",)), None)
        yield server, connections
        await connections.close()
        for writer in server.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def ask(connections: Connections) -> bytes:
    now = time.monotonic()
    request = UpstreamRequest("r", Tenant("a"), "openai", "m", "/v1/x", "", (), b"{}", {}, now, now + 10)
    async with await connections.send(request, "m", b"{}") as response:
        return await response.read()


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
    async with serving(BROKEN + before + LATER + framing) as (server, connections):
        now = time.monotonic()
        request = UpstreamRequest("r", Tenant("a"), "openai", "m", "/v1/x", "", (), b"{}", {}, now, now + 10)
        async with asyncio.timeout(10), await connections.send(request, "m", b"{}") as response:
            if before:
                assert await read_some(response) == b"fine"
            reading = asyncio.ensure_future(_rest(response))
            await asyncio.sleep(0)  # the read waits
            server.more.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await reading


@pytest.mark.parametrize("framing", [b"4;" + b"x" * MAX_FRAMING_BYTES, b"0" * (MAX_FRAMING_BYTES + 2)])
async def test_a_chunk_header_without_an_end_closes_the_connection(framing: bytes) -> None:
    async with serving(BROKEN + b"4\r\nfine\r\n" + LATER + framing) as (server, connections):
        now = time.monotonic()
        request = UpstreamRequest("r", Tenant("a"), "openai", "m", "/v1/x", "", (), b"{}", {}, now, now + 10)
        async with asyncio.timeout(10), await connections.send(request, "m", b"{}") as response:
            assert await read_some(response) == b"fine"
            server.more.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_some(response)


async def _rest(response: aiohttp.ClientResponse) -> None:
    while await read_some(response):
        pass


async def test_a_read_that_begins_after_the_connection_was_closed_fails_as_one_that_waited() -> None:
    async with serving(BROKEN + b"4\r\nfine\r\n" + LATER + b"zz\r\n") as (server, connections):
        now = time.monotonic()
        request = UpstreamRequest("r", Tenant("a"), "openai", "m", "/v1/x", "", (), b"{}", {}, now, now + 10)
        async with asyncio.timeout(10), await connections.send(request, "m", b"{}") as response:
            assert await read_some(response) == b"fine"
            assert response.connection is not None
            assert response.connection.protocol is not None
            closed = response.connection.protocol.closed
            server.more.set()
            assert closed is not None
            await closed
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_some(response)


async def test_answers_leave_nothing_at_the_connection_that_they_came_over() -> None:
    async with serving(CHUNKED) as (server, connections):
        for _ in range(3):
            assert await ask(connections) == b"fine"
        (protocol,) = idle(connections)
        assert len(server.writers) == 1
        assert not protocol.closed._callbacks


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
