"""Microseconds for one look-up of a prompt's prefix, in Redis and in memory, over 1 and 8 engines.

    python -m tests.bench.index_lookup [--rounds 2000]

Each engine holds a different part of the prompt's blocks (the first all of them), and thousands of others. Printed are
the median and the 95th percentile of single look-ups, one after the other, redis-py and hiredis included; `ping` is
what any command costs here, and `naive` the same search with one argument for each hash.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from redis.asyncio import Redis

from engine.protocol import BlockEvents, blocks_key, split_digests
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.redis_process import RedisProcess

OTHER_BLOCKS = 20_000
_NAIVE = """
local found = 0
for i, digest in ipairs(ARGV) do
  if redis.call('HEXISTS', KEYS[1], digest) == 0 then break end
  found = i
end
return found
"""


async def time_us(call: Callable[[], Awaitable[object]], rounds: int) -> tuple[float, float]:
    for _ in range(50):
        await call()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        await call()
        taken.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(taken), statistics.quantiles(taken, n=20)[-1]


async def run(url: str, rounds: int) -> None:
    source = random.Random(1)
    redis: Redis = Redis.from_url(url)
    redis_index = PrefixIndex(MemoryIndex(), RedisCalls(redis, 5.0), retry_s=1.0)
    memory = MemoryIndex()
    memory_index = PrefixIndex(memory, None, retry_s=1.0)
    naive = redis.register_script(_NAIVE)
    print(f"{'blocks':>7} {'engines':>8} {'redis us':>9} {'p95':>7} {'naive us':>9} {'memory us':>10} {'ping us':>8}")
    for blocks in (100, 1600, 6400):
        prompt = source.randbytes(16 * blocks)
        names = [f"engine-{blocks}-{number}" for number in range(8)]
        for number, name in enumerate(names):
            held = prompt[: 16 * (blocks * (8 - number) // 8)] + source.randbytes(16 * OTHER_BLOCKS)
            memory.apply(name, BlockEvents(stored=held, reset=True))
            digests = split_digests(held)
            for start in range(0, len(digests), 1000):
                await redis.hset(blocks_key("m", name), mapping=dict.fromkeys(digests[start : start + 1000], b"g"))
        arguments = split_digests(prompt)
        for engines in (1, 8):
            some = names[:engines]
            found = dict(await redis_index.find("m", prompt, some))
            assert found == memory.find(prompt, some)
            assert found[names[0]] == blocks
            median, p95 = await time_us(lambda some=some, prompt=prompt: redis_index.find("m", prompt, some), rounds)
            plain, _ = await time_us(lambda some=some, prompt=prompt: memory_index.find("m", prompt, some), rounds)
            ping, _ = await time_us(redis.ping, rounds)
            key = blocks_key("m", names[0])
            one_each, _ = await time_us(lambda key=key, a=arguments: naive(keys=[key], args=a), max(50, rounds // 10))
            shown = f"{one_each:9.0f}" if engines == 1 else " " * 9
            print(f"{blocks:7} {engines:8} {median:9.0f} {p95:7.0f} {shown} {plain:10.1f} {ping:8.0f}")
    await redis.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisProcess(Path(folder)) as redis:
        uvloop.run(run(redis.url, options.rounds))


if __name__ == "__main__":
    main()
