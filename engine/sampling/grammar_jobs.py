"""Grammars that wait to be compiled, or are being compiled: whose turn it is, and how many may wait.

Tenants take turns, those of the online queue before those of the batch queue; one worker is always left to another
tenant. Pure bookkeeping: no processes. engine/sampling/grammar_pool.py begins and ends what is chosen here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.protocol import LANES, Grammar, Lane
from engine.sampling.grammar_worker import GrammarWorker, Matcher

WAITING_BYTES: Final = 64 << 20
"""Texts of grammars that wait to be compiled."""
TENANT_WAITING: Final = 0.5
"""Share of the sequences and bytes that wait which one tenant may have."""

Key = tuple[str, Grammar]
"""Salt and grammar: what one tenant compiled is not there for another."""


@dataclass(eq=False, slots=True)
class Job:
    """A grammar that is to be compiled, or is.

    tries  how often its compilation was cut short
    """

    key: Key
    tenant: str
    lane: Lane
    waiting: dict[Matcher, None] = field(default_factory=dict)  # none: it is not wanted any more
    worker: GrammarWorker | None = None
    tries: int = 0


class GrammarJobs:
    """
    max_waiting  sequences that wait for their grammars
    at_once      grammars that are compiled at the same time
    """

    def __init__(self, *, max_waiting: int, at_once: int) -> None:
        self._max_waiting = max_waiting
        self._at_once = at_once
        self._tenant_at_once = max(1, at_once - 1)  # one is always another tenant's
        self._jobs: dict[Key, Job] = {}
        self._turns: OrderedDict[tuple[Lane, str], OrderedDict[Key, Job]] = OrderedDict()  # (lane, tenant) -> jobs
        self._compiling: Counter[str] = Counter()  # by tenant
        self._num_waiting: Counter[str] = Counter()  # sequences by tenant
        self._text_bytes: Counter[str] = Counter()  # of jobs, by tenant

    def __len__(self) -> int:
        return len(self._jobs)

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def find(self, key: Key) -> Job | None:
        return self._jobs.get(key)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their grammars."""
        return self._num_waiting.total()

    def find_refusal(self, tenant: str, grammar: Grammar) -> str | None:
        """Why no more sequences of this tenant may wait."""
        size = len(grammar.text)
        if self.num_waiting >= self._max_waiting or self._text_bytes.total() + size > WAITING_BYTES:
            return "the engine is full: too many sequences wait for their grammars"
        num_own, own_bytes = self._num_waiting[tenant] + 1, self._text_bytes[tenant] + size
        if num_own > max(1, TENANT_WAITING * self._max_waiting) or own_bytes > TENANT_WAITING * WAITING_BYTES:
            return "the engine is full: too many sequences of this tenant wait for their grammars"
        return None

    # -- who waits ----------------------------------------------------------------------------------------------------

    def wait(self, matcher: Matcher) -> None:
        """Its sequence waits for its grammar, which is queued unless another one waits for it already."""
        key = (matcher.salt, matcher.grammar)
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job(key, matcher.tenant, matcher.lane)
            self._text_bytes[job.tenant] += len(matcher.grammar.text)
            self._queue(job)
        if matcher not in job.waiting:
            matcher.grammar = job.key[1]  # equal texts are kept once
            job.waiting[matcher] = None
            self._num_waiting[matcher.tenant] += 1

    def unwait(self, matcher: Matcher) -> Job | None:
        """Its sequence has ended. Returns the job if no other sequence waits for it: it has ended, too."""
        job = self._jobs.get((matcher.salt, matcher.grammar))
        if job is None or matcher not in job.waiting:
            return None
        self._remove(job, matcher)
        if job.waiting:
            return None
        self.end(job)
        return job

    def end(self, job: Job) -> list[Matcher]:
        """The grammar is compiled, or is not going to be. Returns those who waited."""
        waiting = list(job.waiting)
        for matcher in waiting:
            self._remove(job, matcher)
        self._unqueue(job)
        del self._jobs[job.key]
        _subtract(self._text_bytes, job.tenant, len(job.key[1].text))
        if job.worker is not None:
            _subtract(self._compiling, job.tenant, 1)
        return waiting

    def _remove(self, job: Job, matcher: Matcher) -> None:
        del job.waiting[matcher]
        _subtract(self._num_waiting, matcher.tenant, 1)

    # -- turns --------------------------------------------------------------------------------------------------------

    def choose(self, has_place: Callable[[str], bool]) -> Job | None:
        """The next one to compile, which leaves the queue and is to be begun or put back. None when there is none, or
        too many are being compiled.

        has_place  whether a worker may begin for a tenant
        """
        if self._compiling.total() >= self._at_once:
            return None
        for wanted in LANES:
            for (lane, tenant), jobs in self._turns.items():
                if lane == wanted and self._compiling[tenant] < self._tenant_at_once and has_place(tenant):
                    self._turns.move_to_end((lane, tenant))
                    job = next(iter(jobs.values()))
                    self._unqueue(job)
                    return job
        return None

    def begin(self, job: Job, worker: GrammarWorker) -> None:
        job.worker = worker
        self._compiling[job.tenant] += 1

    def put_back(self, job: Job) -> None:
        """It could not be compiled to its end, which is not its fault: the tenant's next turn is its own."""
        if job.worker is not None:
            _subtract(self._compiling, job.tenant, 1)
            job.worker = None
        job.tries += 1
        self._queue(job)
        self._turns[job.lane, job.tenant].move_to_end(job.key, last=False)

    def _queue(self, job: Job) -> None:
        self._turns.setdefault((job.lane, job.tenant), OrderedDict())[job.key] = job

    def _unqueue(self, job: Job) -> None:
        turn = (job.lane, job.tenant)
        jobs = self._turns.get(turn, OrderedDict())
        jobs.pop(job.key, None)
        if not jobs:
            self._turns.pop(turn, None)


def _subtract(counter: Counter[str], tenant: str, count: int) -> None:
    """Tenants without anything are not kept."""
    counter[tenant] -= count
    if not counter[tenant]:
        del counter[tenant]
