"""Where will the first token come soonest? Pure: no I/O, no clock, no memory.

    score = expected wait + PREFILL_WEIGHT * own prefill         seconds, the least wins

The weight above 1 makes an engine that holds the prefix attractive beyond this one request, because prefilling
elsewhere takes time from all requests and evicts blocks; on real traces 4 was the best (docs/decisions.md). The
queue makes a snapshot of the engines, and adds to it what it means to send them.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from engine.protocol import Hello, Lane, Load
from engine.protocol.frozen import dataclass
from gateway.types import Ask, Candidate

ASSUMED_COMPLETION_TOKENS: Final = 128
"""Tokens that a sequence is taken to generate."""

PREFILL_WEIGHT: Final = 4.0
"""Factor on a request's own prefill time against the time it waits: its prefill delays all that come after it."""

ASSUMED_TOKENS_PER_S: Final = 1000.0
"""Of prefills, of an engine that has not measured its own yet."""

MAX_BACKLOG_S: Final = 0.5
"""Of prefill in front of an engine beyond which requests wait in the gateway, where their order can still change."""

ASSUMED_DECODE_TOKENS_PER_S: Final = 100.0
"""Of all sequences of an engine together, before it has measured its own."""

ALIKE: Final = 4.0
"""Engines whose rates differ by less than this factor from the mean are taken to be equally quick: a rate also depends
on how long the last prompts were. Believing it let engines stand idle and made every figure worse."""


MAX_CANDIDATES: Final = 8
"""Engines that a request is told it might have had, the best ones."""


class Engine(Protocol):
    """What the queue has to know of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...

    @property
    def joined(self) -> bool:
        """Whether it can be reached now, under its present hello."""
        ...

    @property
    def prefilling(self) -> Mapping[str, int]: ...


E = TypeVar("E", bound=Engine)

_Rank = tuple[float, float, str, str]


@dataclass(slots=True, eq=False)
class EngineSlots(Generic[E]):
    """An engine's slots. `taken` goes up in `EngineQueue.assign`; whoever uses a slot counts it down again."""

    engine: E
    incarnation: str
    total: int
    taken: int = 0
    given_tokens: float = 0.0  # that it was sent to prefill
    held_back: bool = False  # it had a slot when a request was sent elsewhere or waits, and too much to prefill
    max_sequences: int = field(init=False, default=0)  # as its hello says

    def __post_init__(self) -> None:
        self.max_sequences = self.engine.hello.max_sequences

    @property
    def free(self) -> int:
        return self.total - self.taken


