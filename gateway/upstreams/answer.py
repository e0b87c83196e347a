"""A request is sent to one upstream, and its answer read: its body as it comes, watched, metered into the request's
trace, and searched for a secret of the gateway. What goes wrong with a connection becomes an error of ours here, and
reported to upstream.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable

import aiohttp

from engine.protocol import Lane
from gateway.config import UpstreamSettings
from gateway.errors import UpstreamLostError, UpstreamTimeoutError
from gateway.types import UpstreamRequest
from gateway.upstreams.connections import AttemptFailed, read_some
from gateway.upstreams.metering import Meter, decoded
from gateway.upstreams.redaction import QuotedError, retry_after_s, visible
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

Clock = Callable[[], float]


async def open_answer(upstream: Upstream, request: UpstreamRequest, model: str, body: bytes) -> Answer:
    """Sends the request, and waits for the first bytes of the answer, of an error as well. Raises AttemptFailed, and
    UpstreamTimeoutError when the request's own time is over. The breaker's admission ends with it."""
    upstream.begin(request.lane)
    try:
        answer = await _send(upstream, request, model, body)
    except BaseException as error:
        upstream.slots.ended(request.lane)
        if isinstance(error, AttemptFailed):
            upstream.failed(error.kind)
        else:
            upstream.breaker.abandoned()
        raise
    upstream.answered(answer.status, answer.retry_after_s, request.lane)
    return answer


class Answer:
    """An answer whose first bytes are there. Has to be closed, and may be several times."""

    def __init__(self, upstream: Upstream, response: aiohttp.ClientResponse, first: bytes, lane: Lane) -> None:
        self._upstream = upstream
        self._lane = lane
        self._response = response
        self._first = first
        self._encoding = response.headers.get("Content-Encoding", "").strip().lower()
        self._open = True
        self.status = response.status
        self.headers = visible(response.headers.items(), upstream.secrets)
        self.retry_after_s = retry_after_s(response.headers) if response.status >= 400 else None
        self.final = response.headers.get("x-should-retry", "").lower() == "false"  # the upstream wants no retry

    @property
    def is_plain_stream(self) -> bool:
        """Server-sent events that are not compressed."""
        return self._response.content_type == "text/event-stream" and self._encoding in ("", "identity")

    async def chunks(self, request: UpstreamRequest, *, hides_usage: bool = False) -> AsyncGenerator[bytes, None]:
        """The body as it comes, metered into the request's trace; nothing of it with a key of ours. Ids of what the
        upstream keeps are reported before the client has them: of an answer that is no stream the last bytes wait until
        then. `hides_usage`: without the event that tells the usage. Raises UpstreamLostError."""
        upstream, secrets = self._upstream, self._upstream.secrets.filter()
        meter = self._meter(request, hides_usage=hides_usage)
        watch, last = self._watch(request), b""
        try:
            chunk = self._first
            while chunk:
                ready = secrets.feed(meter.feed(chunk))
                if meter.reads_whole:
                    ready, last = last, ready
                await self._report_ids(request, meter)
                if ready:
                    yield ready
                chunk = await self._next_chunk(watch)
            ready = last + secrets.feed(meter.end()) + secrets.rest()
            await self._report_ids(request, meter)
            if self.status < 400:
                upstream.breaker.succeeded()
            if ready:
                yield ready
        except QuotedError:
            upstream.failed(quoting(upstream.name).kind)
            lost = UpstreamLostError(f"Upstream {upstream.name} failed in the middle of its answer.")
            lost.between_events = meter.between_events
            raise lost from None
        except UpstreamLostError as error:
            error.between_events = meter.between_events
            raise
        finally:
            watch.close()
            self._settle(request, meter)
            self.close()

    async def whole(self, request: UpstreamRequest, max_bytes: int) -> bytes:
        """The body of an error, cut to a limit. Raises AttemptFailed when it does not come, or quotes a secret of ours,
        or cannot be searched for one."""
        body, chunk, watch, secrets = b"", self._first, self._watch(request), self._upstream.secrets
        try:
            while chunk and len(body) < max_bytes:
                body += chunk
                chunk = await self._next_chunk(watch)
        except UpstreamLostError as error:
            raise AttemptFailed("lost", error.message, again=True) from None
        finally:
            watch.close()
            self.close()
        body = body[:max_bytes]
        plain = decoded(body, self._encoding, max_bytes) if secrets.is_any else body
        if plain is None or secrets.is_quoted(plain):
            raise quoting(self._upstream.name)
        return body

    def close(self) -> None:
        """Gives the connection back, or closes it when the answer has not come to its end."""
        if self._open:
            self._open = False
            self._response.close()
            self._upstream.slots.ended(self._lane)

    def _meter(self, request: UpstreamRequest, *, hides_usage: bool) -> Meter:
        settings = self._upstream.settings
        return Meter(
            settings.dialect,
            media_type=self._response.content_type,
            encoding=self._encoding,
            max_bytes=settings.max_metered_bytes,
            hides_usage=hides_usage,
            finds_ids=request.made is not None and self.status == 200,
        )

    async def _report_ids(self, request: UpstreamRequest, meter: Meter) -> None:
        while meter.ids and request.made is not None:
            await request.made(self._upstream.name, meter.ids.pop(0))

    def _watch(self, request: UpstreamRequest) -> Watch:
        def give_up() -> None:
            self._response.content.set_exception(TimeoutError())

        settings = self._upstream.settings
        return Watch(settings.idle_timeout_s, deadline_s(request, settings), give_up)

    async def _next_chunk(self, watch: Watch) -> bytes:
        """Empty at the end. Raises UpstreamLostError."""
        upstream = self._upstream
        try:
            with watch:
                return await read_some(self._response)
        except TimeoutError:
            if watch.over:
                raise too_late(upstream.name) from None
            upstream.failed("timeout")
            raise UpstreamTimeoutError(f"Upstream {upstream.name} stopped in the middle of its answer.") from None
        except (aiohttp.ClientError, OSError):
            upstream.failed("lost")
            raise UpstreamLostError(f"Upstream {upstream.name} ended in the middle of its answer.") from None

    def _settle(self, request: UpstreamRequest, meter: Meter) -> None:
        if not request.metered or self.status >= 300:
            return
        trace, tokens = request.trace, meter.tokens()
        if tokens is None or tokens.is_absurd:
            self._upstream.has_no_usage(absurd=tokens is not None)
            trace.untold = True
            return
        trace.prompt_tokens, trace.completion_tokens = tokens.prompt, tokens.completion
        trace.cached_tokens = trace.reported_cached_tokens = tokens.cached
        trace.cache_write_tokens, trace.lease_writes = tokens.cache_write, tokens.writes


class Watch:
    """Over the waits for the chunks of one answer: one timer for all of them, because a timer for each costs more than
    passing the chunk on. A context manager, entered for each wait. Calls `give_up` once, when a wait has lasted for
    `idle_s`, or beyond `until_s` of the clock. Time between waits does not count: while a client reads slowly, the
    upstream is not slow."""

    def __init__(
        self, idle_s: float, until_s: float, give_up: Callable[[], None], *, clock: Clock = time.monotonic
    ) -> None:
        self._idle_s = idle_s
        self._until_s = until_s
        self._give_up = give_up
        self._clock = clock
        self._since_s: float | None = None  # when the wait began that is going on
        self._look()

    def __enter__(self) -> None:
        self._since_s = self._clock()

    def __exit__(self, *exc: object) -> None:
        self._since_s = None

    @property
    def over(self) -> bool:
        """Whether all time is over, and not that of one wait alone."""
        return self._clock() >= self._until_s

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Now, and again as soon as a wait can have lasted too long."""
        now_s = self._clock()
        since_s = now_s if self._since_s is None else self._since_s
        left_s = min(since_s + self._idle_s, self._until_s) - now_s
        if left_s <= 0 and self._since_s is not None:
            self._give_up()
            return
        self._timer = asyncio.get_running_loop().call_later(left_s if left_s > 0 else self._idle_s, self._look)


