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
    """The request that makes or reuses blocks, as far as eviction wants to know it. One object for all its blocks.

    output_tokens  None until the request has ended; set before its blocks are released

    The rest belongs to the policy:
    turn           of its conversation, from 1; 0 before `begin`
    new_tokens     prompt tokens that no earlier request had
    unstored       blocks of its prompt that are still to be stored; negative once its answer is
    number         class of its blocks, for an answer of numbered_output tokens; -1 before it was looked up
    """

    prompt_tokens: int = 0
    output_tokens: int | None = None

    turn: int = 0
    new_tokens: int = 0
    unstored: int = 0
    number: int = -1
    numbered_output: int | None = None


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
        """The order of use decides; the time is for `oldest_s`."""
        self._now = now

    def begin(self, origin: Origin, reused: Sequence[int], digests: Sequence[bytes]) -> None:
        """The time of use comes with `touch`."""

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        """The time of use comes with `touch`."""

    def touch(self, block: int) -> None:
        self._clock += 1
        self._used[block] = self._clock
        self._used_s[block] = self._now

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

    def oldest_s(self) -> float | None:
        """When the next victim was used last, as `advance` said; None when there is no victim. O(1), amortised."""
        while self._heap:
            used, block = self._heap[0]
            if self._candidate[block] and self._used[block] == used:
                return self._used_s[block]
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return self._size
