"""How soon a block is used again, by its class and by how long it has not been used: learned while it happens.

A class has a hazard for each age: of the blocks that reached it unused, the share that is used before the next one.
Classes hang in a tree, and one that has seen little is taken to be like its parent. The score of a block is the most
hits per second of its place that keeping it can bring,

    max over H of  P(used again within H | age) / E[min(time to its use, H)]

which is Gittins' index for a job with this distribution, and the hit density of Beckmann, Chen and Cidon (NSDI 2018)
with the best horizon instead of the block's whole life.

A sample of the blocks is watched for how long each goes unused, also after it was evicted (`Lifetimes`): what an
eviction policy learns must not depend on what it evicted. Blocks are sampled by their digests, so that one that comes
back is known again, and ever fewer of them until the records reach back far enough.

engine/pool/hit_density.py knows what the classes mean and what the scores are for. No clock: `now` comes in.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

NUM_AGES = 22

AGES_S = [0.0, *(2.0 * math.pow(1.5, power) for power in range(NUM_AGES - 1))]
"""Seconds at which the age bins begin: 0, 2, 3, 4.5, ... The last one, from 1.8 hours on, has no end."""

_UPPER_S = AGES_S[1:]
_WIDTH_S = [above - below for below, above in zip(AGES_S, _UPPER_S, strict=False)] + [AGES_S[-1]]

PARENT_WEIGHT = 25.0
"""Blocks of its own after which a class counts as much as its parent."""

UNSEEN_HAZARD = 0.05
"""In an age that no block has reached: the same in every bin, so older blocks score lower, as with LRU."""

MEMORY = 1 << 16
"""Blocks after which what a class has seen counts half, so that a change of habits is learned."""

_NEWS = 64
"""Events after which one class's scores are computed anew, whichever is next in turn."""

_FIRST_LOOK = 16
"""Events after which a class's scores are computed anew for the first time; later ones wait for a quarter more."""


def age_bin(age_s: float) -> int:
    return bisect_right(_UPPER_S, age_s)


class ReuseRates:
    """Counts, hazards and scores. `entered` and `reused` are O(depth of the tree), `score` is O(1), `settle` bounded.

    parents  of each class, its parent's number; -1 for the one root. Only classes without children may be scored
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self._lines = [self._line(parents, number) for number in range(len(parents))]
        self._entered = [[0.0] * NUM_AGES for _ in parents]
        self._reused = [[0.0] * NUM_AGES for _ in parents]
        self._events = [0] * len(parents)
        self._due = [_FIRST_LOOK] * len(parents)
        self._overdue: deque[int] = deque()
        self._news = 0  # events since the last refresh
        self._seen: list[int] = []  # classes that have had events, to be refreshed in turn
        self._turn = 0
        root_only = self._compute_scores(self._lines[parents.index(-1)])
        self._scores = [root_only] * len(parents)

    @staticmethod
    def _line(parents: Sequence[int], number: int) -> tuple[int, ...]:
        line = [number]
        while (number := parents[number]) >= 0:
            line.append(number)
        return tuple(line)

    def entered(self, number: int, age: int, blocks: int = 1) -> None:
        """Blocks of this class reached an age bin unused."""
        for each in self._lines[number]:
            self._entered[each][age] += blocks
        self._count(number)

    def reused(self, number: int, age: int) -> None:
        """A block of this class was used again in an age bin that it had entered."""
        for each in self._lines[number]:
            self._reused[each][age] += 1.0
        self._count(number)

    def score(self, number: int, age_s: float) -> float:
        """Hits per second of a block's place, in the age's bin between those at its two ends."""
        age = bisect_right(_UPPER_S, age_s)
        scores = self._scores[number]
        if age == NUM_AGES - 1:
            return scores[age]
        low = scores[age]
        return low + (scores[age + 1] - low) * (age_s - AGES_S[age]) / _WIDTH_S[age]

    def settle(self) -> None:
        """Lets a class's scores follow what was counted: of one that has much news, else of the next in turn."""
        if self._overdue:
            self._refresh(self._overdue.popleft())
        elif self._news < _NEWS:
            return
        elif self._seen:
            self._turn = (self._turn + 1) % len(self._seen)
            self._refresh(self._seen[self._turn])

    def hazards(self, number: int) -> list[float]:
        """The share of blocks that are used again in each age bin, of those that reach it."""
        return self._compute_hazards(self._lines[number])

    def _count(self, number: int) -> None:
        self._news += 1
        self._events[number] += 1
        if self._events[number] == self._due[number]:
            self._overdue.append(number)

    def _refresh(self, number: int) -> None:
        self._news = 0
        line = self._lines[number]
        for each in line:
            if self._entered[each][0] > MEMORY:
                self._entered[each] = [count / 2 for count in self._entered[each]]
                self._reused[each] = [count / 2 for count in self._reused[each]]
        self._scores[number] = self._compute_scores(line)
        if self._events[number] >= self._due[number]:
            if self._due[number] == _FIRST_LOOK:
                self._seen.append(number)
            self._due[number] = self._events[number] + self._events[number] // 4

    def _compute_hazards(self, line: Sequence[int]) -> list[float]:
        hazards = [UNSEEN_HAZARD] * NUM_AGES
        for each in reversed(line):
            hazards = [
                min(1.0, (reused + PARENT_WEIGHT * hazard) / (entered + PARENT_WEIGHT))
                for entered, reused, hazard in zip(self._entered[each], self._reused[each], hazards, strict=True)
            ]
        return hazards

    def _compute_scores(self, line: Sequence[int]) -> list[float]:
        """Scores at the beginning of each age bin. A block stands in the middle of its bin with the hazard of all of
        it still ahead: twice what is left, which is what small pools, where blocks wait for seconds, want."""
        unused, place_s = [1.0], [0.0]  # share that is still unused at the beginning of each bin, and its integral
        for hazard, width in zip(self._compute_hazards(line), _WIDTH_S, strict=True):
            left = unused[-1] * (1.0 - hazard)
            place_s.append(place_s[-1] + width * (unused[-1] + left) / 2)
            unused.append(left)
        scores = []
        for age in range(NUM_AGES):
            now, start_s = unused[age], (place_s[age] + place_s[age + 1]) / 2
            later = range(age + 1, NUM_AGES + 1)
            scores.append(max((now - unused[end]) / (place_s[end] - start_s) for end in later) if now else 0.0)
        return scores


