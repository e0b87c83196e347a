"""A request is sent to one upstream, and its answer read: its body as it comes, metered into the request's trace, and
searched for a secret of the gateway. What goes wrong with a connection becomes an error of ours here, and is reported
to upstream.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

import aiohttp

from gateway.errors import UpstreamLostError, UpstreamTimeoutError
from gateway.propagation import Call, begin_call
from gateway.types import UpstreamRequest
from gateway.upstreams.connections import AttemptFailed, Response, bound_idle, read_some
from gateway.upstreams.metering import Meter
from gateway.upstreams.redaction import QuotedError, retry_after_s, visible
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

_DECODED = ("gzip", "deflate", "br", "zstd")
"""Encodings that aiohttp takes off. No request wants them; some hosts use them all the same."""


async def open_answer(upstream: Upstream, request: UpstreamRequest, model: str, body: bytes, latest_s: float) -> Answer:
    """Sends the request, and waits for the first bytes of the answer, of an error as well. Raises AttemptFailed, and
    UpstreamTimeoutError when its time is over (`latest_s`). The breaker's admission ends with it."""
    upstream.requests += 1
    call = begin_call(upstream.name, upstream.settings.dialect, model)
    try:
        answer = await _send(upstream, request, model, body, latest_s, call)
    except BaseException as error:
        if call is not None:
            call.failed(error, error.kind if isinstance(error, AttemptFailed) else "")
            call.end()
        if isinstance(error, AttemptFailed):
            upstream.failed(error.kind)
        else:
            upstream.breaker.abandoned()
        raise
    upstream.answered(answer.status, answer.retry_after_s, request.lane)
    return answer


async def _send(
    upstream: Upstream, request: UpstreamRequest, model: str, body: bytes, latest_s: float, call: Call | None
) -> Answer:
    now_s = time.monotonic()
    until_s = min(now_s + upstream.settings.first_byte_timeout_s, latest_s)
    response: Response | None = None
    try:
        async with asyncio.timeout(max(0.0, until_s - now_s)):
            response = await upstream.connections.send(request, model, body, latest_s, call)
            _check(upstream, response.status)
            first = await read_some(response)
        return Answer(upstream, response, first, request, call)
    except BaseException as error:
        if response is not None:
            response.close()
        if isinstance(error, QuotedError | aiohttp.ClientError | OSError):
            raise _failure(upstream.name, error, until_s == latest_s) from None
        raise


