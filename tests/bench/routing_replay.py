"""Times to the first token under the gateway's own choice of engines, on real traces: virtual time, no model.

    python -m tests.bench.routing_replay --data DIR [--sizes 0.1 0.175] [--hits 29.5] [--sessions 4 8] [--think 30]

DIR holds traces as *.jsonl.gz (tests/bench/traces.py says in which format, and where from). A trace whose source
knows no sessions is played at the load at which round robin keeps eight engines 90% busy; one with sessions is played
in a closed loop, where who has an answer thinks as long as it did in the trace (at most --think seconds, when given).
What is cached at all engines together is a share of the blocks that are different; blocks have 512 tokens. Beside the
gateway: rules that others use or that are simple (tests/bench/routing_rules.py), and one pool of all engines with one
cache for all, first come, first served.

A share of a part's blocks is less than the same share of the hour that the part is of. What is to be beaten on the
conversation trace (GOAL) was measured where one cache for all finds --hits percent of the tokens, so besides --sizes it
is played at the size of which that is true here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.protocol import DIGEST_BYTES, Hello, Load, Namespace
from gateway.config import QueueSettings
from gateway.queues.engine_queue import EngineQueue, WaitingRequest
from gateway.queues.router import EngineSlots
from gateway.types import Ask
from tests.bench.routing_rules import RULES, Lines, Pool
from tests.bench.traces import Trace, read_trace
from tests.bench.virtual_engines import (
    OUTPUT_TOKEN_S,
    Arrivals,
    Cache,
    Call,
    Clients,
    ClosedLoop,
    Figures,
    Server,
    replay,
)

BUSY = 0.9
"""Of round robin's engines."""

GOAL_HITS = 29.5
"""Percent of the prompts' tokens that one cache for all engines found where GOAL was measured."""

GOAL = {"mean": 1.75, "p99": 13.5}
"""Seconds to the first token on the conversation trace, eight engines."""

MakeClients = Callable[[], Clients]


class Reported:
    """An engine as the gateway knows it."""

    def __init__(self, server: Server) -> None:
        self.name = f"engine-{server.number}"
        self.hello = _hello(server)
        self.server = server
        self.load = Load()
        self.prefilling: dict[str, int] = {}
        self.joined = True

    def step(self, now: float) -> None:
        server = self.server
        self.load = Load(
            waiting=int(server.current is not None and server.prefilled_s > now),
            running=int(server.current is not None and server.prefilled_s <= now),
            prefill_backlog=max(0, round((server.prefilled_s - now) * server.tokens_per_s)),
            prefill_tokens_per_s=server.tokens_per_s,
            decode_tokens_per_s=1 / OUTPUT_TOKEN_S,
        )
        self.prefilling = {"everybody": self.load.prefill_backlog}


def _hello(server: Server) -> Hello:
    return Hello(
        incarnation=str(server.number),
        model="m",
        namespace=Namespace(weights="w", dtype="f", kv_dtype="f", block_size=server.block_tokens),
        context_tokens=1 << 20,
        vocab_size=1,
        num_blocks=server.cache.capacity,
        max_sequences=1,
        eos_ids=(),
        tokenizer="t",
        created=0,
    )


@dataclass(slots=True, eq=False)
class Waiting(WaitingRequest):
    call: Call = field(kw_only=True)


