"""The questions of one owner to one model, and which of them mean the same as a new one.

Pure: chance and clock are injected, vectors come from outside. cache.py embeds, looks up here, and carries what is
found to clients and to Redis; the benchmark drives this alone.

    look       the nearest of one scope; the guard; the evidence for the best; what the budget makes of it
    remember   a question that got an answer of its own
    judge      reports to the budget whether two answers were the same; a question whose answer misled is removed
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

FIRST_ROWS: Final = 4
"""Of a matrix, which doubles when it is full: there may be as many scopes as questions."""

NEIGHBOURS: Final = 4
LABELLED_FROM: Final = 0.6
"""Similarity from which on a neighbour is evidence at all."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    entry: AnsweredQuestion
    similarity: float


@dataclass(frozen=True, slots=True)
class Question:
    """A new question, in the form in which it is compared.

    vector  (dimensions,)  float32 of length 1
    """

    scope: bytes
    text: str
    features: Features
    vector: Floats


@dataclass(frozen=True, slots=True)
class Sight:
    """The result of a look-up.

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
class Held:
    """row  of its vector in the matrix"""

    entry: AnsweredQuestion
    features: Features
    row: int


class Candidates:
    """The questions of one scope. Their vectors are one matrix, for one product over all of them: a few milliseconds
    for the `max_scope_entries` that there may be."""

    def __init__(self, dimensions: int) -> None:
        self.held: dict[bytes, Held] = {}  # by key, oldest first
        self._rows: list[Held] = []
        self._vectors: Floats = np.zeros((FIRST_ROWS, dimensions), dtype=np.float32)

    @property
    def dimensions(self) -> int:
        return int(self._vectors.shape[1])

    def add(self, entry: AnsweredQuestion, read: Features, vector: Floats) -> Held:
        """Its key is new."""
        row = len(self._rows)
        if row == len(self._vectors):
            self._vectors = np.concatenate([self._vectors, np.zeros_like(self._vectors)])
        self._vectors[row] = vector
        held = self.held[entry.key] = Held(entry, read, row)
        self._rows.append(held)
        return held

    def remove(self, key: bytes) -> None:
        """It is there. The last row takes its place."""
        held, last = self.held.pop(key), self._rows.pop()
        if last is not held:
            self._vectors[held.row] = self._vectors[last.row]
            self._rows[held.row] = last
            last.row = held.row
        if 4 * len(self._rows) <= len(self._vectors) > FIRST_ROWS:
            self._vectors = self._vectors[: len(self._vectors) // 2].copy()

    def nearest(self, vector: Floats, count: int) -> list[tuple[Held, float]]:
        """Those with the largest cosines, nearest first; fewer where there are fewer."""
        scores = self._vectors[: len(self._rows)] @ vector
        few = len(scores) <= count
        rows = range(len(scores)) if few else np.argpartition(-scores, count)[:count].tolist()
        return sorted(((self._rows[row], float(scores[row])) for row in rows), key=lambda one: -one[1])


class Space:
    """See the module."""

    def __init__(
        self, settings: SemanticCacheSettings, *, random: Callable[[], float], now: Callable[[], float]
    ) -> None:
        """`now` is the clock of entries, in seconds since 1970."""
        self._settings = settings
        self._now = now
        self.budget = Budget(settings.bound, audit_share=settings.audit_share, random=random)
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # by key, used last at the end
        self._scopes: dict[bytes, Candidates] = {}
        self.bytes = 0
        self.evicted = self.quarantined = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[AnsweredQuestion]:
        """All questions, those used last at the end; expired ones may be among them."""
        return iter([held.entry for held in self._held.values()])

    def question(self, scope: bytes, text: str, vector: bytes) -> Question:
        return Question(scope, text, features(text), np.frombuffer(vector, dtype="<f4"))

    def look(self, question: Question, *, least: float = 0.0, counts: bool = True) -> Sight:
        """Looks for an answer. A hit needs `least` similarity; no value makes hits of what would be none. `counts`
        False leaves the budget as it is, and audits nothing."""
        if counts:
            self.budget.count()
        near, vetoes = self._near(question)
        if not near:
            return Sight(question, vetoes=tuple(vetoes))
        evidence = self._evidence(question, near)
        verdict = self._decide(evidence, least, counts=counts)
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

    def remember(self, entry: AnsweredQuestion, read: Features | None = None) -> bool:
        """In place of the one with its key. False for one that is expired, or of another encoder.

        read  the features of its text, where they are known
        """
        self.remove(entry.key)
        candidates = self._scopes.get(entry.scope)
        vector = np.frombuffer(entry.vector, dtype="<f4")
        if candidates is not None and candidates.dimensions != len(vector):
            return False
        if entry.expires_s <= self._now():
            return False
        if candidates is not None and len(candidates.held) >= self._settings.max_scope_entries:
            self._evict(next(iter(candidates.held)))
        candidates = self._scopes.setdefault(entry.scope, Candidates(len(vector)))
        self._held[entry.key] = candidates.add(entry, read or features(entry.text), vector)
        self.bytes += entry.num_bytes
        return True

    def evict_oldest(self) -> int:
        """Removes the least recently used of at least one, and returns its bytes."""
        return self._evict(next(iter(self._held)))

    def find(self, key: bytes) -> AnsweredQuestion | None:
        held = self._held.get(key)
        return None if held is None else held.entry

    def remove(self, key: bytes) -> bool:
        """Whether it was there."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        self.bytes -= held.entry.num_bytes
        candidates = self._scopes[held.entry.scope]
        candidates.remove(key)
        if not candidates.held:
            del self._scopes[held.entry.scope]
        return True

    def judge_miss(self, sight: Sight, key: bytes, agrees: Sequence[bool]) -> None:
        """The request got an answer of its own, stored under `key`; `agrees`: which neighbours' answers are the
        same."""
        if sight.evidence is None:
            return
        self.budget.learn(sight.evidence, agrees[0])
        group = next((one.entry.group for one, same in zip(sight.neighbours, agrees, strict=True) if same), None)
        held = self._held.get(key)
        if group is not None and held is not None:
            held.entry = replace(held.entry, group=group)

    def judge_hit(self, sight: Sight, same: bool) -> None:
        """The answer of a hit was compared with a fresh one."""
        assert sight.evidence is not None
        self.budget.learn(sight.evidence, same, weight=sight.verdict.weight)
        if not same and self.remove(sight.neighbours[0].entry.key):
            self.quarantined += 1

    def _near(self, question: Question) -> tuple[list[Neighbour], list[str]]:
        found: list[Neighbour] = []
        vetoes: list[str] = []
        candidates = self._scopes.get(question.scope)
        for held, similarity in [] if candidates is None else candidates.nearest(question.vector, NEIGHBOURS):
            if held.entry.expires_s <= self._now():
                self.remove(held.entry.key)
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
        new, answered = set(question.features.content), set(self._held[best.entry.key].features.content)
        overlap = len(new & answered) / max(len(new | answered), 1)
        return Evidence(best.similarity, overlap, best.similarity - max(other, default=NO_NEIGHBOUR))

    def _decide(self, evidence: Evidence, least: float, *, counts: bool) -> Verdict:
        settings = self._settings
        floor = max(settings.min_similarity, least)
        if not settings.judged:
            return Verdict(0.0, hit=evidence.similarity >= max(floor, settings.unjudged_similarity))
        verdict = self.budget.decide(evidence, counts=counts)
        return verdict if evidence.similarity >= floor else replace(verdict, hit=False, audit=False)

    def _evict(self, key: bytes) -> int:
        num_bytes = self._held[key].entry.num_bytes
        self.remove(key)
        self.evicted += 1
        return num_bytes
