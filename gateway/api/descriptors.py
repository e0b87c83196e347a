"""File descriptors: connections are refused before the process has none left, and some are kept for operators.

A new connection gets the lowest number that is free, so its own number says how many there are at least. From the first
watermark on a connection is answered with 503 and closed, unless it asks for health, metrics or admin pages; from the
second it is told so before it has asked anything. What is left above is for upstreams, engines, Redis and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable
from typing import Final, cast

from aiohttp import web

from gateway.api.malformed import MALFORMED
from gateway.errors import OverloadedError

log = logging.getLogger(__name__)

RESERVED: Final = 2048
"""Descriptors above each of the two watermarks; a fourth of all where that is less. Connections that come together are
all accepted before the first of them is refused, so that only half as many may come together (the backlog)."""
RETRY_AFTER_S: Final = 5.0
_FOR_OPERATORS: Final = ("/health", "/metrics", "/admin")
_BODY: Final = b"The server has too many connections. Please try again later.\n"
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: %d\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (RETRY_AFTER_S, len(_BODY), _BODY)
)


def raise_limit() -> None:
    """Takes all descriptors that this process may have (RLIMIT_NOFILE), which is often a thousand times as many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_descriptors(http: web.Request) -> None:
    """Raises OverloadedError for a connection beyond the first watermark that is not an operator's."""
    limit = _limit()
    if _number_of(http.transport) < limit - 2 * _reserved(limit) or http.path.startswith(_FOR_OPERATORS):
        return
    _note(limit)
    raise OverloadedError("The server has too many connections. Please try again later.", retry_after_s=RETRY_AFTER_S)


class Site(web.TCPSite):
    """A TCP site whose connections go through a _Gate."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        gate = lambda: _Gate(server)  # noqa: E731
        backlog = min(self._backlog, _reserved(_limit()) // 2)
        self._server = await loop.create_server(gate, self._host, self._port, backlog=backlog)


class _Gate(asyncio.Protocol):
    """A connection before anything has come. It becomes the server's, or is refused."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp, limit = cast("asyncio.Transport", transport), _limit()  # uvloop's are of a class of their own
        if _number_of(tcp) >= limit - _reserved(limit):
            _note(limit)
            tcp.write(_REFUSAL)
            tcp.close()
            return
        protocol = self._make()
        tcp.set_protocol(protocol)
        protocol.connection_made(tcp)


def _note(limit: int) -> None:
    """One line of these in a while: the log counts those that come again and again (logs/writer.py)."""
    MALFORMED.count("TooManyConnections")
    log.warning(
        "connections are refused with 503: the process may have %d file descriptors (ulimit -n), of which %d are kept "
        "for engines, upstreams, files and operators",
        limit,
        2 * _reserved(limit),
    )


def _limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 20


def _reserved(limit: int) -> int:
    return min(RESERVED, limit // 4)


def _number_of(transport: asyncio.BaseTransport | None) -> int:
    """-1 of a connection that is gone."""
    sock = None if transport is None else transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
