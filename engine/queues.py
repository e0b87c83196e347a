"""Where sequences wait and run, by queue and tenant, and which tenant is next to prefill.

Pure bookkeeping: no blocks, no budget. engine/planner.py takes sequences out of here for a step; a preempted one comes
back to the head of its tenant's queue.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from engine.protocol import LANES, Lane
from engine.sequence import Sequence, Status

MAX_IDLE_TENANTS = 1024
"""Tenants with nothing to prefill that are still behind the others because of what they had."""


class Queues:
    """Every sequence that is not finished is in here once, where its status says."""

    def __init__(self) -> None:
        self._waiting: dict[Lane, dict[str, OrderedDict[Sequence, None]]] = {lane: {} for lane in LANES}  # by tenant
        self._running: dict[Lane, dict[Sequence, None]] = {lane: {} for lane in LANES}
        self._waiting_tokens: dict[Lane, int] = dict.fromkeys(LANES, 0)

    @property
    def num_waiting(self) -> int:
        return sum(map(self.count_waiting, LANES))

    @property
    def num_running(self) -> int:
        return sum(map(self.count_running, LANES))

    def count_waiting(self, lane: Lane) -> int:
        return sum(map(len, self._waiting[lane].values()))

    def count_running(self, lane: Lane) -> int:
        return len(self._running[lane])

    def count_unprefilled(self, lane: Lane) -> int:
        """Tokens of its sequences that are still to be prefilled; of those that wait, what could not be found when they
        arrived."""
        running = sum(left for s in self.running(lane) if (left := s.num_tokens - s.num_computed) > 1)
        return self._waiting_tokens[lane] + running

    def running(self, *lanes: Lane) -> Iterator[Sequence]:
        """In the order in which they were started, lane by lane; of all lanes when none is named."""
        return (sequence for lane in lanes or LANES for sequence in self._running[lane])

    def unprefilled(self, lane: Lane, count: int, order: Callable[[Sequence], float]) -> dict[str, Iterator[Sequence]]:
        """Of each tenant what is to be prefilled, lowest `order` first: what runs, and the first `count` that wait.
        Sequences may be started while it is iterated over."""
        running: dict[str, list[Sequence]] = {}
        for sequence in self._running[lane]:
            if sequence.num_tokens - sequence.num_computed > 1:
                running.setdefault(sequence.tenant, []).append(sequence)
        tenants = dict.fromkeys([*running, *self._waiting[lane]])
        waiting = self._waiting[lane]
        return {
            tenant: iter(
                sorted([*running.get(tenant, ()), *itertools.islice(waiting.get(tenant, ()), count)], key=order)
            )
            for tenant in tenants
        }

    def has_several_tenants(self, lane: Lane) -> bool:
        """Whether sequences of more than one tenant run or wait."""
        tenants = itertools.chain(self._waiting[lane], (sequence.tenant for sequence in self._running[lane]))
        first = next(tenants, None)
        return any(tenant != first for tenant in tenants)

    def choose_victim(self) -> Sequence:
        """The youngest running sequence of the batch lane, else of the online lane. There must be one."""
        running = self._running["batch"] or self._running["online"]
        return max(reversed(running), key=lambda sequence: sequence.arrived_s)  # of equals the last admitted

    def add(self, sequence: Sequence) -> None:
        """A new one waits behind those of its tenant."""
        self._waiting[sequence.lane].setdefault(sequence.tenant, OrderedDict())[sequence] = None
        self._waiting_tokens[sequence.lane] += _unknown(sequence)

    def start(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        self._running[sequence.lane][sequence] = None
        sequence.status = Status.RUNNING

    def put_back(self, sequence: Sequence) -> None:
        """One that ran waits again, as the first of its tenant."""
        del self._running[sequence.lane][sequence]
        sequence.status = Status.WAITING
        queue = self._waiting[sequence.lane].setdefault(sequence.tenant, OrderedDict())
        queue[sequence] = None
        queue.move_to_end(sequence, last=False)
        self._waiting_tokens[sequence.lane] += _unknown(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            del self._running[sequence.lane][sequence]
        else:
            self._take_out(sequence)
        sequence.status = Status.FINISHED

    def _take_out(self, sequence: Sequence) -> None:
        queues = self._waiting[sequence.lane]
        del queues[sequence.tenant][sequence]
        if not queues[sequence.tenant]:
            del queues[sequence.tenant]
        self._waiting_tokens[sequence.lane] -= _unknown(sequence)


def _unknown(sequence: Sequence) -> int:
    """Its tokens that could not be found when it arrived."""
    return sequence.num_tokens - sequence.findable_tokens


class Turns:
    """Whose prefill is next in one queue: the tenant's that has had the fewest tokens so far."""

    def __init__(self) -> None:
        self._now = 0  # tokens of the tenant that was served last
        self._next: dict[str, int] = {}  # of the others; a tenant that is not in here has `_now`

    def took(self, tenant: str, tokens: int) -> None:
        """A tenant gets so many tokens of a step."""
        self._now = self._tokens_of(tenant)
        self._next[tenant] = self._now + tokens

    def in_turn(self, sequences: Mapping[str, Iterator[Sequence]]) -> Iterator[Sequence]:
        """All sequences, each of the tenant that has had least so far; what one `took` counts before the next."""
        keeps_idle = len(self._next) <= len(sequences) + MAX_IDLE_TENANTS
        self._next = {
            tenant: at for tenant, at in self._next.items() if at > self._now and (keeps_idle or tenant in sequences)
        }
        heap = [(self._tokens_of(tenant), number, tenant) for number, tenant in enumerate(sequences)]
        heapq.heapify(heap)
        while heap:
            _, number, tenant = heap[0]
            if (sequence := next(sequences[tenant], None)) is None:
                heapq.heappop(heap)
                continue
            yield sequence
            heapq.heapreplace(heap, (self._tokens_of(tenant), number, tenant))

    def _tokens_of(self, tenant: str) -> int:
        return max(self._now, self._next.get(tenant, 0))
