"""Decides which cached block is given up next. Leaf-first by construction: the pool only ever offers blocks that no
other cached block hangs from, so a prefix loses its end before its beginning.

Knows block numbers and the order of use, nothing about tokens, digests or references. engine/blocks.py drives it.
"""

from __future__ import annotations

import heapq
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order among cached leaves. Every call is O(log n) or better, amortised."""

    def touch(self, block: int) -> None:
        """The last reader of a block let go of it: it is now the most recently used one. Blocks that are released
        together are touched tail first, so that of two blocks of one prefix the later one is the older."""
        ...

    def add(self, block: int) -> None:
        """The block may be evicted from now on: cached, unreferenced, and a leaf."""
        ...

    def discard(self, block: int) -> None:
        """The block may not be evicted any more; it was added before."""
        ...

    def pop(self) -> int:
        """Takes out and returns the next victim. Raises IndexError when there is none."""
        ...

    def __len__(self) -> int:
        """How many blocks may be evicted at this moment; their parents follow once these are gone."""
        ...


class LeastRecentlyUsed:
    """The leaf that was used longest ago goes first.

    A heap of (time of last use, block) with lazy deletion: an entry counts only while its block is a candidate and
    was not touched since. A parent that becomes a leaf enters with its own time of use, not with the time at which
    its child went, so prefixes go whole, one after the other, instead of every prefix losing its tail in turn.
    """

    def __init__(self, num_blocks: int) -> None:
        self._used = [0] * num_blocks  # logical time of the last use
        self._candidate = bytearray(num_blocks)
        self._heap: list[tuple[int, int]] = []
        self._clock = 0
        self._size = 0

    def touch(self, block: int) -> None:
        self._clock += 1
        self._used[block] = self._clock

    def add(self, block: int) -> None:
        assert not self._candidate[block], f"block {block} is a candidate already"
        self._candidate[block] = 1
        self._size += 1
        heapq.heappush(self._heap, (self._used[block], block))

    def discard(self, block: int) -> None:
        assert self._candidate[block], f"block {block} is not a candidate"
        self._candidate[block] = 0
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [(self._used[b], b) for b in {b for _, b in self._heap} if self._candidate[b]]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while True:
            used, block = heapq.heappop(self._heap)
            if self._candidate[block] and self._used[block] == used:
                self._candidate[block] = 0
                self._size -= 1
                return block

    def __len__(self) -> int:
        return self._size
