"""Connections to an upstream that does not keep to HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.config import UpstreamSettings
from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.connections import Connections
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
    async with await connections.post(request, "m", b"{}") as response:
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
