"""The connections to one upstream: where a request is sent, with which headers and which key, over which connection
and proxy.

Knows nothing of what an answer means; aiohttp's errors end in answer.py.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from ipaddress import ip_address, ip_network
from typing import Any, Final, Literal, cast
from urllib.parse import quote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from engine.protocol import Lane
from gateway.config import UpstreamSettings
from gateway.propagation import Call
from gateway.types import UpstreamRequest
from gateway.upstreams.apis import APIS
from gateway.upstreams.posting import MAX_HEADER_BYTES, MAX_HEADERS, Posted, Poster
from gateway.upstreams.redaction import Secrets, joined

Kind = Literal["connect", "timeout", "lost", "open", "busy", "key", "redirect"]


class AttemptFailed(Exception):  # noqa: N818 - an attempt that failed, and no error of the gateway
    """An attempt at one upstream brought no answer. `again` is whether this upstream may be tried once more. stage.py
    tries again, or another one, or makes an error for the client of it."""

    def __init__(self, kind: Kind, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.again = again


_HEADERS: Final = {"content-type": "application/json", "accept-encoding": "identity"}
"""Of every request, unless the client or the settings set something else."""

AT_ONCE_BYTES: Final = 1 << 20
"""A larger body is written in parts, so that the event loop turns in between."""

MAX_URLS: Final = 256
"""That are remembered of one upstream."""

_FRAMING: Final = frozenset(("connection", "content-encoding", "content-length", "expect", "host", "transfer-encoding"))
"""Headers that mean something to an HTTP client."""

MAX_FRAMING_BYTES: Final = 64 << 10
"""Between two bytes of a body. A chunk's size and extensions have a few; aiohttp reads them without a bound."""

CLOSED: Final = "the connection was closed before the end of the answer"


class _Protocol(ResponseHandler):
    """Closes a connection whose chunk framing does not end, and has one timer for many reads: aiohttp's own, one for
    each chunk, costs more than passing the chunk on."""

    _framing_bytes = 0
    _timer_s: float | None = None  # the timeout that the timer was set for
    _due_s = 0.0

    def _reschedule_timeout(self) -> None:
        if self._read_timeout and self._read_timeout_handle is not None and self._timer_s == self._read_timeout:
            self._due_s = self._loop.time() + self._read_timeout  # the timer, which fires before, looks at it
            return
        super()._reschedule_timeout()
        self._timer_s, self._due_s = self._read_timeout, 0.0

    def _on_read_timeout(self) -> None:
        left_s = self._due_s - self._loop.time()
        if left_s > 0:
            self._read_timeout_handle = self._loop.call_later(left_s, self._on_read_timeout)
        else:
            super()._on_read_timeout()

    def connection_lost(self, exc: BaseException | None) -> None:
        """After broken chunk framing aiohttp 3.14 closes the connection and leaves the reader of the body waiting."""
        body = self._payload
        super().connection_lost(exc)
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError(CLOSED))

    def data_received(self, data: bytes) -> None:
        body = self._payload
        before = -1 if body is None else body.total_bytes
        super().data_received(data)
        if body is None or body is not self._payload or body.total_bytes != before:
            self._framing_bytes = 0
            return
        self._framing_bytes += len(data)
        if self._framing_bytes > MAX_FRAMING_BYTES and self.transport is not None:
            self.transport.close()


