"""How often the semantic cache answers, and how often wrongly: the gateway's own guard, budget and neighbours.

    python -m tests.bench.semantic_quality --data DIR [--vectors FILE] [--streams mixed qqp ...] [--seeds 3]

DIR holds stream/*.jsonl.gz ({"q", "group"[, "scope"]} in the order of arrival; a hit is right
if the question that it is the answer to has the same group) and pairs/*.jsonl.gz ({"a", "b", "same"}). Answers are
judged by those labels, which stand for a judge that is always right. FILE keeps vectors from one run to the next.

For each stream: the exact cache alone; plain cosine at fixed thresholds; guard and cosine at the threshold without a
judge; the budget from a cold start, at each bound, over several seeds; and calibrated: model and bar fitted to the
requests of half of the groups, measured on the other half, and the other way round.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from gateway.config import SemanticCacheSettings
from gateway.responses.embedding.text_model import find_folder, load
from gateway.responses.semantic.budget import Budget, Evidence, Verdict, fit, logistic
from gateway.responses.semantic.questions import AnsweredQuestion, digest_of
from gateway.responses.semantic.space import Sight, Space
from gateway.responses.semantic.vectors import find_unfit
from gateway.types import EmbeddingInput

THRESHOLDS = (0.80, 0.90, 0.95)
BOUNDS = (0.01, 0.02)
FOREVER_S = 1e12


@dataclass(frozen=True)
class Row:
    text: str
    group: str
    scope: str


@dataclass
class Outcome:
    """Shares of requests."""

    hit: float
    wrong: float
    audits: float = 0.0


class Vectors:
    """Of texts, kept in a file between runs."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, np.ndarray[Any, Any]] = {}
        if file is not None and file.exists():
            kept = np.load(file, allow_pickle=False)
            self._known = dict(zip(kept["texts"].tolist(), kept["vectors"], strict=True))

    def __getitem__(self, text: str) -> np.ndarray[Any, Any]:
        return self._known[text]

    def make(self, texts: Sequence[str]) -> None:
        missing = sorted({text for text in texts if text not in self._known}, key=len)
        if not missing:
            return
        folder = find_folder(None)
        assert folder is not None, "the extra `semantic` is missing"
        model = load(folder)
        for start in range(0, len(missing), 32):
            part = missing[start : start + 32]
            inputs = [EmbeddingInput(model.tokens(text)[: model.max_tokens], model.dimensions) for text in part]
            for text, vector in zip(part, model.vectors(inputs), strict=True):
                self._known[text] = np.frombuffer(vector, dtype="<f4")
        if self._file is not None:
            np.savez(self._file, texts=np.array(list(self._known)), vectors=np.stack(list(self._known.values())))


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def read_stream(file: Path) -> list[Row]:
    return [Row(row["q"].strip(), row["group"], row.get("scope", "")) for row in read_rows(file)]


@dataclass(frozen=True)
class Event:
    """What became of one request of a stream; truth is whether the best candidate's group is its own."""

    row: Row
    kind: str  # exact, semantic, miss
    wrong: bool = False
    audited: bool = False
    evidence: Evidence | None = None
    truth: bool = False


class Player:
    """One stream through one Space, behind an exact cache."""

    def __init__(self, space: Space, vectors: Vectors, settings: SemanticCacheSettings) -> None:
        self.space = space
        self._vectors = vectors
        self._settings = settings
        self._exact: dict[tuple[str, str], str] = {}
        self._groups: dict[bytes, str] = {}

    def play(self, rows: Sequence[Row]) -> list[Event]:
        return [self._ask(row) for row in rows]

    def _ask(self, row: Row) -> Event:
        known = self._exact.get((row.scope, row.text))
        if known is not None:
            self.space.repeated(_key(row))
            return Event(row, "exact", wrong=known != row.group)
        if find_unfit(row.text, max_chars=self._settings.max_text_chars) is not None:
            self._exact[row.scope, row.text] = row.group
            return Event(row, "miss")
        scope = hashlib.sha256(row.scope.encode()).digest()
        sight = self.space.look(self.space.question(scope, row.text, self._vectors[row.text].tobytes()))
        agrees = [self._groups[one.entry.key] == row.group for one in sight.neighbours]
        if sight.hit is None:
            self._remember(row, sight, agrees)
            return Event(row, "miss", evidence=sight.evidence, truth=bool(agrees) and agrees[0])
        self.space.given(sight)
        audited = sight.verdict.audit
        if audited:
            self.space.judge_hit(sight, agrees[0])
        return Event(row, "semantic", not agrees[0], audited, sight.evidence, agrees[0])

    def _remember(self, row: Row, sight: Sight, agrees: Sequence[bool]) -> None:
        question = sight.question
        key = _key(row)
        digest, vector = digest_of(row.group), question.vector.tobytes()
        entry = AnsweredQuestion(key, question.scope, key, row.text, vector, row.group, digest, 0.0, FOREVER_S)
        self._exact[row.scope, row.text] = self._groups[key] = row.group
        self.space.remember(entry, question.features)
        self.space.judge_miss(sight, key, agrees)


