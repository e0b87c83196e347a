"""Counters in Redis, which all gateways share: one script call for each decision, by Redis's own clock.

    kvasir:limits:{TENANT}          hash: kind -> microsecond at which its bucket is full again
    kvasir:limits:{TENANT}:flights  sorted set: id of a request in flight, microsecond at which its lease ends

The keys of one tenant have one slot of a Redis Cluster, and end by themselves when nothing in them matters any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from gateway.errors import RedisDownError
from gateway.limits.base import Take, Taken
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, script, skipped
from gateway.types import LimitKind

_STORE: Final = "counters of limits"


class RedisCounters:
    """See Counters in base.py."""

    def __init__(
        self,
        redis: Redis,
        *,
        lease_s: float,
        timeout_s: float,
        breaker: RedisBreaker | None = None,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call. `now_us` None: Redis's own
        clock, on which gateways agree."""
        self._lease_us = round(lease_s * 1e6)
        self._calls = RedisCalls(timeout_s, breaker)
        self._now_us = now_us
        self._take = redis.register_script(script(__package__, "clock.lua", "buckets.lua", "take.lua"))
        self._give_back = redis.register_script(script(__package__, "clock.lua", "buckets.lua", "give_back.lua"))
        self._renew = redis.register_script(script(__package__, "clock.lua", "renew.lua"))

    async def take(self, tenant: str, take: Take) -> Taken:
        args = [self._now(), take.burst_us, self._lease_us, take.flight or "", take.max_in_flight, *_flat(take.costs)]
        answer = await self._ask(self._take, _keys(tenant), args)
        if answer is None:
            raise RedisDownError(f"the keys of tenant {tenant} hold what no gateway wrote", asked=False)
        admitted, now_us, in_flight, strange, *full_us = answer
        _note(strange)
        return Taken(bool(admitted), now_us, dict(zip(take.costs, full_us, strict=True)), in_flight)

    async def give_back(self, tenant: str, costs: Mapping[LimitKind, int], flights: Sequence[str]) -> None:
        args = [self._now(), len(flights), *flights, *_flat(costs)]
        _note(await self._ask(self._give_back, _keys(tenant), args) or 0)

    async def renew(self, tenant: str, flights: Sequence[str]) -> None:
        await self._ask(self._renew, _keys(tenant)[1:], [self._now(), self._lease_us, *flights])

    def _now(self) -> str | int:
        return "" if self._now_us is None else self._now_us()

    async def _ask(self, script: AsyncScript, keys: list[str], args: list[str | int]) -> Any:
        """None for keys that hold what no gateway wrote."""
        return await self._calls.ask_or_skip(_STORE, script(keys=keys, args=args), None)


def _note(strange: int) -> None:
    for _ in range(strange):
        skipped(_STORE, ValueError())


def _keys(tenant: str) -> list[str]:
    """KEYS of the scripts."""
    tag = f"kvasir:limits:{{{tenant}}}"
    return [tag, f"{tag}:flights"]


def _flat(costs: Mapping[LimitKind, int]) -> list[str | int]:
    return [item for pair in costs.items() for item in pair]
