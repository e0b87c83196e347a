"""Slots at one upstream: how many requests of each lane it has at a time, and the fair queues in front of them.
Knows no HTTP; its neighbour is upstream.py.

    online  `max_in_flight` slots where the operator sets it, lines of batches included; else any number. A free slot
            goes to the tenant whose turn it is, by requests over weight; a tenant that holds its share of all slots
            comes behind those that do not, so that long answers leave room for short ones. A tenant's own requests go
            in the order of their `priority`, then as they came; `flex` counts as `tier_s` seconds more, `priority` as
            so much less, and waiting makes up for it (`aging`)
    batch   a line gets what no online request wants, `batch_slots` at most together with online requests. An upstream
            that is overloaded gets no lines for a while, and then half as many at a time; each round of answers
            adds one, so that lines come about as fast as it takes them (AIMD, RFC 5681, section 3.1)
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from engine.protocol import LANES, Lane
from gateway.config import QueueSettings
from gateway.errors import DeadlineError, QueueFullError
from gateway.gate import FairQueue, Gate, Pace, Waiting
from gateway.types import Ask

REQUEST_S: Final = 1.0
"""Cost of a request in its tenant's turns: the length of its answer is not known yet."""

LONGEST_S: Final = 3600.0
"""Longest Retry-After of an upstream that is followed."""


class UpstreamSlots:
    """`take` and `release` of slots, in one event loop. `limits` are those of [queue], for each upstream by itself."""

    def __init__(
        self,
        max_in_flight: int | None,
        batch_slots: int,
        limits: QueueSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = limits or QueueSettings()
        self.taken: Counter[Lane] = Counter()  # slots
        self.gates: dict[Lane, Gate[Ask]] = {
            "online": Gate(limits.max_waiting, limits.max_waiting_per_tenant),
            "batch": Gate(),
        }
        self._most = math.inf if max_in_flight is None else max_in_flight
        self._batch_slots = batch_slots
        self._limits = limits
        self._clock = clock
        self._queues: dict[Lane, FairQueue[Waiting]] = {"online": FairQueue(limits.tier_s), "batch": FairQueue()}
        self._pace = Pace()
        self._numbers = 0
        self._held = Counter[str]()  # online slots by tenant
        self._weights: dict[str, float] = {}  # of tenants that hold online slots, or wait for one
        self._lines = float(batch_slots)  # that fit at a time, as estimated; at least 1
        self._until_s = -math.inf  # no lines before

    async def take(self, ask: Ask) -> None:
        """Waits for a slot; takes a free one without an await. Raises QueueFullError at once, and DeadlineError when
        its time is over, or for a line while lines are held off. The prompt of `ask` does not matter."""
        if self._most == math.inf and ask.lane == "online":  # which never waits
            self.taken["online"] += 1
            return
        queue, gate = self._queues[ask.lane], self.gates[ask.lane]
        if ask.lane == "batch" and self.held_off_s():
            raise self._late()
        waiter = Waiting(ask, self._clock(), cost_s=REQUEST_S)
        queue.arrived(waiter)
        if not queue and self._is_free(ask.lane):
            self._hold(waiter)
            return
        if full := gate.find_full(ask.tenant):
            waiting, own_limit = full
            setting = "queue.max_waiting_per_tenant" if own_limit else "queue.max_waiting"
            raise QueueFullError.of(waiting, setting, self._retry_s())
        self._numbers += 1
        order_s = waiter.arrived_s * self._limits.aging + queue.tier_s(waiter) if ask.lane == "online" else 0.0
        waiter.order = (ask.priority, order_s, self._numbers)
        queue.enter(waiter)
        gate.enter(waiter)
        if ask.lane == "online":
            self._weights[ask.tenant] = ask.weight
        await gate.wait(
            waiter,
            queue,
            ask.deadline_s - waiter.arrived_s,
            late=self._late,
            leave=partial(self._leave, ask.tenant),
        )

    def release(self, ask: Ask) -> None:
        """Frees a slot that `take` returned."""
        self.taken[ask.lane] -= 1
        if ask.lane == "online" and self._most < math.inf:
            self._held[ask.tenant] -= 1
            self._forget(ask.tenant)
            self._pace.ends.append(self._clock())
        self._hand_out()

    def answered(self) -> None:
        """A line was answered without an error: one more fits per round of answers."""
        self._lines = min(self._lines + 1 / self._lines, float(self._batch_slots))
        self._hand_out()

    def hold_off(self, for_s: float) -> None:
        """No line for `for_s`, LONGEST_S at most; waiting ones fail. Failures of one time halve the estimate once."""
        if not self.held_off_s():
            self._lines = max(self._lines / 2, 1.0)
        self._until_s = max(self._until_s, self._clock() + min(for_s, LONGEST_S))
        for waiter in list(self._queues["batch"]):
            self.gates["batch"].fail(waiter, self._queues["batch"], self._late())

    def held_off_s(self) -> float:
        """Seconds until lines are accepted again; 0: now."""
        return max(0.0, self._until_s - self._clock())

    def _is_free(self, lane: Lane) -> bool:
        """Whether there is a slot; for a line one that no online request wants."""
        if self.taken.total() >= self._most:
            return False
        if lane == "online":
            return True
        lines = self.taken["batch"]
        return (
            not self._queues["online"] and lines < int(self._lines) and self.taken["online"] + lines < self._batch_slots
        )

    def _hand_out(self) -> None:
        for lane in LANES:
            queue = self._queues[lane]
            while queue and self._is_free(lane):
                waiter = queue.first(last=self._find_sated() if lane == "online" else ())
                queue.remove(waiter)
                if self.gates[lane].grant(waiter, waiter.ask):
                    self._hold(waiter)
                else:
                    self._forget(waiter.ask.tenant)

    def _hold(self, waiter: Waiting) -> None:
        ask = waiter.ask
        self._queues[ask.lane].took(waiter)
        self.taken[ask.lane] += 1
        if ask.lane == "online":
            self._held[ask.tenant] += 1
            self._weights[ask.tenant] = ask.weight

    def _leave(self, tenant: str, unused: Ask | None) -> None:
        """A request left the queue, perhaps with a slot that it was granted in the same turn of the loop."""
        if unused is not None:
            self.release(unused)
        else:
            self._forget(tenant)

    def _find_sated(self) -> set[str]:
        """Tenants that hold at least their share of all slots, and one."""
        by_weight = self._most / sum(self._weights.values())
        return {
            tenant
            for tenant, held in self._held.items()
            if held >= max(1, math.ceil(self._weights[tenant] * by_weight - 1e-9))
        }

    def _forget(self, tenant: str) -> None:
        """Drops the state of a tenant without slots and waiting requests."""
        if not self._held[tenant] and not self._queues["online"].has_tenant(tenant):
            del self._held[tenant]
            self._weights.pop(tenant, None)

    def _late(self) -> DeadlineError:
        return DeadlineError.without_slot(self._retry_s())

    def _retry_s(self) -> float:
        return self._pace.wait_s(len(self._queues["online"]), self._clock())
