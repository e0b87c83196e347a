"""Decides which cached block is given up next. Leaf-first by construction: the pool only ever offers blocks that no
other cached block hangs from, so a prefix loses its end before its beginning.

Knows block numbers and the order of use; nothing about tokens or references, and no clock: time comes in.
engine/pool/blocks.py drives it.
"""

from __future__ import annotations

import heapq


class LeastRecentlyUsed:
    """The leaf that was used longest ago goes first. Every call is O(log n) or better for each block, amortised.

    A heap of (time of last use, block) with lazy deletion: an entry counts only while its block is a candidate and
    was not touched since. A parent that becomes a leaf enters with its own time of use, not with the time at which
    its child went, so prefixes go whole, one after the other, instead of every prefix losing its tail in turn.
    """

    def __init__(self, num_blocks: int) -> None:
        self._used = [0] * num_blocks  # logical time of the last use
        self._used_s = [0.0] * num_blocks  # and the caller's
        self._now = 0.0
        self._candidate = bytearray(num_blocks)
        self._heap: list[tuple[int, int]] = []
        self._clock = 0
        self._size = 0

    def advance(self, now: float) -> None:
        """What follows happens at this second of the caller's clock; it is for `oldest_s`, the order of use decides."""
        self._now = now

    def touch(self, block: int) -> None:
        """The last reader of a block let go of it: it is now the most recently used one. Blocks that are released
        together are touched tail first, so that of two blocks of one prefix the later one is the older."""
        self._clock += 1
        self._used[block] = self._clock
        self._used_s[block] = self._now

    def add(self, block: int) -> None:
        """The block may be evicted from now on: cached, unreferenced, and a leaf."""
        assert not self._candidate[block], f"block {block} is a candidate already"
        self._candidate[block] = 1
        self._size += 1
        heapq.heappush(self._heap, (self._used[block], block))

    def discard(self, block: int) -> None:
        """The block may not be evicted any more; it was added before."""
        assert self._candidate[block], f"block {block} is not a candidate"
        self._candidate[block] = 0
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [(self._used[b], b) for b in {b for _, b in self._heap} if self._candidate[b]]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        """Takes out and returns the next victim. Raises IndexError when there is none."""
        while True:
            used, block = heapq.heappop(self._heap)
            if self._candidate[block] and self._used[block] == used:
                self._candidate[block] = 0
                self._size -= 1
                return block

    def oldest_s(self) -> float | None:
        """When the next victim was used last, as `advance` said; None when there is no victim. O(1), amortised."""
        while self._heap:
            used, block = self._heap[0]
            if self._candidate[block] and self._used[block] == used:
                return self._used_s[block]
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        """How many blocks may be evicted at this moment; their parents follow once these are gone."""
        return self._size
