"""Which lines wait, run, and are done: the promises, and the twin of redis_lines.py in memory.

    stage    -> queue     a job's lines are planned one after the other, and wait only when all of them are known
    waits    -> claim     -> runs, until its lease ends; then whoever takes over gets it, too
    runs     -> complete  -> done, with the first result that comes; any later one is refused
    runs     -> put_back  -> waits, at its old place
    waits    -> drop      -> done, with the result of lines that never ran

A line that was queued is in one of the three at any time, and once done stays so, whoever is killed when.

A *lane* holds the lines of one tenant that ask one model, in byte order of their places (paths.py). Lines are claimed
from behind the last one that was, and from the beginning again behind the end, like an elevator. Tenants with lines for
a model take turns by the tokens that were claimed; who has the turn keeps it for QUANTUM_TOKENS, for the cache's sake.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

from gateway.queues.batch.base import NO_USAGE, Counts, LinePlan
from gateway.queues.batch.job import Progress
from gateway.queues.batch.paths import Ref, path_of, place_of, ref_at, tokens_at
from gateway.types import Usage

QUANTUM_TOKENS: Final = 65_536
MODEL_CHARS: Final = 200
"""Of a model's name. It comes from clients; what is longer and begins alike shares a lane, and nothing else."""

Kind = Literal["succeeded", "failed", "cancelled", "expired"]
Back = Literal["waits", "exhausted", "gone"]


class Claim(NamedTuple):
    """A line that somebody may work on. `lane` and `place` are where it waited, `attempts` how often it was tried in
    vain, `deaths` how many engines died at work on it."""

    ref: Ref
    lane: str
    place: bytes
    attempts: int = 0
    deaths: int = 0


class Result(NamedTuple):
    """What a line came to. Where its bytes are: a spool of the job's folder; lines that never ran have none."""

    kind: Kind
    spool: str = ""
    offset: int = 0
    num_bytes: int = 0


class Lines(Protocol):
    """Times are milliseconds since 1970, of the caller's clock. Everything raises OverloadedError while Redis is away;
    what it was asked for may have been done all the same."""

    async def stage(self, job: str, start: int, plans: Sequence[LinePlan]) -> int:
        """The plans of the lines from `start` on. How many of the job's lines are planned now; when that was not
        `start` before, nothing is added."""

    async def queue(self, job: str, tenant: str, most: int) -> int:
        """Lets up to so many planned lines wait. How many are left to be."""

    async def models(self, most: int) -> list[str]:
        """For which lines may wait, so many at most. Which, and in which order, is left to chance."""

    async def claim(self, owner: str, model: str, most: int, until_ms: int) -> list[Claim]:
        """The next lines that ask a model, on a lease until `until_ms`."""

    async def take_over(self, owner: str, most: int, now_ms: int, until_ms: int, tried: int) -> list[Claim]:
        """Lines whose lease is over, those first whose was over first. That counts as an attempt. Of those with earlier
        ones `tried` at most, so that a line which ends its gateway meets few others each time."""

    async def renew(self, owner: str, refs: Sequence[Ref], until_ms: int) -> list[Ref]:
        """Those that still are this owner's, whose lease ends at `until_ms` from now on."""

    async def put_back(self, owner: str, claim: Claim, most_attempts: int, *, died: bool = False) -> Back:
        """ "waits": somebody will claim it again. "exhausted": it was tried so often by now, and is still the owner's.
        "gone": it is not. `most_attempts` 0: this was no attempt. `died`: an engine did, which is counted by itself."""

    async def complete(self, claim: Claim, result: Result, usage: Usage) -> int | None:
        """How many lines of the job are done, if this is the result from now on; None when the line had one."""

    async def drop_staged(self, job: str, total: int, kind: Kind, most: int) -> bool:
        """Gives up to so many lines that were never queued a result; whether there are more. None will be."""

    async def lanes(self, job: str) -> list[str]:
        """In which it has lines, or had."""

    async def drop_waiting(self, job: str, lane: str, after: bytes, kind: Kind, most: int) -> bytes:
        """Of `most` lines after this place, gives those of the job a result. Where to go on; empty at the end."""

    async def progress(self, job: str) -> Progress: ...

    async def tally(self, job: str) -> tuple[Counts, Usage]:
        """Of lines that are done; `total` is 0."""

    async def results(self, job: str, start: int, count: int) -> list[Result | None]:
        """Of so many lines from one on."""

    async def forget(self, job: str) -> None:
        """A job of which no line waits or runs."""


