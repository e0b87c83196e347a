"""What counts tenants' requests and tokens, and the arithmetic that all who count share.

Each limit per minute is a bucket that holds a minute's worth, or less, and fills evenly. A bucket is one number: the
microsecond at which it will be full again (a virtual clock, as in GCRA). What is taken moves that time on by as long as
it takes to flow back, so that a bucket needs no limit to be kept, and no timer to fill it:

    |-------------- burst_us -------------|
    now          full_us                  now + burst_us
    |<- is missing ->|<---- is there ---->|

Whoever takes no more than is there leaves `full_us` at or before `now + burst_us`. So within any time t from the
start on no more is taken than limit * (burst_us + t) / 60 s, but for a request that is larger than what a bucket
holds, which has it when nothing is missing. What was set aside and not used flows back when it is known
(`give_back`); what was used beyond that is owed, and full_us may then be later.

Requests in flight are leases: each has an id and an end, which its gateway moves on while it lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.types import LimitKind, Room

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
    """What became of it.

    admitted   False: nothing was taken
    now_us     by the clock of who counts
    full_us    of each bucket that was asked for, after it
    in_flight  leases after it; 0 where they were not asked for
    """

    admitted: bool
    now_us: int
    full_us: Mapping[LimitKind, int]
    in_flight: int = 0


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
