"""The real index and the real router before a large fleet, in virtual time: microseconds for each decision, memory, and
the hit rate beside round robin; then what one look-up and one event cost a Redis that has the same index.

    python -m tests.bench.fleet_scale [--engines 200] [--requests 1000000] [--seed 1] [--redis]

Sessions of 200 tenants arrive at random (Poisson): a system prompt that all sessions of a tenant share, then turns that
add to it, with pauses. An engine prefills one request at a time, decodes any number, and loses its least recently used
blocks; what it stores and loses reaches the index as events. A decision is a look-up (gateway/index), and what
gateway/queues does when a request arrives and when an answer ends. Round robin gets the same requests at the same times
and equal caches. Blocks have 16 tokens. With --redis the blocks of all engines are written to a Redis of its own, as
engine/publish.py does it, and its own CPU time is read.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import math
import random
import sys
import tempfile
import time
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from redis.asyncio import Redis

from engine.protocol import DIGEST_BYTES, BlockEvents, Hello, Load, Namespace, split_digests
from engine.publish import Publisher, ResidencyTable
from gateway.config import QueueSettings
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.queues.engine_queue import WaitingRequest
from gateway.queues.router import EngineSlots
from gateway.queues.slots import SlotQueue
from gateway.storage.redis_calls import RedisCalls, connect
from gateway.types import Ask
from tests.fakes.redis_process import RedisProcess

BLOCK_TOKENS: Final = 16
TENANTS, SYSTEM_BLOCKS = 200, 32
OPENING_BLOCKS, TURN_BLOCKS = (8, 48), (4, 32)
GOES_ON: Final = 0.8
"""Probability of a further turn."""
PAUSE_S: Final = 10.0
PREFILL_TOKENS_PER_S, DECODE_S = 8_000.0, 1.0
SLOTS, CACHE_BLOCKS = 32, 16_384
BUSY: Final = 0.4
"""Of the engines' time for prefill, were nothing cached but a session's own earlier turns."""


class Engine:
    """As the queue sees it, and its cache."""

    def __init__(self, number: int) -> None:
        self.name = f"engine-{number}"
        self.hello = Hello(
            incarnation=f"incarnation-{number:04}",
            model="m",
            namespace=Namespace(weights="w", dtype="f", kv_dtype="f", block_size=BLOCK_TOKENS),
            context_tokens=1 << 20,
            vocab_size=1,
            num_blocks=CACHE_BLOCKS,
            max_sequences=SLOTS,
            eos_ids=(),
            tokenizer="t",
            created=0,
        )
        self.load = Load(prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_tokens_per_s=2_000.0)
        self.prefilling: dict[str, int] = {}
        self.joined = True
        self.cache = Cache()
        self.free_s = 0.0  # when it has prefilled everything that it was sent
        self.busy_s = 0.0
        self.running = 0

    def report(self, now: float) -> None:
        backlog = round(max(0.0, self.free_s - now) * PREFILL_TOKENS_PER_S)
        self.load = Load(
            running=self.running,
            prefill_backlog=backlog,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_tokens_per_s=2_000.0,
        )
        self.prefilling = {"all": backlog}


class Cache:
    """Blocks by the time of their last use; of one prompt the last block goes first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, digests: Sequence[bytes]) -> BlockEvents:
        """The prompt is held from now on; what that changes."""
        held, stored, removed = self.blocks, list[bytes](), list[bytes]()
        for digest in reversed(digests):
            if digest in held:
                held.move_to_end(digest)
            else:
                held[digest] = None
                stored.append(digest)
        while len(held) > CACHE_BLOCKS:
            removed.append(held.popitem(last=False)[0])
        return BlockEvents(stored=b"".join(reversed(stored)), removed=b"".join(removed))

    def match(self, digests: Sequence[bytes]) -> int:
        """Leading blocks that are held."""
        return next((at for at, digest in enumerate(digests) if digest not in self.blocks), len(digests))


@dataclass(slots=True)
class Request:
    """One turn."""

    tenant: str
    digests: bytes
    session: Iterator[bytes]


