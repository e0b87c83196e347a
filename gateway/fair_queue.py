"""Who waits, and who of them is next: tenants take turns (start-time fair queueing, Goyal and others, 1996), and a
tenant's own requests go in an order. Pure: no I/O, no clock, no futures.

Part of the foundation: queues/lane.py and upstreams/online_slots.py are made of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from gateway.types import Ask, Tier

MAX_IDLE_TENANTS: Final = 1024
"""Tenants without requests whose turns are remembered, until the next look at who need not be."""

TIER_SIGNS: Final[dict[Tier, float]] = {"priority": -1.0, "default": 0.0, "flex": 1.0}
"""Who goes first: to be multiplied by what a tier is worth."""

RATE_SAMPLES: Final = 64
"""Ends of requests that the service rate is taken from."""

MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
"""SDKs do not retry at all when they are told to wait for minutes."""

Order = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. `order` decides within its tenant: the least goes first."""

    ask: Ask
    arrived_s: float
    order: Order = (0, 0.0, 0)
    cost_s: float = 0.0
    since_s: float = 0.0  # where turns were when it arrived


W = TypeVar("W", bound=Waiting)


class Turns:
    """Whose turn it is, in seconds of service. Who comes back after a while has saved nothing up, and who used more
    than the others waits until they have had as much."""

    def __init__(self) -> None:
        self.now_s = 0.0  # where those stand whose turn it was last
        self._next_s: dict[str, float] = {}

    def start_s(self, waiter: Waiting) -> float:
        """Where its tenant stands with it: where everybody stood when it arrived, or behind what the tenant used."""
        return max(waiter.since_s, self._next_s.get(waiter.ask.tenant, 0.0))

    def took(self, waiter: Waiting) -> None:
        self._use(waiter.ask.tenant, self.start_s(waiter), waiter.cost_s / waiter.ask.weight)

    def took_now(self, tenant: str, used_s: float) -> None:
        """As `took`, of a request that came now."""
        self._use(tenant, max(self.now_s, self._next_s.get(tenant, 0.0)), used_s)

    def _use(self, tenant: str, start_s: float, used_s: float) -> None:
        self.now_s = max(self.now_s, start_s)
        self._next_s[tenant] = start_s + used_s

    def forget_all_but(self, tenants: Iterable[str]) -> None:
        """Those who would stand where everybody begins need not be remembered."""
        if len(self._next_s) > MAX_IDLE_TENANTS:
            kept = set(tenants)
            self._next_s = {
                tenant: next_s for tenant, next_s in self._next_s.items() if tenant in kept or next_s > self.now_s
            }


class FairQueue(Generic[W]):
    """Requests of all tenants. `tier_s` is what `flex` stands behind those of its time, and `priority` before."""

    def __init__(self, tier_s: float) -> None:
        self._tier_s = tier_s
        self._turns = Turns()
        self._tenants: dict[str, list[tuple[Order, W]]] = {}  # in order; only those with requests

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[W]:
        """Everybody who waits, tenant by tenant. Nobody may come or go meanwhile."""
        return (waiter for line in self._tenants.values() for _, waiter in line)

    def arrived(self, waiter: W) -> None:
        """Notes where turns are. Each one that comes is told here, first."""
        waiter.since_s = self._turns.now_s

    def enter(self, waiter: W) -> None:
        """It waits from now on, in its `order`, which nobody else has."""
        insort(self._tenants.setdefault(waiter.ask.tenant, []), (waiter.order, waiter))

    def remove(self, waiter: W) -> bool:
        """It waits no more. False when it did not."""
        line = self._tenants.get(waiter.ask.tenant, [])
        index = bisect_left(line, waiter.order, key=_order)
        if index == len(line) or line[index][1] is not waiter:
            return False
        del line[index]
        if not line:
            del self._tenants[waiter.ask.tenant]
        return True

    def took(self, *waiters: W) -> None:
        """They are served, and wait no more, or never did."""
        for waiter in waiters:
            self._turns.took(waiter)
        self._turns.forget_all_but(self._tenants)

    def took_now(self, tenant: str, used_s: float) -> None:
        """A request of the tenant came now and is served, for so many seconds over its weight."""
        self._turns.took_now(tenant, used_s)
        self._turns.forget_all_but(self._tenants)

    def waiting(self) -> dict[str, int]:
        """Requests by tenant, of those who have some."""
        return {tenant: len(line) for tenant, line in self._tenants.items()}

    def count_tenants(self) -> int:
        """Tenants with requests that wait."""
        return len(self._tenants)

    def waiting_of(self, tenant: str) -> int:
        return len(self._tenants.get(tenant, ()))

    def tier_s(self, waiter: W) -> float:
        return TIER_SIGNS[waiter.ask.tier] * self._tier_s

    def first(self, last: Collection[str]) -> W:
        """Who is next. Tenants in `last` come behind all others. Somebody has to wait."""
        heads = [line[0][1] for tenant, line in self._tenants.items() if tenant not in last]
        return min(heads or (line[0][1] for line in self._tenants.values()), key=self._when)

    def in_order(self) -> Iterator[W]:
        """Everybody, as they would be served if all could be served now. Nobody may come or go meanwhile."""
        if len(self._tenants) == 1:
            (line,) = self._tenants.values()
            yield from (waiter for _, waiter in line)
            return
        turns = [self._turn(iter(line), 0.0) for line in self._tenants.values()]
        heap = [turn for turn in turns if turn is not None]
        heapq.heapify(heap)
        while heap:
            _, _, waiter, start_s, behind = heap[0]
            yield waiter
            if (following := self._turn(behind, start_s + waiter.cost_s / waiter.ask.weight)) is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, following)

    def _turn(self, line: Iterator[tuple[Order, W]], used_s: float) -> _Turn[W] | None:
        """Of the next in a tenant's line, when the tenant would have been given so much."""
        if (entry := next(line, None)) is None:
            return None
        waiter = entry[1]
        start_s = max(self._turns.start_s(waiter), used_s)
        return start_s + self.tier_s(waiter), waiter.ask.tenant, waiter, start_s, line

    def _when(self, waiter: W) -> tuple[float, str]:
        """It is its tenant's turn, in the order in which tenants are taken."""
        return self._turns.start_s(waiter) + self.tier_s(waiter), waiter.ask.tenant


_Turn = tuple[float, str, W, float, Iterator[tuple[Order, W]]]
"""When it is whose, in which order they are taken; one who waits, where the tenant stands, and who waits behind."""


@dataclass(slots=True)
class Pace:
    """How quickly requests end."""

    ends: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))

    def wait_s(self, waiting: int, now: float) -> float:
        """How long that many requests would take at the rate of the last ends."""
        if len(self.ends) < 2:
            return MIN_RETRY_S
        rate = len(self.ends) / max(now - self.ends[0], 1e-3)
        return min(max(waiting / rate, MIN_RETRY_S), MAX_RETRY_S)


def _order(entry: tuple[Order, Any]) -> Order:
    return entry[0]
