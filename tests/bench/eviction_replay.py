"""Token hit rates of the engine's own block pool and eviction policies on real traces: virtual time, no model.

    python -m tests.bench.eviction_replay --data DIR [--sizes 0.01 0.02 0.05 0.1 0.2] [--seeds 3] [--halves]

DIR holds traces as *.jsonl.gz (tests/bench/traces.py says in which format, and where from). Sizes are shares of the
blocks that are different; blocks have 512 tokens. A request allocates, registers and releases blocks as in the engine,
all at its arrival, so it needs its whole prompt in the pool at once and evicts for that. Beside the two policies:
everything kept for ever, and Belady's optimum, which knows the future, may leave blocks out, and gives up leaves first.

The last column is microseconds of processor time for one operation of the pool: a block that is found, reused, evicted,
allocated, registered or released. --halves replays each half of a trace by itself; --seeds repeats hit density with
another sample of watched blocks, and prints the spread.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import xxhash

from engine.pool.blocks import BlockPool
from engine.pool.eviction import EvictionPolicy, LeastRecentlyUsed, Origin
from engine.pool.hit_density import HitDensity
from engine.protocol import TOKEN_BYTES
from tests.bench.traces import Request, Trace, read_trace

SIZES = (0.01, 0.02, 0.05, 0.1, 0.2)
NEVER = sys.maxsize
MakePolicy = Callable[[int], EvictionPolicy]


@dataclass
class Figures:
    """What a replay came to."""

    hit_tokens: int = 0
    prompt_tokens: int = 0
    operations: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Prompt tokens that were found, in percent."""
        return 100 * self.hit_tokens / self.prompt_tokens

    @property
    def operation_us(self) -> float:
        return 1e6 * self.seconds / self.operations


class Names:
    """A block's digest and its token: in the pool a block of the trace is one token, its own number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._digests: dict[int, bytes] = {}

    def digests(self, request: Request) -> list[bytes]:
        found = []
        for block in request.blocks:
            if block not in self._digests:
                self._digests[block] = xxhash.xxh3_128_digest(block.to_bytes(TOKEN_BYTES, "little"), seed=self._seed)
            found.append(self._digests[block])
        return found

    @staticmethod
    def tokens(request: Request) -> bytes:
        return b"".join(block.to_bytes(TOKEN_BYTES, "little") for block in request.blocks)


def replay(trace: Trace, num_blocks: int, make_policy: MakePolicy, seed: int = 0) -> Figures:
    pool, figures, names = BlockPool(num_blocks, 1, make_policy(num_blocks)), Figures(), Names(seed)
    for start in range(0, len(trace.requests), 256):
        requests = trace.requests[start : start + 256]
        named = [(names.tokens(request), names.digests(request)) for request in requests]
        began_s = time.process_time()
        for request, (tokens, digests) in zip(requests, named, strict=True):
            figures.hit_tokens += serve(pool, request, tokens, digests) * trace.block_tokens
        figures.seconds += time.process_time() - began_s
        figures.prompt_tokens += sum(request.prompt_tokens for request in requests)
        # found, acquired and released; or allocated, registered and released
        figures.operations += 3 * sum(len(request.blocks) for request in requests)
    figures.operations += pool.evictions
    return figures


def serve(pool: BlockPool, request: Request, tokens: bytes, digests: list[bytes]) -> int:
    """One request from beginning to end. Returns the number of blocks that it found."""
    pool.policy.advance(request.arrived_s)
    reused = pool.prefixes.find("", tokens, digests)
    origin = Origin(prompt_tokens=request.prompt_tokens)
    pool.policy.begin(origin, reused, digests)
    pool.acquire(reused)
    table, parent = list(reused), reused[-1] if reused else None
    table += pool.allocate(min(len(digests) - len(reused), pool.available)) or []
    for index in range(len(reused), len(table)):
        block = table[index]
        content = tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
        parent = pool.register(block, parent, "", digests[index], content, origin)
    origin.output_tokens = request.output_tokens
    pool.release(table)
    return len(reused)


def replay_belady(trace: Trace, num_blocks: int) -> Figures:
    """What goes is the block whose next use is farthest away. A block is used whenever one below it is, so of the
    blocks with one next use the deepest is a leaf, and goes first."""
    next_uses: list[list[int]] = [[] for _ in trace.requests]
    upcoming: dict[int, int] = {}
    for index in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[index].blocks
        next_uses[index] = [upcoming.get(block, NEVER) for block in blocks]
        upcoming.update(dict.fromkeys(blocks, index))
    figures, cached, farthest = Figures(), dict[int, int](), list[tuple[int, int, int]]()
    for request, following in zip(trace.requests, next_uses, strict=True):
        found = next((at for at, block in enumerate(request.blocks) if block not in cached), len(request.blocks))
        figures.hit_tokens += found * trace.block_tokens
        figures.prompt_tokens += request.prompt_tokens
        for depth, (block, use) in enumerate(zip(request.blocks, following, strict=True)):
            cached[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(cached) > num_blocks:
            use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -use:
                del cached[block]
    return figures


def replay_infinite(trace: Trace) -> Figures:
    figures, seen = Figures(), set[int]()
    for request in trace.requests:
        figures.hit_tokens += sum(block in seen for block in request.blocks) * trace.block_tokens
        figures.prompt_tokens += request.prompt_tokens
        seen.update(request.blocks)
    return figures


def hit_density(block_tokens: int) -> MakePolicy:
    return lambda num_blocks: HitDensity(num_blocks, block_tokens)


def measure(trace: Trace, sizes: list[float], seeds: int) -> None:
    infinite = replay_infinite(trace).rate
    print(f"\n{trace.name}: {len(trace.requests):,} requests, {trace.num_unique:,} blocks, infinite {infinite:.1f}%")
    print("| size | LRU | hit density | spread | difference | Belady | us per operation: LRU, hit density |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        num_blocks = max(1, int(size * trace.num_unique))
        lru = replay(trace, num_blocks, LeastRecentlyUsed)
        runs = [replay(trace, num_blocks, hit_density(trace.block_tokens), seed) for seed in range(seeds)]
        rates = [run.rate for run in runs]
        print(
            f"| {size:.0%} | {lru.rate:.2f} | {rates[0]:.2f} | {min(rates):.2f}-{max(rates):.2f} "
            f"| {min(rates) - lru.rate:+.2f} | {replay_belady(trace, num_blocks).rate:.2f} "
            f"| {lru.operation_us:.2f}, {runs[0].operation_us:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--only", nargs="*", default=[], help="names of traces; all when not given")
    parser.add_argument("--sizes", type=float, nargs="*", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--halves", action="store_true")
    options = parser.parse_args()
    for path in sorted(options.data.glob("*.jsonl.gz")):
        if options.only and path.name.split(".")[0] not in options.only:
            continue
        trace = read_trace(path)
        parts = [trace.part(0, 0.5), trace.part(0.5, 1)] if options.halves else [trace]
        for part in parts:
            measure(part, options.sizes, options.seeds)


if __name__ == "__main__":
    main()
