"""Limits of tenants for tests: with a clock that the test turns, in memory or in a Redis that gateways share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.config import LimitSettings, TenantSettings
from gateway.limits.counters import Counters, MemoryCounters, RedisCounters, SharedCounters
from gateway.limits.limits import TenantLimits
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.tuned import tuned

START_US = 1_800_000_000_000_000
"""Of the size of Redis's own clock: nothing may be lost to rounding there."""


@dataclass
class Clock:
    """Microseconds when called."""

    now_us: int = START_US

    def __call__(self) -> int:
        return self.now_us

    def seconds(self) -> float:
        return self.now_us / 1e6

    def pass_s(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)


def tenant_limits(
    clock: Clock,
    *,
    tenants: Sequence[TenantSettings] = (),
    redis: Redis | Counters | None = None,
    timeout_s: float = 10.0,
    **limits: Any,
) -> TenantLimits:
    """`limits` are those of [limits]."""
    settings = tuned(LimitSettings, **limits)
    memory = MemoryCounters(lease_s=settings.lease_s, now_us=clock)
    if isinstance(redis, Redis):
        breaker = RedisBreaker(retry_s=1.0, clock=clock.seconds)
        redis = RedisCounters(RedisCalls(redis, timeout_s, breaker), lease_s=settings.lease_s, now_us=clock)
    shared = SharedCounters(redis, memory)
    return TenantLimits(settings, tenants, shared, clock.seconds)
