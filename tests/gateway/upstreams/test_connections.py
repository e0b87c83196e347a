"""Connections to an upstream that does not keep to HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from packaging.requirements import Requirement

from gateway.config import UpstreamSettings
from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.connections import MAX_FRAMING_BYTES, Connections, read_some
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