def _key(row: Row) -> bytes:
    return hashlib.sha256(f"{row.scope}\n{row.text}".encode()).digest()


class FixedBudget:
    """In place of a Budget: one rule from beginning to end, and nothing learned."""

    def __init__(self, rule: Callable[[Evidence], bool]) -> None:
        self._rule = rule

    def count(self) -> None: ...

    def count_exact(self) -> None: ...

    def given(self) -> None: ...

    def decide(self, evidence: Evidence, *, counts: bool = True) -> Verdict:
        return Verdict(0.0, hit=self._rule(evidence))

    def learn(self, evidence: Evidence, same: bool, *, weight: float | None = None) -> None: ...


def player(
    vectors: Vectors, *, seed: int = 0, rule: Callable[[Evidence], bool] | None = None, **changes: Any
) -> Player:
    settings = SemanticCacheSettings(**changes)
    space = Space(settings, random=random.Random(seed).random, now=lambda: 0.0)
    if rule is not None:
        space.budget = FixedBudget(rule)  # type: ignore[assignment]
    return Player(space, vectors, settings)


def outcome(events: Sequence[Event]) -> Outcome:
    count = max(len(events), 1)
    return Outcome(
        sum(event.kind != "miss" for event in events) / count,
        sum(event.wrong for event in events) / count,
        sum(event.audited for event in events) / count,
    )


def plain_cosine(rows: Sequence[Row], vectors: Vectors, threshold: float) -> Outcome:
    """What everybody ships: the nearest question of the scope, one threshold, no guard."""
    import gateway.responses.semantic.space as module

    guard = module.find_veto
    module.find_veto = lambda one, other, **_: None
    try:
        rule = lambda evidence: evidence.similarity >= threshold  # noqa: E731
        return outcome(player(vectors, rule=rule, min_similarity=0.0).play(rows))
    finally:
        module.find_veto = guard


def calibrated(rows: Sequence[Row], vectors: Vectors, bound: float) -> Outcome:
    """Both halves by groups: fitted on the one, measured on the other."""
    seen = player(vectors, rule=lambda evidence: evidence.similarity >= 0.93, min_similarity=0.0).play(rows)
    total = Outcome(0.0, 0.0)
    for half in (0, 1):
        taught = [event for event in seen if _half(event.row) == half]
        parameters, bar = _calibrate(taught, bound)
        rule = lambda evidence, p=parameters, b=bar: float(logistic(np.array(evidence.row()) @ p)) >= b  # noqa: E731
        events = player(vectors, rule=rule, min_similarity=0.0).play(rows)
        measured = outcome([event for event in events if _half(event.row) != half])
        total = Outcome(total.hit + measured.hit / 2, total.wrong + measured.wrong / 2)
    return total


def _half(row: Row) -> int:
    return hashlib.sha256(row.group.encode()).digest()[0] % 2


def _calibrate(events: Sequence[Event], bound: float) -> tuple[Any, float]:
    """The lowest bar with which these events would have kept to 0.75 of the bound."""
    labelled = [event for event in events if event.evidence is not None]
    rows = np.array([event.evidence.row() for event in labelled if event.evidence is not None]).reshape(-1, 4)
    truth = np.array([event.truth for event in labelled], dtype=np.float64)
    parameters = fit(rows, truth, np.ones(len(truth)))
    probability = logistic(rows @ parameters)
    order = np.argsort(-probability)
    wrong = np.cumsum(1.0 - truth[order])
    over = np.flatnonzero(wrong > 0.75 * bound * len(events))
    return parameters, float(probability[order][over[0]]) + 1e-9 if len(over) else 0.0


