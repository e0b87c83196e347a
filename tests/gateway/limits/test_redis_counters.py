"""Many calls at once: whose turn has not come says nothing about Redis. What calls do is in tests/contract."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.limits.base import CountersDownError, Take
from gateway.limits.redis_counters import MAX_CALLS, RedisCounters

BURST = 20 * MAX_CALLS


@pytest.fixture
def counters() -> RedisCounters:
    """Nobody is asked: the tests answer."""
    return RedisCounters(Redis(), lease_s=60, timeout_s=0.25)


async def test_a_burst_that_takes_longer_than_a_call_may_is_no_outage(
    counters: RedisCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, spent_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + spent_s)

    async def answer(**_: Any) -> list[int]:
        nonlocal spent_s
        spent_s += 0.05
        await asyncio.sleep(0)
        return [1, 0, 0]

    monkeypatch.setattr(counters, "_take", answer)
    taken = await asyncio.gather(*(counters.take("north", Take({})) for _ in range(BURST)))
    assert all(one.admitted for one in taken)
    assert spent_s > 100 * 0.25


async def test_of_those_who_wait_for_their_turn_nobody_asks_after_a_call_has_failed(
    counters: RedisCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def hang(**_: Any) -> list[int]:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(counters, "_take", hang)
    takes = (counters.take("north", Take({})) for _ in range(BURST))
    failed = await asyncio.gather(*takes, return_exceptions=True)
    assert all(isinstance(one, CountersDownError) for one in failed)
    assert asked == MAX_CALLS
    asked = 0
    with pytest.raises(CountersDownError):
        await counters.take("north", Take({}))
    assert asked == 1  # the next one asks again
