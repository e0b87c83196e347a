"""Slots at the engines: a bounded number for each, and two fair queues, online and batch, in front of engines that are
alike.

Single event loop, no locks: every change happens between two awaits. engine_queue.py decides which request goes where,
the gate (gateway/gate.py) holds those that wait; this gives them a clock, deadlines and limits. The pipeline asks for a
slot; app.py reports when an engine has joined, is gone, or has reported its load.

    admit     a slot is free and no request is before this one: taken at once, without an await
    wait      requests for one model wait together, whatever engine they will go to
    refuse    too many wait: QueueFullError with the time after which trying again makes sense

Batch requests have slots of their own, so that no online request waits for them: as many as the engine could run beside
the online ones, and none while an online request waits or is still to be prefilled. Their sender bounds how many wait;
they wait until their own deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from functools import partial
from types import TracebackType
from typing import Final, Generic

from engine.protocol import Hello, Lane
from engine.protocol.frozen import dataclass
from gateway.config import QueueSettings
from gateway.errors import DeadlineError, EngineLostError, QueueFullError
from gateway.gate import Gate, Pace
from gateway.queues.engine_queue import EngineQueue, WaitingRequest
from gateway.queues.router import E, EngineSlots
from gateway.types import Ask

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between looks at requests that are held back, when nothing else happens."""


FEW: Final = 16
"""Engines of a group of which each report is acted on at once."""

REPORT_S: Final = 5e-5
"""Times the engines of a larger group, from one look for what they reported to the next. A look costs microseconds for
each engine, and engines report with each step: at 200 engines it would be all that the gateway does."""


