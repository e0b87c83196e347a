"""The questions of one owner to one model, and which of them mean what a new one means.

Pure: chance and clock are injected, vectors come from outside. cache.py embeds, asks this, and carries what is
found to clients and to Redis; the benchmark drives this alone.

    look       the nearest of one scope; the guard; the evidence for the best; what the budget makes of it
    remember   a question that got an answer of its own
    judge      whether two answers were the same, told to the budget; a question whose answer misled is taken out
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway.config import SemanticCacheSettings
from gateway.responses.semantic.budget import NO_NEIGHBOUR, Budget, Evidence, Verdict
from gateway.responses.semantic.features import Features, features
from gateway.responses.semantic.guard import find_veto
from gateway.responses.semantic.questions import AnsweredQuestion

Floats = npt.NDArray[np.float32]

SLAB_ROWS: Final = 1024
"""Vectors that memory is taken for at a time: nothing is copied when there are more."""
FIRST_ROWS: Final = 4
"""The same of the first, which is doubled until it has as many: there may be as many scopes as questions."""

NEIGHBOURS: Final = 4
LABELLED_FROM: Final = 0.6
"""Similarity from which on a neighbour is evidence at all."""


class Nearest:
    """Vectors of length 1 under numbers that the caller gives, and which of them are nearest: one product over all of
    them, a few milliseconds for the `max_scope_entries` that there may be."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self._slabs: list[Floats] = []  # each (SLAB_ROWS, dimensions); the only one may have fewer rows
        self._numbers: list[int] = []  # of each row
        self._rows: dict[int, int] = {}  # number -> row

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, vector: Floats) -> None:
        """`number` is new."""
        assert number not in self._rows
        row = len(self._numbers)
        if not self._slabs:
            self._slabs.append(np.zeros((FIRST_ROWS, self.dimensions), dtype=np.float32))
        elif row == len(self._slabs[0]) < SLAB_ROWS:
            self._slabs[0] = np.concatenate([self._slabs[0], np.zeros_like(self._slabs[0])])
        elif row == len(self._slabs) * SLAB_ROWS:
            self._slabs.append(np.zeros((SLAB_ROWS, self.dimensions), dtype=np.float32))
        self._row(row)[:] = vector
        self._numbers.append(number)
        self._rows[number] = row

    def remove(self, number: int) -> None:
        """`number` is there. The last row takes its place."""
        row, last = self._rows.pop(number), self._numbers.pop()
        if last != number:
            self._row(row)[:] = self._row(len(self._numbers))
            self._numbers[row] = last
            self._rows[last] = row
        if len(self._numbers) <= (len(self._slabs) - 1) * SLAB_ROWS:
            self._slabs.pop()

    def find(self, vector: Floats, count: int) -> list[tuple[int, float]]:
        """Numbers and cosines of the nearest, nearest first; fewer where there are fewer."""
        if not self._slabs:
            return []
        scores = np.concatenate([slab @ vector for slab in self._slabs])[: len(self._numbers)]
        few = len(scores) <= count
        rows = range(len(scores)) if few else np.argpartition(-scores, count)[:count].tolist()
        return sorted(((self._numbers[row], float(scores[row])) for row in rows), key=lambda one: -one[1])

    def _row(self, row: int) -> Floats:
        found: Floats = self._slabs[row // SLAB_ROWS][row % SLAB_ROWS]
        return found


@dataclass(frozen=True, slots=True)
class Neighbour:
    entry: AnsweredQuestion
    similarity: float


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, in the form in which it is compared.

    vector  (dimensions,)  float32 of length 1
    """

    scope: bytes
    text: str
    features: Features
    vector: Floats


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look found.

    neighbours  that the guard has nothing against, nearest first
    vetoes      of the others, by name of the rule
    """

    question: Question
    neighbours: tuple[Neighbour, ...] = ()
    vetoes: tuple[str, ...] = ()
    evidence: Evidence | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict(0.0, hit=False))

    @property
    def hit(self) -> Neighbour | None:
        return self.neighbours[0] if self.verdict.hit else None


@dataclass(slots=True)
class _Held:
    number: int
    entry: AnsweredQuestion
    features: Features


@dataclass(slots=True)
class _Scope:
    """held  by key, used last at the end"""

    nearest: Nearest
    held: OrderedDict[bytes, _Held] = field(default_factory=OrderedDict)


