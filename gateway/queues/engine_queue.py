"""Who waits, and who is sent where when a slot is free. Pure: no I/O, no clock, no futures.

    tenants    take turns by the seconds of an engine that their requests took (start-time fair queueing), over weight
    a tenant's requests go in the order of their `priority`, then shortest prefill first; every second of waiting
               counts like `aging` seconds less
    tiers      `flex` counts as `tier_s` seconds more in both, `priority` as so much less, and as no prefill
    a tenant's batch requests go in the order in which they came, which is that of their prefixes
    an engine  is chosen when a slot is free, for requests in that order: each goes where its first token comes
               soonest, given those before it. Who is better off waiting for a busy engine waits, and counts as in front
               of that engine; when that line grows too long, a free engine takes the next of it
    a backlog  at an engine holds back the requests behind it, but not a short one of another tenant: the engine
               prefills in turns of tenants, so most of the backlog is not in front of that

slots.py puts futures, limits and deadlines around it; tests/bench/routing_replay.py drives it in virtual time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar

from engine.protocol import Lane
from gateway.config import QueueSettings
from gateway.gate import FairQueue, Waiting
from gateway.queues.admission_control import AdmissionControl, choose_open
from gateway.queues.overload import Overload
from gateway.queues.prefix_affinity import PrefixAffinity
from gateway.queues.sessions import Session, Sessions
from gateway.types import Ask

PLAN_DEPTH: Final = 128
"""Requests that are looked at for the slots that are free at one moment, besides those that are bound to one engine:
they wait for it alone, and however many they are, others may go elsewhere."""


class Picture(Protocol):
    """See routing/router.py."""

    def choose(self, ask: Ask, closed: Collection[str] = ()) -> Any | None: ...

    def is_ready(self, incarnation: str) -> bool: ...

    def passes_backlog(self, incarnation: str, ask: Ask) -> bool: ...

    def add(self, incarnation: str, ask: Ask) -> None: ...

    def cost_s(self, ask: Ask) -> float: ...

    def prefill_s(self, tokens: int) -> float: ...


class Router(Protocol):
    def picture(self, engine_slots: Iterable[Any], lane: Lane) -> Picture: ...


E = TypeVar("E")


@dataclass(slots=True, eq=False)
class EngineSlots(Generic[E]):
    """An engine's slots. `taken` goes up in `assign`; whoever takes a slot counts it down again."""

    engine: E
    incarnation: str
    total: int
    taken: int = 0
    given_tokens: float = 0.0  # that it was sent to prefill
    held_back: bool = False  # it had a place when somebody was sent elsewhere or waits, and too much to prefill

    @property
    def free(self) -> int:
        return self.total - self.taken


@dataclass(slots=True, eq=False)
class WaitingRequest(Waiting):
    """A request that waits."""

    known_tokens: int = 0  # of its prompt, that were computed for it or another one not long before it arrived
    session: Session | None = None  # whose next turn it is


W = TypeVar("W", bound=WaitingRequest)


