"""The online lane: a bounded number of places per engine, and a bounded, fair line in front of them.

Single event loop, no locks: every change happens between two awaits. Knows nothing of prompts or of what an engine
does with a sequence; the street asks for a place, app.py tells it when an engine is gone.

    admit     a place is free and nobody waits for it: taken at once, without an await
    wait      one line per engine and tenant; a freed place goes to the next tenant in turn, oldest request first
    refuse    a line is full: QueueFullError with the time after which trying again makes sense
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from gateway.config import QueueSettings
from gateway.errors import DeadlineError, EngineLostError, QueueFullError
from gateway.types import Tenant

RATE_SAMPLES = 64  # ends of requests that the service rate is taken from
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # SDKs do not retry at all when they are told to wait for minutes


class _Hello(Protocol):
    @property
    def incarnation(self) -> str: ...

    @property
    def max_sequences(self) -> int: ...


class Engine(Protocol):
    """What the queue has to know of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def hello(self) -> _Hello: ...


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What /metrics and /admin/stats show of the queue."""

    waiting: int
    in_flight: dict[str, int]  # by engine name
    waiting_by_tenant: dict[str, int]
    admitted: int  # since the start, as are the next three
    refused: int
    expired: int
    abandoned: int  # waiting requests whose client left


class OnlineQueue:
    """street.Queue with the limits of [queue]."""

    def __init__(self, settings: QueueSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._engines: dict[str, _Line] = {}  # by incarnation; only those with places taken or requests waiting
        self._waiting = 0
        self._waiting_by_tenant: Counter[str] = Counter()
        self._admitted = self._refused = self._expired = self._abandoned = 0

    def place(self, engine: Engine, tenant: Tenant, deadline_s: float) -> _Place:
        """An async context manager around the time in which the engine works on a request.

        Entering raises QueueFullError at once, DeadlineError after waiting, EngineLostError when `forget` is called
        for the engine. Whatever way the block is left, the place is given back exactly once.
        """
        return _Place(self, engine, tenant.name, deadline_s)

    def forget(self, incarnation: str) -> None:
        """The engine is gone: whoever waits for it gets EngineLostError now. Places taken are given back as usual."""
        if line := self._engines.get(incarnation):
            line.lost = True
            for tenant, waiters in list(line.tenants.items()):
                for waiter in list(waiters):
                    if not waiter.done():  # a cancelled one takes itself out
                        self._leave(line, tenant, waiter)
                        waiter.set_exception(EngineLostError(f"Engine {line.name} went away before it had a place."))

    def status(self) -> QueueStatus:
        in_flight: Counter[str] = Counter()
        for line in self._engines.values():
            in_flight[line.name] += line.taken
        return QueueStatus(
            waiting=self._waiting,
            in_flight=dict(in_flight),
            waiting_by_tenant=dict(self._waiting_by_tenant),
            admitted=self._admitted,
            refused=self._refused,
            expired=self._expired,
            abandoned=self._abandoned,
        )

    def waiting_for(self, incarnation: str) -> int:
        """Requests that wait for a place at one engine; 0 when it is not known."""
        line = self._engines.get(incarnation)
        return sum(map(len, line.tenants.values())) if line else 0

    # -- what _Place does -----------------------------------------------------------------------------------------

    async def _admit(self, engine: Engine, tenant: str, deadline_s: float) -> _Line:
        line = self._line(engine)
        if line.lost:
            raise EngineLostError(f"Engine {line.name} went away.")
        if line.taken < line.places and not line.tenants:
            line.taken += 1
            self._admitted += 1
            return line
        self._check_limits(line, tenant)
        await self._wait(line, tenant, deadline_s)
        return line

    def _line(self, engine: Engine) -> _Line:
        incarnation = engine.hello.incarnation
        if (line := self._engines.get(incarnation)) is None:
            places = self._settings.places_per_engine or 2 * engine.hello.max_sequences
            line = self._engines[incarnation] = _Line(engine.name, incarnation, places)
        return line

    def _check_limits(self, line: _Line, tenant: str) -> None:
        limits, theirs = self._settings, self._waiting_by_tenant[tenant]
        if self._waiting < limits.max_waiting and theirs < limits.max_waiting_per_tenant:
            return
        self._refused += 1
        retry_after_s = line.wait_s(self._clock())
        mine = theirs >= limits.max_waiting_per_tenant
        count, setting = (theirs, "queue.max_waiting_per_tenant") if mine else (self._waiting, "queue.max_waiting")
        raise QueueFullError(
            f"Too many requests are waiting ({count}, the limit of {setting}). "
            f"Please try again in {math.ceil(retry_after_s)}s.",
            retry_after_s=retry_after_s,
        )

    async def _wait(self, line: _Line, tenant: str, deadline_s: float) -> None:
        loop, now = asyncio.get_running_loop(), self._clock()
        timeout_s = min(deadline_s - now, self._settings.max_wait_s)
        waiter: asyncio.Future[None] = loop.create_future()
        line.tenants.setdefault(tenant, {})[waiter] = None
        self._waiting += 1
        self._waiting_by_tenant[tenant] += 1
        timer = loop.call_later(max(timeout_s, 0.0), self._expire, line, tenant, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(line)  # the place came in the same turn of the loop in which the client left
            else:
                self._abandoned += self._leave(line, tenant, waiter)
            raise
        finally:
            timer.cancel()

    def _expire(self, line: _Line, tenant: str, waiter: asyncio.Future[None]) -> None:
        if not waiter.done() and self._leave(line, tenant, waiter):
            self._expired += 1
            waiter.set_exception(
                DeadlineError(
                    "The server is busy: no place became free in time (queue.max_wait_s or the request's own limit).",
                    retry_after_s=line.wait_s(self._clock()),
                )
            )

    def _leave(self, line: _Line, tenant: str, waiter: asyncio.Future[None]) -> bool:
        """Takes a waiter out of its line. False when it was not in it any more."""
        waiters = line.tenants.get(tenant)
        if waiters is None or waiter not in waiters:
            return False
        del waiters[waiter]
        if not waiters:
            del line.tenants[tenant]
        self._left(tenant)
        self._drop_if_idle(line)
        return True

    def _left(self, tenant: str) -> None:
        self._waiting -= 1
        self._waiting_by_tenant[tenant] -= 1
        if not self._waiting_by_tenant[tenant]:
            del self._waiting_by_tenant[tenant]

    def _release(self, line: _Line) -> None:
        line.taken -= 1
        line.ends.append(self._clock())
        while line.tenants and line.taken < line.places:
            tenant, waiter = line.next_in_turn()
            self._left(tenant)
            if not waiter.done():  # a cancelled one has not run yet to take itself out
                line.taken += 1
                self._admitted += 1
                waiter.set_result(None)
            else:
                self._abandoned += 1
        self._drop_if_idle(line)

    def _drop_if_idle(self, line: _Line) -> None:
        # The service rate goes with it: an idle engine says nothing about how long a full line will take.
        if not line.taken and not line.tenants and self._engines.get(line.incarnation) is line:
            del self._engines[line.incarnation]


@dataclass(slots=True, eq=False)
class _Line:
    """One engine's places and who waits for them."""

    name: str
    incarnation: str
    places: int
    taken: int = 0
    lost: bool = False
    # tenant -> its waiters, both in the order of their turns; a dict is an ordered set with quick removal
    tenants: dict[str, dict[asyncio.Future[None], None]] = field(default_factory=dict)
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))

    def next_in_turn(self) -> tuple[str, asyncio.Future[None]]:
        """Removes and returns the oldest waiter of the next tenant, who goes to the end of the round."""
        tenant, waiters = next(iter(self.tenants.items()))
        waiter = next(iter(waiters))
        del waiters[waiter], self.tenants[tenant]
        if waiters:
            self.tenants[tenant] = waiters
        return tenant, waiter

    def wait_s(self, now: float) -> float:
        """How long the line would take to empty at the rate of the last ends."""
        waiting = sum(map(len, self.tenants.values()))
        if len(self.ends) < 2:
            return MIN_RETRY_S
        rate = len(self.ends) / max(now - self.ends[0], 1e-3)
        return min(max(waiting / rate, MIN_RETRY_S), MAX_RETRY_S)


class _Place:
    """See OnlineQueue.place. Not reusable."""

    __slots__ = ("_ask", "_line", "_queue")

    def __init__(self, queue: OnlineQueue, *ask: Any) -> None:
        self._queue = queue
        self._ask = ask
        self._line: _Line | None = None

    async def __aenter__(self) -> None:
        self._line = await self._queue._admit(*self._ask)  # noqa: SLF001 - one object in two halves

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        line, self._line = self._line, None
        if line is not None:
            self._queue._release(line)  # noqa: SLF001