class _Connector(aiohttp.TCPConnector):
    """Never reuses a connection with unexpected bytes behind an answer: they would be read as the answer to the next
    request, perhaps of another tenant. aiohttp checks when a connection becomes idle, not when it is taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = cast("partial[ResponseHandler]", partial(_Protocol, loop=self._loop))

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        while (connection := await super()._get(key, traces)) is not None:
            if connection.protocol is not None and not connection.protocol.should_close:
                break
            connection.close()
        return connection


Response = aiohttp.ClientResponse | Posted


async def read_some(response: Response) -> bytes:
    """The next bytes of an answer of Connections; empty at its end. Raises aiohttp.ClientError, also for a connection
    that was closed before the end."""
    try:
        return await response.content.readany()
    except RuntimeError:  # how aiohttp says that the connection was closed before this read
        raise aiohttp.ClientPayloadError(CLOSED) from None


def bound_idle(response: Response, timeout_s: float) -> None:
    """From now on no read waits longer for the next bytes; aiohttp.SocketTimeoutError ends it. While nothing is read,
    because the client is slow, no time counts."""
    connection = response.connection
    if connection is not None and connection.protocol is not None:
        connection.protocol.read_timeout = timeout_s
        connection.protocol.start_timeout()


class Connections:
    """The sessions of one upstream, one per lane, opened when first used."""

    def __init__(self, settings: UpstreamSettings, key: str | None, proxy: str | None = None) -> None:
        self._settings, self._api = settings, APIS[settings.dialect]
        self._proxy = proxy
        self._url = lru_cache(MAX_URLS)(self._find_url)
        self._sessions: dict[Lane, aiohttp.ClientSession] = {}  # no online request waits for a line's connection
        self._posters: dict[Lane, Poster] = {}  # of these, where nothing is in the way
        self._headers = {name.lower(): value.get_secret_value() for name, value in settings.headers.items()}
        self.secrets = Secrets(key, self._headers)
        if key:
            name = self._api.key_header
            self._headers[name] = f"Bearer {key}" if name == "authorization" else key
        self._is_plain = proxy is None and URL(settings.url).user is None and _FRAMING.isdisjoint(self._headers)

    async def send(
        self, request: UpstreamRequest, model: str, body: bytes, latest_s: float, call: Call | None = None
    ) -> Response:
        """Sends the request, whose answer has to be there as a whole at `latest_s` (monotonic clock). The caller reads
        the body (with `read_some`) and closes it. `call` is in its trace. Raises aiohttp's errors."""
        session, url = self._of(request.lane), self._url(request.path, model, request.query)
        headers = {**_HEADERS, **joined(request.headers), **self._headers}
        if call is not None:
            call.write(headers)
        total_s = latest_s - time.monotonic()
        if (poster := self._posters.get(request.lane)) and request.method == "POST" and 0 < len(body) <= AT_ONCE_BYTES:
            return await poster.post(url, headers, body, total_s)
        return await session.request(
            request.method,
            url,
            data=body if len(body) <= AT_ONCE_BYTES else io.BytesIO(body),
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=total_s, connect=self._settings.connect_timeout_s),
        )

    async def fetch(self, path: str) -> bytes:
        """The body of a GET, for the gateway itself. Raises AttemptFailed."""
        status, body = await self.call("GET", path, timeout_s=self._settings.idle_timeout_s)
        if status != 200:
            raise AttemptFailed("lost", f"{self._settings.name} answers with status {status}", again=False)
        return body

    async def call(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a request of the gateway itself, of `max_metered_bytes` at most. Raises AttemptFailed."""
        settings = self._settings
        url = settings.url + path.removeprefix(self._api.base_path)
        headers = {**_HEADERS, **self._api.headers, **self._headers}
        data = body if body is None or len(body) <= AT_ONCE_BYTES else io.BytesIO(body)
        status = 0
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._of("online").request(method, url, data=data, headers=headers, allow_redirects=False) as response,
            ):
                status = response.status
                await response.content.readexactly(settings.max_metered_bytes)
                raise AttemptFailed("lost", "it is too long", again=False)
        except asyncio.IncompleteReadError as whole:
            return status, whole.partial
        except (aiohttp.ClientError, OSError):
            raise AttemptFailed("connect", f"{settings.name} cannot be reached", again=False) from None

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    def _find_url(self, path: str, model: str, query: str) -> URL:
        path = path.replace("{model}", quote(model, safe="/")).removeprefix(self._api.base_path)
        return URL(f"{self._settings.url}{path}{f'?{query}' if query else ''}", encoded=True)

    def _of(self, lane: Lane) -> aiohttp.ClientSession:
        if lane not in self._sessions:
            settings = self._settings
            limit = settings.max_connections if lane == "online" else settings.batch_slots
            self._sessions[lane] = aiohttp.ClientSession(
                connector=_Connector(limit=limit, keepalive_timeout=60.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=self._proxy,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
                max_headers=MAX_HEADERS,
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
            )
            if self._is_plain:
                self._posters[lane] = Poster(self._sessions[lane], URL(settings.url), settings.connect_timeout_s)
        return self._sessions[lane]


def find_proxy(url: str, environ: Mapping[str, str]) -> str | None:
    """The URL of the HTTP proxy in front of an upstream, as the environment names it for other programs; it may have a
    password in it. None without one. Raises ValueError, without its text, for what is no URL of an HTTP proxy.

    `HTTPS_PROXY` is for upstreams with https, `HTTP_PROXY` for those with http, `ALL_PROXY` for both; names in small
    letters win. `NO_PROXY` lists hosts, domains (`internal`, `.internal`, `*.internal`), either with a port, addresses
    and networks (`10.0.0.0/8`) that are reached without one. aiohttp's own `trust_env` would read passwords from a
    .netrc as well, and send them to upstreams.
    """
    parts = urlsplit(url)
    written = _variable(f"{parts.scheme}_proxy", environ) or _variable("all_proxy", environ)
    direct = _variable("no_proxy", environ).replace("*.", ".")
    place = parts.netloc.rpartition("@")[2]
    if not written or proxy_bypass_environment(place, {"no": direct}) or _is_within(parts.hostname, direct.split(",")):
        return None
    proxy = written if "://" in written else f"http://{written}"
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a proxy's URL begins with http:// or https:// and a host")
    return proxy


def _is_within(host: str | None, networks: Iterable[str]) -> bool:
    with suppress(ValueError):
        address = ip_address(host or "")
        for network in networks:
            with suppress(ValueError):  # a name
                if address in ip_network(network.strip().strip("[]"), strict=False):
                    return True
    return False


def _variable(name: str, environ: Mapping[str, str]) -> str:
    return (environ.get(name) or environ.get(name.upper()) or "").strip()
