"""Counters of requests and tokens, of tenants and of their keys: in Redis for all gateways, or in the memory of one.

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
    kvasir:limits:{TENANT}/KEY...   the same of a key of the tenant: an owner is TENANT or TENANT/KEY (types.owners_of)

What is of one tenant has one slot of a Redis Cluster, and ends by itself when nothing in it matters any more.
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

MAX_OWNERS: Final = 20_000
"""That memory counts for; more than there may be at a time (issued/base.py)."""


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
    also_us    the same of a second owner
    refused_by the number of an owner that refuses, 0 or 1
    """

    admitted: bool
    now_us: int
    full_us: Mapping[LimitKind, int]
    also_us: Mapping[LimitKind, int] = field(default_factory=dict)
    refused_by: int = 0


Costs = Mapping[LimitKind, int]


class Counters(Protocol):
    """Buckets and leases by owner. An owner's do not change another's. Every method raises RedisDownError; what
    is no counter in Redis is passed over."""

    async def take(self, owner: str, take: Take, also: tuple[str, Take] | None = None) -> Taken:
        """Atomic: of requests that come at once none gets what another one took. With `also`, the take of a second
        owner of the same tenant, all of both is taken or nothing."""
        ...

    async def give_back(
        self, owner: str, costs: Costs, flights: Sequence[str], also: tuple[str, Costs] | None = None
    ) -> None:
        """At the end of a request: `costs` flow back, or are taken where they are negative; leases end, if they have
        not ended before. `also` as for `take`."""
        ...

    async def renew(self, owner: str, flights: Sequence[str]) -> None:
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
    """Of one owner."""

    full_us: dict[LimitKind, int] = field(default_factory=dict)
    ends_us: dict[str, int] = field(default_factory=dict)  # of leases

    @property
    def latest_us(self) -> int:
        """When nothing of it matters any more."""
        return max((*self.full_us.values(), *self.ends_us.values()), default=0)


class MemoryCounters:
    """See Counters. Never down. Owners are those with limits; of those that are no more, what has come back is dropped
    once there are MAX_OWNERS."""

    def __init__(self, *, lease_s: float, now_us: Callable[[], int] = monotonic_us) -> None:
        self._lease_us = round(lease_s * 1e6)
        self._now_us = now_us
        self._owners: dict[str, _Counted] = {}

    async def take(self, owner: str, take: Take, also: tuple[str, Take] | None = None) -> Taken:
        now, every = self._now_us(), [(owner, take), *([] if also is None else [also])]
        looked = [self._look(now, one, its) for one, its in every]
        refused_by = next((number for number, (fits, _) in enumerate(looked) if not fits), None)
        admitted = refused_by is None
        if admitted:
            for (one, its), (_, full) in zip(every, looked, strict=True):
                counted = self._counted(one)
                full.update({kind: full[kind] + cost for kind, cost in its.costs.items()})
                counted.full_us.update(full)
                if its.flight is not None:
                    counted.ends_us[its.flight] = now + self._lease_us
        full, also_us = [full for _, full in (*looked, (True, {}))][:2]
        return Taken(admitted, now, full, also_us, refused_by or 0)

    def _look(self, now: int, owner: str, take: Take) -> tuple[bool, dict[LimitKind, int]]:
        """Whether all of it is there, and when its buckets are full again."""
        counted = self._counted(owner)
        counted.ends_us = {flight: end for flight, end in counted.ends_us.items() if end > now}
        full = {kind: max(counted.full_us.get(kind, 0), now) for kind in take.costs}
        fits = not any(wait_us(full[kind], now, cost, take.burst_us) for kind, cost in take.costs.items())
        return fits and (take.flight is None or len(counted.ends_us) < take.max_in_flight), full

    async def give_back(
        self, owner: str, costs: Costs, flights: Sequence[str], also: tuple[str, Costs] | None = None
    ) -> None:
        now = self._now_us()
        for one, its in ((owner, costs), *([] if also is None else [also])):
            counted = self._counted(one)
            for kind, cost in its.items():
                counted.full_us[kind] = max(counted.full_us.get(kind, 0), now) - cost
            for flight in flights:
                counted.ends_us.pop(flight, None)

    async def renew(self, owner: str, flights: Sequence[str]) -> None:
        now, ends = self._now_us(), self._counted(owner).ends_us
        for flight in flights:
            if ends.get(flight, 0) > now:
                ends[flight] = now + self._lease_us

    def _counted(self, owner: str) -> _Counted:
        if (counted := self._owners.get(owner)) is None:
            if len(self._owners) >= MAX_OWNERS:
                now = self._now_us()
                self._owners = {name: one for name, one in self._owners.items() if one.latest_us > now}
            counted = self._owners[owner] = _Counted()
        return counted