@dataclass(frozen=True, slots=True)
class OverloadStatus:
    """Whether sessions push one another out of the caches of a model's engines. See admission_control.py."""

    holds: bool
    share: float  # of the engines' time that goes into computing again, from 0 to 1
    held_back: int  # requests that wait for room in a cache though an engine is free


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What /metrics and /admin/stats show of the online or the batch queue."""

    waiting: int
    in_flight: dict[str, int]  # by engine name
    waiting_by_tenant: dict[str, int]
    admitted: int  # since the start, as are the next three
    refused: int
    expired: int
    abandoned: int  # waiting requests whose client left
    overload: dict[str, OverloadStatus]  # by model; empty for the batch queue


@dataclass(slots=True, eq=False)
class _Group(Generic[E]):
    """The queues in front of engines that are alike, and how quickly the online one moves."""

    queues: dict[Lane, EngineQueue[E]]
    model: str
    overloaded: bool = False  # as last logged
    look: asyncio.TimerHandle | None = None  # at requests that are held back
    report: asyncio.TimerHandle | None = None  # a look that reports have led to
    pace: Pace = field(default_factory=Pace)

    @property
    def online(self) -> EngineQueue[E]:
        return self.queues["online"]

    @property
    def batch(self) -> EngineQueue[E]:
        return self.queues["batch"]


class SlotQueue(Generic[E]):
    """stages.Queue with the limits of [queue]."""

    def __init__(
        self, settings: QueueSettings, clock: Callable[[], float] = time.monotonic, *, workers: int = 1
    ) -> None:
        """`workers`: processes of one gateway that have queues, each with its part of an engine's slots."""
        self._settings = settings
        self._workers = workers
        self._clock = clock
        self._groups: dict[Hashable, _Group[E]] = {}  # those that have engines
        self._group_of: dict[str, _Group[E]] = {}  # by incarnation
        self._gates: dict[Lane, Gate[EngineSlots[E]]] = {
            "online": Gate(settings.max_waiting, settings.max_waiting_per_tenant),
            "batch": Gate(),
        }

    def slot(self, engines: Sequence[E], ask: Ask) -> AbstractAsyncContextManager[E]:
        """The time in which an engine works on a request. Entering it returns the engine: one of `engines`, or one like
        them that joined while the request waited.

        engines  all that serve its model now, alike in what tokens and blocks mean; at least one

        Entering raises QueueFullError at once, DeadlineError after waiting, EngineLostError when there is no engine
        left that it could have. However the block is left, the slot is given back exactly once.
        """
        return _Slot(self, engines, ask)

    def forget(self, incarnation: str) -> None:
        """The engine is gone. Requests that can go nowhere else get EngineLostError now; slots taken are given back as
        ever."""
        self._group_of.pop(incarnation, None)
        for key, group in list(self._groups.items()):
            if (slots := group.online.engine_slots.pop(incarnation, None)) is None:
                continue
            del group.batch.engine_slots[incarnation]
            for lane, queue in group.queues.items():
                for waiter in list(queue):
                    if not queue.engine_slots or waiter.ask.only == incarnation:
                        error = EngineLostError(f"Engine {slots.engine.name} went away.")
                        self._gates[lane].fail(waiter, queue, error)
            if group.online.engine_slots:
                self._assign(group)
            else:
                del self._groups[key]

    def heard(self, engine: E) -> None:
        """An engine has joined, or reported its load: requests that waited for that may be sent to it."""
        waiting = any(gate.waiting for gate in self._gates.values())
        if not waiting or (group := self._groups.get(_alike(engine.hello))) is None:
            return
        slots = group.online.engine_slots.get(engine.hello.incarnation)
        if slots is None:
            self._add_slots(group, engine)
            self._assign(group)
        elif len(group.online.engine_slots) > FEW:
            if group.report is None and (slots.held_back or len(group.batch)):
                after_s = REPORT_S * len(group.online.engine_slots)
                group.report = asyncio.get_running_loop().call_later(after_s, self._look_reported, group)
        elif slots.held_back:
            self._assign(group)
        else:
            self._assign_batch(group)

    def status(self, lane: Lane = "online") -> QueueStatus:
        gate, in_flight = self._gates[lane], Counter[str]()
        overload: dict[str, OverloadStatus] = {}
        for group in self._groups.values():
            if lane == "online":
                group.online.pass_time(self._clock())
                self._log_overload(group)
                found = group.online.overload
                status = OverloadStatus(found.holds, found.share, group.online.held_back)
                overload[group.model] = max(status, overload.get(group.model, status), key=lambda one: one.share)
            for slots in group.queues[lane].engine_slots.values():
                if slots.taken:
                    in_flight[slots.engine.name] += slots.taken
        return QueueStatus(
            waiting=gate.waiting,
            in_flight=dict(in_flight),
            waiting_by_tenant=dict(gate.by_tenant),
            admitted=gate.admitted,
            refused=gate.refused,
            expired=gate.expired,
            abandoned=gate.abandoned,
            overload=overload,
        )

    @property
    def waiting(self) -> int:
        """Online requests that wait for a slot."""
        return self._gates["online"].waiting

    # -- a request ----------------------------------------------------------------------------------------------------

    async def take(self, group: _Group[E], ask: Ask) -> EngineSlots[E]:
        """A slot of one of these engines, counted as taken until `release`."""
        queue, gate = group.queues[ask.lane], self._gates[ask.lane]
        if ask.only is not None and ask.only not in queue.engine_slots:
            raise EngineLostError("The engine that has the other answers to this prompt went away.")
        waiter = WaitingRequest(ask, self._clock())
        if ask.lane == "batch":
            self._leave_over(group)
        assigned = queue.enter(waiter)
        self._look_at(group)
        if assigned:
            own = next((slots for other, slots in assigned if other is waiter), None)
            self._grant(group, ask.lane, [(other, slots) for other, slots in assigned if other is not waiter])
            if own is not None:
                gate.admitted += 1
                return own
        if full := gate.find_full(ask.tenant):
            queue.remove(waiter)
            waiting, own_limit = full
            setting = "queue.max_waiting_per_tenant" if own_limit else "queue.max_waiting"
            raise QueueFullError.of(waiting, setting, group.pace.wait_s(len(queue), self._clock()))
        timeout_s = ask.deadline_s - waiter.arrived_s
        if ask.lane == "online":
            timeout_s = min(timeout_s, self._settings.max_wait_s)
        gate.enter(waiter)
        late, leave = partial(self._late, group, queue), partial(self._leave, group, ask.lane)
        return await gate.wait(waiter, queue, timeout_s, late=late, leave=leave)

    def _late(self, group: _Group[E], queue: EngineQueue[E]) -> DeadlineError:
        return DeadlineError.without_slot(group.pace.wait_s(len(queue), self._clock()))

    def _leave(self, group: _Group[E], lane: Lane, slots: EngineSlots[E] | None) -> None:
        """A request waits no more, and has no use for what it may have been granted."""
        if slots is not None:
            self.release(group, lane, slots)
        else:
            self._assign_batch(group)

    def release(self, group: _Group[E], lane: Lane, slots: EngineSlots[E]) -> None:
        """Gives back what `take` took."""
        slots.taken -= 1
        if lane == "online":
            group.pace.ends.append(self._clock())
            self._assign(group)
        else:
            self._assign_batch(group)

    # -- the engines --------------------------------------------------------------------------------------------------

    def find_group(self, engines: Sequence[E]) -> _Group[E]:
        """Theirs; a new one where there is none. An engine that has left since it was looked up has been forgotten, and
        one that was started again meanwhile may be another. Raises EngineLostError when none is left."""
        engines = [engine for engine in engines if engine.joined]
        if not engines:
            raise EngineLostError("The engines of this model went away.")
        group = self._group_of.get(engines[0].hello.incarnation)
        if group is None:
            key = _alike(engines[0].hello)
            if (group := self._groups.get(key)) is None:
                lanes: tuple[Lane, ...] = ("online", "batch")
                queues = {lane: EngineQueue[E](self._settings, lane) for lane in lanes}
                group = self._groups[key] = _Group(queues, engines[0].hello.model)
        online = group.online.engine_slots
        for engine in engines:
            slots = online.get(engine.hello.incarnation)
            if slots is None:
                if _alike(engine.hello) != _alike(engines[0].hello):
                    continue
                self._add_slots(group, engine)
            elif slots.engine is not engine:
                for queue in group.queues.values():
                    queue.engine_slots[engine.hello.incarnation].engine = engine
        return group

    def _add_slots(self, group: _Group[E], engine: E) -> None:
        hello = engine.hello
        total = self._settings.slots_per_engine or max(1, 2 * hello.max_sequences // self._workers)
        self._group_of[hello.incarnation] = group
        for queue in group.queues.values():
            # One that is new has prefilled nothing, and would get everything that is equal anywhere until it has.
            given = min((slots.given_tokens for slots in queue.engine_slots.values()), default=0.0)
            queue.engine_slots[hello.incarnation] = EngineSlots(engine, hello.incarnation, total, given_tokens=given)

    def _assign(self, group: _Group[E]) -> None:
        self._grant(group, "online", group.online.assign(self._clock()))
        self._look_at(group)
        self._assign_batch(group)

    def _assign_batch(self, group: _Group[E]) -> None:
        if len(group.batch) and not len(group.online):
            self._leave_over(group)
            self._grant(group, "batch", group.batch.assign(self._clock()))

    def _grant(self, group: _Group[E], lane: Lane, assigned: list[tuple[WaitingRequest, EngineSlots[E]]]) -> None:
        """Slots of clients that have left meanwhile go to others."""
        while assigned:
            unused = [slots for waiter, slots in assigned if not self._gates[lane].grant(waiter, slots)]
            for slots in unused:
                slots.taken -= 1
            assigned = group.queues[lane].assign(self._clock()) if unused else []

    def _leave_over(self, group: _Group[E]) -> None:
        """Sets how many slots batch requests may have at each engine now: none while an online request waits."""
        for incarnation, slots in group.batch.engine_slots.items():
            most = self._settings.batch_slots_per_engine or max(1, slots.engine.hello.max_sequences // self._workers)
            slots.total = 0 if len(group.online) else _left_over(group.online.engine_slots[incarnation], most)

    def _look_reported(self, group: _Group[E]) -> None:
        group.report = None
        if group.online.engine_slots:
            self._assign(group)

    # -- overload -----------------------------------------------------------------------------------------------------

    def _look_at(self, group: _Group[E]) -> None:
        """Looks again later, when requests are held back: time alone may make room for them."""
        self._log_overload(group)
        if group.online.held_back and group.look is None:
            group.look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again, group)

    def _look_again(self, group: _Group[E]) -> None:
        group.look = None
        if group.online.engine_slots:
            self._assign(group)

    def _log_overload(self, group: _Group[E]) -> None:
        overload = group.online.overload
        if overload.holds == group.overloaded:
            return
        group.overloaded = overload.holds
        if overload.holds:
            log.warning(
                "KV cache thrashing on model %s: %.0f%% of the engines' time recomputes evicted prefixes; prompts "
                "without a cached prefix now wait",
                group.model,
                100 * overload.share,
            )
        else:
            log.info("KV cache thrashing on model %s is over", group.model)


class _Slot(Generic[E]):
    """What SlotQueue.slot returns. No generator with asynccontextmanager, which would take as long as the queue."""

    def __init__(self, queue: SlotQueue[E], engines: Sequence[E], ask: Ask) -> None:
        self._queue = queue
        self._engines = engines
        self._ask = ask

    async def __aenter__(self) -> E:
        self._group = self._queue.find_group(self._engines)
        self._slots = await self._queue.take(self._group, self._ask)
        return self._slots.engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.release(self._group, self._ask.lane, self._slots)


def _left_over(slots: EngineSlots[E], most: int) -> int:
    """How many of `most` batch slots at an engine the online queue (`slots`) leaves: sequences that the engine could
    run besides, and none before all online prompts are prefilled."""
    load = slots.engine.load
    if load.prefill_backlog > load.batch_backlog:
        return 0
    online = load.running + load.waiting - load.batch_running - load.batch_waiting
    return min(most, max(0, slots.engine.hello.max_sequences - max(online, slots.taken)))


def _alike(hello: Hello) -> Hashable:
    """Equal for engines that a prompt can be sent to as it is."""
    return hello.model, hello.namespace, hello.tokenizer, hello.context_tokens
