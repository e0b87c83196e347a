"""One upstream: it is asked until its answer begins (opened.py has what follows), and its breaker and its counters are
told. What goes wrong with its connections (connections.py) becomes an error of ours here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from engine.protocol import Lane
from gateway.breaker import Breaker
from gateway.config import QueueSettings, UpstreamSettings
from gateway.types import UpstreamRequest
from gateway.upstreams.batch_slots import BatchSlots
from gateway.upstreams.connections import Connections, read_some
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.hints import Seen
from gateway.upstreams.online_slots import OnlineSlots
from gateway.upstreams.opened import Opened, deadline_s, quoting, too_late
from gateway.upstreams.usage import MAX_TOKENS

log = logging.getLogger(__name__)

_FAILED: Final = frozenset((500, 502, 503, 504, 529))
"""Statuses that say something about the upstream and not about the request."""

_NO_ROOM: Final = frozenset((429, 503, 529))
"""Statuses with which an upstream says that it has too much to do."""

NO_ROOM_S: Final = 2.0
"""That it gets no lines of batches then, where it does not say for how long."""


class Upstream:
    """Made before the event loop runs; the connections are opened when they are wanted."""

    def __init__(
        self,
        settings: UpstreamSettings,
        key: str | None,
        *,
        queue: QueueSettings,
        clock: Callable[[], float] = time.monotonic,
        proxy: str | None = None,
    ) -> None:
        """`queue` has the limits for those who wait where `max_in_flight` is set. `proxy` is a URL."""
        self.settings = settings
        self.name = settings.name
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, clock)
        self.online = OnlineSlots(settings.max_in_flight, queue, clock) if settings.max_in_flight else None
        self.batch_slots = BatchSlots(settings.batch_slots, clock, self.online)
        self.connections = Connections(settings, key, proxy)
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
            self.batch_slots.left()

    def _entered(self, lane: Lane) -> None:
        self.in_flight[lane] += 1
        if lane == "online":
            self.batch_slots.entered()

    def succeeded(self) -> None:
        """An answer came to its end."""
        self.breaker.succeeded()

    def told_no_usage(self, *, absurd: bool) -> None:
        """An answer could not be metered; `absurd`: its figures cannot be those of one answer. The log says it once."""
        self.unmetered += 1
        if absurd:
            self.errors["usage"] += 1
            if self.errors["usage"] == 1:
                log.warning(
                    "upstream %s reports a usage of more than %d tokens; it is not counted", self.name, MAX_TOKENS
                )

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
        waiting = {} if self.online is None else self.online.waiting
        return {
            "dialect": self.settings.dialect,
            "requests": self.requests,
            "in_flight": self.in_flight.total(),
            "waiting": sum(waiting.values()),
            "waiting_by_tenant": waiting,
            "batch_in_flight": self.batch_slots.taken,
            "batch_waiting": self.batch_slots.waiting,
            "errors": dict(self.errors),
            "unmetered": self.unmetered,
            "hints": self.hints,
            "breaker": self.breaker.state,
        }

    async def close(self) -> None:
        await self.connections.close()

    async def _open(self, request: UpstreamRequest, model: str, body: bytes) -> Opened:
        latest_s = deadline_s(request, self.settings)
        until_s = min(time.monotonic() + self.settings.first_byte_timeout_s, latest_s)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                response = await self.connections.send(request, model, body)
                self._check(response)
                first = await read_some(response)
            if response.status < 400 and self.hidden.is_key_quoted(first):
                raise quoting(self.name)
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, aiohttp.ClientError | OSError):
                raise self._failure(error, until_s, latest_s) from None
            raise
        return Opened(self, response, first, request.lane)

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

    def _failure(self, error: Exception, until_s: float, latest_s: float) -> Exception:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return AttemptFailed("connect", f"{self.name} cannot be reached", again=True)
        if isinstance(error, TimeoutError):
            if until_s == latest_s:
                return too_late(self.name)
            return AttemptFailed("timeout", f"{self.name} did not begin its answer in time", again=False)
        return AttemptFailed("lost", f"{self.name} ended without an answer", again=True)

    def _told(self, opened: Opened, lane: Lane) -> None:
        """A failure that a line of a batch is answered with opens nothing: it may fail each time, it is tried again and
        again, and the online lane would be left without its upstream."""
        status = opened.status
        if status in _NO_ROOM:
            self.batch_slots.hold_off(NO_ROOM_S if opened.retry_after_s is None else opened.retry_after_s)
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
            self.batch_slots.answered()
