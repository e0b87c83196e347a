"""Counters in this process: the naive twin of redis_counters.py, and what counts while there is no Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.limits.base import Take, Taken, wait_us
from gateway.types import LimitKind


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class _Counted:
    """Of one tenant."""

    full_us: dict[LimitKind, int] = field(default_factory=dict)
    ends_us: dict[str, int] = field(default_factory=dict)  # of leases


class MemoryCounters:
    """See Counters in base.py. Never down. Tenants are those with limits, so there are few."""

    def __init__(self, *, lease_s: float, now_us: Callable[[], int] = monotonic_us) -> None:
        self._lease_us = round(lease_s * 1e6)
        self._now_us = now_us
        self._tenants: dict[str, _Counted] = {}

    async def take(self, tenant: str, take: Take) -> Taken:
        now, counted = self._now_us(), self._counted(tenant)
        ends = counted.ends_us = {flight: end for flight, end in counted.ends_us.items() if end > now}
        full = {kind: max(counted.full_us.get(kind, 0), now) for kind in take.costs}
        admitted = not any(wait_us(full[kind], now, cost, take.burst_us) for kind, cost in take.costs.items())
        if take.flight is not None and len(ends) >= take.max_in_flight:
            admitted = False
        if admitted:
            full = {kind: full[kind] + cost for kind, cost in take.costs.items()}
            counted.full_us.update(full)
            if take.flight is not None:
                ends[take.flight] = now + self._lease_us
        return Taken(admitted, now, full, 0 if take.flight is None else len(ends))

    async def give_back(self, tenant: str, costs: Mapping[LimitKind, int], flights: Sequence[str]) -> None:
        now, counted = self._now_us(), self._counted(tenant)
        for kind, cost in costs.items():
            counted.full_us[kind] = max(counted.full_us.get(kind, 0), now) - cost
        for flight in flights:
            counted.ends_us.pop(flight, None)

    async def renew(self, tenant: str, flights: Sequence[str]) -> None:
        now, ends = self._now_us(), self._counted(tenant).ends_us
        for flight in flights:
            if ends.get(flight, 0) > now:
                ends[flight] = now + self._lease_us

    def _counted(self, tenant: str) -> _Counted:
        return self._tenants.setdefault(tenant, _Counted())
