"""Slots at the engines: a bounded number for each, and a fair line in front of all of them, for each of two lanes.

Single event loop, no locks: every change happens between two awaits. lane.py says who goes where, line.py holds who
waits; this gives them a clock, futures, limits and deadlines. The pipeline asks for a place; app.py has it told when an
engine has joined, is gone, or has said how busy it is.

    admit     a slot is free and nobody is before this request: taken at once, without an await
    wait      requests for one model wait together, whatever engine they will go to
    refuse    too many wait: QueueFullError with the time after which trying again makes sense

The batch lane has slots of its own, so that nobody of the online lane ever waits for one that it holds: as many as the
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
from gateway.queues.lane import EngineSlots, Lane, Router
from gateway.queues.line import E, Figures, Line, OverloadStatus, QueueStatus, WaitingRequest, alike, left_over
from gateway.types import Ask

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between looks at those who are held back, when nothing else happens."""


class SlotQueue(Generic[E]):
    """stages.Queue with the limits of [queue]."""

    def __init__(self, settings: QueueSettings, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._router = router
        self._clock = clock
        self._lines: dict[Hashable, Line[E]] = {}  # those that have engines
        self._line_of: dict[str, Line[E]] = {}  # by incarnation
        self._figures: dict[LaneName, Figures] = {"online": Figures(), "batch": Figures()}

    def slot(self, engines: Sequence[E], ask: Ask) -> _Slot[E]:
        """An async context manager around the time in which an engine works on a request. Entering it returns the
        engine: one of `engines`, or one like them that joined while the request waited.

        engines  all that serve its model now, alike in what tokens and blocks mean; at least one

        Entering raises QueueFullError at once, DeadlineError after waiting, EngineLostError when there is no engine
        left that it could have. However the block is left, the slot is given back exactly once.
        """
        return _Slot(self, engines, ask)

    def forget(self, incarnation: str) -> None:
        """The engine is gone. Who can go nowhere else gets EngineLostError now; slots taken are given back as ever."""
        self._line_of.pop(incarnation, None)
        for key, line in list(self._lines.items()):
            if (slots := line.online.engine_slots.pop(incarnation, None)) is None:
                continue
            del line.batch.engine_slots[incarnation]
            for waiter in [waiter for lane in line.lanes for waiter in lane]:
                if not line.online.engine_slots or waiter.ask.only == incarnation:
                    self._fail(line, waiter, EngineLostError(f"Engine {slots.engine.name} went away."))
            if line.online.engine_slots:
                self._assign(line)
            else:
                del self._lines[key]

    def heard(self, engine: E) -> None:
        """An engine has joined, or said how busy it is: who waited for that may be sent to it."""
        waiting = any(figures.waiting for figures in self._figures.values())
        if not waiting or (line := self._lines.get(alike(engine.hello))) is None:
            return
        known = line.online.engine_slots.get(engine.hello.incarnation)
        if known is None:
            self._add_slots(line, engine)
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
            for slots in line.lane(lane).engine_slots.values():
                if slots.taken:
                    in_flight[slots.engine.name] += slots.taken
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
        """Requests of the online lane that wait for a slot."""
        return self._figures["online"].waiting

    # -- what _Slot does -----------------------------------------------------------------------------------------

    async def _admit(self, engines: Sequence[E], ask: Ask) -> tuple[Line[E], EngineSlots[E]]:
        line = self._line(engines)
        lane = line.lane(ask.lane)
        if ask.only is not None and ask.only not in lane.engine_slots:
            raise EngineLostError("The engine that has the other answers to this prompt went away.")
        waiter = WaitingRequest(ask, self._clock())
        mine: EngineSlots[E] | None = None
        if ask.lane == "batch":
            self._leave_over(line)
        sent = lane.enter(waiter)
        self._look_at(line)
        if sent:
            mine = next((slots for other, slots in sent if other is waiter), None)
            self._figures[ask.lane].admitted += mine is not None
            if mine is None or len(sent) > 1:
                self._grant(lane, [(other, slots) for other, slots in sent if other is not waiter])
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
            if engine.hello.incarnation not in line.online.engine_slots:
                self._add_slots(line, engine)
            for lane in line.lanes:
                lane.engine_slots[engine.hello.incarnation].engine = engine
        return line

    def _add_slots(self, line: Line[E], engine: E) -> None:
        hello = engine.hello
        total = self._settings.slots_per_engine or 2 * hello.max_sequences
        self._line_of[hello.incarnation] = line
        for lane in line.lanes:
            # One that is new has prefilled nothing, and would get everything that is equal anywhere until it has.
            given = min((slots.given_tokens for slots in lane.engine_slots.values()), default=0.0)
            lane.engine_slots[hello.incarnation] = EngineSlots(engine, hello.incarnation, total, given_tokens=given)

    def _refusal(self, line: Line[E], tenant: str) -> QueueFullError | None:
        limits, waiting = self._settings, self.waiting
        theirs = self._figures["online"].waiting_by_tenant[tenant]
        if waiting < limits.max_waiting and theirs < limits.max_waiting_per_tenant:
            return None
        retry_after_s = line.pace.wait_s(len(line.online) - 1, self._clock())
        mine = theirs >= limits.max_waiting_per_tenant
        count, setting = (theirs, "queue.max_waiting_per_tenant") if mine else (waiting, "queue.max_waiting")
        return QueueFullError.of(count, setting, retry_after_s)

    async def _wait(self, line: Line[E], waiter: WaitingRequest) -> EngineSlots[E]:
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
        granted: asyncio.Future[EngineSlots[E]] = loop.create_future()
        waiter.granted = granted
        figures.waiting += 1
        figures.waiting_by_tenant[tenant] += 1
        timer = loop.call_later(max(timeout_s, 0.0), self._expire, line, waiter)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(line, name, granted.result())  # it came in the turn of the loop in which the client left
            elif lane.remove(waiter):
                figures.left(tenant)
                figures.abandoned += 1
                if online:
                    self._assign_batch(line)
            raise
        finally:
            timer.cancel()

    def _expire(self, line: Line[E], waiter: WaitingRequest) -> None:
        error = DeadlineError.without_slot(line.pace.wait_s(len(line.lane(waiter.ask.lane)), self._clock()))
        self._figures[waiter.ask.lane].expired += self._fail(line, waiter, error)
        self._assign_batch(line)

    def _fail(self, line: Line[E], waiter: WaitingRequest, error: KvasirError) -> bool:
        """Ends somebody's waiting. False when it had ended; who was cancelled and has not run yet takes itself out."""
        assert waiter.granted is not None
        if waiter.granted.done() or not line.lane(waiter.ask.lane).remove(waiter):
            return False
        self._figures[waiter.ask.lane].left(waiter.ask.tenant)
        waiter.granted.set_exception(error)
        return True

    def _release(self, line: Line[E], lane: LaneName, slots: EngineSlots[E]) -> None:
        slots.taken -= 1
        if lane == "online":
            line.pace.ends.append(self._clock())
            self._assign(line)
        else:
            self._assign_batch(line)

    def _assign(self, line: Line[E]) -> None:
        self._grant(line.online, line.online.assign(self._clock()))
        self._look_at(line)
        self._assign_batch(line)

    def _assign_batch(self, line: Line[E]) -> None:
        if len(line.batch) and not len(line.online):
            self._leave_over(line)
            self._grant(line.batch, line.batch.assign(self._clock()))

    def _look_at(self, line: Line[E]) -> None:
        """Tells of an overload, in which there may be room for somebody because time has passed and nothing else."""
        self._tell(line)
        if line.online.held_back and line.look is None:
            line.look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again, line)

    def _look_again(self, line: Line[E]) -> None:
        line.look = None
        if line.online.engine_slots:
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
        """Tells the batch lane how many slots it may have at each engine now."""
        for incarnation, slots in line.batch.engine_slots.items():
            most = self._settings.batch_slots_per_engine or slots.engine.hello.max_sequences
            slots.total = 0 if len(line.online) else left_over(line.online.engine_slots[incarnation], most)

    def _grant(self, lane: Lane[E, WaitingRequest], sent: list[tuple[WaitingRequest, EngineSlots[E]]]) -> None:
        """Tells those who waited. Places of clients that have left meanwhile go to others."""
        figures = self._figures[lane.name]
        while sent:
            unused = 0
            for waiter, slots in sent:
                assert waiter.granted is not None
                figures.left(waiter.ask.tenant)
                if waiter.granted.done():  # cancelled, and has not run yet to take itself out
                    slots.taken -= 1
                    unused += 1
                else:
                    waiter.granted.set_result(slots)
            figures.admitted += len(sent) - unused
            figures.abandoned += unused
            sent = lane.assign(self._clock()) if unused else []


class _Slot(Generic[E]):
    """See SlotQueue.slot. Not reusable."""

    __slots__ = ("_ask", "_engines", "_queue", "_taken")

    def __init__(self, queue: SlotQueue[E], engines: Sequence[E], ask: Ask) -> None:
        self._queue = queue
        self._engines = engines
        self._ask = ask
        self._taken: tuple[Line[E], LaneName, EngineSlots[E]] | None = None

    async def __aenter__(self) -> E:
        line, slots = await self._queue._admit(self._engines, self._ask)  # noqa: SLF001 - one object in two halves
        self._taken = line, self._ask.lane, slots
        return slots.engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            self._queue._release(*taken)  # noqa: SLF001
