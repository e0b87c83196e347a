"""Slots for the online lane at one upstream, where the operator bounds how many requests it has at a time, and a fair
line in front of them. Lines of batches count in the bound (slots.py), and get what nobody here waits for.

    a free place  goes to the tenant whose turn it is, by requests over weight (fair_queue.py); a tenant that holds its
                  share of all places comes behind those who do not, so that long answers leave room for short ones
    a tenant's    own requests go in the order of their `priority`, then as they came; `flex` counts as
                  `tier_s` seconds more, `priority` as so much less, and waiting makes up for it (`aging`)

Single event loop, no locks. Knows no HTTP; its neighbours are upstream.py and stage.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.config import QueueSettings
from gateway.errors import DeadlineError, QueueFullError
from gateway.fair_queue import FairQueue, Pace, Waiting
from gateway.types import Ask

REQUEST_S: Final = 1.0
"""What a request counts as in its tenant's turns: nobody knows how long its answer will be."""


@dataclass(slots=True, eq=False)
class _Waiter(Waiting):
    placed: asyncio.Future[None] | None = None  # None before it turns out that it has to wait


class OnlineSlots:
    """`take` in an event loop; each place that it gave is released once. `limits` are those of the queue in front of
    engines, and hold for each upstream by itself."""

    def __init__(self, most: int, limits: QueueSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.taken = 0  # by requests of the online lane
        self._most = most
        self._limits = limits
        self._clock = clock
        self._queue: FairQueue[_Waiter] = FairQueue(limits.tier_s)
        self._pace = Pace()
        self._numbers = 0
        self._lines = 0
        self._held = Counter[str]()  # places by tenant
        self._weights: dict[str, float] = {}  # of tenants who hold places or wait
        self._left_over: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> dict[str, int]:
        """Requests by tenant, of those who have some."""
        return self._queue.waiting()

    @property
    def has_left_over(self) -> bool:
        """Whether there is a slot that no online request wants."""
        return not self._queue and self._is_free()

    def tell(self, left_over: Callable[[], None]) -> None:
        """It is called from now on when a place may be left over."""
        self._left_over = left_over

    def line_came(self) -> None:
        """A line of a batch has a slot that was left over."""
        self._lines += 1

    def line_left(self) -> None:
        self._lines -= 1
        self._hand_out()

    def take_free(self, tenant: str, weight: float) -> bool:
        """Takes a place if one is free that nobody waits for."""
        if not self.has_left_over:
            return False
        self._queue.took_now(tenant, REQUEST_S / weight)
        self._hold(tenant, weight)
        return True

    async def take(self, ask: Ask) -> None:
        """Waits for a slot. Raises QueueFullError at once, and DeadlineError when its time is over. `ask` says nothing
        of a prompt."""
        if self.take_free(ask.tenant, ask.weight):
            return
        self._check_room(ask.tenant)
        waiter = _Waiter(ask, self._clock(), cost_s=REQUEST_S)
        self._queue.arrived(waiter)
        await self._wait(waiter)

    def release(self, tenant: str) -> None:
        """A place that `take` gave to a request of the tenant."""
        self.taken -= 1
        self._held[tenant] -= 1
        self._forget(tenant)
        self._pace.ends.append(self._clock())
        self._hand_out()
        self._left_over()

    async def _wait(self, waiter: _Waiter) -> None:
        ask, loop = waiter.ask, asyncio.get_running_loop()
        waiter.placed = loop.create_future()
        self._numbers += 1
        order_s = waiter.arrived_s * self._limits.aging + self._queue.tier_s(waiter)
        waiter.order = (ask.priority, order_s, self._numbers)
        self._weights[ask.tenant] = ask.weight
        self._queue.enter(waiter)
        timer = loop.call_later(max(0.0, ask.deadline_s - waiter.arrived_s), self._expire, waiter)
        try:
            await waiter.placed
        except BaseException:
            if waiter.placed.done() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
                self.release(ask.tenant)  # it came in the turn of the loop in which the client left
            elif self._queue.remove(waiter):
                self._forget(ask.tenant)
            raise
        finally:
            timer.cancel()

    def _expire(self, waiter: _Waiter) -> None:
        assert waiter.placed is not None
        if not waiter.placed.done() and self._queue.remove(waiter):
            self._forget(waiter.ask.tenant)
            waiter.placed.set_exception(DeadlineError.without_slot(self._wait_s()))

    def _check_room(self, tenant: str) -> None:
        limits = self._limits
        if (theirs := self._queue.waiting_of(tenant)) >= limits.max_waiting_per_tenant:
            raise QueueFullError.of(theirs, "queue.max_waiting_per_tenant", self._wait_s())
        if (waiting := len(self._queue)) >= limits.max_waiting:
            raise QueueFullError.of(waiting, "queue.max_waiting", self._wait_s())

    def _wait_s(self) -> float:
        return self._pace.wait_s(len(self._queue), self._clock())

    def _is_free(self) -> bool:
        return self.taken + self._lines < self._most

    def _hand_out(self) -> None:
        while self._queue and self._is_free():
            waiter = self._queue.first(last=self._find_sated())
            self._queue.remove(waiter)
            assert waiter.placed is not None
            if waiter.placed.done():  # cancelled, and has not run yet to take itself out
                self._forget(waiter.ask.tenant)
            else:
                self._queue.took(waiter)
                self._hold(waiter.ask.tenant, waiter.ask.weight)
                waiter.placed.set_result(None)

    def _hold(self, tenant: str, weight: float) -> None:
        self.taken += 1
        self._held[tenant] += 1
        self._weights[tenant] = weight

    def _find_sated(self) -> set[str]:
        """Tenants that hold their share of all places, among those that are here; one at least."""
        by_weight = self._most / sum(self._weights.values())
        return {
            tenant
            for tenant, held in self._held.items()
            if held >= max(1, math.ceil(self._weights[tenant] * by_weight - 1e-9))
        }

    def _forget(self, tenant: str) -> None:
        """A tenant that is not here any more."""
        if not self._held[tenant] and not self._queue.waiting_of(tenant):
            del self._held[tenant]
            self._weights.pop(tenant, None)
