"""The one waiting line: in which order requests of several tenants are served (`FairQueue`), and the gate at which each
waits until it is served, its time is over, or its client leaves (`Gate`).

Tenants take turns (start-time fair queueing, Goyal and others, 1996), and a tenant's own requests go in an order. The
order is pure: no I/O, no clock, no futures. Part of the foundation: slots at engines and upstreams and the embedder's
queue are made of it.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from gateway.errors import DeadlineError
from gateway.types import Ask, Tier

MAX_IDLE_TENANTS: Final = 1024
"""Tenants without requests whose turns are remembered, before the least useful are dropped."""

TIER_SIGNS: Final[dict[Tier, float]] = {"priority": -1.0, "default": 0.0, "flex": 1.0}
"""Multiplied by what a tier is worth: the least goes first."""

RATE_SAMPLES: Final = 64
"""Ends of requests that the service rate is taken from."""

MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
"""SDKs do not retry at all when Retry-After is minutes."""

Order = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. `order` decides within its tenant: the least goes first."""

    ask: Ask
    arrived_s: float
    order: Order = (0, 0.0, 0)
    cost_s: float = 0.0
    since_s: float = 0.0  # where turns were when it arrived
    size: int = 1  # that counts in the gate's limits
    granted: asyncio.Future[Any] | None = None  # None before it turns out that it has to wait


W = TypeVar("W", bound=Waiting)
W_contra = TypeVar("W_contra", bound=Waiting, contravariant=True)
T = TypeVar("T")


class FairQueue(Generic[W]):
    """Requests of all tenants, which take turns in seconds of service. A tenant that comes back after a while has saved
    nothing up, and one that used more than the others waits until they have had as much.

    tier_s  what `flex` stands behind those of its time, and `priority` before
    """

    def __init__(self, tier_s: float = 0.0) -> None:
        self._tier_s = tier_s
        self._now_s = 0.0  # virtual time: the start of the last service
        self._next_s: dict[str, float] = {}  # virtual time at which a tenant's next service starts
        self._tenants: dict[str, list[tuple[Order, W]]] = {}  # in order; only those with requests

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[W]:
        """All requests, tenant by tenant. The queue must not change meanwhile."""
        return (waiter for entries in self._tenants.values() for _, waiter in entries)

    def arrived(self, waiter: W) -> None:
        """Notes where turns are. Called first, once for each request."""
        waiter.since_s = self._now_s

    def enter(self, waiter: W) -> None:
        """It waits from now on, in its `order`, which no other has."""
        insort(self._tenants.setdefault(waiter.ask.tenant, []), (waiter.order, waiter))

    def remove(self, waiter: W) -> bool:
        """It waits no more. False when it did not."""
        entries = self._tenants.get(waiter.ask.tenant, [])
        index = bisect_left(entries, waiter.order, key=_order)
        if index == len(entries) or entries[index][1] is not waiter:
            return False
        del entries[index]
        if not entries:
            del self._tenants[waiter.ask.tenant]
        return True

    def took(self, *waiters: W) -> None:
        """They are served, and wait no more, or never did."""
        for waiter in waiters:
            start_s = self._start_s(waiter)
            self._now_s = max(self._now_s, start_s)
            self._next_s[waiter.ask.tenant] = start_s + waiter.cost_s / waiter.ask.weight
        if len(self._next_s) > MAX_IDLE_TENANTS:  # tenants at the common start need not be remembered
            self._next_s = {
                name: next_s for name, next_s in self._next_s.items() if name in self._tenants or next_s > self._now_s
            }

    def count_tenants(self) -> int:
        """Tenants with requests that wait."""
        return len(self._tenants)

    def has_tenant(self, tenant: str) -> bool:
        return tenant in self._tenants

    def tier_s(self, waiter: W) -> float:
        return TIER_SIGNS[waiter.ask.tier] * self._tier_s

    def first(self, last: Collection[str] = ()) -> W:
        """The next request; there has to be one. Tenants in `last` come behind all others."""
        heads = [entries[0][1] for tenant, entries in self._tenants.items() if tenant not in last]
        return min(heads or (entries[0][1] for entries in self._tenants.values()), key=self._when)

    def in_order(self) -> Iterator[W]:
        """All requests, as they would be served if all could be served now. The queue must not change meanwhile."""
        if len(self._tenants) == 1:
            (entries,) = self._tenants.values()
            yield from (waiter for _, waiter in entries)
            return
        turns = [self._turn(iter(entries), 0.0) for entries in self._tenants.values()]
        heap = [turn for turn in turns if turn is not None]
        heapq.heapify(heap)
        while heap:
            _, _, waiter, start_s, behind = heap[0]
            yield waiter
            if (following := self._turn(behind, start_s + waiter.cost_s / waiter.ask.weight)) is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, following)

    def _turn(self, entries: Iterator[tuple[Order, W]], used_s: float) -> _Turn[W] | None:
        """Of a tenant's next request, when the tenant would have been given so much."""
        if (entry := next(entries, None)) is None:
            return None
        waiter = entry[1]
        start_s = max(self._start_s(waiter), used_s)
        return start_s + self.tier_s(waiter), waiter.ask.tenant, waiter, start_s, entries

    def _start_s(self, waiter: W) -> float:
        """Where its tenant stands with it: where all stood when it arrived, or behind what the tenant used."""
        return max(waiter.since_s, self._next_s.get(waiter.ask.tenant, 0.0))

    def _when(self, waiter: W) -> tuple[float, str]:
        """Its tenant's turn, in the order in which tenants are taken."""
        return self._start_s(waiter) + self.tier_s(waiter), waiter.ask.tenant


