"""Which lines wait, run, and are done, in memory: the twin of redis_lines.py, with the promises of both.

    stage    -> queue     a job's lines are planned one after the other, and wait only when all of them are planned
    waits    -> claim     -> runs until its lease ends; then another gateway takes it over
    runs     -> complete  -> done, with the first result; any later one is refused
    runs     -> put_back  -> waits again at its old place
    waits    -> drop      -> done: it never runs

A queued line is in one of the three states at any time, and a line that is done stays so, whoever is killed when.

A *lane* holds the lines of one tenant for one model, in byte order of their places (paths.py). Lines are claimed from
behind the last claimed one, and from the beginning again at the end, like an elevator. Tenants with lines for a model
take turns by claimed tokens; a turn lasts QUANTUM_TOKENS, for the cache's sake.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from gateway.queues.batch.base import NO_USAGE, Counts, LinePlan
from gateway.queues.batch.paths import Ref, path_of, place_of, ref_at, tokens_at
from gateway.types import Usage

QUANTUM_TOKENS: Final = 65_536
MODEL_CHARS: Final = 200
"""Of a model's name. It comes from clients; what is longer and begins alike shares a lane, and nothing else."""

Kind = Literal["succeeded", "failed", "cancelled", "expired"]
KINDS: Final[tuple[Kind, ...]] = ("succeeded", "failed", "cancelled", "expired")


class Claim(NamedTuple):
    """A line to work on. `lane` and `place` are where it waited. `attempts` counts the tries in vain, `deaths` the
    engines that died at work on it."""

    ref: Ref
    lane: str
    place: bytes
    attempts: int = 0
    deaths: int = 0

    @property
    def model(self) -> str:
        """As `models` has it."""
        return self.lane.partition(":")[2]


class Result(NamedTuple):
    """How a line ended, and where its bytes are: in a spool of the job's folder. Lines that never ran have none."""

    kind: Kind
    spool: str = ""
    offset: int = 0
    num_bytes: int = 0


class Progress(NamedTuple):
    """Lines of a job that are planned, and of those that are queued; `counts` and `usage` are those of lines that are
    done, with a `total` of 0."""

    planned: int = 0
    queued: int = 0
    counts: Counts = Counts()
    usage: Usage = NO_USAGE

    @property
    def done(self) -> int:
        return -self.counts.processing


@dataclass
class _Job:
    staged: list[LinePlan] = field(default_factory=list)
    lanes: set[str] = field(default_factory=set)
    results: dict[int, Result] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    def done(self, kind: Kind, lines: int = 1, usage: Usage = NO_USAGE) -> int:
        before = self.progress
        counts = replace(before.counts, **{kind: getattr(before.counts, kind) + lines})
        self.progress = before._replace(counts=counts, usage=before.usage + usage)
        return self.progress.done