def online(rows: Sequence[Row], vectors: Vectors, bound: float, seeds: int) -> tuple[Outcome, Budget]:
    """From a cold start; the mean over seeds, and the budget of the last one."""
    found: list[Outcome] = []
    for seed in range(seeds):
        one = player(vectors, seed=seed, bound=bound, min_similarity=0.6)
        found.append(outcome(one.play(rows)))
    mean = Outcome(*(float(np.mean([getattr(each, name) for each in found])) for name in ("hit", "wrong", "audits")))
    return mean, one.space.budget


def report_stream(name: str, rows: Sequence[Row], vectors: Vectors, seeds: int) -> None:
    exact = outcome(player(vectors, rule=lambda evidence: False).play(rows))
    cells = [f"exact {exact.hit:.3f}"]
    for threshold in THRESHOLDS:
        one = plain_cosine(rows, vectors, threshold)
        cells.append(f"cosine {threshold:.2f} {one.hit:.3f}/{one.wrong:.4f}")
    unjudged = outcome(player(vectors, judged=False).play(rows))
    cells.append(f"guard+0.915 {unjudged.hit:.3f}/{unjudged.wrong:.4f}")
    for bound in BOUNDS:
        one = calibrated(rows, vectors, bound)
        cells.append(f"calibrated {bound:.0%} {one.hit:.3f}/{one.wrong:.4f}")
    for bound in BOUNDS:
        one, _ = online(rows, vectors, bound, seeds)
        kept = "" if one.wrong <= bound else " OVER"
        cells.append(f"online {bound:.0%} {one.hit:.3f}/{one.wrong:.4f} audits {one.audits:.3f}{kept}")
    print(f"{name:12} {len(rows):5}  " + " | ".join(cells), flush=True)


def report_pairs(file: Path, vectors: Vectors, budget: Budget) -> None:
    """Shares of pairs that would be hits: true ones and false ones, without a judge, and under a learned budget."""
    name = file.name.split(".")[0]
    cells = []
    for title, changes in (
        ("guard+0.915", {"judged": False}),
        ("learned 1%", {}),
        ("learned 1% strict", {"strict": True}),
    ):
        hits: dict[int, list[bool]] = {0: [], 1: []}
        for row in read_rows(file):
            hits[row["same"]].append(_pair_hits(row, vectors, budget, changes))
        true, false = (f"{np.mean(hits[same]):.3f}" if hits[same] else "-" for same in (1, 0))
        cells.append(f"{title} true {true} false {false}")
    print(f"{name:16} " + " | ".join(cells), flush=True)


def _pair_hits(row: dict[str, Any], vectors: Vectors, budget: Budget, changes: dict[str, Any]) -> bool:
    """Whether b is answered with what a was answered, by either cache."""
    if row["a"].strip() == row["b"].strip() and row.get("a_history") == row.get("b_history"):
        return True
    one = player(vectors, min_similarity=0.6, **changes)
    if changes.get("judged", True):
        one.space.budget = _Decided(budget)  # type: ignore[assignment]
    asked = [Row(row[side].strip(), side, json.dumps(row.get(f"{side}_history"))) for side in "ab"]
    return one.play(asked)[1].kind != "miss"


class _Decided(FixedBudget):
    """What a budget has learned: its bar, which stays, also where the budget is closed just now."""

    def __init__(self, budget: Budget) -> None:
        bar = budget.figures().bar
        super().__init__(lambda evidence: budget.decide(evidence, counts=False).probability >= bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--streams", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    streams = {file.name.split(".")[0]: read_stream(file) for file in sorted((options.data / "stream").glob("*.gz"))}
    pairs = [file for file in sorted((options.data / "pairs").glob("*.gz")) if "extra" not in file.name]
    vectors = Vectors(options.vectors)
    texts = [row.text for rows in streams.values() for row in rows]
    texts += [row[side].strip() for file in pairs for row in read_rows(file) for side in "ab"]
    vectors.make(texts)
    for name, rows in streams.items():
        if not options.streams or name in options.streams:
            report_stream(name, rows, vectors, options.seeds)
    _, budget = online(streams["mixed"], vectors, BOUNDS[0], 1)
    for file in pairs:
        report_pairs(file, vectors, budget)


if __name__ == "__main__":
    main()
