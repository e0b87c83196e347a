"""Decides which cached block is given up next. Leaf-first by construction: the pool only ever offers blocks that no
other cached block hangs from, so a prefix loses its end before its beginning.

Knows block numbers, the order of use and what requests say of themselves; nothing about tokens or references, and no
clock: time comes in. engine/pool/blocks.py drives it. The other policy is in engine/pool/hit_density.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Origin:
    """The request that makes or reuses blocks, for the policy. One object for all its blocks.

    turn      of its conversation, from 1; 0 before `begin`
    unstored  blocks of its prompt that are still to be stored; negative once its answer is
    """

    turn: int = 0
    unstored: int = 0


class EvictionPolicy(Protocol):
    """An order among cached leaves. Every call is O(log n) or better for each block, amortised."""

    def advance(self, now: float) -> None:
        """What follows happens at this second of the caller's clock."""
        ...

    def begin(self, origin: Origin, reused: Sequence[int], digests: Sequence[bytes]) -> None:
        """A request begins. It reuses these blocks, perhaps none, of those that its prompt's digests name; the others
        it will store. Called again with the same origin when the request begins anew."""
        ...

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        """The block has new contents, under that name; `parent` is negative at the beginning of a prefix."""
        ...

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
    """The leaf that was used longest ago goes first, whatever the requests say.

    A heap of uses with lazy deletion: one counts only while its block is a candidate and was not touched since. A
    parent that becomes a leaf enters with its own time of use, not with the time at which its child went, so prefixes
    go whole, one after the other, instead of every prefix losing its tail in turn.
    """

    def __init__(self, num_blocks: int) -> None:
        self._uses = [(0.0, 0, block) for block in range(num_blocks)]  # the caller's second, which use it was, block
        self._now = 0.0
        self._num_uses = 0
        self._candidate = bytearray(num_blocks)
        self._heap: list[tuple[float, int, int]] = []
        self._size = 0

    def advance(self, now: float) -> None:
        self._now = now

    def begin(self, origin: Origin, reused: Sequence[int], digests: Sequence[bytes]) -> None:
        """The time of use comes with `touch`."""

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        """The time of use comes with `touch`."""

    def touch(self, block: int) -> None:
        self._use(block, self._now)

    def _use(self, block: int, at_s: float) -> None:
        self._num_uses += 1
        self._uses[block] = (at_s, self._num_uses, block)

    def add(self, block: int) -> None:
        assert not self._candidate[block], f"block {block} is a candidate already"
        self._candidate[block] = 1
        self._size += 1
        heapq.heappush(self._heap, self._uses[block])

    def discard(self, block: int) -> None:
        assert self._candidate[block], f"block {block} is not a candidate"
        self._candidate[block] = 0
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [self._uses[b] for b in {b for *_, b in self._heap} if self._candidate[b]]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while True:
            use = heapq.heappop(self._heap)
            block = use[2]
            if self._candidate[block] and self._uses[block] is use:
                self._candidate[block] = 0
                self._size -= 1
                return block

    def oldest_s(self) -> float | None:
        """When the next victim was used last, as `advance` said; None when there is no victim. O(1), amortised."""
        while self._heap:
            use = self._heap[0]
            if self._candidate[use[2]] and self._uses[use[2]] is use:
                return use[0]
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return self._size