@dataclass
class _Model:
    """The turns of tenants."""

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
    """Lines in this process: for tests, and where there is no Redis. Times are milliseconds since 1970, of the caller's
    clock."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._models: dict[str, _Model] = {}
        self._waiting: dict[str, list[bytes]] = {}  # by lane, in order
        self._cursors: dict[str, bytes] = {}
        self._claims: dict[Ref, tuple[int, str, Claim]] = {}  # end of the lease, owner
        self._tries: dict[Ref, tuple[int, int]] = {}  # attempts and deaths

    async def stage(self, job: str, start: int, plans: Sequence[LinePlan]) -> int:
        """Adds the plans of the lines from `start` on, unless another number is planned already. How many are planned
        now."""
        one = self._jobs.setdefault(job, _Job())
        if one.progress.planned == start:
            one.staged += plans
            one.progress = one.progress._replace(planned=start + len(plans))
        return one.progress.planned

    async def queue(self, job: str, tenant: str, most: int) -> int:
        """Lets up to so many planned lines wait. How many are left."""
        one = self._jobs.setdefault(job, _Job())
        for line, plan in enumerate(one.staged[:most], one.progress.queued):
            lane = lane_of(tenant, plan.model)
            one.lanes.add(lane)
            self._wait(lane, place_of(path_of(plan.digests), Ref(job, line), plan.tokens))
            one.progress = one.progress._replace(queued=line + 1)
        del one.staged[:most]
        return len(one.staged)

    async def models(self, most: int) -> list[str]:
        """At most so many of the models that lines wait for, chosen and ordered at random."""
        return random.sample(list(self._models), min(most, len(self._models)))

    async def claim(self, owner: str, model: str, most: int, until_ms: int) -> list[Claim]:
        """The next lines for a model, on a lease until `until_ms`."""
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
                claims.append(Claim(ref, lane, place, *self._tries.get(ref, (0, 0))))
        for claim in claims:
            self._claims[claim.ref] = (until_ms, owner, claim)
        return claims

    async def take_over(self, owner: str, most: int, now_ms: int, until_ms: int, tried: int) -> list[Claim]:
        """Lines whose lease is over, the oldest lease first. That counts as an attempt. At most `tried` of those with
        earlier attempts, so that a line which ends its gateway meets few others each time."""
        claims: list[Claim] = []
        for _, ref in sorted((until, ref) for ref, (until, _, _) in self._claims.items() if until <= now_ms):
            attempts, deaths = self._tries.get(ref, (0, 0))
            if len(claims) < most and (ref not in self._tries or tried > 0):
                tried -= ref in self._tries
                self._tries[ref] = attempts + 1, deaths
                claim = self._claims[ref][2]._replace(attempts=attempts + 1, deaths=deaths)
                self._claims[ref] = (until_ms, owner, claim)
                claims.append(claim)
        return claims

    async def renew(self, owner: str, refs: Sequence[Ref], until_ms: int) -> list[Ref]:
        """Renews the leases of those that still are this owner's, and returns them."""
        ours = [ref for ref in refs if ref in self._claims and self._claims[ref][1] == owner]
        for ref in ours:
            self._claims[ref] = (until_ms, owner, self._claims[ref][2])
        return ours

    async def put_back(self, owner: str, claim: Claim) -> bool:
        """The line waits again, with the claim's counts. False when it is not this owner's."""
        if self._claims.get(claim.ref, (0, "", claim))[1] != owner:
            return False
        if claim.attempts or claim.deaths:
            self._tries[claim.ref] = claim.attempts, claim.deaths
        del self._claims[claim.ref]
        self._wait(claim.lane, claim.place)
        return True

    async def complete(self, claim: Claim, result: Result, usage: Usage) -> int | None:
        """Stores the result. How many lines of the job are done now; None when the line had a result."""
        waiting = self._waiting.get(claim.lane, [])
        if self._claims.pop(claim.ref, None) is None and claim.place not in waiting:
            return None
        if claim.place in waiting:
            waiting.remove(claim.place)
        self._tries.pop(claim.ref, None)
        self._jobs[claim.ref.job].results[claim.ref.line] = result
        return self._jobs[claim.ref.job].done(result.kind, 1, usage)

    async def lanes(self, job: str) -> list[str]:
        """Lanes in which it has lines, or had."""
        return sorted(self._jobs.get(job, _Job()).lanes)

    async def drop(self, job: str, total: int, kind: Kind, lane: str, after: bytes, most: int) -> bytes:
        """Lines that do not run never will: those of `total` that are not queued, and of the `most` lines of a lane
        after this place those of the job. They have no result but this kind. Where to go on; empty at the end."""
        one = self._jobs.setdefault(job, _Job())
        one.staged.clear()
        one.done(kind, total - one.progress.queued)
        one.progress = one.progress._replace(planned=total, queued=total)
        waiting = self._waiting.get(lane, [])
        start = bisect_right(waiting, after) if after else 0
        places = waiting[start : start + most]
        for place in places:
            if (ref := ref_at(place)).job == job:
                waiting.remove(place)
                self._tries.pop(ref, None)
                one.done(kind)
        return places[-1] if len(places) == most else b""

    async def progress(self, job: str) -> Progress:
        return self._jobs.get(job, _Job()).progress

    async def results(self, job: str, start: int, count: int) -> list[Result | None]:
        found = self._jobs.get(job, _Job()).results
        return [found.get(line) for line in range(start, start + count)]

    async def forget(self, job: str) -> None:
        """Removes a job of which no line waits or runs."""
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