class Gateway:
    """Policy: what gateway/queues/slots.py does with its lane, without its clock."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._engines = [Reported(server) for server in servers]
        self._lane: EngineQueue[Reported] = EngineQueue(QueueSettings())
        self._lane.engine_slots = {
            engine.hello.incarnation: EngineSlots(engine, engine.hello.incarnation, total=1) for engine in self._engines
        }
        self._sent: list[tuple[Waiting, EngineSlots[Reported]]] = []

    def arrive(self, call: Call, now: float) -> None:
        self._step(now)
        cached = {engine.hello.incarnation: engine.server.cached_tokens(call.request) for engine in self._engines}
        request, block_tokens = call.request, self._engines[0].server.block_tokens
        digests = b"".join([block.to_bytes(DIGEST_BYTES, "little") for block in request.blocks])
        ask = Ask("everybody", request.prompt_tokens, math.inf, cached, digests=digests, block_size=block_tokens)
        self._sent += self._lane.enter(Waiting(ask, now, call=call))

    def assign(self, now: float) -> Iterator[tuple[Call, Server]]:
        self._step(now)
        self._sent += self._lane.assign(now)
        for waiting, slots in self._sent:
            yield waiting.call, slots.engine.server
        self._sent.clear()

    def _step(self, now: float) -> None:
        for engine, slots in zip(self._engines, self._lane.engine_slots.values(), strict=True):
            engine.step(now)
            slots.taken = int(engine.server.current is not None or any(taken is slots for _, taken in self._sent))


def fleet(trace: Trace, count: int, share: float, *, one_cache: bool = False) -> list[Server]:
    """Engines that share a number of blocks: each its part, or all of them all of it."""
    total = int(share * trace.num_unique)
    if one_cache:
        cache = Cache(max(1, total))
        return [Server(number, cache, trace.block_tokens) for number in range(count)]
    return [Server(number, Cache(max(1, total // count)), trace.block_tokens) for number in range(count)]


def busy_stretch(trace: Trace, count: int, share: float) -> float:
    """How much slower than it was a trace has to be played for round robin to keep its engines BUSY."""
    servers = fleet(trace, count, share)
    figures = replay(Arrivals(trace, 100.0), servers, Lines(servers, RULES["round robin"]))
    lasted_s = trace.requests[-1].arrived_s - trace.requests[0].arrived_s
    return sum(figures.busy_s) / count / BUSY / lasted_s


def hit_rate(trace: Trace, share: float) -> float:
    """Percent of the prompts' tokens that one cache for all finds, when they come in the trace's order."""
    (server,) = fleet(trace, 1, share)
    hits = 0
    for request in trace.requests:
        hits += server.cached_tokens(request)
        server.cache.use(request.blocks)
    return 100 * hits / sum(request.prompt_tokens for request in trace.requests)


def size_for(trace: Trace, percent: float) -> float | None:
    """The least share of the blocks, to a thousandth, at which one cache for all finds so many of the tokens; None when
    it never does."""
    low, high = 0, 1000
    if hit_rate(trace, 1.0) < percent:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hit_rate(trace, middle / 1000) >= percent else (middle, high)
    return high / 1000


def compare(title: str, trace: Trace, clients: MakeClients, count: int, share: float) -> Figures:
    """Prints a row for every rule. Returns the gateway's."""
    print(f"\n{title}")
    print("| | hit % | mean s | p95 | p99 | imbalance |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rule in RULES.items():
        servers = fleet(trace, count, share)
        _row(name, replay(clients(), servers, Lines(servers, rule)))
    servers = fleet(trace, count, share)
    gateway = replay(clients(), servers, Gateway(servers))
    _row("**the gateway**", gateway)
    servers = fleet(trace, count, share, one_cache=True)
    _row("one pool, in order (bound)", replay(clients(), servers, Pool(servers)))
    return gateway


def _row(name: str, figures: Figures) -> None:
    print(
        f"| {name} | {figures.hit_rate:.1f} | {figures.mean_s:.2f} | {figures.percentile_s(0.95):.1f} "
        f"| {figures.percentile_s(0.99):.1f} | {figures.imbalance:.2f} |",
        flush=True,
    )


def measure(trace: Trace, options: argparse.Namespace) -> None:
    if not all(request.session for request in trace.requests):
        measure_arrivals(trace, options)
        return
    count = options.engines
    for share in options.sizes:
        for sessions in options.sessions:
            title = (
                f"{trace.name}: closed loop, {sessions} sessions per engine, {count} engines, {share:.1%} cached, "
                f"think {options.think:g} s"
            )
            compare(title, trace, lambda n=sessions: ClosedLoop(trace, n * count, options.think), count, share)


def measure_arrivals(trace: Trace, options: argparse.Namespace) -> None:
    """At each size, and at that at which one cache for all finds what it found where the goal was measured."""
    count = options.engines
    as_goal = size_for(trace, options.hits) if trace.name == options.goal_trace else None
    for share in [*options.sizes, *([as_goal] if as_goal is not None else [])]:
        stretch = busy_stretch(trace, count, share)
        title = (
            f"{trace.name}: {len(trace.requests):,} requests, {count} engines, {share:.1%} cached, "
            f"{stretch:.3f} times as slow"
        )
        figures = compare(title, trace, lambda stretch=stretch: Arrivals(trace, stretch), count, share)
        if as_goal is not None:
            _beside_goal(trace, share, options.hits, figures)


def _beside_goal(trace: Trace, share: float, hits: float, figures: Figures) -> None:
    found = hit_rate(trace, share)
    verdict = "so this is its size" if abs(found - hits) < 0.5 else "so this is not its size"
    print(
        f"\nOne cache for all finds {found:.1f}% of the tokens with {share:.1%} of this part's blocks; "
        f"where the goal was measured it found {hits}%, {verdict}."
    )
    told = {"mean": figures.mean_s, "p99": figures.percentile_s(0.99)}
    print(
        "; ".join(
            f"{name} {value:.2f} s, goal {GOAL[name]} ({value / GOAL[name]:.2f}x)" for name, value in told.items()
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--only", nargs="*", default=[], help="names of traces; all when not given")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.1])
    parser.add_argument("--hits", type=float, default=GOAL_HITS, help="percent that one cache for all is to find")
    parser.add_argument("--goal-trace", default="mooncake_conversation", help="name of the trace that GOAL is for")
    parser.add_argument("--sessions", type=int, nargs="*", default=[4, 8], help="at a time, for each engine")
    parser.add_argument("--think", type=float, default=math.inf, help="seconds between answer and question, at most")
    options = parser.parse_args()
    for path in sorted(options.data.glob("*.jsonl.gz")):
        if not options.only or path.name.split(".")[0] in options.only:
            measure(read_trace(path), options)


if __name__ == "__main__":
    main()