_NONE: Final = (("", Take({})),)


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

    async def take(self, owner: str, take: Take, also: tuple[str, Take] | None = None) -> Taken:
        every = [(owner, take), *([] if also is None else [also])]
        flight = next((its.flight for _, its in every if its.flight), "")
        args: list[str | int] = [take.burst_us, self._lease_us, flight]
        for _, its in every:
            args += [0 if its.flight is None else its.max_in_flight, *_flat(its.costs)]
        answer = await self._ask(self._take, [one for one, _ in every], args)
        if answer is None:
            raise RedisDownError(f"the keys of tenant {owner} hold what no gateway wrote", asked=False)
        refused, now_us, *full_us = answer
        rest = iter(full_us)
        full, also_us = [{kind: next(rest) for kind in its.costs} for _, its in (*every, *_NONE)][:2]
        return Taken(not refused, now_us, full, also_us, max(0, refused - 1))

    async def give_back(
        self, owner: str, costs: Costs, flights: Sequence[str], also: tuple[str, Costs] | None = None
    ) -> None:
        every = [(owner, costs), *([] if also is None else [also])]
        args = [len(flights), *flights, *(item for _, its in every for item in _flat(its))]
        await self._ask(self._give_back, [one for one, _ in every], args)

    async def renew(self, owner: str, flights: Sequence[str]) -> None:
        await self._ask(self._renew, [owner], [self._lease_us, *flights])

    async def _ask(self, script: Script, owners: Sequence[str], args: Sequence[str | int]) -> Any:
        """None for keys that hold what no gateway wrote."""
        now = "" if self._now_us is None else self._now_us()
        keys = [name for tag in map(redis_key, owners) for name in (tag, f"{tag}:flights")]
        return await self._calls.ask_or_skip(_STORE, script(keys=keys, args=[now, *args]), None)


def redis_key(owner: str) -> str:
    """The beginning of its keys in Redis."""
    tenant, slash, key = owner.partition("/")
    return f"kvasir:limits:{{{tenant}}}{slash}{key}"


def _flat(costs: Costs) -> list[str | int]:
    return [len(costs), *(item for pair in costs.items() for item in pair)]


class SharedCounters:
    """Redis while it is reachable, this gateway's own memory while it is not: a limiter that is down limits less, and
    refuses no request for it. What memory counted is not written to Redis afterwards. Never raises."""

    def __init__(self, redis: Counters | None, memory: Counters) -> None:
        self._redis = redis
        self._memory = memory
        self.ending = set[asyncio.Task[None]]()  # leases that no request holds

    async def take(self, owner: str, take: Take, also: tuple[str, Take] | None = None) -> tuple[Taken, Counters]:
        """Also returns the counters that decided: what was taken there is returned there."""
        if self._redis is not None:
            try:
                return await self._redis.take(owner, take, also), self._redis
            except BaseException as error:
                if flight := take.flight or (also and also[1].flight):  # it may be granted, and no request holds it
                    other = None if also is None else (also[0], dict[LimitKind, int]())
                    ending = tasks.spawn(quiet(self._redis.give_back(owner, {}, [flight], other)), name="end lease")
                    self.ending.add(ending)
                    ending.add_done_callback(self.ending.discard)
                if not isinstance(error, RedisDownError):
                    raise
        return await self._memory.take(owner, take, also), self._memory


async def quiet(call: Awaitable[None]) -> None:
    """Awaits `call`, and ignores that Redis cannot be reached: reservations and leases expire by themselves."""
    with suppress(RedisDownError):
        await call
