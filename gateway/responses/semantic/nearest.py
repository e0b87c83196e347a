"""The nearest of many vectors: one product over all of them while they are few, an index of usearch beyond.

Knows nothing of texts. Runs on the event loop: adding and finding take about a millisecond, also while the index is
being built, which is done a few vectors at a time. What each setting of the index costs and finds is in the notebook.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

EXACT_UP_TO: Final = 16384
"""Vectors that one product is made over. Beyond, it takes longer than a look into the index."""

MOVED_AT_A_TIME: Final = 2
"""Vectors that go into the index with each one that is added, once there are more than EXACT_UP_TO."""

SLAB_ROWS: Final = 1024
"""Vectors that memory is taken for at a time: nothing is copied when there are more."""
FIRST_ROWS: Final = 4
"""The same of the first, which is doubled until it has as many: there may be as many scopes as questions."""

LOOKED_AT_WHEN_ADDED: Final = 64
LOOKED_AT_WHEN_FOUND: Final = 384
"""Vectors that the index keeps in view: with fewer, it misses more of the nearest."""


class Nearest:
    """Vectors of length 1 under numbers that the caller gives."""

    def __init__(self, dimensions: int, *, exact_up_to: int = EXACT_UP_TO) -> None:
        self.dimensions = dimensions
        self._exact_up_to = exact_up_to
        self._slabs: list[Floats] = []  # each (SLAB_ROWS, dimensions); the only one may have fewer rows
        self._names: list[int] = []  # number of each row
        self._places: dict[int, int] = {}  # number -> row
        self._index: Any = None
        self._unindexed: list[int] = []  # numbers that are still to be moved

    def __len__(self) -> int:
        return len(self._names)

    @property
    def num_bytes(self) -> int:
        """Of the vectors, without those of an index."""
        return sum(slab.nbytes for slab in self._slabs)

    def add(self, number: int, vector: Floats) -> None:
        """`number` is new."""
        assert number not in self._places
        row = len(self._names)
        if not self._slabs:
            self._slabs.append(np.zeros((FIRST_ROWS, self.dimensions), dtype=np.float32))
        elif row == len(self._slabs[0]) < SLAB_ROWS:
            self._slabs[0] = np.concatenate([self._slabs[0], np.zeros_like(self._slabs[0])])
        elif row == len(self._slabs) * SLAB_ROWS:
            self._slabs.append(np.zeros((SLAB_ROWS, self.dimensions), dtype=np.float32))
        self._row(row)[:] = vector
        self._names.append(number)
        self._places[number] = row
        if self._index is not None:
            self._index.add(number, vector, threads=1)
            self._move()
        elif len(self._names) > self._exact_up_to:
            self._index = _index(self.dimensions)
            self._unindexed = list(self._names)
            self._move()

    def remove(self, number: int) -> None:
        """`number` is there. The last row takes its place."""
        row, last = self._places.pop(number), self._names.pop()
        if last != number:
            self._row(row)[:] = self._row(len(self._names))
            self._names[row] = last
            self._places[last] = row
        if self._index is not None and number in self._index:
            self._index.remove(number)
        if len(self._names) <= (len(self._slabs) - 1) * SLAB_ROWS:
            self._slabs.pop()

    def find(self, vector: Floats, count: int) -> list[tuple[int, float]]:
        """Numbers and cosines of the nearest, nearest first; fewer where there are fewer."""
        if self._index is not None and not self._unindexed:
            numbers = self._index.search(vector, count, threads=1).keys
            rows = [self._places[int(number)] for number in numbers if int(number) in self._places]
            scores = [float(self._row(row) @ vector) for row in rows]
        else:
            every = [slab @ vector for slab in self._slabs]
            all_scores = np.concatenate(every)[: len(self._names)] if every else np.empty(0, dtype=np.float32)
            few = len(all_scores) <= count
            rows = list(range(len(all_scores))) if few else np.argpartition(-all_scores, count)[:count].tolist()
            scores = [float(all_scores[row]) for row in rows]
        found = [(self._names[row], score) for row, score in zip(rows, scores, strict=True)]
        return sorted(found, key=lambda one: -one[1])

    def _row(self, row: int) -> Floats:
        found: Floats = self._slabs[row // SLAB_ROWS][row % SLAB_ROWS]
        return found

    def _move(self) -> None:
        for _ in range(MOVED_AT_A_TIME):
            if not self._unindexed:
                return
            number = self._unindexed.pop()
            if number in self._places and number not in self._index:
                self._index.add(number, self._row(self._places[number]), threads=1)


def _index(dimensions: int) -> Any:
    from usearch.index import Index

    return Index(
        ndim=dimensions,
        metric="ip",
        dtype="f16",  # half the memory, and faster; what it finds is compared in full
        expansion_add=LOOKED_AT_WHEN_ADDED,
        expansion_search=LOOKED_AT_WHEN_FOUND,
    )
