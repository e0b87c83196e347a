"""Counters of tenants' requests and tokens: in Redis for all gateways, or in the memory of one.

Each limit per minute is a bucket that holds a minute's worth, or less, and fills evenly. A bucket is one number: the
microsecond at which it will be full again (a virtual clock, as in GCRA). What is taken moves that time on by as long as
it takes to flow back, so that a bucket stores no limit and needs no timer:

    |-------------- burst_us -------------|
    now          full_us                  now + burst_us
    |<- is missing ->|<---- is there ---->|

A request that takes no more than is there leaves `full_us` at or before `now + burst_us`. So within any time t from the
start on no more is taken than limit * (burst_us + t) / 60 s, but for a request that is larger than what a bucket
holds, which has it when nothing is missing. What was set aside and not used flows back when it is known
(`give_back`); what was used beyond that is owed, and full_us may then be later.

Requests in flight are leases: each has an id and an end, which its gateway moves on while it lives.

    kvasir:limits:{TENANT}          hash: kind -> microsecond at which its bucket is full again
    kvasir:limits:{TENANT}:flights  sorted set: id of a request in flight, microsecond at which its lease ends

The keys of one tenant have one slot of a Redis Cluster, and end by themselves when nothing in them matters any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from engine.redis_client import Script
from gateway import tasks
from gateway.errors import RedisDownError
from gateway.storage.redis_calls import RedisCalls
from gateway.types import LimitKind, Room

_STORE: Final = "counters of limits"

WINDOW_US: Final = 60_000_000
"""A minute, in which a limit flows into its bucket. A bucket holds no more than that."""


@dataclass(frozen=True, slots=True)
class Take:
    """What one request takes, all of it or nothing.

    costs          microseconds in which what is taken flows back; 0 is always there
    flight         id of its lease, where requests in flight are limited, else None
    max_in_flight  leases at a time, with this one
    burst_us       what each bucket holds: as much as flows into it in this time
    """

    costs: Mapping[LimitKind, int]
    flight: str | None = None
    max_in_flight: int = 0
    burst_us: int = WINDOW_US


@dataclass(frozen=True, slots=True)
class Taken:
    """The decision.

    admitted   False: nothing was taken
    now_us     by the clock of the counters
    full_us    of each requested bucket, afterwards
    """

    admitted: bool
    now_us: int
    full_us: Mapping[LimitKind, int]


class Counters(Protocol):
    """Buckets and leases by tenant. A tenant's do not change another's. Every method raises RedisDownError; what
    is no counter in Redis is passed over."""

    async def take(self, tenant: str, take: Take) -> Taken:
        """Atomic: of requests that come at once none gets what another one took."""
        ...

    async def give_back(self, tenant: str, costs: Mapping[LimitKind, int], flights: Sequence[str]) -> None:
        """At the end of a request: `costs` flow back, or are taken where they are negative; leases end, if they have
        not ended before."""
        ...

    async def renew(self, tenant: str, flights: Sequence[str]) -> None:
        """Moves the ends of leases on. Those that have ended, or were lost, stay so."""
        ...


def cost_us(amount: int, limit: int) -> int:
    """In which so much flows back, rounded up."""
    return -(-amount * WINDOW_US // limit)


def room(limit: int, full_us: int, now_us: int, burst_us: int = WINDOW_US) -> Room:
    """What a bucket has at a moment. Never more than could be taken then."""
    missing_us = max(0, full_us - now_us)
    return Room(limit, max(0, (burst_us - missing_us) * limit // WINDOW_US), missing_us / 1e6)


def wait_us(full_us: int, now_us: int, cost: int, burst_us: int = WINDOW_US) -> int:
    """Until so much is there, or the bucket is full, if nothing else is taken meanwhile; 0 when it is."""
    return max(0, max(full_us, now_us) + min(cost, burst_us) - now_us - burst_us) if cost else 0


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class _Counted:
    """Of one tenant."""

    full_us: dict[LimitKind, int] = field(default_factory=dict)
    ends_us: dict[str, int] = field(default_factory=dict)  # of leases


class MemoryCounters:
    """See Counters. Never down. Tenants are those with limits, so there are few."""

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
        return Taken(admitted, now, full)

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


class RedisCounters:
    """See Counters. One script call for each decision, by Redis's own clock, on which gateways agree."""

    def __init__(self, calls: RedisCalls, *, lease_s: float, now_us: Callable[[], int] | None = None) -> None:
        """`now_us` None: Redis's own clock."""
        self._lease_us = round(lease_s * 1e6)
        self._calls = calls
        self._now_us = now_us
        self._take, self._give_back, self._renew = (
            calls.script(__package__, "counters.lua", f"{name}.lua") for name in ("take", "give_back", "renew")
        )

    async def take(self, tenant: str, take: Take) -> Taken:
        costs = [item for pair in take.costs.items() for item in pair]
        args = [take.burst_us, self._lease_us, take.flight or "", take.max_in_flight, *costs]
        answer = await self._ask(self._take, tenant, args)
        if answer is None:
            raise RedisDownError(f"the keys of tenant {tenant} hold what no gateway wrote", asked=False)
        admitted, now_us, *full_us = answer
        return Taken(bool(admitted), now_us, dict(zip(take.costs, full_us, strict=True)))

    async def give_back(self, tenant: str, costs: Mapping[LimitKind, int], flights: Sequence[str]) -> None:
        args = [len(flights), *flights, *(item for pair in costs.items() for item in pair)]
        await self._ask(self._give_back, tenant, args)

    async def renew(self, tenant: str, flights: Sequence[str]) -> None:
        await self._ask(self._renew, tenant, [self._lease_us, *flights])

    async def _ask(self, script: Script, tenant: str, args: Sequence[str | int]) -> Any:
        """None for keys that hold what no gateway wrote."""
        tag, now = f"kvasir:limits:{{{tenant}}}", "" if self._now_us is None else self._now_us()
        return await self._calls.ask_or_skip(_STORE, script(keys=[tag, f"{tag}:flights"], args=[now, *args]), None)


class SharedCounters:
    """Redis while it is reachable, this gateway's own memory while it is not: a limiter that is down limits less, and
    refuses no request for it. What memory counted is not written to Redis afterwards. Never raises."""

    def __init__(self, redis: Counters | None, memory: Counters) -> None:
        self._redis = redis
        self._memory = memory
        self.ending = set[asyncio.Task[None]]()  # leases that no request holds

    async def take(self, tenant: str, take: Take) -> tuple[Taken, Counters]:
        """Also returns the counters that decided: what was taken there is returned there."""
        if self._redis is not None:
            try:
                return await self._redis.take(tenant, take), self._redis
            except BaseException as error:
                if take.flight is not None:  # Redis may have granted a lease that no request holds
                    ending = tasks.spawn(quiet(self._redis.give_back(tenant, {}, [take.flight])), name="end lease")
                    self.ending.add(ending)
                    ending.add_done_callback(self.ending.discard)
                if not isinstance(error, RedisDownError):
                    raise
        return await self._memory.take(tenant, take), self._memory


async def quiet(call: Awaitable[None]) -> None:
    """Awaits `call`, and ignores that Redis cannot be reached: reservations and leases expire by themselves."""
    with suppress(RedisDownError):
        await call