class Answer:
    """An answer whose first bytes are there. Has to be closed, and may be several times."""

    def __init__(
        self, upstream: Upstream, response: Response, first: bytes, request: UpstreamRequest, call: Call | None = None
    ) -> None:
        """Raises QuotedError."""
        self._call = call
        self._upstream = upstream
        self._request = request
        self._response = response
        self.status = response.status
        if call is not None:
            call.status = self.status
        self._filter = upstream.secrets.filter()
        self._first = self._filter.feed(first) if self.status < 400 else first
        self.headers = visible(response.headers.items(), upstream.secrets)
        if response.headers.get("Content-Encoding", "").lower() in _DECODED:
            self.headers = without(self.headers, "content-encoding", "content-length")
        self.retry_after_s = retry_after_s(response.headers) if self.status >= 400 else None
        self.final = response.headers.get("x-should-retry", "").lower() == "false"  # the upstream wants no retry
        bound_idle(response, upstream.settings.idle_timeout_s)

    @property
    def is_stream(self) -> bool:
        """Server-sent events."""
        return self._response.content_type == "text/event-stream"

    async def chunks(self, *, hides_usage: bool = False) -> AsyncGenerator[bytes, None]:
        """The body as it comes, metered into the request's trace; nothing of it with a key of ours. Ids of what the
        upstream keeps are reported before the client has them: of an answer that is no stream the last bytes wait until
        then. `hides_usage`: without the event that tells the usage. Raises UpstreamLostError."""
        upstream, request, settings = self._upstream, self._request, self._upstream.settings
        meter = Meter(
            settings.dialect,
            is_stream=self.is_stream,
            max_bytes=settings.max_metered_bytes,
            hides_usage=hides_usage,
            finds_ids=request.on_created is not None and self.status == 200,
        )
        ready, last = meter.feed(self._first), b""
        try:
            while True:
                if meter.reads_whole:
                    ready, last = last, ready
                if meter.ids:
                    await self._report_ids(meter)
                if ready:
                    yield ready
                if not (chunk := await self._next_chunk()):
                    break
                ready = meter.feed(self._filter.feed(chunk))
            ready = last + meter.feed(self._filter.rest()) + meter.end()
            if meter.ids:
                await self._report_ids(meter)
            if self.status < 400:
                upstream.breaker.succeeded()
            if ready:
                yield ready
        except QuotedError:
            upstream.failed(quoting(upstream.name).kind)
            lost = UpstreamLostError(f"Upstream {upstream.name} failed in the middle of its answer.")
            lost.between_events = meter.between_events
            self._went_wrong(lost)
            raise lost from None
        except UpstreamLostError as error:
            error.between_events = meter.between_events
            self._went_wrong(error)
            raise
        finally:
            self._settle(meter)
            self.close()

    async def whole(self, max_bytes: int) -> bytes:
        """The body of an error, cut to a limit. Raises AttemptFailed when it does not come, or quotes a secret of
        ours."""
        body, chunk = b"", self._first
        try:
            while chunk and len(body) < max_bytes:
                body += chunk
                chunk = await self._next_chunk()
        except UpstreamLostError as error:
            raise AttemptFailed("lost", error.message, again=True) from None
        finally:
            self.close()
        if self._upstream.secrets.is_quoted(body):
            raise quoting(self._upstream.name)
        return body[:max_bytes]

    def close(self) -> None:
        """Gives the connection back, or closes it when the answer has not come to its end."""
        self._response.close()
        if self._call is not None:
            self._call.end()

    def _went_wrong(self, error: UpstreamLostError) -> None:
        if self._call is not None:
            self._call.failed(error)

    async def _report_ids(self, meter: Meter) -> None:
        while meter.ids and self._request.on_created is not None:
            await self._request.on_created(self._upstream.name, meter.ids.pop(0))

    async def _next_chunk(self) -> bytes:
        """Empty at the end. Raises UpstreamLostError."""
        if self._response.content.at_eof():
            return b""
        upstream = self._upstream
        try:
            return await read_some(self._response)
        except aiohttp.SocketTimeoutError:
            upstream.failed("timeout")
            raise UpstreamTimeoutError(f"Upstream {upstream.name} stopped in the middle of its answer.") from None
        except TimeoutError:
            raise too_late(upstream.name) from None
        except (aiohttp.ClientError, OSError):
            upstream.failed("lost")
            raise UpstreamLostError(f"Upstream {upstream.name} ended in the middle of its answer.") from None

    def _settle(self, meter: Meter) -> None:
        if not self._request.metered or self.status >= 300:
            return
        trace, tokens = self._request.trace, meter.tokens()
        if tokens is None or tokens.is_absurd:
            self._upstream.has_no_usage(absurd=tokens is not None)
            trace.unmetered = True
            return
        tokens = tokens.with_created(*trace.created)
        trace.prompt_tokens, trace.completion_tokens = tokens.prompt, tokens.completion
        trace.reasoning_tokens = tokens.reasoning
        trace.cached_tokens = trace.reported_cached_tokens = tokens.cached
        trace.cache_write_tokens, trace.lease_writes = tokens.cache_write, tokens.writes


def without(headers: tuple[tuple[str, str], ...], *names: str) -> tuple[tuple[str, str], ...]:
    """The headers but these, which are named in small letters."""
    return tuple(item for item in headers if item[0].lower() not in names)


def _check(upstream: Upstream, status: int) -> None:
    """Raises AttemptFailed for an answer that is about the gateway and not for the client (its body might quote our
    key), or none at all."""
    upstream.refuses_key(status == 401)
    if status == 401:
        raise AttemptFailed("key", f"{upstream.name} refuses the gateway's key", again=False)
    if status < 200:  # another protocol, for which there was no request
        raise AttemptFailed("lost", f"{upstream.name} ended without an answer", again=False)
    if 300 <= status < 400:
        raise AttemptFailed("redirect", f"{upstream.name} sends the gateway elsewhere", again=False)


def _failure(name: str, error: Exception, is_deadline: bool) -> Exception:
    if isinstance(error, QuotedError):
        return quoting(name)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return AttemptFailed("connect", f"{name} cannot be reached", again=True)
    if isinstance(error, TimeoutError):
        if is_deadline:
            return too_late(name)
        return AttemptFailed("timeout", f"{name} did not begin its answer in time", again=False)
    return AttemptFailed("lost", f"{name} ended without an answer", again=True)


def too_late(name: str) -> UpstreamTimeoutError:
    """The error when all the time that an answer may take is over; no other upstream is tried."""
    limits = "server.request_timeout_s, upstreams.timeout_s"
    error = UpstreamTimeoutError(f"The answer of upstream {name} took longer than it may ({limits}).")
    error.for_good = True
    return error


def quoting(name: str) -> AttemptFailed:
    """The failure of an answer that has a secret of ours in it, which is in the log from now on."""
    log.warning("upstream %s quotes a secret of the gateway in an answer; it is not passed on", name)
    return AttemptFailed("key", f"{name} failed", again=False)