class Traffic:
    """Sessions, always the same for one seed. `next` is what an answer leads to."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._systems = [self._dice.randbytes(DIGEST_BYTES * SYSTEM_BLOCKS) for _ in range(TENANTS)]

    def begin(self) -> Request:
        tenant = self._dice.randrange(TENANTS)
        session = self._session(self._systems[tenant])
        return Request(f"tenant-{tenant}", next(session), session)

    def after(self, request: Request) -> Request | None:
        digests = next(request.session, None)
        return None if digests is None else Request(request.tenant, digests, request.session)

    def gap_s(self, mean_s: float) -> float:
        return self._dice.expovariate(1 / mean_s)

    def _session(self, digests: bytes) -> Iterator[bytes]:
        digests += self._dice.randbytes(DIGEST_BYTES * self._dice.randint(*OPENING_BLOCKS))
        yield digests
        while self._dice.random() < GOES_ON:
            digests += self._dice.randbytes(DIGEST_BYTES * self._dice.randint(*TURN_BLOCKS))
            yield digests


@dataclass
class Figures:
    """What a run came to. Times are CPU seconds of this process."""

    requests: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    round_robin_blocks: int = 0
    event_blocks: int = 0
    most_waiting: int = 0
    most_sessions: int = 0
    wait_s: float = 0.0
    span_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("look-up", "arrival", "end", "events"), 0.0))
    parts: list[float] = field(default_factory=list)  # microseconds of a decision, of each tenth of the requests

    @property
    def decided_s(self) -> float:
        """Of all decisions so far."""
        return self.cpu_s["look-up"] + self.cpu_s["arrival"] + self.cpu_s["end"]


class Fleet:
    """The gateway's stages, its engines, and as many caches again for round robin."""

    def __init__(self, engines: int, seed: int, busy: float = BUSY) -> None:
        self.engines = [Engine(number) for number in range(engines)]
        self.memory = MemoryIndex()
        for engine in self.engines:
            self.memory.apply(engine.hello.incarnation, BlockEvents(reset=True))
        self.index = PrefixIndex(self.memory, None, retry_s=1.0)
        self.now_s = 0.0
        self.queue: SlotQueue[Engine] = SlotQueue(QueueSettings(max_waiting=1 << 30), lambda: self.now_s)
        self.online = self.queue.find_group(self.engines).online
        self.figures = Figures()
        self.latest: deque[bytes] = deque(maxlen=2_000)  # prompts
        self._names = [engine.hello.incarnation for engine in self.engines]
        self._round_robin = itertools.cycle([Cache() for _ in self.engines])
        self._traffic = Traffic(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, object]] = []
        self._asked: dict[WaitingRequest, Request] = {}
        self._left = 0
        # A session has 1 / (1 - GOES_ON) turns, of which each prefills the middle of its range.
        turns = GOES_ON / (1 - GOES_ON)
        tokens = BLOCK_TOKENS * (sum(OPENING_BLOCKS) / 2 + turns * sum(TURN_BLOCKS) / 2)
        self._between_s = tokens / (busy * engines * PREFILL_TOKENS_PER_S)

    def run(self, requests: int) -> Figures:
        """Until so many requests have been answered, and no further one was begun."""
        self._left = requests
        tenth, before_s = max(1, requests // 10), 0.0
        self._push(0.0, "begin", None)
        while self._events:
            self.now_s, _, what, subject = heapq.heappop(self._events)
            if what == "begin" and self._left:
                self._arrive(self._traffic.begin())
                self._push(self.now_s + self._traffic.gap_s(self._between_s), "begin", None)
            elif what == "turn" and self._left:
                assert isinstance(subject, Request)
                self._arrive(subject)
            elif what == "end":
                assert isinstance(subject, tuple)
                self._end(*subject)
            if self.figures.requests >= (len(self.figures.parts) + 1) * tenth:
                decided_s = self.figures.decided_s
                self.figures.parts.append(1e6 * (decided_s - before_s) / tenth)
                print(f"{self.figures.requests:,} requests, {self.figures.parts[-1]:.0f} us each", file=sys.stderr)
                before_s = decided_s
        self.figures.span_s = self.now_s
        return self.figures

    def _push(self, at_s: float, what: str, subject: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what, subject))

    def _arrive(self, request: Request) -> None:
        self._left -= 1
        figures, begun = self.figures, time.process_time()
        held = result_of(self.index.find("m", request.digests, self._names))
        looked_up = time.process_time()
        group = self.queue.find_group(self.engines)
        ask = Ask(
            request.tenant,
            len(request.digests) // DIGEST_BYTES * BLOCK_TOKENS,
            math.inf,
            {name: blocks * BLOCK_TOKENS for name, blocks in held.items() if blocks},
            digests=request.digests,
            block_size=BLOCK_TOKENS,
        )
        waiter = WaitingRequest(ask, self.now_s)
        self._asked[waiter] = request
        assigned = group.online.enter(waiter)
        entered = time.process_time()
        figures.cpu_s["look-up"] += looked_up - begun
        figures.cpu_s["arrival"] += entered - looked_up
        digests = split_digests(request.digests)
        cache = next(self._round_robin)
        figures.round_robin_blocks += cache.match(digests)
        cache.use(digests)
        self._start(assigned)
        figures.most_waiting = max(figures.most_waiting, len(group.online))

    def _start(self, assigned: list[tuple[WaitingRequest, EngineSlots[Engine]]]) -> None:
        figures = self.figures
        for waiter, slots in assigned:
            engine, request = slots.engine, self._asked.pop(waiter)
            digests = split_digests(request.digests)
            hit = engine.cache.match(digests)
            told = waiter.ask.cached_tokens.get(slots.incarnation, 0)
            assert hit * BLOCK_TOKENS == told or waiter.arrived_s < self.now_s, "the index is not what the cache is"
            own_s = (len(digests) - hit) * BLOCK_TOKENS / PREFILL_TOKENS_PER_S
            engine.free_s = max(self.now_s, engine.free_s) + own_s
            engine.busy_s += own_s
            engine.running += 1
            engine.report(self.now_s)
            events, begun = engine.cache.use(digests), time.process_time()
            self.memory.apply(slots.incarnation, events)
            figures.cpu_s["events"] += time.process_time() - begun
            figures.event_blocks += (len(events.stored) + len(events.removed)) // DIGEST_BYTES
            figures.prompt_blocks += len(digests)
            figures.hit_blocks += hit
            figures.wait_s += self.now_s - waiter.arrived_s
            self._push(engine.free_s + DECODE_S, "end", (slots, request))
            figures.requests += 1
            self.latest.append(request.digests)

    def _end(self, slots: EngineSlots[Engine], request: Request) -> None:
        slots.engine.running -= 1
        slots.engine.report(self.now_s)
        begun = time.process_time()
        slots.taken -= 1
        assigned = self.online.assign(self.now_s)
        self.figures.cpu_s["end"] += time.process_time() - begun
        self._start(assigned)
        following = self._traffic.after(request)
        if following is not None:
            self._push(self.now_s + self._traffic.gap_s(PAUSE_S), "turn", following)