class LoadSnapshot(Generic[E]):
    """Engines as they are at one moment, for requests of a lane, and what is meant for them since; engines that drain
    are not in it. In front of an online request is nothing of the batch lane, which gives way.

    It is made for each decision, so what it costs for an engine is a fleet's limit: one pass over the engines, and a
    choice looks at them by their wait, only as far as a shorter prefill might make up for it.
    """

    def __init__(self, engine_slots: Collection[EngineSlots[E]], lane: Lane = "online") -> None:
        loads = [slots.engine.load for slots in engine_slots]
        rates = _levelled([load.prefill_tokens_per_s for load in loads], ASSUMED_TOKENS_PER_S)
        self.tokens_per_s = max(rates) if rates else ASSUMED_TOKENS_PER_S
        self._outlooks = {
            slots.incarnation: _Outlook(slots, load, rate, lane)
            for slots, load, rate in zip(engine_slots, loads, rates, strict=True)
            if not load.draining
        }
        self._by_wait = sorted(self._outlooks.values(), key=_wait_of)
        self._possible: Sequence[_Outlook[E]] = ()  # of the last choice, by wait; empty when there was none to make

    def choose(self, ask: Ask, closed: Collection[str] = ()) -> E | None:
        """The engine with the least score; None when there is none that it may be. One that is `closed` only where
        there is no other."""
        outlooks, self._possible = self._outlooks, ()
        if ask.only is not None:
            return outlooks[ask.only].engine if ask.only in outlooks else None
        possible = self._by_wait
        for avoided in (ask.avoid, closed):
            if avoided:
                possible = [outlook for outlook in possible if outlook.incarnation not in avoided] or possible
        if len(possible) < 2:
            return possible[0].engine if possible else None
        self._possible = possible
        return self._best(ask, 1)[0][1].engine

    def tell(self, ask: Ask) -> None:
        """Which engines there were, to the request for which `choose` was called last, before `add`."""
        if ask.route is not None:
            best = self._best(ask, MAX_CANDIDATES)
            ask.route[:] = [self._candidate(*one, ask, one is best[0]) for one in best]

    def _best(self, ask: Ask, count: int) -> list[tuple[_Rank, _Outlook[E]]]:
        """So many of the possible engines, the least rank first."""
        prompt_tokens, cached = ask.prompt_tokens, ask.cached_tokens
        least_s = PREFILL_WEIGHT * (max(0, prompt_tokens - max(cached.values(), default=0)) / self.tokens_per_s)
        best: list[tuple[_Rank, _Outlook[E]]] = []
        worst_s = worst_even = float("inf")
        for outlook in self._possible:
            wait_s = outlook.wait_s
            if wait_s + least_s > worst_s:  # and all behind it wait no shorter
                break
            own_tokens = prompt_tokens - cached.get(outlook.incarnation, 0)
            score_s = wait_s + PREFILL_WEIGHT * (own_tokens / outlook.tokens_per_s if own_tokens > 0 else 0.0)
            if score_s > worst_s or (score_s == worst_s and not ask.affinity and outlook.given > worst_even):
                continue
            insort(best, (self._rank(outlook, ask), outlook), key=_rank_of)
            if len(best) >= count:
                del best[count:]
                worst_s, worst_even, _, _ = best[-1][0]
        return best

    def _candidate(self, rank: _Rank, outlook: _Outlook[E], ask: Ask, chosen: bool) -> Candidate:
        score_s, cached = rank[0], ask.cached_tokens.get(outlook.incarnation, 0)
        own_s = _own_tokens(ask, outlook.incarnation) / outlook.tokens_per_s
        return Candidate(outlook.engine.name, cached, score_s - PREFILL_WEIGHT * own_s, score_s, chosen)

    def score_s(self, incarnation: str, ask: Ask) -> float:
        """Seconds until the first token, with the own prefill weighted."""
        return self._rank(self._outlooks[incarnation], ask)[0]

    def is_ready(self, incarnation: str) -> bool:
        """Whether the engine has so little in front of it that it should be given more. One that has measured nothing
        is: it is not known yet how long anything takes."""
        outlook = self._outlooks.get(incarnation)
        if outlook is None:
            return False
        return not outlook.measured or outlook.backlog_s <= MAX_BACKLOG_S

    def passes_backlog(self, incarnation: str, ask: Ask) -> bool:
        """Whether the engine should be given an online request though it has a backlog. Tenants take turns in its
        prefills: in front of the request is what its tenant has there, and of others no more than that and its own
        prompt, each."""
        outlook = self._outlooks.get(incarnation)
        if outlook is None:
            return False
        in_front = outlook.in_front_of(ask.tenant, _own_tokens(ask, incarnation))
        return in_front / outlook.tokens_per_s <= MAX_BACKLOG_S

    def add(self, incarnation: str, ask: Ask) -> None:
        """The engine will have this request before any later one."""
        outlook = self._outlooks[incarnation]
        outlook.add(_own_tokens(ask, incarnation), ask.tenant)
        self._by_wait.remove(outlook)
        insort(self._by_wait, outlook, key=_wait_of)

    def cost_s(self, ask: Ask) -> float:
        """What the request takes of the engine that holds most of it, in seconds of its time."""
        held = max((tokens for name, tokens in ask.cached_tokens.items() if name in self._outlooks), default=0)
        turn_s = max((outlook.turn_s for outlook in self._by_wait), default=0.0)
        return max(0, ask.prompt_tokens - held) / self.tokens_per_s + turn_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds of an engine's time for so many tokens."""
        return tokens / self.tokens_per_s

    def _rank(self, outlook: _Outlook[E], ask: Ask) -> _Rank:
        own_s = _own_tokens(ask, outlook.incarnation) / outlook.tokens_per_s
        score_s = outlook.wait_s + PREFILL_WEIGHT * own_s
        even = _rendezvous(ask.affinity, outlook.incarnation) if ask.affinity else outlook.given
        return score_s, even, outlook.engine.name, outlook.incarnation


