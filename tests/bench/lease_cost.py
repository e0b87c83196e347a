"""What leases cost the engine's thread: microseconds for each, in a pool of 100,000 blocks.

    python -m tests.bench.lease_cost [--blocks 100000]

Fixed seed, no model. Medians; "past the budget" is with as many leases as a tenant, or all tenants, may have.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.config import EngineSettings
from engine.leases.leases import Leases
from engine.pool.blocks import BlockPool
from engine.protocol import TOKEN_BYTES, Namespace, chain_digests, split_digests

SIZE = 16
ROOT = Namespace(weights="w", dtype="bfloat16", kv_dtype="bfloat16", block_size=SIZE).root()
TTL_S = 3600.0


class Bench:
    """A pool with leases under the default settings."""

    def __init__(self, num_blocks: int) -> None:
        config = EngineSettings()
        self.rng = random.Random(0)
        self.pool = BlockPool(num_blocks, SIZE)
        self.leases = Leases(
            {"device": self.pool},
            share=config.lease_share,
            tenant_share=config.lease_tenant_share,
            max_leases=config.max_leases,
        )
        self.now = 0.0

    def store(self, num_blocks: int) -> tuple[bytes, list[bytes]]:
        """A new prompt in the pool, held by nobody: its tokens and digests."""
        tokens = array("I", [self.rng.randrange(50_000) for _ in range(num_blocks * SIZE)]).tobytes()
        digests = split_digests(chain_digests(ROOT, tokens, SIZE))
        table = self.pool.allocate(num_blocks)
        assert table is not None, "the pool is too small for this benchmark"
        width, parent = SIZE * TOKEN_BYTES, None
        for index, block in enumerate(table):
            content = tokens[index * width : (index + 1) * width]
            parent = self.pool.register(block, parent, "", digests[index], content)
        self.pool.release(table)
        self.pool.prefixes.take_events()
        return tokens, digests

    def grant(self, prompt: tuple[bytes, list[bytes]], tenant: str = "t") -> Callable[[], Any]:
        return partial(self.leases.grant, tenant, "", *prompt, TTL_S, arrived_s=self.now, now=self.now)


def time_us(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def report(name: str, times_us: list[float]) -> None:
    print(f"{name:72} {statistics.median(times_us):9.1f} us  ({len(times_us)} times)")


def measure_new(num_blocks: int) -> None:
    for depth in (10, 100, 6250):
        bench = Bench(num_blocks)
        count = min(100, num_blocks // 8 // depth)
        report(
            f"grant, {depth} blocks, within the budget",
            [time_us(bench.grant(bench.store(depth))) for _ in range(count)],
        )


def measure_pressure(num_blocks: int) -> None:
    """Steps in which 32 sequences ask for a lease each. All of a step: what is worth least is sorted out once."""
    for tenants in (1, 8):
        bench = Bench(num_blocks)
        times: list[float] = []
        for _ in range(160):
            bench.now += 1.0
            prompts = [bench.store(100) for _ in range(32)]
            times.append(sum(time_us(bench.grant(p, f"t{i % tenants}")) for i, p in enumerate(prompts)) / 32)
        report(f"grant, 100 blocks, past the budget of {tenants} tenants, {len(bench.leases)} leases", times[-30:])


def measure_use(num_blocks: int) -> None:
    bench = Bench(num_blocks)
    prompts = [bench.store(100) for _ in range(200)]
    for prompt in prompts:
        bench.grant(prompt)()
    tokens, digests = long = bench.store(6250)
    report("find, 6,250 blocks, another salt", [time_us(lambda: bench.leases.find("x", *long)) for _ in range(200)])
    report("find, 6,250 blocks, no lease", [time_us(lambda: bench.leases.find("", *long)) for _ in range(200)])
    report("find, 100 blocks, one lease", [time_us(partial(bench.leases.find, "", *prompt)) for prompt in prompts])
    bench.grant(long)()
    found = bench.leases.find("", tokens, digests)
    report("read, 6,250 blocks", [time_us(lambda: bench.leases.read(found, "", *long)) for _ in range(200)])
    report("renew one", [time_us(lambda: bench.leases.renew(found, bench.now)) for _ in range(200)])
    report("expire, nothing to do", [time_us(lambda: bench.leases.expire(bench.now)) for _ in range(200)])
    size = len(bench.leases)
    report("expire, for each lease", [time_us(lambda: bench.leases.expire(bench.now + 2 * TTL_S)) / size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args()
    measure_new(options.blocks)
    measure_pressure(options.blocks)
    measure_use(options.blocks)


if __name__ == "__main__":
    main()