@dataclass
class _Job:
    planned: int = 0
    queued: int = 0
    staged: list[LinePlan] = field(default_factory=list)
    lanes: set[str] = field(default_factory=set)
    results: dict[int, Result] = field(default_factory=dict)
    usage: Usage = NO_USAGE


@dataclass
class _Model:
    """Whose turn it is."""

    turns: dict[str, int] = field(default_factory=dict)  # of tenants with lines
    now: int = 0
    last: str = ""

    def enter(self, tenant: str) -> None:
        self.turns.setdefault(tenant, self.now)

    def next(self) -> str:
        first = min(self.turns, key=lambda tenant: (self.turns[tenant], tenant))
        last = self.turns.get(self.last)
        return self.last if last is not None and last - self.turns[first] < QUANTUM_TOKENS else first


class MemoryLines:
    """Lines in this process: for tests, and where there is no Redis."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._models: dict[str, _Model] = {}
        self._waiting: dict[str, list[bytes]] = {}  # by lane, in order
        self._cursors: dict[str, bytes] = {}
        self._claims: dict[Ref, tuple[int, str, Claim]] = {}  # end of the lease, owner
        self._attempts: dict[Ref, int] = {}
        self._deaths: dict[Ref, int] = {}

    async def stage(self, job: str, start: int, plans: Sequence[LinePlan]) -> int:
        one = self._jobs.setdefault(job, _Job())
        if one.planned == start:
            one.staged += plans
            one.planned += len(plans)
        return one.planned

    async def queue(self, job: str, tenant: str, most: int) -> int:
        one = self._jobs.setdefault(job, _Job())
        for plan in one.staged[:most]:
            lane = lane_of(tenant, plan.model)
            one.lanes.add(lane)
            self._wait(lane, place_of(path_of(plan.digests), Ref(job, one.queued), plan.tokens))
            one.queued += 1
        del one.staged[:most]
        return len(one.staged)

    async def models(self, most: int) -> list[str]:
        return random.sample(list(self._models), min(most, len(self._models)))

    async def claim(self, owner: str, model: str, most: int, until_ms: int) -> list[Claim]:
        claims: list[Claim] = []
        one = self._models.get(model)
        while one is not None and len(claims) < most:
            if not one.turns:
                del self._models[model]
                break
            tenant = one.next()
            lane = lane_of(tenant, model)
            places = self._following(lane, most - len(claims))
            if not places:
                del one.turns[tenant]
                self._cursors.pop(lane, None)
                continue
            one.now, one.last = one.turns[tenant], tenant
            for place in places:
                one.turns[tenant] += tokens_at(place) + 1
                ref = ref_at(place)
                claims.append(Claim(ref, lane, place, self._attempts.get(ref, 0), self._deaths.get(ref, 0)))
        for claim in claims:
            self._claims[claim.ref] = (until_ms, owner, claim)
        return claims

    async def take_over(self, owner: str, most: int, now_ms: int, until_ms: int, tried: int) -> list[Claim]:
        claims: list[Claim] = []
        for _, ref in sorted((until, ref) for ref, (until, _, _) in self._claims.items() if until <= now_ms):
            before = self._attempts.get(ref, 0)
            if len(claims) < most and (not before or tried > 0):
                tried -= before > 0
                claim = self._claims[ref][2]._replace(attempts=before + 1, deaths=self._deaths.get(ref, 0))
                self._attempts[ref] = before + 1
                self._claims[ref] = (until_ms, owner, claim)
                claims.append(claim)
        return claims

    async def renew(self, owner: str, refs: Sequence[Ref], until_ms: int) -> list[Ref]:
        ours = [ref for ref in refs if ref in self._claims and self._claims[ref][1] == owner]
        for ref in ours:
            self._claims[ref] = (until_ms, owner, self._claims[ref][2])
        return ours

    async def put_back(self, owner: str, claim: Claim, most_attempts: int, *, died: bool = False) -> Back:
        if self._claims.get(claim.ref, (0, "", claim))[1] != owner:
            return "gone"
        counts = self._deaths if died else self._attempts
        if most_attempts:
            counts[claim.ref] = counts.get(claim.ref, 0) + 1
            if counts[claim.ref] >= most_attempts:
                return "exhausted"
        del self._claims[claim.ref]
        self._wait(claim.lane, claim.place)
        return "waits"

    async def complete(self, claim: Claim, result: Result, usage: Usage) -> int | None:
        waiting = self._waiting.get(claim.lane, [])
        if self._claims.pop(claim.ref, None) is None and claim.place not in waiting:
            return None
        if claim.place in waiting:
            waiting.remove(claim.place)
        self._attempts.pop(claim.ref, None)
        self._deaths.pop(claim.ref, None)
        one = self._jobs[claim.ref.job]
        one.results[claim.ref.line] = result
        one.usage += usage
        return len(one.results)

    async def drop_staged(self, job: str, total: int, kind: Kind, most: int) -> bool:
        one = self._jobs.setdefault(job, _Job())
        one.staged.clear()
        one.planned = total
        end = min(total, one.queued + most)
        one.results.update(dict.fromkeys(range(one.queued, end), Result(kind)))
        one.queued = max(end, one.queued)
        return one.queued < total

    async def lanes(self, job: str) -> list[str]:
        return sorted(self._jobs.get(job, _Job()).lanes)

    async def drop_waiting(self, job: str, lane: str, after: bytes, kind: Kind, most: int) -> bytes:
        waiting = self._waiting.get(lane, [])
        start = bisect_right(waiting, after) if after else 0
        places = waiting[start : start + most]
        for place in places:
            if (ref := ref_at(place)).job == job:
                waiting.remove(place)
                self._attempts.pop(ref, None)
                self._deaths.pop(ref, None)
                self._jobs[job].results[ref.line] = Result(kind)
        return places[-1] if len(places) == most else b""

    async def progress(self, job: str) -> Progress:
        one = self._jobs.get(job, _Job())
        return Progress(one.planned, one.queued, len(one.results))

    async def tally(self, job: str) -> tuple[Counts, Usage]:
        one = self._jobs.get(job, _Job())
        kinds = [result.kind for result in one.results.values()]
        names: tuple[Kind, ...] = ("succeeded", "failed", "cancelled", "expired")
        return Counts(0, *(kinds.count(kind) for kind in names)), one.usage

    async def results(self, job: str, start: int, count: int) -> list[Result | None]:
        found = self._jobs.get(job, _Job()).results
        return [found.get(line) for line in range(start, start + count)]

    async def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def _wait(self, lane: str, place: bytes) -> None:
        tenant, _, model = lane.partition(":")
        self._models.setdefault(model, _Model()).enter(tenant)
        waiting = self._waiting.setdefault(lane, [])
        waiting.insert(bisect_right(waiting, place), place)

    def _following(self, lane: str, most: int) -> list[bytes]:
        """Takes them out."""
        waiting = self._waiting.get(lane, [])
        start = bisect_right(waiting, self._cursors.get(lane, b""))
        start = 0 if start == len(waiting) else start
        places = waiting[start : start + most]
        del waiting[start : start + most]
        if places:
            self._cursors[lane] = places[-1]
        return places


def lane_of(tenant: str, model: str) -> str:
    """Names of tenants have no colon."""
    return f"{tenant}:{model[:MODEL_CHARS]}"