def _rank_of(one: tuple[_Rank, object]) -> _Rank:
    return one[0]


class _Outlook(Generic[E]):
    """What is in front of a new request at one engine.

    wait_s  until the running step and the prefills in front are done, and a slot is free when all are taken
    """

    __slots__ = (
        *("backlog_s", "busy", "engine", "given", "incarnation", "measured", "prefilling_now", "slots", "step_s"),
        *("tokens_per_s", "turn_s", "wait_s"),
    )

    def __init__(self, slots: EngineSlots[E], load: Load, tokens_per_s: float, lane: Lane) -> None:
        decode_tokens_per_s = load.decode_tokens_per_s or ASSUMED_DECODE_TOKENS_PER_S
        self.engine, self.incarnation, self.given = slots.engine, slots.incarnation, slots.given_tokens
        self.tokens_per_s, self.measured = tokens_per_s, load.prefill_tokens_per_s
        backlog, running, waiting = load.prefill_backlog, load.running, load.waiting
        if lane == "online":
            backlog -= load.batch_backlog
            running -= load.batch_running
            waiting -= load.batch_waiting
        self.backlog_s = backlog / tokens_per_s
        self.prefilling_now: dict[str, int] | None = None  # tokens by tenant, once it is needed
        self.step_s = running / decode_tokens_per_s
        busy, taken = running + waiting, slots.taken
        self.busy = busy if busy > taken else taken  # those of all gateways; a load may be a moment old
        most, total = slots.max_sequences, slots.total
        self.slots = most if most < total else total
        # n answers of that length end in length * n / rate seconds: one every length / rate.
        self.turn_s = ASSUMED_COMPLETION_TOKENS / decode_tokens_per_s
        self._set_wait()

    def _set_wait(self) -> None:
        excess = self.busy + 1 - self.slots
        self.wait_s = self.step_s + self.backlog_s + (excess * self.turn_s if excess > 0 else 0.0)

    def in_front_of(self, tenant: str, own_tokens: int) -> float:
        """Tokens that are prefilled before a request of the tenant, when all tenants take turns. What other gateways
        sent is taken to be one other tenant's."""
        prefilling = self._prefilling()
        theirs = prefilling.get(tenant, 0)
        turn = theirs + own_tokens
        strange = max(0.0, self.backlog_s * self.tokens_per_s - sum(prefilling.values()))
        others = sum(min(tokens, turn) for other, tokens in prefilling.items() if other != tenant)
        return theirs + others + min(strange, turn)

    def _prefilling(self) -> dict[str, int]:
        if self.prefilling_now is None:
            self.prefilling_now = dict(self.engine.prefilling)
        return self.prefilling_now

    def add(self, own_tokens: int, tenant: str) -> None:
        prefilling = self._prefilling()
        prefilling[tenant] = prefilling.get(tenant, 0) + own_tokens
        self.backlog_s += own_tokens / self.tokens_per_s
        self.busy += 1
        self.given += own_tokens
        self._set_wait()


_wait_of = attrgetter("wait_s")


def _own_tokens(ask: Ask, incarnation: str) -> int:
    return max(0, ask.prompt_tokens - ask.cached_tokens.get(incarnation, 0))


def _rendezvous(affinity: str, incarnation: str) -> int:
    """Rendezvous hashing: the least over all engines is the same one at every gateway, and only keys of an engine that
    leaves go elsewhere."""
    name = f"{len(affinity)}:{affinity}{incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def _levelled(rates: list[float], assumed: float) -> list[float]:
    """Tokens per second to reckon with. One that has measured nothing yet is taken to be as quick as the others, or
    it would never get a request."""
    if len(rates) == 1:
        return [rates[0] or assumed]
    measured = [rate for rate in rates if rate]
    mean = len(measured) / sum(1 / rate for rate in measured) if measured else assumed
    return [rate if rate and not mean / ALIKE <= rate <= mean * ALIKE else mean for rate in rates]