def result_of(work: object) -> dict[str, int]:
    """What a coroutine returns that waits for nothing."""
    try:
        work.send(None)  # type: ignore[attr-defined]
    except StopIteration as end:
        return dict(end.value)
    raise AssertionError("it waited")


def index_bytes(fleet: Fleet) -> tuple[int, int]:
    """Bytes of a memory index with what the fleet's has, without what a gateway recalls of lost blocks; and its
    entries."""
    gc.collect()
    tracemalloc.start()
    copy = MemoryIndex()
    for engine in fleet.engines:
        copy.apply(engine.hello.incarnation, BlockEvents(stored=b"".join(engine.cache.blocks), reset=True))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size, sum(copy.blocks(engine.hello.incarnation) for engine in fleet.engines)


async def measure_redis(fleet: Fleet, look_ups: int) -> None:
    """Prints the CPU time of a Redis, and the bytes that it reads and writes, for a look-up and for an event."""
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder, RedisProcess(Path(folder)) as process:
        redis = connect(process.url, 60.0)
        publishers = [await publisher(redis, engine) for engine in fleet.engines]
        index = PrefixIndex(MemoryIndex(), RedisCalls(redis, 60.0), retry_s=1.0)
        names = [engine.hello.incarnation for engine in fleet.engines]
        used = (await redis.info("memory"))["used_memory"]
        entries = sum(len(engine.cache.blocks) for engine in fleet.engines)
        print(f"Redis: {used / entries:.0f} bytes for each of {entries:,} blocks")
        before = await counters(redis)
        for number in range(look_ups):
            await index.find("m", fleet.latest[number % len(fleet.latest)], names)
        await report(redis, before, look_ups, "look-up")
        before, dice = await counters(redis), random.Random(0)
        for number in range(look_ups):
            one, table = publishers[number % len(publishers)]
            events = BlockEvents(stored=dice.randbytes(DIGEST_BYTES * 20), removed=b"".join(table)[: DIGEST_BYTES * 20])
            table.apply(events)
            one.publish(events)
            await one._write_pending()
        await report(redis, before, look_ups, "20 blocks stored, 20 removed")
        before = await counters(redis)
        for one, _ in publishers:
            await one._heartbeat()
        await report(redis, before, len(publishers), "heartbeat")
        await redis.aclose()