_Turn = tuple[float, str, W, float, Iterator[tuple[Order, W]]]
"""When it is which tenant's turn, in the order in which they are taken; its request, where the tenant stands, and its
requests behind."""


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


class Removes(Protocol[W_contra]):
    """A queue, as a gate needs it: a FairQueue, or one that is made of it."""

    def remove(self, waiter: W_contra, /) -> bool: ...


class Gate(Generic[T]):
    """Requests that wait until each is granted a T. Single event loop, no locks. The waiting of a request ends once:

    granted    `wait` returns what `grant` was given
    failed     `wait` raises what `fail` was given
    expired    its time is over: DeadlineError
    abandoned  its client left; what it was granted in that turn of the event loop is handed back

    Public counters are those of the operator: `waiting` is the sum of sizes now, the others count requests.
    """

    def __init__(self, most: float = float("inf"), most_per_tenant: float = float("inf")) -> None:
        """The limits of `waiting`, in all and for each tenant."""
        self.waiting = 0
        self.by_tenant = Counter[str]()
        self.admitted = self.refused = self.expired = self.abandoned = 0
        self._most = most
        self._most_per_tenant = most_per_tenant

    def find_full(self, tenant: str, size: int = 1) -> tuple[int, bool] | None:
        """Whether the request is one too many, and is refused: how much waits, and whether that is the tenant's."""
        for waiting, most, own in (
            (self.by_tenant[tenant], self._most_per_tenant, True),
            (self.waiting, self._most, False),
        ):
            if waiting + size > most:
                self.refused += 1
                return waiting, own
        return None

    def enter(self, waiter: Waiting) -> None:
        """It waits from now on, for `wait` to be called."""
        waiter.granted = asyncio.get_running_loop().create_future()
        self.waiting += waiter.size
        self.by_tenant[waiter.ask.tenant] += waiter.size

    def shrink(self, waiter: Waiting, by: int) -> None:
        """So much of it waits no more."""
        waiter.size -= by
        self.waiting -= by
        self.by_tenant[waiter.ask.tenant] -= by
        if not self.by_tenant[waiter.ask.tenant]:
            del self.by_tenant[waiter.ask.tenant]

    async def wait(
        self,
        waiter: W,
        queue: Removes[W],
        timeout_s: float,
        *,
        late: Callable[[], DeadlineError],
        leave: Callable[[T | None], None] = lambda _: None,
    ) -> T:
        """What the request is granted. However this ends, the request is not in `queue` afterwards.

        late   the error when its time is over
        leave  called when the request leaves without what it waited for: with what it had been granted, which is to be
               given back, or with None
        """

        def expire() -> None:
            if self.fail(waiter, queue, late()):
                self.expired += 1
                leave(None)

        assert waiter.granted is not None, "it has entered"
        granted: asyncio.Future[T] = waiter.granted
        timer = asyncio.get_running_loop().call_later(max(timeout_s, 0.0), expire)
        try:
            return await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                if granted.exception() is None:  # it was granted in the turn of the loop in which the client left
                    leave(granted.result())
            elif queue.remove(waiter):
                self.shrink(waiter, waiter.size)
                self.abandoned += 1
                leave(None)
            raise
        finally:
            timer.cancel()

    def grant(self, waiter: Waiting, granted: T) -> bool:
        """Grants it to a request that was taken out of its queue. False when its client has left: it is for others."""
        assert waiter.granted is not None, "it waits"
        self.shrink(waiter, waiter.size)
        if waiter.granted.done():  # cancelled, and has not run yet to take itself out
            self.abandoned += 1
            return False
        self.admitted += 1
        waiter.granted.set_result(granted)
        return True

    def fail(self, waiter: W, queue: Removes[W], error: Exception) -> bool:
        """Ends its waiting with an error. False when it had ended; a request that was cancelled and has not run yet
        takes itself out."""
        if waiter.granted is None or waiter.granted.done():
            return False
        if queue.remove(waiter):
            self.shrink(waiter, waiter.size)
        waiter.granted.set_exception(error)
        return True


def _order(entry: tuple[Order, Any]) -> Order:
    return entry[0]
