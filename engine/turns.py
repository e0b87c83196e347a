"""Turns of tenants in the prefills of a queue, by tokens, all with the same weight (start-time fair queueing, Goyal and
others, 1996). Pure; engine/planner.py asks and charges.

A tenant with a short prompt is served in the next step, however many long ones of another tenant are there. A tenant
that was away has saved nothing up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from engine.sequence import Sequence

MAX_IDLE_TENANTS = 1024
"""Tenants with nothing to prefill that are still behind the others because of what they had."""


class Turns:
    """Of one queue."""

    def __init__(self) -> None:
        self._now = 0  # where the tenant stands that was served last, in tokens
        self._next: dict[str, int] = {}  # where the others stand; a tenant that is not in here stands at `_now`

    def took(self, tenant: str, tokens: int) -> None:
        """A tenant gets so many tokens of a step."""
        self._now = self._stands(tenant)
        self._next[tenant] = self._now + tokens

    def in_turn(self, sequences: Mapping[str, Iterator[Sequence]]) -> Iterator[Sequence]:
        """All sequences, each of the tenant that has had least so far; what one `took` counts before the next."""
        keeps_idle = len(self._next) <= len(sequences) + MAX_IDLE_TENANTS
        self._next = {
            tenant: at for tenant, at in self._next.items() if at > self._now and (keeps_idle or tenant in sequences)
        }
        heap = [(self._stands(tenant), number, tenant) for number, tenant in enumerate(sequences)]
        heapq.heapify(heap)
        while heap:
            _, number, tenant = heap[0]
            if (sequence := next(sequences[tenant], None)) is None:
                heapq.heappop(heap)
                continue
            yield sequence
            heapq.heapreplace(heap, (self._stands(tenant), number, tenant))

    def _stands(self, tenant: str) -> int:
        return max(self._now, self._next.get(tenant, 0))