MAX_RECORDS = 1 << 17
"""Blocks that are watched at most; about 400 bytes each."""

_MAX_AGED = 1024
"""Cohorts that one call lets grow older, at most: after a quiet hour the rest follows with the next calls."""

_LIMIT_BITS = 32


@dataclass(slots=True, eq=False)
class Cohort:
    """Watched blocks of one class whose lifetimes began together; `alive` of them are still unused."""

    number: int  # class
    since_s: float
    age: int = 0  # bin that it has entered
    alive: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """A watched block. Outlives the block itself.

    hits, children, first_child, turn   as hit_density.py keeps them for a cached block, for when it comes back
    """

    digest: bytes
    cohort: Cohort | None = None  # of the lifetime that runs
    since_s: float = -1.0  # when the last lifetime began; negative before the first
    hits: int = 0
    children: int = 0
    first_child: bytes | None = None
    turn: int = 0


class Lifetimes:
    """Records by digest. Every call is O(1) amortised, and `advance` is bounded."""

    def __init__(self, rates: ReuseRates, max_records: int = MAX_RECORDS) -> None:
        self._rates = rates
        self._max_records = max_records
        self._limit = 1 << _LIMIT_BITS
        self._below = b"\xff" * 17  # digests below this are sampled
        self._records: OrderedDict[bytes, Record] = OrderedDict()  # by the beginning of the last lifetime
        self._youngest = Cohort(-1, 0.0)
        self._aging: list[deque[Cohort]] = [deque() for _ in range(NUM_AGES - 1)]

    def __len__(self) -> int:
        """Blocks that are watched, cached or not."""
        return len(self._records)

    def find(self, digest: bytes) -> Record | None:
        """The record of a block that is watched, cached or not."""
        return self._records.get(digest)

    def watch(self, digest: bytes) -> Record | None:
        """The record of a block that is stored now: the one it had before it was evicted, or a new one; None when it
        is not in the sample."""
        if digest >= self._below:
            return None
        return self._records.get(digest) or Record(digest)

    def begin(self, record: Record, number: int, now: float) -> None:
        """The block's last reader has released it."""
        if record.digest >= self._below:
            return
        if record.cohort is not None:
            record.cohort.alive -= 1
        cohort = self._youngest
        if cohort.number != number or cohort.since_s != now or cohort.age:
            cohort = self._youngest = Cohort(number, now)
            self._aging[0].append(cohort)
        cohort.alive += 1
        record.cohort, record.since_s = cohort, now
        self._records[record.digest] = record
        self._records.move_to_end(record.digest)
        self._rates.entered(number, 0)
        if len(self._records) > self._max_records:
            self._make_room(now)

    def end(self, record: Record, now: float) -> None:
        """The block is used again. Nothing happens if no lifetime runs."""
        cohort = record.cohort
        if cohort is None:
            return
        age = age_bin(now - cohort.since_s)
        for older in range(cohort.age + 1, age + 1):
            self._rates.entered(cohort.number, older)
        self._rates.reused(cohort.number, age)
        cohort.alive -= 1
        record.cohort = None

    def advance(self, now: float) -> None:
        """Lets unused blocks grow older, and forgets cohorts of which none is left."""
        left = _MAX_AGED
        for age, waiting in enumerate(self._aging):
            last = now - AGES_S[age + 1]
            while waiting and left and (waiting[0].since_s <= last or not waiting[0].alive):
                cohort = waiting.popleft()
                left -= 1
                if cohort.alive:
                    cohort.age = age + 1
                    self._rates.entered(cohort.number, age + 1, cohort.alive)
                    if age + 1 < len(self._aging):
                        self._aging[age + 1].append(cohort)
                else:
                    cohort.age = NUM_AGES  # takes no block any more

    def _make_room(self, now: float) -> None:
        _, oldest = self._records.popitem(last=False)
        self._forget(oldest)
        if now - oldest.since_s < AGES_S[-1]:  # too many to reach back as far as the ages do: from now on watch half
            self._limit = max(1, self._limit // 2)
            self._below = self._limit.to_bytes(_LIMIT_BITS // 8 + 1)[1:]
            for digest in [digest for digest in self._records if digest >= self._below]:
                self._forget(self._records.pop(digest))

    @staticmethod
    def _forget(record: Record) -> None:
        if record.cohort is not None:
            record.cohort.alive -= 1
            record.cohort = None