class EngineQueue(Generic[E, W]):
    """The requests of one lane for engines that are alike."""

    def __init__(self, settings: QueueSettings, router: Router, name: Lane = "online") -> None:
        self.engine_slots: dict[str, EngineSlots[E]] = {}  # by incarnation
        self.name = name
        self._settings = settings
        self._router = router
        self._waiting: FairQueue[W] = FairQueue(settings.tier_s)
        self._affinity = PrefixAffinity()
        self._numbers = 0
        self._now_s = 0.0
        self._aged_s = 0.0  # seconds of prefill that waiting since the beginning makes up for
        self.sessions = Sessions()
        self.overload = Overload(settings.overload_share)
        self.held_back = 0  # requests that had no slot at an engine that is free, when somebody looked last
        self._open_to_all: set[str] = set()  # engines, in an overload

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[W]:
        """Everybody who waits, tenant by tenant. Nobody may come or go meanwhile."""
        return iter(self._waiting)

    def enter(self, waiter: W) -> list[tuple[W, EngineSlots[E]]]:
        """It waits from now on. Returns what `assign` returns: it may have a slot at once, or be in others' way."""
        picture = self._picture()
        self._numbers += 1
        self.pass_time(waiter.arrived_s)
        self._find(waiter)
        waiter.cost_s = picture.cost_s(waiter.ask)
        priority = 0 if self.name == "batch" else waiter.ask.priority
        waiter.order = (priority, self._order_s(waiter), self._numbers)
        self._waiting.arrived(waiter)
        if (
            not self._waiting
            and not self.overload.holds
            and (slots := self._free_slots_now(waiter, picture)) is not None
        ):
            self._waiting.took(waiter)
            return [(waiter, slots)]
        self._waiting.enter(waiter)
        if waiter.session is not None:
            waiter.session.waiting += 1
        return self._assign(picture)

    def remove(self, waiter: W) -> bool:
        """It waits no more. False when it did not."""
        if not self._waiting.remove(waiter):
            return False
        if waiter.session is not None:
            waiter.session.waiting -= 1
        self.held_back *= bool(self._waiting)
        return True

    def assign(self, now_s: float) -> list[tuple[W, EngineSlots[E]]]:
        """Takes those out who have a slot now, and counts it as taken."""
        self.pass_time(now_s)
        return self._assign(self._picture()) if self._waiting else []

    def pass_time(self, now_s: float) -> None:
        """It is so late now; whether there is an overload is looked at."""
        passed_s = max(0.0, now_s - self._now_s)
        self._now_s += passed_s
        self._aged_s += passed_s * (self._settings.overload_aging if self.overload.holds else self._settings.aging)
        idle_engines = 0 if self._waiting else len(self.engine_slots)
        if not self.overload.look(self._now_s, idle_engines, goes_on=self.held_back > 0):
            self._open_to_all.clear()

    def _assign(self, picture: Picture) -> list[tuple[W, EngineSlots[E]]]:
        engine_slots = self.engine_slots
        open_slots = {name for name, slots in engine_slots.items() if self._is_open(slots, picture)}
        if not open_slots and not any(slots.held_back for slots in engine_slots.values()):
            return []
        sent: list[tuple[W, EngineSlots[E]]] = []
        refused, tenants = set[str](), self._waiting.count_tenants()
        looked_at = held_back = 0
        admission = self._admission() if self.overload.holds else None
        for waiter in self._waiting.in_order():
            if waiter.ask.only is None and (looked_at := looked_at + 1) > PLAN_DEPTH:
                break
            if self.name == "batch":
                self._follow(waiter)
            closed = () if admission is None else admission.closed(waiter.ask)
            if (engine := picture.choose(waiter.ask, closed)) is None:
                continue
            slots = engine_slots[engine.hello.incarnation]
            has_place = slots.incarnation in open_slots or self._has_way(waiter, slots, picture)
            picture.add(slots.incarnation, waiter.ask)
            held_back += not has_place and bool(closed)
            if has_place:
                if admission is not None:
                    admission.add(slots.incarnation, waiter.ask)
                self._take(waiter, slots, picture)
                sent.append((waiter, slots))
                if not self._is_open(slots, picture):
                    open_slots.discard(slots.incarnation)
            else:
                refused.add(waiter.ask.tenant)
            if not open_slots and (tenants == 1 or len(refused) == tenants):
                break
        for waiter, _ in sent:
            self.remove(waiter)
        self._waiting.took(*(waiter for waiter, _ in sent))
        self.held_back = held_back
        return sent

    def _order_s(self, waiter: W) -> float:
        if self.name == "batch":
            return 0.0
        cost_s = 0.0 if waiter.ask.tier == "priority" else waiter.cost_s
        return cost_s + self._aged_s + self._waiting.tier_s(waiter)

    def _admission(self) -> AdmissionControl:
        engine_slots, now_s = self.engine_slots.values(), self._now_s
        self._open_to_all = choose_open(engine_slots, self._open_to_all, self.sessions, now_s)
        return AdmissionControl(engine_slots, self.sessions, self._open_to_all, now_s)

    def _picture(self) -> Picture:
        return self._router.picture(self.engine_slots.values(), self.name)

    def _is_open(self, slots: EngineSlots[E], picture: Picture) -> bool:
        """An engine that has nothing of ours may always be given something, however much others sent it."""
        slots.held_back = slots.free > 0 and slots.taken > 0 and not picture.is_ready(slots.incarnation)
        return slots.free > 0 and not slots.held_back

    def _has_way(self, waiter: W, slots: EngineSlots[E], picture: Picture) -> bool:
        """Whether it is sent to an engine that others wait for: it may go to no other, or has little in front of it."""
        if slots.free <= 0:
            return False
        passes = self.name == "online" and picture.passes_backlog(slots.incarnation, waiter.ask)
        return waiter.ask.only is not None or passes

    def _free_slots_now(self, waiter: W, picture: Picture) -> EngineSlots[E] | None:
        """What `_assign` would come to if nobody else waited."""
        if (engine := picture.choose(waiter.ask)) is None:
            return None
        slots = self.engine_slots[engine.hello.incarnation]
        if not self._is_open(slots, picture) and not self._has_way(waiter, slots, picture):
            return None
        self._take(waiter, slots, picture)
        return slots

    def _take(self, waiter: W, slots: EngineSlots[E], picture: Picture) -> None:
        ask, cached = waiter.ask, waiter.ask.cached_tokens.get(slots.incarnation, 0)
        slots.taken += 1
        slots.given_tokens += max(0, ask.prompt_tokens - cached)
        again = max(0, min(waiter.known_tokens, ask.prompt_tokens) - cached)
        own_s = picture.prefill_s(max(0, ask.prompt_tokens - cached))
        self.overload.computed(max(waiter.cost_s, own_s), picture.prefill_s(again))
        if ask.digests and self.name == "batch":
            self._affinity.sent(ask.digests, slots.incarnation, self._now_s)
        elif ask.digests:
            self.sessions.sent(waiter.session, ask.digests, slots.incarnation, self._now_s)

    def _find(self, waiter: W) -> None:
        """What is known of its prompt from those that were sent before it."""
        ask = waiter.ask
        if self.name == "batch":
            self._follow(waiter)
        elif ask.digests:
            known, session = self.sessions.find(ask.digests, self._now_s)
            waiter.known_tokens, waiter.session = known * ask.block_size, session
            if session is not None:
                self.sessions.came(session, self._now_s)
                if ask.cached_tokens.get(session.incarnation, 0) < waiter.known_tokens / 2:
                    self.sessions.lost(session)

    def _follow(self, waiter: W) -> None:
        """Takes what was sent before it, and begins like it, to be there when its turn comes."""
        ask = waiter.ask
        if ask.digests and (found := self._affinity.find(ask.digests, self._now_s)):
            cached = dict(ask.cached_tokens)
            for incarnation, blocks in found.items():
                cached[incarnation] = max(cached.get(incarnation, 0), blocks * ask.block_size)
            waiter.ask = replace(ask, cached_tokens=cached)
