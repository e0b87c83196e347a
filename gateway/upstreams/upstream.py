"""One upstream: its settings, connections, slots and breaker, its counters, and its list of models. answer.py sends it
requests, and reports how they went.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import orjson

from engine.protocol import Lane
from gateway.breaker import Breaker
from gateway.config import QueueSettings, UpstreamSettings
from gateway.errors import DeadlineError, QueueFullError
from gateway.tasks import cancel, spawn, was_cancelled
from gateway.types import Ask, UpstreamRequest
from gateway.upstreams.apis import APIS, MAX_TOKENS
from gateway.upstreams.bodies import PrefixHistory
from gateway.upstreams.cached_prefixes import ALONE, CachedPrefixes, Shared
from gateway.upstreams.connections import AttemptFailed, Connections
from gateway.upstreams.slots import UpstreamSlots

log = logging.getLogger(__name__)

_FAILED: Final = frozenset((500, 502, 503, 504, 529))
"""Statuses that count as failures of the upstream."""

_NO_ROOM: Final = frozenset((429, 503, 529))
"""Statuses of an overloaded upstream."""

NO_ROOM_S: Final = 2.0
"""Seconds without batch lines after such a status that has no Retry-After."""

AT_ONCE_S: Final = 1e-3
"""Shorter waits for a slot are not counted."""

BATCH_WAIT_S: Final = 60.0
"""Seconds that a batch line waits for a slot; then its job is checked again, which may be cancelled by then."""

MAX_LISTED_CHARS: Final = 256

Closing = list[Callable[[], object]]
"""What ends with an answer, last in first out."""


class Upstream:
    """Made before the event loop runs; the connections are opened when they are wanted."""

    def __init__(
        self,
        settings: UpstreamSettings,
        key: str | None,
        proxy: str | None = None,
        *,
        queue: QueueSettings,
        clock: Callable[[], float] = time.monotonic,
        shared: Shared = ALONE,
    ) -> None:
        """`queue` has the limits for requests that wait where `max_in_flight` is set. `proxy` is a URL. `shared` is
        what gateways know together."""
        self.made_of = settings, key, proxy
        self.settings = settings
        self.name = settings.name
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, clock)
        self.slots = UpstreamSlots(settings.max_in_flight or None, settings.batch_slots, queue, clock)
        self.connections = Connections(settings, key, proxy)
        self.secrets = self.connections.secrets
        self.seen = PrefixHistory(settings.max_hints, settings.hint_ttl_s, clock)
        self.prefixes = CachedPrefixes(settings, self.connections, self.seen, shared)
        self.models: list[str] = []  # that it lists, for GET /v1/models alone
        self.hints = 0
        self.requests = 0
        self.unmetered = 0
        self.errors: Counter[str] = Counter()
        self._max_wait_s = queue.max_wait_s
        self._key_refused = False  # in its last answer
        self._listing: asyncio.Task[None] | None = None

    async def take_slot(self, request: UpstreamRequest, closing: Closing, *, others: bool) -> float:
        """Waits for a slot, which `closing` gives back: an online request its turn where those are bounded, within
        `queue.max_wait_s` at all upstreams together; a line of a batch what online requests leave. Returns by when, by
        the monotonic clock, the whole answer has to be there: the request's time at the upstream begins now.

        others  whether another upstream can be tried instead
        Raises AttemptFailed, and for an online request QueueFullError and DeadlineError.
        """
        online, began_s = request.lane == "online", time.monotonic()
        if self.breaker.state == "open":
            raise self.breaker_open()
        # A line has a connection with its slot.
        if online and self.slots.taken["online"] >= self.settings.max_connections + self.settings.max_waiting:
            self.errors["busy"] += 1
            raise AttemptFailed("busy", f"{self.name} has no connection left", again=False)
        wait_s = self._max_wait_s - request.trace.queue_ms / 1e3 if online else BATCH_WAIT_S
        if online and others and self.settings.overflow_s is not None:
            wait_s = min(wait_s, self.settings.overflow_s)
        ask = Ask(
            request.tenant.name,
            0,
            min(request.deadline_s, began_s + wait_s),
            lane=request.lane,
            tier=request.tier,
            priority=request.priority if online else 0,
            weight=request.tenant.weight,
        )
        try:
            await self.slots.take(ask)
        except (QueueFullError, DeadlineError) as error:
            if not online:
                raise AttemptFailed("busy", f"{self.name} has no slot for the batch lane", again=False) from None
            self.errors["full" if isinstance(error, QueueFullError) else "late"] += 1
            raise
        finally:
            now_s = time.monotonic()
            if now_s - began_s > AT_ONCE_S:
                request.trace.queue_ms += (now_s - began_s) * 1e3
        closing.append(partial(self.slots.release, ask))
        return min(request.deadline_s, now_s + self.settings.timeout_s)

    def start(self) -> None:
        """Begins to read its list of models, where it is to. Needs a running event loop."""
        if self.settings.list_models:
            self._listing = spawn(self.list_models(), f"models of upstream {self.name}")

    def succeed(self, old: Upstream) -> None:
        """Goes on to count where the one before it, with other settings, is now."""
        self.requests, self.unmetered, self.hints = old.requests, old.unmetered, old.hints
        self.errors, self.models = old.errors, old.models

    def breaker_open(self) -> AttemptFailed:
        return AttemptFailed("open", f"the circuit breaker of {self.name} is open", again=False)

    async def close(self) -> None:
        await cancel(self._listing)
        await self.prefixes.close()
        await self.connections.close()

    # -- what answer.py reports ---------------------------------------------------------------------------------------

    def answered(self, status: int, retry_after_s: float | None, lane: Lane) -> None:
        """An answer begins. A failed batch line never opens the breaker: lines are retried again and again, and online
        requests would lose their upstream."""
        if status in _NO_ROOM:
            self.slots.hold_off(NO_ROOM_S if retry_after_s is None else retry_after_s)
        if status in _FAILED and (lane == "online" or self.breaker.state != "closed"):
            self.failed(str(status))
            return
        if status >= 400:
            self.errors[str(status)] += 1
            if status not in _FAILED:
                self.breaker.succeeded()
            return
        self.breaker.began()
        if lane == "batch":
            self.slots.answered()

    def refuses_key(self, refuses: bool) -> None:
        """Whether it refuses the gateway's key now; logged once, until it accepts the key."""
        if refuses and not self._key_refused:
            log.warning("upstream %s refuses the key of the gateway (upstreams.key)", self.name)
        self._key_refused = refuses

    def has_no_usage(self, *, absurd: bool) -> None:
        """An answer could not be metered; `absurd`: with figures that no answer can have, which is logged once."""
        self.unmetered += 1
        if absurd:
            self.errors["usage"] += 1
            if self.errors["usage"] == 1:
                log.warning(
                    "upstream %s reports a usage of more than %d tokens; it is not counted", self.name, MAX_TOKENS
                )

    def failed(self, kind: str) -> None:
        """Counts a failure; logs when it opens the circuit breaker."""
        self.errors[kind] += 1
        was = self.breaker.state
        self.breaker.failed()
        if was == "closed" and self.breaker.state == "open":
            log.warning(
                "upstream %s: circuit breaker open for %.0f s after %d failures in a row (breaker_failures), last: %s",
                self.name,
                self.settings.breaker_open_s,
                self.settings.breaker_failures,
                kind,
            )

    # -- the operator -------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """For metrics and /admin/stats."""
        online, batch = self.slots.gates["online"], self.slots.gates["batch"]
        return {
            "dialect": self.settings.dialect,
            "requests": self.requests,
            "in_flight": self.slots.taken.total(),
            "waiting": online.waiting,
            "waiting_by_tenant": dict(online.by_tenant),
            "batch_in_flight": self.slots.taken["batch"],
            "batch_waiting": batch.waiting,
            "errors": dict(self.errors),
            "unmetered": self.unmetered,
            "hints": self.hints,
            "cached_contents": dict(self.prefixes.events),
            "breaker": self.breaker.state,
        }

    async def list_models(self) -> None:
        """Reads its list of models every `list_every_s`; keeps the last one on failure. Does not end."""
        failed = False
        while not was_cancelled():
            try:
                body = await self.connections.fetch(APIS[self.settings.dialect].models_path)
                self.models = model_names(body)[: self.settings.max_listed]
                failed = False
            except (AttemptFailed, ValueError) as error:
                if not failed:
                    log.warning("upstream %s does not list its models: %s", self.name, error)
                failed = True
            await asyncio.sleep(self.settings.list_every_s)


def model_names(body: bytes) -> list[str]:
    """Model names in the answer of a list endpoint, of any dialect. Raises ValueError for anything else."""
    listed: Any = orjson.loads(body)
    models = (listed.get("data") or listed.get("models")) if isinstance(listed, Mapping) else None
    if not isinstance(models, list):
        raise ValueError("its answer is no list of models")
    found = [one.get("id") or one.get("name") for one in models if isinstance(one, Mapping)]
    return [name.removeprefix("models/") for name in found if isinstance(name, str) and len(name) <= MAX_LISTED_CHARS]
