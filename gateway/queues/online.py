"""The online lane: a bounded number of places per engine, and a bounded, fair line in front of all of them.

Single event loop, no locks: every change happens between two awaits. lane.py says who goes where; this gives it a
clock, futures, limits and deadlines. The street asks for a place; app.py has it told when an engine has joined, is
gone, or has said how busy it is.

    admit     a place is free and nobody is before this request: taken at once, without an await
    wait      requests for one model wait together, whatever engine they will go to
    refuse    too many wait: QueueFullError with the time after which trying again makes sense
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar

from engine.protocol import Hello, Load
from gateway.config import QueueSettings
from gateway.errors import DeadlineError, EngineLostError, KvasirError, QueueFullError
from gateway.queues.lane import Lane, Router, Seat, Waiter
from gateway.types import Allowance, Ask

RATE_SAMPLES: Final = 64
"""Ends of requests that the service rate is taken from."""

MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
"""SDKs do not retry at all when they are told to wait for minutes."""


class Engine(Protocol):
    """What the queue has to know of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...


E = TypeVar("E", bound=Engine)


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


@dataclass(slots=True, eq=False)
class _Waiter(Waiter):
    """A request, and the place that it gets."""

    seated: asyncio.Future[Seat[Any]] | None = None  # None before it turns out that it has to wait


@dataclass(slots=True, eq=False)
class _Line(Generic[E]):
    """The lane of engines that are alike, and how quickly it moves."""

    lane: Lane[E, _Waiter]
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))

    def wait_s(self, waiting: int, now: float) -> float:
        """How long that many requests would take at the rate of the last ends."""
        if len(self.ends) < 2:
            return MIN_RETRY_S
        rate = len(self.ends) / max(now - self.ends[0], 1e-3)
        return min(max(waiting / rate, MIN_RETRY_S), MAX_RETRY_S)


