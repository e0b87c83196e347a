"""Watches a sample of the blocks for how long each goes unused, also after it was evicted.

A lifetime begins when the last reader of a block lets go of it and ends when somebody wants it again, cached or not:
what an eviction policy learns must not depend on what it evicted. Blocks are sampled by their digests, so that one that
comes back is known again, and ever fewer of them until the records reach back far enough. Says what happened to
engine/pool/reuse_rates.py; engine/pool/hit_density.py asks. No clock: `now` comes in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from engine.pool.reuse_rates import AGES_S, NUM_AGES, ReuseRates, age_bin

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
        """Nobody reads the block any more."""
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
        """Somebody uses the block again. Nothing happens if no lifetime runs."""
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
