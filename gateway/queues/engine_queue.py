"""Which request goes to which engine when a slot is free. Pure: no I/O, no clock, no futures.

    tenants    take turns by the engine seconds of their requests (start-time fair queueing), over weight
    online     a tenant's requests go by `priority`, then shortest prefill first; every second of waiting counts like
               `aging` seconds less
    batch      a tenant's requests go in the order of arrival, which is that of their prefixes
    tiers      `flex` counts as `tier_s` seconds more in both, `priority` as so much less, and as no prefill
    an engine  is chosen when a slot is free, for requests in that order: each goes where its first token comes
               soonest, given those before it. A request that is better off waiting for a busy engine waits, and counts
               as in front of that engine; when too many do, a free engine takes the next of them
    a backlog  at an engine holds back the requests behind it, but not a short one of another tenant: the engine
               prefills in turns of tenants, so most of the backlog is not in front of that

slots.py adds futures, limits and deadlines; tests/bench/routing_replay.py drives it in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Generic

from engine.protocol import Lane
from engine.protocol.frozen import dataclass
from gateway.config import QueueSettings
from gateway.gate import FairQueue, Waiting
from gateway.queues.admission_control import AdmissionControl, Overload, choose_open
from gateway.queues.router import E, EngineSlots, LoadSnapshot
from gateway.queues.sessions import PrefixAffinity, Session, Sessions

PLAN_DEPTH: Final = 128
"""Requests that are looked at for the slots that are free at one moment, besides those that are bound to one engine."""


@dataclass(slots=True, eq=False)
class WaitingRequest(Waiting):
    """A request that waits."""

    known_tokens: int = 0  # of its prompt, that were computed not long before it arrived
    session: Session | None = None  # the one that it continues


class EngineQueue(Generic[E]):
    """The online or batch requests for engines that are alike."""

    def __init__(self, settings: QueueSettings, name: Lane = "online") -> None:
        self.engine_slots: dict[str, EngineSlots[E]] = {}  # by incarnation
        self.name = name
        self._settings = settings
        self._waiting: FairQueue[WaitingRequest] = FairQueue(settings.tier_s)
        self._affinity = PrefixAffinity()
        self._numbers = 0
        self._now_s = 0.0
        self._aged_s = 0.0  # seconds of prefill that waiting since the beginning makes up for
        self.sessions = Sessions()
        self.overload = Overload(settings.overload_share)
        self.held_back = 0  # requests that had no slot at an engine that is free, at the last look
        self._open_to_all: set[str] = set()  # engines, in an overload

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingRequest]:
        """All that wait, tenant by tenant. The queue must not change meanwhile."""
        return iter(self._waiting)

    def enter(self, waiter: WaitingRequest) -> list[tuple[WaitingRequest, EngineSlots[E]]]:
        """It waits from now on. Returns what `assign` returns: it may get a slot at once, or change what others get."""
        snapshot = self._snapshot()
        self._numbers += 1
        self.pass_time(waiter.arrived_s)
        self._find(waiter)
        waiter.cost_s = snapshot.cost_s(waiter.ask)
        priority = 0 if self.name == "batch" else waiter.ask.priority
        waiter.order = (priority, self._order_s(waiter), self._numbers)
        self._waiting.arrived(waiter)
        self._waiting.enter(waiter)
        if waiter.session is not None:
            waiter.session.waiting += 1
        return self._assign(snapshot)

    def remove(self, waiter: WaitingRequest) -> bool:
        """It waits no more. False when it did not."""
        if not self._waiting.remove(waiter):
            return False
        if waiter.session is not None:
            waiter.session.waiting -= 1
        self.held_back *= bool(self._waiting)
        return True

    def assign(self, now_s: float) -> list[tuple[WaitingRequest, EngineSlots[E]]]:
        """Takes out the requests that get a slot now, and counts the slots as taken."""
        if not self._waiting:
            return []
        self.pass_time(now_s)
        return self._assign(self._snapshot())

    def pass_time(self, now_s: float) -> None:
        """Moves the clock on, and looks whether there is an overload."""
        passed_s = max(0.0, now_s - self._now_s)
        self._now_s += passed_s
        self._aged_s += passed_s * (self._settings.overload_aging if self.overload.holds else self._settings.aging)
        idle_engines = 0 if self._waiting else len(self.engine_slots)
        if not self.overload.look(self._now_s, idle_engines, goes_on=self.held_back > 0):
            self._open_to_all.clear()

    def _assign(self, snapshot: LoadSnapshot[E]) -> list[tuple[WaitingRequest, EngineSlots[E]]]:
        engine_slots = self.engine_slots
        open_slots = {name for name, slots in engine_slots.items() if self._is_open(slots, snapshot)}
        if not open_slots and not any(slots.held_back for slots in engine_slots.values()):
            return []
        assigned: list[tuple[WaitingRequest, EngineSlots[E]]] = []
        refused, tenants = set[str](), self._waiting.count_tenants()
        looked_at = held_back = 0
        admission = self._admission() if self.overload.holds else None
        for waiter in self._waiting.in_order():
            if waiter.ask.only is None and (looked_at := looked_at + 1) > PLAN_DEPTH:
                break
            if self.name == "batch":
                self._follow(waiter)
            closed = () if admission is None else admission.closed(waiter.ask)
            if (engine := snapshot.choose(waiter.ask, closed)) is None:
                continue
            slots = engine_slots[engine.hello.incarnation]
            has_slot = slots.incarnation in open_slots or self._may_pass(waiter, slots, snapshot)
            if has_slot:
                snapshot.tell(waiter.ask)
            snapshot.add(slots.incarnation, waiter.ask)
            held_back += not has_slot and bool(closed)
            if has_slot:
                if admission is not None:
                    admission.add(slots.incarnation, waiter.ask)
                self._take(waiter, slots, snapshot)
                assigned.append((waiter, slots))
                if not self._is_open(slots, snapshot):
                    open_slots.discard(slots.incarnation)
            else:
                refused.add(waiter.ask.tenant)
            if not open_slots and (tenants == 1 or len(refused) == tenants):
                break
        for waiter, _ in assigned:
            self.remove(waiter)
        self._waiting.took(*(waiter for waiter, _ in assigned))
        self.held_back = held_back
        return assigned

    def _order_s(self, waiter: WaitingRequest) -> float:
        if self.name == "batch":
            return 0.0
        cost_s = 0.0 if waiter.ask.tier == "priority" else waiter.cost_s
        return cost_s + self._aged_s + self._waiting.tier_s(waiter)

    def _admission(self) -> AdmissionControl:
        engine_slots, now_s = self.engine_slots.values(), self._now_s
        self._open_to_all = choose_open(engine_slots, self._open_to_all, self.sessions, now_s)
        return AdmissionControl(engine_slots, self.sessions, self._open_to_all, now_s)

    def _snapshot(self) -> LoadSnapshot[E]:
        return LoadSnapshot(self.engine_slots.values(), self.name)

    def _is_open(self, slots: EngineSlots[E], snapshot: LoadSnapshot[E]) -> bool:
        """Whether it takes any request. An engine that has none of ours always does, however much others sent it."""
        is_free = slots.free > 0
        slots.held_back = is_free and slots.taken > 0 and not snapshot.is_ready(slots.incarnation)
        return is_free and not slots.held_back

    def _may_pass(self, waiter: WaitingRequest, slots: EngineSlots[E], snapshot: LoadSnapshot[E]) -> bool:
        """Whether it gets a slot that is held back: it may go to no other engine, or has little in front of it."""
        if slots.free <= 0:
            return False
        passes = self.name == "online" and snapshot.passes_backlog(slots.incarnation, waiter.ask)
        return waiter.ask.only is not None or passes

    def _take(self, waiter: WaitingRequest, slots: EngineSlots[E], snapshot: LoadSnapshot[E]) -> None:
        ask, cached = waiter.ask, waiter.ask.cached_tokens.get(slots.incarnation, 0)
        slots.taken += 1
        slots.given_tokens += max(0, ask.prompt_tokens - cached)
        again = max(0, min(waiter.known_tokens, ask.prompt_tokens) - cached)
        own_s = snapshot.prefill_s(max(0, ask.prompt_tokens - cached))
        self.overload.computed(max(waiter.cost_s, own_s), snapshot.prefill_s(again))
        if ask.digests and self.name == "batch":
            self._affinity.sent(ask.digests, slots.incarnation, self._now_s)
        elif ask.digests:
            self.sessions.sent(waiter.session, ask.digests, slots.incarnation, self._now_s)

    def _find(self, waiter: WaitingRequest) -> None:
        """Looks for its session, and for how much of its prompt was sent before."""
        ask = waiter.ask
        if self.name == "batch":
            self._follow(waiter)
        elif ask.digests:
            known, session = self.sessions.find(ask.digests, self._now_s)
            waiter.known_tokens, waiter.session = known * ask.block_size, session
            if session is not None:
                self.sessions.arrived(session, self._now_s)
                if ask.cached_tokens.get(session.incarnation, 0) < waiter.known_tokens / 2:
                    self.sessions.lost(session)

    def _follow(self, waiter: WaitingRequest) -> None:
        """Counts a prefix that was sent to an engine before as cached there."""
        ask = waiter.ask
        if ask.digests and (found := self._affinity.find(ask.digests, self._now_s)):
            cached = dict(ask.cached_tokens)
            for incarnation, blocks in found.items():
                cached[incarnation] = max(cached.get(incarnation, 0), blocks * ask.block_size)
            waiter.ask = replace(ask, cached_tokens=cached)
