"""Places at the engines: a bounded number for each, and a fair line in front of all of them, for each of two lanes.

Single event loop, no locks: every change happens between two awaits. lane.py says who goes where, line.py holds who
waits; this gives them a clock, futures, limits and deadlines. The street asks for a place; app.py has it told when an
engine has joined, is gone, or has said how busy it is.

    admit     a place is free and nobody is before this request: taken at once, without an await
    wait      requests for one model wait together, whatever engine they will go to
    refuse    too many wait: QueueFullError with the time after which trying again makes sense

The batch lane has places of its own, so that nobody of the online lane ever waits for one that it holds: as many as the
engine could run beside what the online lane has there, and none while anybody of the online lane waits, or is still to
be prefilled. How many wait there is for the one to bound who sends them, and they wait until their own deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Final, Generic

from engine.protocol import Lane as LaneName
from gateway.config import QueueSettings
from gateway.errors import DeadlineError, EngineLostError, KvasirError, QueueFullError
from gateway.queues.lane import Lane, Router, Seat
from gateway.queues.line import E, Figures, Line, OverloadStatus, QueueStatus, WaitingRequest, alike, left_over
from gateway.types import Ask

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between looks at those who are held back, when nothing else happens."""


class PlaceQueue(Generic[E]):
    """stages.Queue with the limits of [queue]."""

    def __init__(self, settings: QueueSettings, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._router = router
        self._clock = clock
        self._lines: dict[Hashable, Line[E]] = {}  # those that have engines
        self._line_of: dict[str, Line[E]] = {}  # by incarnation
        self._figures: dict[LaneName, Figures] = {"online": Figures(), "batch": Figures()}

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
            if (seat := line.online.seats.pop(incarnation, None)) is None:
                continue
            del line.batch.seats[incarnation]
            for waiter in [waiter for lane in line.lanes for waiter in lane]:
                if not line.online.seats or waiter.ask.only == incarnation:
                    self._fail(line, waiter, EngineLostError(f"Engine {seat.engine.name} went away."))
            if line.online.seats:
                self._assign(line)
            else:
                del self._lines[key]

    def heard(self, engine: E) -> None:
        """An engine has joined, or said how busy it is: who waited for that may be sent to it."""
        waiting = any(figures.waiting for figures in self._figures.values())
        if not waiting or (line := self._lines.get(alike(engine.hello))) is None:
            return
        known = line.online.seats.get(engine.hello.incarnation)
        if known is None:
            self._add_seat(line, engine)
        if known is None or known.held_back:
            self._assign(line)
        else:
            self._assign_batch(line)

    def status(self, lane: LaneName = "online") -> QueueStatus:
        figures, in_flight = self._figures[lane], Counter[str]()
        overload: dict[str, OverloadStatus] = {}
        for line in self._lines.values():
            if lane == "online":
                line.online.pass_time(self._clock())
                self._tell(line)
                overloaded = line.online.overload
                seen = OverloadStatus(overloaded.holds, overloaded.share, line.online.held_back)
                overload[line.model] = max(seen, overload.get(line.model, seen), key=lambda status: status.share)
            for seat in line.lane(lane).seats.values():
                if seat.taken:
                    in_flight[seat.engine.name] += seat.taken
        return QueueStatus(
            waiting=figures.waiting,
            in_flight=dict(in_flight),
            waiting_by_tenant=dict(figures.waiting_by_tenant),
            admitted=figures.admitted,
            refused=figures.refused,
            expired=figures.expired,
            abandoned=figures.abandoned,
            overload=overload,
        )

    @property
    def waiting(self) -> int:
        """Requests of the online lane that wait for a place."""
        return self._figures["online"].waiting

    # -- what _Place does -----------------------------------------------------------------------------------------

    async def _admit(self, engines: Sequence[E], ask: Ask) -> tuple[Line[E], Seat[E]]:
        line = self._line(engines)
        lane = line.lane(ask.lane)
        if ask.only is not None and ask.only not in lane.seats:
            raise EngineLostError("The engine that has the other answers to this prompt went away.")
        waiter = WaitingRequest(ask, self._clock())
        mine: Seat[E] | None = None
        if ask.lane == "batch":
            self._leave_over(line)
        sent = lane.enter(waiter)
        self._look_at(line)
        if sent:
            mine = next((seat for other, seat in sent if other is waiter), None)
            self._figures[ask.lane].admitted += mine is not None
            if mine is None or len(sent) > 1:
                self._seat(lane, [(other, seat) for other, seat in sent if other is not waiter])
        return line, mine or await self._wait(line, waiter)

    def _line(self, engines: Sequence[E]) -> Line[E]:
        line = self._line_of.get(engines[0].hello.incarnation)
        if line is None:
            key = alike(engines[0].hello)
            if (line := self._lines.get(key)) is None:
                line = self._lines[key] = Line(
                    Lane(self._settings, self._router),
                    Lane(self._settings, self._router, "batch"),
                    engines[0].hello.model,
                )
        for engine in engines:
            if engine.hello.incarnation not in line.online.seats:
                self._add_seat(line, engine)
            for lane in line.lanes:
                lane.seats[engine.hello.incarnation].engine = engine
        return line

    def _add_seat(self, line: Line[E], engine: E) -> None:
        hello = engine.hello
        places = self._settings.places_per_engine or 2 * hello.max_sequences
        self._line_of[hello.incarnation] = line
        for lane in line.lanes:
            # One that is new has prefilled nothing, and would get everything that is equal anywhere until it has.
            given = min((seat.given_tokens for seat in lane.seats.values()), default=0.0)
            lane.seats[hello.incarnation] = Seat(engine, hello.incarnation, places, given_tokens=given)

    def _refusal(self, line: Line[E], tenant: str) -> QueueFullError | None:
        limits, waiting = self._settings, self.waiting
        theirs = self._figures["online"].waiting_by_tenant[tenant]
        if waiting < limits.max_waiting and theirs < limits.max_waiting_per_tenant:
            return None
        retry_after_s = line.pace.wait_s(len(line.online) - 1, self._clock())
        mine = theirs >= limits.max_waiting_per_tenant
        count, setting = (theirs, "queue.max_waiting_per_tenant") if mine else (waiting, "queue.max_waiting")
        return QueueFullError.of(count, setting, retry_after_s)

    async def _wait(self, line: Line[E], waiter: WaitingRequest) -> Seat[E]:
        tenant, name = waiter.ask.tenant, waiter.ask.lane
        lane, figures, online = line.lane(name), self._figures[name], name == "online"
        if online and (refusal := self._refusal(line, tenant)) is not None:
            lane.remove(waiter)
            figures.refused += 1
            raise refusal
        loop = asyncio.get_running_loop()
        timeout_s = waiter.ask.deadline_s - waiter.arrived_s
        if online:
            timeout_s = min(timeout_s, self._settings.max_wait_s)
        seated: asyncio.Future[Seat[E]] = loop.create_future()
        waiter.seated = seated
        figures.waiting += 1
        figures.waiting_by_tenant[tenant] += 1
        timer = loop.call_later(max(timeout_s, 0.0), self._expire, line, waiter)
        try:
            return await seated
        except asyncio.CancelledError:
            if seated.done() and not seated.cancelled() and seated.exception() is None:
                self._release(line, name, seated.result())  # it came in the turn of the loop in which the client left
            elif lane.remove(waiter):
                figures.left(tenant)
                figures.abandoned += 1
                if online:
                    self._assign_batch(line)
            raise
        finally:
            timer.cancel()

    def _expire(self, line: Line[E], waiter: WaitingRequest) -> None:
        error = DeadlineError.without_place(line.pace.wait_s(len(line.lane(waiter.ask.lane)), self._clock()))
        self._figures[waiter.ask.lane].expired += self._fail(line, waiter, error)
        self._assign_batch(line)

    def _fail(self, line: Line[E], waiter: WaitingRequest, error: KvasirError) -> bool:
        """Ends somebody's waiting. False when it had ended; who was cancelled and has not run yet takes itself out."""
        assert waiter.seated is not None
        if waiter.seated.done() or not line.lane(waiter.ask.lane).remove(waiter):
            return False
        self._figures[waiter.ask.lane].left(waiter.ask.tenant)
        waiter.seated.set_exception(error)
        return True

    def _release(self, line: Line[E], lane: LaneName, seat: Seat[E]) -> None:
        seat.taken -= 1
        if lane == "online":
            line.pace.ends.append(self._clock())
            self._assign(line)
        else:
            self._assign_batch(line)

    def _assign(self, line: Line[E]) -> None:
        self._seat(line.online, line.online.assign(self._clock()))
        self._look_at(line)
        self._assign_batch(line)

    def _assign_batch(self, line: Line[E]) -> None:
        if len(line.batch) and not len(line.online):
            self._leave_over(line)
            self._seat(line.batch, line.batch.assign(self._clock()))

    def _look_at(self, line: Line[E]) -> None:
        """Tells of an overload, in which there may be room for somebody because time has passed and nothing else."""
        self._tell(line)
        if line.online.held_back and line.look is None:
            line.look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again, line)

    def _look_again(self, line: Line[E]) -> None:
        line.look = None
        if line.online.seats:
            self._assign(line)

    def _tell(self, line: Line[E]) -> None:
        """Says when an overload begins and when it ends."""
        overload = line.online.overload
        if overload.holds == line.overloaded:
            return
        line.overloaded = overload.holds
        if overload.holds:
            log.warning(
                "sessions push one another out of the caches: the engines of %s spend %.0f%% of their time computing "
                "again what was evicted. Who has no prefix waits for room, or for one engine in eight, meanwhile",
                line.model,
                100 * overload.share,
            )
        else:
            log.info("the overload of the engines of %s is over", line.model)

    def _leave_over(self, line: Line[E]) -> None:
        """Tells the batch lane how many places it may have at each engine now."""
        for incarnation, seat in line.batch.seats.items():
            most = self._settings.batch_places_per_engine or seat.engine.hello.max_sequences
            seat.places = 0 if len(line.online) else left_over(line.online.seats[incarnation], most)

    def _seat(self, lane: Lane[E, WaitingRequest], sent: list[tuple[WaitingRequest, Seat[E]]]) -> None:
        """Tells those who waited. Places of clients that have left meanwhile go to others."""
        figures = self._figures[lane.name]
        while sent:
            unused = 0
            for waiter, seat in sent:
                assert waiter.seated is not None
                figures.left(waiter.ask.tenant)
                if waiter.seated.done():  # cancelled, and has not run yet to take itself out
                    seat.taken -= 1
                    unused += 1
                else:
                    waiter.seated.set_result(seat)
            figures.admitted += len(sent) - unused
            figures.abandoned += unused
            sent = lane.assign(self._clock()) if unused else []


class _Place(Generic[E]):
    """See PlaceQueue.place. Not reusable."""

    __slots__ = ("_ask", "_engines", "_queue", "_taken")

    def __init__(self, queue: PlaceQueue[E], engines: Sequence[E], ask: Ask) -> None:
        self._queue = queue
        self._engines = engines
        self._ask = ask
        self._taken: tuple[Line[E], LaneName, Seat[E]] | None = None

    async def __aenter__(self) -> E:
        line, seat = await self._queue._admit(self._engines, self._ask)  # noqa: SLF001 - one object in two halves
        self._taken = line, self._ask.lane, seat
        return seat.engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            self._queue._release(*taken)  # noqa: SLF001
