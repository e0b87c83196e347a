"""An answer of an upstream whose first bytes are there: its body as it comes, watched, metered into the request's
trace, and looked through for a secret of ours. upstream.py is told how it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import aiohttp

from engine.protocol import Lane
from gateway.config import UpstreamSettings
from gateway.errors import UpstreamLostError, UpstreamTimeoutError
from gateway.types import UpstreamRequest
from gateway.upstreams.connections import read_some
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.headers import retry_after_s, returned
from gateway.upstreams.hidden import Hidden, QuotedError
from gateway.upstreams.metering import Meter, decoded
from gateway.upstreams.watch import Watch

log = logging.getLogger(__name__)


class Source(Protocol):
    """Whose answer it is."""

    @property
    def settings(self) -> UpstreamSettings: ...

    @property
    def hidden(self) -> Hidden: ...

    def succeeded(self) -> None:
        """It came to its end, and is no error."""
        ...

    def failed(self, kind: str) -> None:
        """It did not come to its end."""
        ...

    def told_no_usage(self, *, absurd: bool) -> None:
        """It came, and could not be metered; `absurd`: its figures cannot be those of one answer."""
        ...

    def left(self, lane: Lane) -> None:
        """It is closed; called once."""
        ...


class Opened:
    """Has to be closed, and may be several times."""

    def __init__(self, source: Source, response: aiohttp.ClientResponse, first: bytes, lane: Lane) -> None:
        settings = source.settings
        self._source = source
        self._settings = settings
        self._lane = lane
        self._response = response
        self._first = first
        self._encoding = response.headers.get("Content-Encoding", "").strip().lower()
        self._meter = Meter(
            settings.dialect,
            media_type=response.content_type,
            encoding=self._encoding,
            max_bytes=settings.max_metered_bytes,
        )
        self._open = True
        self.status = response.status
        self.headers = returned(response.headers.items(), source.hidden.is_quoted)
        self.retry_after_s = retry_after_s(response.headers) if response.status >= 400 else None
        self.final = response.headers.get("x-should-retry", "").lower() == "false"  # the upstream wants no retry

    @property
    def is_stream(self) -> bool:
        """Server-sent events."""
        return self._meter.is_stream

    @property
    def is_plain_stream(self) -> bool:
        """Server-sent events that are not compressed."""
        return self._meter.is_plain_stream

    async def pieces(self, request: UpstreamRequest) -> AsyncGenerator[bytes, None]:
        """The body as it comes, metered into the request's trace; nothing of it with a key of ours. Raises
        UpstreamLostError."""
        passing = self._source.hidden.passing()
        async with aclosing(self._raw(request)) as pieces:
            try:
                async for piece in pieces:
                    if told := passing.feed(piece):
                        yield told
            except QuotedError:
                self._source.failed(quoting(self._settings.name).kind)
                raise UpstreamLostError(f"Upstream {self._settings.name} failed in the middle of its answer.") from None
        if rest := passing.rest():
            yield rest

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
        hidden = self._source.hidden
        if hidden.is_any and ((plain := decoded(body, self._encoding, max_bytes)) is None or hidden.is_quoted(plain)):
            raise quoting(self._settings.name)
        return body

    def close(self) -> None:
        """Gives the connection back, or closes it when the answer has not come to its end."""
        if self._open:
            self._open = False
            self._response.close()
            self._source.left(self._lane)

    async def _raw(self, request: UpstreamRequest) -> AsyncGenerator[bytes, None]:
        try:
            watch = self._watch(request)
            piece = self._first
            try:
                while piece:
                    self._meter.feed(piece)
                    yield piece
                    piece = await self._next_piece(watch)
            finally:
                watch.close()
            if self.status < 400:
                self._source.succeeded()
        except UpstreamLostError as error:
            error.between_events = self._meter.between_events
            raise
        finally:
            self._settle(request)
            self.close()

    def _watch(self, request: UpstreamRequest) -> Watch:
        """Over how long the pieces take."""

        def give_up() -> None:
            self._response.content.set_exception(TimeoutError())

        call_later = asyncio.get_running_loop().call_later
        return Watch(self._settings.idle_timeout_s, deadline_s(request, self._settings), give_up, call_later)

    async def _next_piece(self, watch: Watch) -> bytes:
        """Empty at the end. Raises UpstreamLostError."""
        name = self._settings.name
        try:
            with watch:
                return await read_some(self._response)
        except TimeoutError:
            if watch.over:
                raise too_late(name) from None
            self._source.failed("timeout")
            raise UpstreamTimeoutError(f"Upstream {name} stopped in the middle of its answer.") from None
        except (aiohttp.ClientError, OSError):
            self._source.failed("lost")
            raise UpstreamLostError(f"Upstream {name} ended in the middle of its answer.") from None

    def _settle(self, request: UpstreamRequest) -> None:
        if not request.metered or self.status >= 300:
            return
        if (tokens := self._meter.tokens()) is None or tokens.is_absurd:
            self._source.told_no_usage(absurd=tokens is not None)
            request.trace.untold = True
            return
        trace = request.trace
        trace.prompt_tokens, trace.completion_tokens = tokens.prompt, tokens.completion
        trace.cached_tokens = trace.told_cached_tokens = tokens.cached
        trace.cache_write_tokens, trace.lease_writes = tokens.cache_write, tokens.writes


def deadline_s(request: UpstreamRequest, settings: UpstreamSettings) -> float:
    """By when its answer has to be there as a whole, by the monotonic clock."""
    return min(request.deadline_s, request.received_s + settings.timeout_s)


def too_late(name: str) -> UpstreamTimeoutError:
    """What it is when it is not; nobody else is asked."""
    limits = "server.request_timeout_s, upstreams.timeout_s"
    error = UpstreamTimeoutError(f"The answer of upstream {name} took longer than it may ({limits}).")
    error.for_good = True
    return error


def quoting(name: str) -> AttemptFailed:
    """What an answer is that has a secret of ours in it, which is in the log from now on."""
    log.warning("upstream %s quotes a secret of the gateway in an answer; clients are not told", name)
    return AttemptFailed("key", f"{name} failed", again=False)