class OnlineQueue(Generic[E]):
    """street.Queue with the limits of [queue]."""

    def __init__(self, settings: QueueSettings, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._router = router
        self._clock = clock
        self._lines: dict[Hashable, _Line[E]] = {}  # those that have engines
        self._line_of: dict[str, _Line[E]] = {}  # by incarnation
        self._waiting_by_tenant: Counter[str] = Counter()
        self._waiting = 0
        self._admitted = self._refused = self._expired = self._abandoned = 0

    def place(self, engines: Sequence[E], ask: Ask) -> _Place[E]:
        """An async context manager around the time in which an engine works on a request. Entering it returns the
        engine: one of `engines`, or one like them that joined while the request waited.

        engines  all that serve its model now, alike in what tokens and blocks mean; at least one

        Entering raises QueueFullError at once, DeadlineError after waiting, EngineLostError when there is no engine
        left that it could have. However the block is left, the place is given back exactly once.
        """
        return _Place(self, engines, ask)

    def forget(self, incarnation: str) -> None:
        """The engine is gone. Who can go nowhere else gets EngineLostError now; places taken are given back as ever."""
        self._line_of.pop(incarnation, None)
        for key, line in list(self._lines.items()):
            if (seat := line.lane.seats.pop(incarnation, None)) is None:
                continue
            for waiter in list(line.lane):
                if not line.lane.seats or waiter.ask.only == incarnation:
                    self._fail(line, waiter, EngineLostError(f"Engine {seat.engine.name} went away."))
            if line.lane.seats:
                self._assign(line)
            else:
                del self._lines[key]

    def heard(self, engine: E) -> None:
        """An engine has joined, or said how busy it is: who waited for that may be sent to it."""
        if not self._waiting or (line := self._lines.get(_alike(engine.hello))) is None:
            return
        known = line.lane.seats.get(engine.hello.incarnation)
        if known is None:
            self._add_seat(line, engine)
        if known is None or known.held_back:
            self._assign(line)

    def status(self) -> QueueStatus:
        in_flight: Counter[str] = Counter()
        for line in self._lines.values():
            for seat in line.lane.seats.values():
                if seat.taken:
                    in_flight[seat.engine.name] += seat.taken
        return QueueStatus(
            waiting=self._waiting,
            in_flight=dict(in_flight),
            waiting_by_tenant=dict(self._waiting_by_tenant),
            admitted=self._admitted,
            refused=self._refused,
            expired=self._expired,
            abandoned=self._abandoned,
        )

    def allowance(self, tenant: str) -> Allowance:
        """The narrower of the tenant's own limit and that of all."""
        limits, now = self._settings, self._clock()
        theirs = limits.max_waiting_per_tenant - self._waiting_by_tenant.get(tenant, 0)
        remaining = max(min(theirs, limits.max_waiting - self._waiting), 0)
        waits = [line.wait_s(len(line.lane), now) for line in self._lines.values() if len(line.lane)]
        return Allowance(min(limits.max_waiting_per_tenant, limits.max_waiting), remaining, max(waits, default=0.0))

    @property
    def waiting(self) -> int:
        return self._waiting

    # -- what _Place does -----------------------------------------------------------------------------------------

    async def _admit(self, engines: Sequence[E], ask: Ask) -> tuple[_Line[E], Seat[E]]:
        line = self._line(engines)
        if ask.only is not None and ask.only not in line.lane.seats:
            raise EngineLostError("The engine that has the other answers to this prompt went away.")
        waiter = _Waiter(ask, self._clock())
        mine: Seat[E] | None = None
        if sent := line.lane.enter(waiter):
            mine = next((seat for other, seat in sent if other is waiter), None)
            self._admitted += mine is not None
            if mine is None or len(sent) > 1:
                self._seat(line, [(other, seat) for other, seat in sent if other is not waiter])
        return line, mine or await self._wait(line, waiter)

    def _line(self, engines: Sequence[E]) -> _Line[E]:
        line = self._line_of.get(engines[0].hello.incarnation)
        if line is None:
            key = _alike(engines[0].hello)
            if (line := self._lines.get(key)) is None:
                line = self._lines[key] = _Line(Lane(self._settings, self._router))
        seats = line.lane.seats
        for engine in engines:
            if (seat := seats.get(engine.hello.incarnation)) is None:
                self._add_seat(line, engine)
            else:
                seat.engine = engine
        return line

    def _add_seat(self, line: _Line[E], engine: E) -> None:
        seats, hello = line.lane.seats, engine.hello
        places = self._settings.places_per_engine or 2 * hello.max_sequences
        # One that is new has prefilled nothing, and would get everything that is equal anywhere until it has.
        given = min((seat.given_tokens for seat in seats.values()), default=0.0)
        self._line_of[hello.incarnation] = line
        seats[hello.incarnation] = Seat(engine, hello.incarnation, places, given_tokens=given)

    def _refusal(self, line: _Line[E], tenant: str) -> QueueFullError | None:
        limits, theirs = self._settings, self._waiting_by_tenant[tenant]
        if self._waiting < limits.max_waiting and theirs < limits.max_waiting_per_tenant:
            return None
        retry_after_s = line.wait_s(len(line.lane) - 1, self._clock())
        mine = theirs >= limits.max_waiting_per_tenant
        count, setting = (theirs, "queue.max_waiting_per_tenant") if mine else (self._waiting, "queue.max_waiting")
        return QueueFullError(
            f"Too many requests are waiting ({count}, the limit of {setting}). "
            f"Please try again in {math.ceil(retry_after_s)}s.",
            retry_after_s=retry_after_s,
        )

    async def _wait(self, line: _Line[E], waiter: _Waiter) -> Seat[E]:
        tenant = waiter.ask.tenant
        if (refusal := self._refusal(line, tenant)) is not None:
            line.lane.remove(waiter)
            self._refused += 1
            raise refusal
        loop = asyncio.get_running_loop()
        timeout_s = min(waiter.ask.deadline_s - waiter.arrived_s, self._settings.max_wait_s)
        seated: asyncio.Future[Seat[E]] = loop.create_future()
        waiter.seated = seated
        self._waiting += 1
        self._waiting_by_tenant[tenant] += 1
        timer = loop.call_later(max(timeout_s, 0.0), self._expire, line, waiter)
        try:
            return await seated
        except asyncio.CancelledError:
            if seated.done() and not seated.cancelled() and seated.exception() is None:
                self._release(line, seated.result())  # it came in the same turn of the loop in which the client left
            elif line.lane.remove(waiter):
                self._left(tenant)
                self._abandoned += 1
            raise
        finally:
            timer.cancel()

    def _expire(self, line: _Line[E], waiter: _Waiter) -> None:
        error = DeadlineError(
            "The server is busy: no place became free in time (queue.max_wait_s or the request's own limit).",
            retry_after_s=line.wait_s(len(line.lane), self._clock()),
        )
        self._expired += self._fail(line, waiter, error)

    def _fail(self, line: _Line[E], waiter: _Waiter, error: KvasirError) -> bool:
        """Ends somebody's waiting. False when it had ended; who was cancelled and has not run yet takes itself out."""
        assert waiter.seated is not None
        if waiter.seated.done() or not line.lane.remove(waiter):
            return False
        self._left(waiter.ask.tenant)
        waiter.seated.set_exception(error)
        return True

    def _left(self, tenant: str) -> None:
        self._waiting -= 1
        self._waiting_by_tenant[tenant] -= 1
        if not self._waiting_by_tenant[tenant]:
            del self._waiting_by_tenant[tenant]

    def _release(self, line: _Line[E], seat: Seat[E]) -> None:
        seat.taken -= 1
        line.ends.append(self._clock())
        self._assign(line)

    def _assign(self, line: _Line[E]) -> None:
        self._seat(line, line.lane.assign())

    def _seat(self, line: _Line[E], sent: list[tuple[_Waiter, Seat[E]]]) -> None:
        """Tells those who waited. Places of clients that have left meanwhile go to others."""
        while sent:
            unused = 0
            for waiter, seat in sent:
                assert waiter.seated is not None
                self._left(waiter.ask.tenant)
                if waiter.seated.done():  # cancelled, and has not run yet to take itself out
                    seat.taken -= 1
                    unused += 1
                else:
                    waiter.seated.set_result(seat)
            self._admitted += len(sent) - unused
            self._abandoned += unused
            sent = line.lane.assign() if unused else []


def _alike(hello: Hello) -> Hashable:
    """Equal for engines that a prompt can be sent to as it is."""
    return hello.model, hello.namespace, hello.tokenizer, hello.context_tokens


class _Place(Generic[E]):
    """See OnlineQueue.place. Not reusable."""

    __slots__ = ("_ask", "_queue", "_taken")

    def __init__(self, queue: OnlineQueue[E], *ask: Any) -> None:
        self._queue = queue
        self._ask = ask
        self._taken: tuple[_Line[E], Seat[E]] | None = None

    async def __aenter__(self) -> E:
        self._taken = await self._queue._admit(*self._ask)  # noqa: SLF001 - one object in two halves
        return self._taken[1].engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            self._queue._release(*taken)  # noqa: SLF001
