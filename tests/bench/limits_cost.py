"""What limits of tenants cost a request: over a real Redis, in memory, and where a tenant has none.

    python -m tests.bench.limits_cost [--requests 3000]

One process with a Redis beside it on a socket file. A decision is what stands before an answer (`set_aside`), and the
settling is behind it. Then whole requests over HTTP with a fake pipeline and a client in the same process, in rounds
that alternate; what Redis did for them is counted by Redis. Medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from gateway.config import LimitSettings, TenantSettings
from gateway.limits.counters import MemoryCounters, RedisCounters, SharedCounters
from gateway.limits.limits import TenantLimits
from gateway.storage.redis_calls import RedisCalls, connect
from gateway.types import ANONYMOUS, Need, Usage, owners_of
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess

MANY = 10**9
NONE = LimitSettings()
ALL = LimitSettings(
    requests_per_minute=MANY,
    tokens_per_minute=MANY,
    input_tokens_per_minute=MANY,
    output_tokens_per_minute=MANY,
    max_in_flight=1000,
)
NEED = Need(input_tokens=1000, answer_tokens=500, answers=1)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 16}
ROUNDS = 7


def limits_of(settings: LimitSettings, redis: Redis | None) -> TenantLimits:
    shared = None if redis is None else RedisCounters(RedisCalls(redis, 1), lease_s=60)
    return TenantLimits(settings, (), SharedCounters(shared, MemoryCounters(lease_s=60)))


def limits_of_a_key(redis: Redis) -> TenantLimits:
    """As ALL, of the tenant and of its key."""
    limits, owner = limits_of(ALL, redis), owners_of(ANONYMOUS, "key_1")[1]
    limits.replace(ALL, (), (TenantSettings.model_construct(name=owner, **ALL.model_dump()),))
    return limits


async def decide(limits: TenantLimits) -> None:
    hold = await limits.set_aside(owners_of(ANONYMOUS, "key_1"), NEED)
    if hold is not None:
        hold.settle(Usage(900, 20, 800))
    await asyncio.sleep(0)  # who settles gets its turn


async def timed_us(work: Callable[[], Awaitable[Any]], count: int, at_once: int) -> float:
    """Of wall time for each, with so many at once."""
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            await work()

    start_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(at_once)))
    return (time.perf_counter() - start_s) / count * 1e6


async def scripts(redis: Redis) -> tuple[int, float]:
    """Scripts that Redis has run, and microseconds of its own for each."""
    stats: Any = await redis.info("commandstats")
    told = stats.get("cmdstat_evalsha", {"calls": 0, "usec_per_call": 0.0})
    return told["calls"], told["usec_per_call"]


async def decisions(redis: Redis, count: int) -> None:
    print("| decision and settling, us | one at a time | 32 at once |")
    print("| --- | --- | --- |")
    for name, limits in {
        "no limits": limits_of(NONE, redis),
        "five limits, memory": limits_of(ALL, None),
        "five limits, Redis": limits_of(ALL, redis),
        "five of the tenant and five of its key, Redis": limits_of_a_key(redis),
    }.items():
        cells = []
        for at_once in (1, 32):
            rounds = [await timed_us(lambda each=limits: decide(each), count, at_once) for _ in range(3)]  # type: ignore[misc]
            cells.append(f"{statistics.median(rounds):.1f}")
            await limits.close()
        print(f"| {name} | {' | '.join(cells)} |")


async def ask(gateway: Gateway) -> None:
    status, _, _ = await gateway.post("/v1/chat/completions", CHAT)
    assert status == 200


async def requests(redis: Redis, count: int) -> None:
    every = {"no limits": limits_of(NONE, redis), "five limits, Redis": limits_of(ALL, redis)}
    times: dict[str, list[float]] = {name: [] for name in every}
    calls = dict.fromkeys(every, 0)
    async with AsyncExitStack() as stack:
        gateways = {
            name: await stack.enter_async_context(running(FakePipeline(), limits=limits))
            for name, limits in every.items()
        }
        for _ in range(ROUNDS):
            for name, gateway in gateways.items():
                before, _ = await scripts(redis)
                gateway.pipeline.requests.clear()
                times[name].append(await timed_us(lambda each=gateway: ask(each), count, 8))  # type: ignore[misc]
                await gateway.limits.close()
                calls[name] += (await scripts(redis))[0] - before
    print("\n| request over HTTP | us | scripts in Redis |")
    print("| --- | --- | --- |")
    for name, each in times.items():
        print(f"| {name} | {statistics.median(each):.0f} | {calls[name] / (ROUNDS * count):.2f} |")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisProcess(Path(folder)) as process:
        redis = connect(process.url, 5.0)
        try:
            await decisions(redis, arguments.requests)
            await requests(redis, arguments.requests // 10)
            print(f"\nRedis itself: {(await scripts(redis))[1]:.1f} us for each script")
        finally:
            await redis.aclose()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
