"""Requests and connections that are refused before they have a route: malformed ones, and those for which the process
has too few file descriptors left.

A new connection gets the lowest free descriptor, so its own number is a lower bound of how many are open. From the
first watermark on a connection is answered with 503 and closed, unless it asks for health, metrics or admin pages; from
the second on it is refused before it sends anything. The rest is for upstreams, engines, Redis and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import socket
import ssl
from collections import Counter
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine, HttpProcessingError

from gateway.errors import OverloadedError

log = logging.getLogger(__name__)

RESERVED: Final = 2048
"""Descriptors above each of the two watermarks; a fourth of all where that is less. Connections that come together are
all accepted before the first of them is refused, so that only half as many may come together (the backlog)."""
HANDSHAKE_S: Final = 10.0
"""For a handshake of TLS; a connection is looked at by its number after it."""
RETRY_AFTER_S: Final = 5.0
_FOR_OPERATORS: Final = ("/health", "/metrics", "/admin")
_MESSAGE: Final = "The server has too many connections. Please try again later."
_REFUSAL: Final = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    f"Retry-After: {RETRY_AFTER_S:g}\r\nContent-Length: {len(_MESSAGE)}\r\n\r\n{_MESSAGE}"
).encode()
_TWICE: Final = re.compile(r"Duplicate '([A-Za-z-]{1,40})' header")

REFUSED: Final = Counter[str]()
"""Refusals of this process by reason: `DuplicateHeader`, `TooManyConnections`, or the class of aiohttp's error."""


def count_malformed(record: logging.LogRecord) -> bool:
    """Filter of aiohttp's logger: a request that aiohttp refused is counted, and logged without a traceback and without
    any of its bytes but the name of a header. Any port scanner could fill the log otherwise."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    twice = _TWICE.search(error.message)
    reason = "DuplicateHeader" if twice else type(error).__name__
    REFUSED[reason] += 1
    level = logging.DEBUG if isinstance(error, BadStatusLine) else logging.WARNING  # that was no HTTP at all
    what = f"the header {twice[1]} came twice" if twice else reason
    log.log(level, "a request was refused with 400 before it had a route: %s", what)
    return False


def raise_limit() -> None:
    """Takes all descriptors that this process may have (RLIMIT_NOFILE), which is often a thousand times as many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_descriptors(http: web.Request) -> None:
    """Raises OverloadedError for a connection beyond the first watermark that is not an operator's."""
    if not http.path.startswith(_FOR_OPERATORS) and _is_beyond(http.transport, reserves=2):
        raise OverloadedError(_MESSAGE, retry_after_s=RETRY_AFTER_S)


class Site(web.TCPSite):
    """A TCP site whose connections go through a _Gate. `sock` is bound, in place of host and port."""

    def __init__(
        self,
        runner: web.BaseRunner,
        host: str,
        port: int,
        *,
        backlog: int = 128,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, host, port, backlog=backlog, ssl_context=tls)
        self._sock = sock

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        backlog = min(self._backlog, _reserved(_limit()) // 2)
        gate = lambda: _Gate(server)  # noqa: E731
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"backlog": backlog}
        if self._ssl_context is not None:
            options |= {"ssl": self._ssl_context, "ssl_handshake_timeout": HANDSHAKE_S}
        if self._sock is None:
            self._server = await loop.create_server(gate, self._host, self._port, **options)
        else:
            self._server = await loop.create_server(gate, sock=self._sock, **options)


class _Gate(asyncio.Protocol):
    """A connection before its first byte. It becomes the server's, or is refused."""

    def __init__(self, server: web.Server) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own
        if _is_beyond(tcp, reserves=1):
            tcp.write(_REFUSAL)
            tcp.close()
            return
        protocol = self._server()
        tcp.set_protocol(protocol)
        protocol.connection_made(tcp)


def _is_beyond(transport: asyncio.BaseTransport | None, *, reserves: int) -> bool:
    """Whether a connection leaves less than so many reserves; then it is counted. The log writes repeated lines once in
    a while (logs/writer.py)."""
    limit = _limit()
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.fileno() < limit - reserves * _reserved(limit):
        return False
    REFUSED["TooManyConnections"] += 1
    log.warning(
        "connections are refused with 503: the process may have %d file descriptors (ulimit -n), of which %d are kept "
        "for engines, upstreams, files and operators",
        limit,
        2 * _reserved(limit),
    )
    return True


def _limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 20


def _reserved(limit: int) -> int:
    return min(RESERVED, limit // 4)
