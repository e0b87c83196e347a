"""The nearest of many vectors, also when some were removed."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.responses.semantic.space import SLAB_ROWS, Nearest

RNG = np.random.default_rng(7)


def vectors(count: int, dimensions: int = 16) -> np.ndarray:
    made = RNG.standard_normal((count, dimensions)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def slowly(held: dict[int, np.ndarray], vector: np.ndarray, count: int) -> list[int]:
    return sorted(held, key=lambda number: -float(held[number] @ vector))[:count]


def test_the_nearest_come_first_and_no_more_than_there_are() -> None:
    nearest = Nearest(16)
    assert nearest.find(vectors(1)[0], 4) == []
    held = dict(enumerate(vectors(3)))
    for number, vector in held.items():
        nearest.add(number, vector)
    found = nearest.find(held[1], 4)
    assert [number for number, _ in found] == slowly(held, held[1], 4)
    assert found[0] == (1, pytest.approx(1.0, abs=1e-5))


def test_what_was_removed_is_not_found_and_the_others_still_are() -> None:
    nearest, held = Nearest(16), dict(enumerate(vectors(2 * SLAB_ROWS + 3)))
    for number, vector in held.items():
        nearest.add(number, vector)
    for number in range(0, 2 * SLAB_ROWS, 2):
        nearest.remove(number)
        del held[number]
    assert len(nearest) == len(held)
    for query in vectors(20):
        assert [number for number, _ in nearest.find(query, 4)] == slowly(held, query, 4)
    for number in list(held):
        nearest.remove(number)
    assert (len(nearest), nearest.find(vectors(1)[0], 4)) == (0, [])