async def _send(upstream: Upstream, request: UpstreamRequest, model: str, body: bytes) -> Answer:
    latest_s = deadline_s(request, upstream.settings)
    until_s = min(time.monotonic() + upstream.settings.first_byte_timeout_s, latest_s)
    response: aiohttp.ClientResponse | None = None
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            response = await upstream.connections.send(request, model, body)
            _check(upstream, response.status)
            first = await read_some(response)
        if response.status < 400 and upstream.secrets.is_key_quoted(first):
            raise quoting(upstream.name)
    except BaseException as error:
        if response is not None:
            response.close()
        if isinstance(error, aiohttp.ClientError | OSError):
            raise _failure(upstream.name, error, until_s == latest_s) from None
        raise
    return Answer(upstream, response, first, request.lane)


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
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return AttemptFailed("connect", f"{name} cannot be reached", again=True)
    if isinstance(error, TimeoutError):
        if is_deadline:
            return too_late(name)
        return AttemptFailed("timeout", f"{name} did not begin its answer in time", again=False)
    return AttemptFailed("lost", f"{name} ended without an answer", again=True)


def deadline_s(request: UpstreamRequest, settings: UpstreamSettings) -> float:
    """By when its answer has to be there as a whole, by the monotonic clock."""
    return min(request.deadline_s, request.received_s + settings.timeout_s)


def too_late(name: str) -> UpstreamTimeoutError:
    """The error when it is not; no other upstream is tried."""
    limits = "server.request_timeout_s, upstreams.timeout_s"
    error = UpstreamTimeoutError(f"The answer of upstream {name} took longer than it may ({limits}).")
    error.for_good = True
    return error


def quoting(name: str) -> AttemptFailed:
    """The failure of an answer that has a secret of ours in it, which is in the log from now on."""
    log.warning("upstream %s quotes a secret of the gateway in an answer; it is not passed on", name)
    return AttemptFailed("key", f"{name} failed", again=False)