async def publisher(redis: Redis, engine: Engine) -> tuple[Publisher, ResidencyTable]:
    """That of an engine, which has written all of its blocks and is called by hand from now on."""
    table = ResidencyTable()
    table.apply(BlockEvents(stored=b"".join(engine.cache.blocks)))
    made = Publisher(redis, table, engine.hello, "http://127.0.0.1:1", heartbeat_s=1.0, lease_s=600.0)
    await made._write_all()
    return made, table


async def counters(redis: Redis) -> dict[str, float]:
    told = await redis.info()
    return {
        "us": 1e6 * (told["used_cpu_user"] + told["used_cpu_sys"]),
        "in": told["total_net_input_bytes"],
        "out": told["total_net_output_bytes"],
        "commands": told["total_commands_processed"],
    }


async def report(redis: Redis, before: dict[str, float], count: int, what: str) -> None:
    now = await counters(redis)
    each = {name: (now[name] - before[name]) / count for name in now}
    print(f"Redis: {what}: {each['us']:.0f} us of CPU, {each['in']:.0f} bytes in, {each['out']:.0f} out", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--busy", type=float, default=BUSY, help="share of the engines' prefill time; above 1 it is full"
    )
    parser.add_argument("--redis", action="store_true", help="measure a Redis with the index of the end")
    options = parser.parse_args()
    fleet, begun = Fleet(options.engines, options.seed, options.busy), time.process_time()
    figures = fleet.run(options.requests)
    whole_s, count = time.process_time() - begun, figures.requests
    print(f"{count:,} requests at {options.engines} engines, {count / figures.span_s:,.0f} a second of their time")
    decided_us, whole_us = 1e6 * figures.decided_s / count, 1e6 * whole_s / count
    print(f"CPU: {decided_us:.0f} us for a decision, {whole_us:.0f} us with the simulation")
    for name, spent_s in figures.cpu_s.items():
        print(f"  {name:<8} {1e6 * spent_s / count:6.1f} us a request")
    print(f"first and last tenth of the decisions: {figures.parts[0]:.0f} and {figures.parts[-1]:.0f} us")
    print(f"hits: {figures.hit_blocks / figures.prompt_blocks:.1%} of the blocks; ", end="")
    print(f"round robin {figures.round_robin_blocks / figures.prompt_blocks:.1%}")
    print(f"waited {figures.wait_s / count:.2f} s on average, at most {figures.most_waiting} at a time")
    print(f"events: {figures.event_blocks / count:.0f} blocks stored or removed for a request")
    size, entries = index_bytes(fleet)
    print(f"index: {size / 1e6:.0f} MB for {entries:,} blocks ({size / entries:.0f} bytes each)", flush=True)
    if options.redis:
        asyncio.run(measure_redis(fleet, 2_000))


if __name__ == "__main__":
    main()