class Space:
    """See the module."""

    def __init__(
        self,
        settings: SemanticCacheSettings,
        *,
        random: Callable[[], float],
        now: Callable[[], float],
        grew: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`now` is the clock of entries, in seconds since 1970. `grew` is told by how many bytes, fewer ones too, and
        may evict."""
        self.grew = grew
        self._settings = settings
        self._now = now
        self.budget = Budget(settings.bound, audit_share=settings.audit_share, random=random)
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # by key, used last at the end
        self._numbers: dict[int, _Held] = {}
        self._scopes: dict[bytes, _Scope] = {}
        self._next = 0
        self.bytes = 0
        self.evicted = self.quarantined = 0

    def __len__(self) -> int:
        return len(self._held)

    def question(self, scope: bytes, text: str, vector: bytes) -> Question:
        return Question(scope, text, features(text), np.frombuffer(vector, dtype="<f4"))

    def look(self, question: Question, *, least: float = 0.0, counts: bool = True) -> Sight:
        """What there is for a request. A hit needs `least` similarity; no value makes hits of what would be none.
        `counts` False leaves the budget as it is, and audits nothing."""
        if counts:
            self.budget.count()
        near, vetoes = self._near(question)
        if not near:
            return Sight(question, vetoes=tuple(vetoes))
        best = near[0]
        evidence = self._evidence(question, near)
        verdict = self._decide(evidence, best, least, counts=counts)
        return Sight(question, tuple(near), tuple(vetoes), evidence, verdict)

    def repeated(self, key: bytes) -> None:
        """The exact cache answered a request, whose question this knows if it was looked up before."""
        if key in self._held:
            self.budget.count_exact()

    def given(self, sight: Sight) -> None:
        """Its hit went to the client."""
        self.budget.given()
        entry = sight.neighbours[0].entry
        if entry.key in self._held:
            self._held.move_to_end(entry.key)
            self._scopes[entry.scope].held.move_to_end(entry.key)

    def remember(self, entry: AnsweredQuestion, read: Features | None = None) -> bool:
        """In place of what has its key. False for what is over its time, too large, or of another encoder.

        read  the features of its text, where they are known
        """
        self.remove(entry.key)
        settings = self._settings
        scope = self._scopes.get(entry.scope)
        vector = np.frombuffer(entry.vector, dtype="<f4")
        if scope is not None and scope.nearest.dimensions != len(vector):
            return False
        if entry.expires_s <= self._now() or entry.num_bytes > settings.max_bytes or not settings.max_entries:
            return False
        if scope is not None and len(scope.held) >= settings.max_scope_entries:
            self._evict(next(iter(scope.held.values())))
        while len(self._held) >= settings.max_entries or self.bytes + entry.num_bytes > settings.max_bytes:
            self.evict_oldest()
        held = _Held(self._next, entry, read or features(entry.text))
        self._next += 1
        scope = self._scopes.get(entry.scope) or self._scopes.setdefault(entry.scope, _Scope(Nearest(len(vector))))
        scope.nearest.add(held.number, vector)
        self._held[entry.key] = self._numbers[held.number] = scope.held[entry.key] = held
        self.bytes += entry.num_bytes
        self.grew(entry.num_bytes)
        return True

    def evict_oldest(self) -> None:
        """What was used longest ago goes. There is something."""
        self._evict(next(iter(self._held.values())))

    def find(self, key: bytes) -> AnsweredQuestion | None:
        held = self._held.get(key)
        return None if held is None else held.entry

    def __iter__(self) -> Iterator[AnsweredQuestion]:
        """What is held, those used last at the end; what is over its time may be among it."""
        return iter([held.entry for held in self._held.values()])

    def remove(self, key: bytes) -> bool:
        """Whether it was there."""
        held = self._held.get(key)
        if held is None:
            return False
        self._drop(held)
        return True

    def judge_miss(self, sight: Sight, key: bytes, agrees: Sequence[bool]) -> None:
        """The request got an answer of its own, kept under `key`; `agrees` says of each neighbour's whether it is the
        same."""
        if sight.evidence is None:
            return
        self.budget.learn(sight.evidence, agrees[0])
        group = next((one.entry.group for one, same in zip(sight.neighbours, agrees, strict=True) if same), None)
        held = self._held.get(key)
        if group is not None and held is not None:
            held.entry = replace(held.entry, group=group)

    def judge_hit(self, sight: Sight, same: bool) -> None:
        """The answer that a hit gave was compared with a fresh one."""
        assert sight.evidence is not None
        self.budget.learn(sight.evidence, same, weight=sight.verdict.weight)
        if not same and self.remove(sight.neighbours[0].entry.key):
            self.quarantined += 1

    def _near(self, question: Question) -> tuple[list[Neighbour], list[str]]:
        scope = self._scopes.get(question.scope)
        found: list[Neighbour] = []
        vetoes: list[str] = []
        if scope is None:
            return found, vetoes
        for number, similarity in scope.nearest.find(question.vector, NEIGHBOURS):
            held = self._numbers[number]
            if held.entry.expires_s <= self._now():
                self._drop(held)
            elif similarity >= LABELLED_FROM:
                veto = find_veto(question.features, held.features, strict=self._settings.strict)
                if veto is None:
                    found.append(Neighbour(held.entry, similarity))
                else:
                    vetoes.append(veto)
        return found, vetoes

    def _evidence(self, question: Question, near: list[Neighbour]) -> Evidence:
        best = near[0]
        other = [one.similarity for one in near[1:] if one.entry.group != best.entry.group]
        asked, answered = set(question.features.content), set(self._held[best.entry.key].features.content)
        overlap = len(asked & answered) / max(len(asked | answered), 1)
        return Evidence(best.similarity, overlap, best.similarity - max(other, default=NO_NEIGHBOUR))

    def _decide(self, evidence: Evidence, best: Neighbour, least: float, *, counts: bool) -> Verdict:
        settings = self._settings
        floor = max(settings.min_similarity, least)
        if not settings.judged:
            hit = best.similarity >= max(floor, settings.unjudged_similarity)
            return Verdict(0.0, hit=hit)
        verdict = self.budget.decide(evidence) if counts else self.budget.decide_uncounted(evidence)
        return verdict if best.similarity >= floor else replace(verdict, hit=False, audit=False)

    def _evict(self, held: _Held) -> None:
        self._drop(held)
        self.evicted += 1

    def _drop(self, held: _Held) -> None:
        del self._held[held.entry.key]
        del self._numbers[held.number]
        self.bytes -= held.entry.num_bytes
        self.grew(-held.entry.num_bytes)
        scope = self._scopes[held.entry.scope]
        scope.nearest.remove(held.number)
        del scope.held[held.entry.key]
        if not scope.held:
            del self._scopes[held.entry.scope]
