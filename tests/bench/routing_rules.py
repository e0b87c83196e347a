"""Simple rules that a routing replay compares with: each chooses an engine when a request arrives, and a line in front
of every engine is served in order. They know how long each answer will be, which no gateway does.

Where two engines are equal, the one that was given fewer requests is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tests.bench.virtual_engines import OUTPUT_TOKEN_S, Call, Server


class Lines:
    """Policy: `rule` chooses, first come, first served."""

    def __init__(self, servers: Sequence[Server], rule: Rule) -> None:
        self.servers = servers
        self.given = [0] * len(servers)
        self.lines: list[deque[tuple[Call, float, int]]] = [deque() for _ in servers]
        self._work_s = [0.0] * len(servers)
        self._rule = rule

    def work_s(self, server: Server, now: float) -> float:
        """Until the server has done everything that it was given."""
        return max(0.0, server.free_s - now) + self._work_s[server.number]

    def count(self, server: Server) -> int:
        return len(self.lines[server.number]) + (server.current is not None)

    def backlog_tokens(self, server: Server) -> int:
        """Prompt tokens that are still to be computed for those in line."""
        return sum(tokens for _, _, tokens in self.lines[server.number])

    def least(self, rank: Callable[[Server], float]) -> Server:
        return min(self.servers, key=lambda server: (rank(server), self.given[server.number]))

    def arrive(self, call: Call, now: float) -> None:
        server, request = self._rule(self, call, now), call.request
        cost_s = server.own_s(request) + request.output_tokens * OUTPUT_TOKEN_S
        new_tokens = request.prompt_tokens - server.cached_tokens(request)
        self.lines[server.number].append((call, cost_s, new_tokens))
        self._work_s[server.number] += cost_s
        self.given[server.number] += 1

    def assign(self, now: float) -> Iterator[tuple[Call, Server]]:
        for server, line in zip(self.servers, self.lines, strict=True):
            if server.current is None and line:
                call, cost_s, _ = line.popleft()
                self._work_s[server.number] -= cost_s
                yield call, server


Rule = Callable[[Lines, Call, float], Server]


class Pool:
    """Policy: one line for all engines, and whoever is free takes the first. With one cache for all it is the bound of
    what rules that serve in order can do."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._line: deque[Call] = deque()

    def arrive(self, call: Call, now: float) -> None:
        self._line.append(call)

    def assign(self, now: float) -> Iterator[tuple[Call, Server]]:
        for server in self._servers:
            if server.current is None and self._line:
                yield self._line.popleft(), server


def round_robin(lines: Lines, call: Call, now: float) -> Server:
    return lines.servers[sum(lines.given) % len(lines.servers)]


def least_work(lines: Lines, call: Call, now: float) -> Server:
    return lines.least(lambda server: lines.work_s(server, now))


def expected_wait(weight: float) -> Rule:
    """Wait + weight * own prefill; with 1 it is the least expected time to the first token."""
    return lambda lines, call, now: lines.least(
        lambda server: lines.work_s(server, now) + weight * server.own_s(call.request)
    )


def dynamo(weight: float) -> Rule:
    """Weight * (prefill tokens queued + own new ones) + tokens in use; the least wins."""

    def choose(lines: Lines, call: Call, now: float) -> Server:
        def cost(server: Server) -> float:
            own = call.request.prompt_tokens - server.cached_tokens(call.request)
            active = server.current.request.prompt_tokens if server.current else 0
            return weight * (lines.backlog_tokens(server) + own) + active

        return lines.least(cost)

    return choose


def weighted_scores(lines: Lines, call: Call, now: float) -> Server:
    """3 for the share of the prompt that is held, 2 for an empty line and 2 for little work, as llm-d adds them."""
    counts = [lines.count(server) for server in lines.servers]
    works = [lines.work_s(server, now) for server in lines.servers]

    def score(server: Server) -> float:
        held = server.cached_tokens(call.request) / call.request.prompt_tokens
        line = 1 - counts[server.number] / (max(counts) or 1)
        work = 1 - works[server.number] / (max(works) or 1)
        return 3 * held + 2 * line + 2 * work

    return lines.least(lambda server: -score(server))


def preble(lines: Lines, call: Call, now: float) -> Server:
    """Where more than half is held, the one of those that holds most; else the least cost. Not to one with half as much
    work again as the mean."""
    works = [lines.work_s(server, now) for server in lines.servers]
    mean_s = sum(works) / len(works)
    best = lines.least(lambda server: -server.cached_tokens(call.request))
    held = best.cached_tokens(call.request)
    if held > call.request.prompt_tokens - held and works[best.number] <= 1.5 * mean_s + 1:
        return best
    return lines.least(lambda server: works[server.number] + server.own_s(call.request))


def sglang(lines: Lines, call: Call, now: float) -> Server:
    """The holder of more than half, unless lines differ by more than 4 and half as much again; else the shortest."""
    counts = [lines.count(server) for server in lines.servers]
    best = lines.least(lambda server: -server.cached_tokens(call.request))
    uneven = max(counts) - min(counts) > 4 and max(counts) > 1.5 * min(counts)
    if not uneven and best.cached_tokens(call.request) > 0.5 * call.request.prompt_tokens:
        return best
    return lines.least(lambda server: counts[server.number])


RULES: dict[str, Rule] = {
    "round robin": round_robin,
    "least work": least_work,
    "Dynamo, 1": dynamo(1.0),
    "Dynamo, 2": dynamo(2.0),
    "llm-d, 3/2/2": weighted_scores,
    "Preble": preble,
    "SGLang": sglang,
    "least expected TTFT": expected_wait(1.0),
    "wait + 4 x own prefill": expected_wait(4.0),
}
