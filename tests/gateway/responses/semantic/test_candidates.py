"""The nearest of many vectors, also when some were removed."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.responses.semantic.features import features
from gateway.responses.semantic.questions import AnsweredQuestion
from gateway.responses.semantic.space import FIRST_ROWS, Candidates

RNG = np.random.default_rng(7)


def vectors(count: int, dimensions: int = 16) -> np.ndarray:
    made = RNG.standard_normal((count, dimensions)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def filled(count: int) -> tuple[Candidates, dict[bytes, np.ndarray]]:
    candidates, held = Candidates(16), {key(number): vector for number, vector in enumerate(vectors(count))}
    for name, vector in held.items():
        entry = AnsweredQuestion(name, b"s", name, "", vector.tobytes(), "", b"", 0.0, 1.0)
        candidates.add(entry, features(""), vector)
    return candidates, held


def found(candidates: Candidates, vector: np.ndarray) -> list[bytes]:
    return [one.entry.key for one, _ in candidates.nearest(vector, 4)]


def slowly(held: dict[bytes, np.ndarray], vector: np.ndarray) -> list[bytes]:
    return sorted(held, key=lambda name: -float(held[name] @ vector))[:4]


def test_the_nearest_come_first_and_no_more_than_there_are() -> None:
    candidates, held = filled(3)
    vector = held[key(1)]
    assert found(candidates, vector) == slowly(held, vector)
    assert candidates.nearest(vector, 4)[0][1] == pytest.approx(1.0, abs=1e-5)


def test_what_was_removed_is_not_found_and_the_others_still_are() -> None:
    candidates, held = filled(64 * FIRST_ROWS + 3)
    for number in range(0, 64 * FIRST_ROWS, 2):
        candidates.remove(key(number))
        del held[key(number)]
    for vector in vectors(20):
        assert found(candidates, vector) == slowly(held, vector)
    for name in list(held):
        candidates.remove(name)
    assert candidates.nearest(vectors(1)[0], 4) == []
