"""What the block pool and the scheduler cost: microseconds per operation in a pool of 100,000 blocks.

    python -m tests.bench.block_pool [--blocks 100000] [--prompt-blocks 500] [--eviction hit-density]

Fixed seed, no model. The pool is filled until every new block evicts an old one, and measured in that state; a prompt
comes every second of virtual time. With --prompt-blocks 1 every cached block is a leaf, the worst case of a policy.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.config import EngineSettings
from engine.pool.blocks import BlockPool
from engine.pool.eviction import Origin
from engine.pool.hit_density import HitDensity
from engine.protocol import Namespace, Sampling, Submit, chain_digests, split_digests
from engine.scheduler import Scheduler
from engine.sequence import Step

SIZE = 16
NAMESPACE = Namespace(weights="w", dtype="bfloat16", kv_dtype="bfloat16", block_size=SIZE)


class Clock:
    """Adds up processor time and operations by name."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def time(self, name: str, operations: int, call: Callable[[], object]) -> object:
        began = time.process_time()
        result = call()
        row = self.rows.setdefault(name, [0.0, 0])
        row[0] += time.process_time() - began
        row[1] += operations
        return result

    def report(self) -> None:
        for name, (seconds, operations) in self.rows.items():
            print(f"{name:44} {seconds / operations * 1e6:8.2f} us  ({operations:,.0f} times)")


def measure_pool(num_blocks: int, prompt_blocks: int, eviction: str, clock: Clock) -> BlockPool:
    policy = HitDensity(num_blocks, SIZE) if eviction == "hit-density" else None
    pool, rng = BlockPool(num_blocks, SIZE, policy), random.Random(0)
    stored: list[tuple[bytes, list[bytes]]] = []
    root = NAMESPACE.root()
    for turn in range(3 * num_blocks // prompt_blocks):
        full = "evicting" if pool.num_free < prompt_blocks else "free blocks"
        tokens = array("I", [rng.randrange(50_000) for _ in range(prompt_blocks * SIZE)]).tobytes()
        digests = split_digests(chain_digests(root, tokens, SIZE))
        origin = Origin(prompt_tokens=prompt_blocks * SIZE)
        clock.time("advance the time, per prompt", 1, partial(pool.policy.advance, float(turn)))
        clock.time("begin", prompt_blocks, partial(pool.policy.begin, origin, [], digests))
        table = clock.time(f"allocate a run, {full}", prompt_blocks, partial(pool.allocate, prompt_blocks))
        assert isinstance(table, list)

        def register(
            table: list[int] = table, tokens: bytes = tokens, digests: list[bytes] = digests, origin: Origin = origin
        ) -> None:
            parent = None
            for index, block in enumerate(table):
                content = tokens[index * SIZE * 4 : (index + 1) * SIZE * 4]
                parent = pool.register(block, parent, "", digests[index], content, origin)

        clock.time("register", prompt_blocks, register)
        origin.output_tokens = turn % 500
        clock.time("release", prompt_blocks, partial(pool.release, table))
        stored.append((tokens, digests))
        if turn % 4 == 3:
            tokens, digests = stored[-2]
            hit = clock.time("find_prefix, hit", prompt_blocks, partial(pool.prefixes.find, "", tokens, digests))
            assert isinstance(hit, list)
            clock.time("begin", len(hit) or 1, partial(pool.policy.begin, Origin(prompt_tokens=1), hit, digests))
            clock.time("acquire", len(hit) or 1, partial(pool.acquire, hit))
            clock.time("release", len(hit) or 1, partial(pool.release, hit))
        clock.time("take_events", prompt_blocks, pool.prefixes.take_events)
    tables: list[list[int]] = [[] for _ in range(32)]
    for step in range(32 * 64):
        table = tables[step % 32]
        more = clock.time("allocate one to grow", 1, partial(pool.allocate, 1, table[-1] if table else None))
        assert isinstance(more, list)
        table += more
    runs = sum(1 + sum(b != a + 1 for a, b in pairwise(table)) for table in tables)
    print(f"32 sequences of 64 blocks, grown in turns one by one while evicting, lie in {runs} runs")
    for table in tables:
        pool.release(table)
    clock.time("check_invariants, per block", num_blocks, pool.check_invariants)
    clock.time("snapshot, per block", num_blocks, pool.prefixes.snapshot)
    return pool


def measure_scheduler(num_blocks: int, clock: Clock) -> None:
    config = EngineSettings(block_size=SIZE, max_sequences=64, step_tokens=1024)
    pool, rng = BlockPool(num_blocks, SIZE), random.Random(0)
    scheduler = Scheduler(pool, NAMESPACE, config, context_tokens=1 << 20, vocab_size=50_000)
    for seq in range(64):
        tokens = array("I", [rng.randrange(50_000) for _ in range(512)]).tobytes()
        digests = chain_digests(NAMESPACE.root(), tokens, SIZE)
        scheduler.submit("g", Submit(seq, tokens, digests, Sampling(max_tokens=1000)), 0.0)
    decodes = 0
    while scheduler.has_work:
        began = time.perf_counter()
        step = scheduler.schedule(0.0)
        assert isinstance(step, Step)
        results = [rng.randrange(50_000) if work.samples else None for work in step.work]
        middle = time.perf_counter()
        scheduler.commit(step, results, 0.0)
        scheduler.take_updates()
        scheduler.load()
        if step.num_rows == len(step.work) == 64:
            decodes += 1
            clock.rows.setdefault("schedule a step of 64 decodes, per step", [0.0, 0])[0] += middle - began
            clock.rows["schedule a step of 64 decodes, per step"][1] += 1
            clock.rows.setdefault("commit, updates and load, per step", [0.0, 0])[0] += time.perf_counter() - middle
            clock.rows["commit, updates and load, per step"][1] += 1
        if decodes > 900:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--prompt-blocks", type=int, default=500)
    parser.add_argument("--eviction", choices=["lru", "hit-density"], default="lru")
    options = parser.parse_args()
    clock = Clock()
    measure_pool(options.blocks, options.prompt_blocks, options.eviction, clock)
    measure_scheduler(options.blocks, clock)
    clock.report()


if __name__ == "__main__":
    main()
