"""One upstream: how it is asked and how its answer comes in, its breaker and its counters. What goes wrong with its
connections (connections.py) becomes an error of ours here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import aiohttp

from engine.protocol import Lane
from gateway.config import UpstreamSettings
from gateway.errors import UpstreamLostError, UpstreamTimeoutError
from gateway.types import UpstreamRequest
from gateway.upstreams.breaker import Breaker
from gateway.upstreams.connections import Connections
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.headers import retry_after_s, returned
from gateway.upstreams.hidden import QuotedError
from gateway.upstreams.hints import Seen
from gateway.upstreams.metering import Meter, decoded
from gateway.upstreams.places import Places
from gateway.upstreams.watch import Watch

log = logging.getLogger(__name__)

_FAILED: Final = frozenset((500, 502, 503, 504, 529))
"""Statuses that say something about the upstream and not about the request."""

_NO_ROOM: Final = frozenset((429, 503, 529))
"""Statuses with which an upstream says that it has too much to do."""

NO_ROOM_S: Final = 2.0
"""That it gets no lines of batches then, where it does not say for how long."""


class Opened:
    """An answer whose first bytes are there. Has to be closed, and may be several times."""

    def __init__(
        self, upstream: Upstream, response: aiohttp.ClientResponse, first: bytes, meter: Meter, lane: Lane
    ) -> None:
        self._upstream = upstream
        self._lane = lane
        self._response = response
        self._first = first
        self._meter = meter
        self._encoding = _encoding(response)
        self._open = True
        self.status = response.status
        self.headers = returned(response.headers.items(), upstream.hidden.is_quoted)
        self.retry_after_s = retry_after_s(response.headers) if response.status >= 400 else None
        self.final = response.headers.get("x-should-retry", "").lower() == "false"  # the upstream wants no retry

    @property
    def is_plain_stream(self) -> bool:
        """Server-sent events that are not compressed."""
        return self._meter.is_plain_stream

    async def pieces(self, request: UpstreamRequest) -> AsyncGenerator[bytes, None]:
        """The body as it comes, metered into the request's trace; nothing of it with a key of ours. Raises
        UpstreamLostError."""
        passing = self._upstream.hidden.passing()
        async with aclosing(self._raw(request)) as pieces:
            try:
                async for piece in pieces:
                    if told := passing.feed(piece):
                        yield told
            except QuotedError:
                raise self._upstream.quoted() from None
        if rest := passing.rest():
            yield rest

    async def _raw(self, request: UpstreamRequest) -> AsyncGenerator[bytes, None]:
        try:
            watch = self._upstream.watch(self._response, request)
            piece = self._first
            try:
                while piece:
                    self._meter.feed(piece)
                    yield piece
                    piece = await self._upstream.next_piece(self._response, watch)
            finally:
                watch.close()
            if self.status < 400:
                self._upstream.breaker.succeeded()
        except UpstreamLostError as error:
            error.between_events = self._meter.between_events
            raise
        finally:
            self._settle(request)
            self.close()

    async def whole(self, request: UpstreamRequest, max_bytes: int) -> bytes:
        """The body of an error, cut to a limit. Raises AttemptFailed when it does not come, or quotes a secret of ours,
        or cannot be looked through for one."""
        body = b""
        try:
            async with aclosing(self._raw(request)) as pieces:
                async for piece in pieces:
                    body += piece
                    if len(body) >= max_bytes:
                        break
        except UpstreamLostError as error:
            raise AttemptFailed("lost", error.message, again=True) from None
        body = body[:max_bytes]
        hidden = self._upstream.hidden
        if hidden.is_any and ((plain := decoded(body, self._encoding, max_bytes)) is None or hidden.is_quoted(plain)):
            raise self._upstream.quoting()
        return body

    def close(self) -> None:
        """Gives the connection back, or closes it when the answer has not come to its end."""
        if self._open:
            self._open = False
            self._response.close()
            self._upstream.left(self._lane)

    def _settle(self, request: UpstreamRequest) -> None:
        if not request.metered or self.status >= 300:
            return
        if (tokens := self._meter.tokens()) is None:
            self._upstream.unmetered += 1
            return
        trace = request.trace
        trace.prompt_tokens, trace.completion_tokens = tokens.prompt, tokens.completion
        trace.cached_tokens = trace.told_cached_tokens = tokens.cached
        trace.cache_write_tokens, trace.lease_writes = tokens.cache_write, tokens.writes


class Upstream:
    """Made before the event loop runs; the connections are opened when they are wanted."""

    def __init__(
        self, settings: UpstreamSettings, key: str | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, clock)
        self.places = Places(settings.batch_places, clock)
        self.connections = Connections(settings, key)
        self.hidden = self.connections.hidden
        self.seen = Seen(settings.max_hints, settings.hint_ttl_s, clock)
        self.hints = 0
        self.requests = 0
        self.unmetered = 0
        self.errors: Counter[str] = Counter()
        self.in_flight: Counter[Lane] = Counter()
        self._key_refused = False  # in its last answer

    async def open(self, request: UpstreamRequest, model: str, body: bytes) -> Opened:
        """Sends it, and waits for the first bytes of the answer, of an error as well. Raises AttemptFailed, and
        UpstreamTimeoutError when the request's own time is over. The breaker is told how it went."""
        if self._is_busy(request.lane):
            self.breaker.abandoned()
            self.errors["busy"] += 1
            raise AttemptFailed("busy", f"{self.name} has no connection left", again=False)
        self.requests += 1
        self._entered(request.lane)
        try:
            opened = await self._open(request, model, body)
        except BaseException as error:
            self.left(request.lane)
            if isinstance(error, AttemptFailed):
                self.failed(error.kind)
            else:
                self.breaker.abandoned()
            raise
        self._told(opened, request.lane)
        return opened

    def _is_busy(self, lane: Lane) -> bool:
        """Lines have a place by now, and a connection with it."""
        most = self.settings.max_connections + self.settings.max_waiting
        return lane == "online" and self.in_flight[lane] >= most

    def left(self, lane: Lane) -> None:
        """A request of it that `open` sent is over."""
        self.in_flight[lane] -= 1
        if lane == "online":
            self.places.left()

    def _entered(self, lane: Lane) -> None:
        self.in_flight[lane] += 1
        if lane == "online":
            self.places.entered()

    def quoting(self) -> AttemptFailed:
        """What an answer is that has a secret of ours in it."""
        log.warning("upstream %s quotes a secret of the gateway in an answer; clients are not told", self.name)
        return AttemptFailed("key", f"{self.name} failed", again=False)

    def quoted(self) -> UpstreamLostError:
        """The same for one that has begun."""
        self.failed(self.quoting().kind)
        return UpstreamLostError(f"Upstream {self.name} failed in the middle of its answer.")

    def watch(self, response: aiohttp.ClientResponse, request: UpstreamRequest) -> Watch:
        """Over how long the pieces of an answer take."""

        def give_up() -> None:
            response.content.set_exception(TimeoutError())

        call_later = asyncio.get_running_loop().call_later
        return Watch(self.settings.idle_timeout_s, self._deadline_s(request), give_up, call_later)

    async def next_piece(self, response: aiohttp.ClientResponse, watch: Watch) -> bytes:
        """Empty at the end. Raises UpstreamLostError."""
        try:
            with watch:
                return await response.content.readany()
        except TimeoutError:
            if watch.over:
                raise self._too_late() from None
            self.failed("timeout")
            raise UpstreamTimeoutError(f"Upstream {self.name} stopped in the middle of its answer.") from None
        except (aiohttp.ClientError, OSError):
            self.failed("lost")
            raise UpstreamLostError(f"Upstream {self.name} ended in the middle of its answer.") from None

    def failed(self, kind: str) -> None:
        """Counts a failure; says in the log when the upstream is left alone from now on, once until it answers."""
        self.errors[kind] += 1
        was = self.breaker.state
        self.breaker.failed()
        if was == "closed" and self.breaker.state == "open":
            log.warning(
                "upstream %s is left alone for %.0f s: it failed again and again, the last time with %s",
                self.name,
                self.settings.breaker_open_s,
                kind,
            )

    def figures(self) -> dict[str, Any]:
        """For metrics and /admin/stats."""
        return {
            "dialect": self.settings.dialect,
            "requests": self.requests,
            "in_flight": self.in_flight.total(),
            "batch_in_flight": self.places.taken,
            "batch_waiting": self.places.waiting,
            "errors": dict(self.errors),
            "unmetered": self.unmetered,
            "hints": self.hints,
            "breaker": self.breaker.state,
        }

    async def close(self) -> None:
        await self.connections.close()

    async def _open(self, request: UpstreamRequest, model: str, body: bytes) -> Opened:
        settings = self.settings
        until_s = min(time.monotonic() + settings.first_byte_timeout_s, self._deadline_s(request))
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                response = await self.connections.post(request, model, body)
                self._check(response)
                first = await response.content.readany()
            if response.status < 400 and self.hidden.is_key_quoted(first):
                raise self.quoting()
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, aiohttp.ClientError | OSError):
                raise self._failure(error, until_s, self._deadline_s(request)) from None
            raise
        meter = Meter(
            settings.dialect,
            media_type=response.content_type,
            encoding=_encoding(response),
            max_bytes=settings.max_metered_bytes,
        )
        return Opened(self, response, first, meter, request.lane)

    def _check(self, response: aiohttp.ClientResponse) -> None:
        """An answer that is about the gateway and not for the client (its body might quote our key), or none at all."""
        refused, self._key_refused = self._key_refused, response.status == 401
        if self._key_refused:
            if not refused:  # once, until it takes the key
                log.warning("upstream %s refuses the key of the gateway (upstreams.key)", self.name)
            raise AttemptFailed("key", f"{self.name} refuses the gateway's key", again=False)
        if response.status < 200:  # another protocol, which nobody asked for
            raise AttemptFailed("lost", f"{self.name} ended without an answer", again=False)
        if 300 <= response.status < 400:
            raise AttemptFailed("redirect", f"{self.name} sends the gateway elsewhere", again=False)

    def _failure(self, error: Exception, until_s: float, deadline_s: float) -> Exception:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return AttemptFailed("connect", f"{self.name} cannot be reached", again=True)
        if isinstance(error, TimeoutError):
            if until_s == deadline_s:
                return self._too_late()
            return AttemptFailed("timeout", f"{self.name} did not begin its answer in time", again=False)
        return AttemptFailed("lost", f"{self.name} ended without an answer", again=True)

    def _too_late(self) -> UpstreamTimeoutError:
        limits = "server.request_timeout_s, upstreams.timeout_s"
        error = UpstreamTimeoutError(f"The answer of upstream {self.name} took longer than it may ({limits}).")
        error.for_good = True
        return error

    def _told(self, opened: Opened, lane: Lane) -> None:
        """A failure that a line of a batch is answered with opens nothing: it may fail each time, it is tried again and
        again, and the online lane would be left without its upstream."""
        status = opened.status
        if status in _NO_ROOM:
            self.places.hold_off(NO_ROOM_S if opened.retry_after_s is None else opened.retry_after_s)
        if status in _FAILED and (lane == "online" or self.breaker.state != "closed"):
            self.failed(str(status))
            return
        if status in _FAILED:
            self.errors[str(status)] += 1
            return
        if status >= 400:
            self.breaker.succeeded()
            self.errors[str(status)] += 1
            return
        self.breaker.began()
        if lane == "batch":
            self.places.answered()

    def _deadline_s(self, request: UpstreamRequest) -> float:
        return min(request.deadline_s, request.received_s + self.settings.timeout_s)


def _encoding(response: aiohttp.ClientResponse) -> str:
    """How its body is encoded; empty where it says nothing."""
    return response.headers.get("Content-Encoding", "").strip().lower()
