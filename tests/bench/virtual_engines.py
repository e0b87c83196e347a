"""Engines and clients of a routing replay, in virtual time: no model, no sockets, no tokens.

An engine works on one request at a time: it prefills what its cache lacks, and decodes. Its cache is leaf-first LRU. A
policy says which request goes where; `replay` plays a trace's arrivals, or its sessions in a closed loop, against it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.bench.traces import Request, Trace

TOKEN_S = 1e-4
"""Of prefilling one token, without attention."""

PAIR_S = 1e-9
"""Of one token's attention to one token before it: 100,000 tokens take 10 s, and 5 s more for attention."""

OUTPUT_TOKEN_S = 1e-3
"""Of a generated token, as its share of a batch."""

RATE_S = 30.0
"""Of prefilling, that the measured rate is an average of."""


def prefill_s(prompt_tokens: int, cached_tokens: int) -> float:
    new = prompt_tokens - cached_tokens
    return new * (TOKEN_S + PAIR_S * (cached_tokens + new / 2))


class Cache:
    """Blocks by the time of their last use. Who is used uses its whole prefix, so what goes first is always a leaf."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are held."""
        held, low, high = self._blocks, 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, blocks: Sequence[int]) -> None:
        """The prompt's blocks are held from now on; of a prompt that is larger than the cache, the first ones."""
        held = self._blocks
        for block in reversed(blocks[: self.capacity]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity:
            held.popitem(last=False)


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way."""

    number: int
    request: Request
    arrived_s: float
    session: int = 0


@dataclass(eq=False)
class Server:
    """One engine."""

    number: int
    cache: Cache
    block_tokens: int
    current: Call | None = None
    prefilled_s: float = 0.0  # when the prefill of that is or was done
    free_s: float = 0.0  # when it has done, or had done, all of that
    busy_s: float = 0.0
    tokens_per_s: float = 1 / TOKEN_S  # of prefill, as it measures itself

    def cached_tokens(self, request: Request) -> int:
        """Of its prompt; one token is always computed."""
        return min(self.cache.match(request.blocks) * self.block_tokens, request.prompt_tokens - 1)

    def own_s(self, request: Request) -> float:
        """Seconds of prefill that a request would take here."""
        return prefill_s(request.prompt_tokens, self.cached_tokens(request))


class Policy(Protocol):
    """Who goes where."""

    def arrive(self, call: Call, now: float) -> None: ...

    def assign(self, now: float) -> Iterable[tuple[Call, Server]]:
        """Requests that start now, each at another server without `current`. Asked after every arrival and end."""
        ...


@dataclass
class Figures:
    """What a replay came to."""

    first_token_s: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    span_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were found, in percent."""
        return 100 * self.hit_tokens / self.prompt_tokens

    @property
    def mean_s(self) -> float:
        return sum(self.first_token_s) / len(self.first_token_s)

    def percentile_s(self, share: float) -> float:
        ordered = sorted(self.first_token_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def imbalance(self) -> float:
        """The busiest engine's time at work, as a multiple of the mean."""
        return max(self.busy_s) * len(self.busy_s) / sum(self.busy_s)


class Clients(Protocol):
    """Where requests come from."""

    def first(self) -> Iterator[Call]: ...

    def after(self, call: Call, now: float) -> Iterator[Call]:
        """What the end of an answer leads to."""
        ...


class Arrivals:
    """A trace as it was, `stretch` times as slow."""

    def __init__(self, trace: Trace, stretch: float) -> None:
        self._trace, self._stretch = trace, stretch

    def first(self) -> Iterator[Call]:
        for number, request in enumerate(self._trace.requests):
            yield Call(number, request, request.arrived_s * self._stretch)

    def after(self, call: Call, now: float) -> Iterator[Call]:
        return iter(())


class ClosedLoop:
    """A number of sessions at a time: who has an answer thinks, and asks again; whose session is over begins the next.

    think_s  longest time that anybody thinks
    """

    def __init__(self, trace: Trace, at_once: int, think_s: float) -> None:
        sessions: dict[str, list[Request]] = {}
        for request in trace.requests:
            sessions.setdefault(request.session, []).append(request)
        self._waiting = iter(enumerate(sessions.values()))
        self._at_once, self._think_s = at_once, think_s
        self._open: dict[int, Iterator[Request]] = {}
        self._numbers = itertools.count()

    def first(self) -> Iterator[Call]:
        for _ in range(self._at_once):
            yield from self._begin(0.0)

    def after(self, call: Call, now: float) -> Iterator[Call]:
        request = next(self._open[call.session], None)
        if request is None:
            del self._open[call.session]
            yield from self._begin(now)
        else:
            arrives_s = now + min(request.think_s, self._think_s)
            yield Call(next(self._numbers), request, arrives_s, call.session)

    def _begin(self, now: float) -> Iterator[Call]:
        for session, requests in itertools.islice(self._waiting, 1):
            rest = self._open[session] = iter(requests)
            yield Call(next(self._numbers), next(rest), now, session)


def replay(clients: Clients, servers: Sequence[Server], policy: Policy) -> Figures:
    """Until every client is served. Events at one time: ends before arrivals, in the order in which they were known."""
    figures, order = Figures(), itertools.count()
    events: list[tuple[float, int, int, Call | Server]] = []

    def arrivals(calls: Iterable[Call]) -> None:
        for call in calls:
            heapq.heappush(events, (call.arrived_s, 1, next(order), call))

    arrivals(clients.first())
    now = 0.0
    while events:
        now, _, _, what = heapq.heappop(events)
        if isinstance(what, Call):
            policy.arrive(what, now)
        else:
            ended, what.current = what.current, None
            assert ended is not None
            arrivals(clients.after(ended, now))
        for call, server in policy.assign(now):
            _start(call, server, now, figures)
            heapq.heappush(events, (server.free_s, 0, next(order), server))
    figures.span_s = now
    figures.busy_s = [server.busy_s for server in servers]
    return figures


def _start(call: Call, server: Server, now: float, figures: Figures) -> None:
    assert server.current is None
    request, cached = call.request, server.cached_tokens(call.request)
    server.current = call
    own_s = prefill_s(request.prompt_tokens, cached)
    server.prefilled_s = now + own_s
    share = min(1.0, own_s / RATE_S)
    server.tokens_per_s += share * ((request.prompt_tokens - cached) / own_s - server.tokens_per_s)
    server.free_s = server.prefilled_s + request.output_tokens * OUTPUT_TOKEN_S
    server.busy_s += server.free_s - now
    server.cache.use(request.blocks)
    figures.first_token_s.append(server.prefilled_s - call.arrived_s)
    figures.hit_tokens += cached
    figures.prompt_tokens += request.prompt_tokens
