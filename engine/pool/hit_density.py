"""Evicts the cached leaf that promises the fewest hits: one that was used long ago, by a conversation that is young.

The longer a conversation is, the likelier it goes on, and the longer a pause it comes back from. So a block counts as
used TURN_S later than it was for each turn that its conversation had before; a head, from which different prompts go
on, for each hit. What was in the cache for one request only goes first that way, and what is never used again goes in
the end. A conversation whose blocks were evicted is known again by the ends of its prompts.

No clock, no tokens, no references: engine/pool/blocks.py drives it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from engine.pool.eviction import LeastRecentlyUsed, Origin

TURN_S: Final = 100.0
"""On real conversations 30 to 300 s find nearly the same; by 1,000 s caches of 20% find less than with LRU."""

MOST_TURNS: Final = 100
"""That count."""

HEAD_CHILDREN: Final = 2
"""Different blocks of prompts that follow upon a block, from which on it is a head."""

MAX_TIPS: Final = 1 << 14
"""Ends of prompts that are remembered with their turn."""


class HitDensity(LeastRecentlyUsed):
    """An EvictionPolicy."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._turn = [1] * num_blocks  # of the request that made or last used the block
        self._hits = [0] * num_blocks
        self._first_child: list[bytes | None] = [None] * num_blocks
        self._children = [0] * num_blocks  # the first one, and each time another was stored that differs from it
        self._tips: OrderedDict[bytes, int] = OrderedDict()  # digest -> turn

    def begin(self, origin: Origin, reused: Sequence[int], digests: Sequence[bytes]) -> None:
        if origin.turn:
            return  # it was preempted: its own blocks are no news
        origin.turn = self._find_turn(reused, digests) + 1
        origin.unstored = len(digests) - len(reused)
        if digests:
            self._tips[digests[-1]] = origin.turn
            self._tips.move_to_end(digests[-1])
            if len(self._tips) > MAX_TIPS:
                self._tips.popitem(last=False)
        for block in reused:
            self._hits[block] += 1
            self._turn[block] = origin.turn

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        self._turn[block] = 1 if origin is None else origin.turn
        self._hits[block] = self._children[block] = 0
        self._first_child[block] = None
        if parent >= 0 and (origin is None or origin.unstored > 0):  # an answer is no other prompt
            first = self._first_child[parent]
            if first is None:
                self._first_child[parent] = digest
            self._children[parent] += first != digest
        if origin is not None:
            origin.unstored -= 1

    def touch(self, block: int) -> None:
        turns = self._hits[block] if self._is_head(block) else self._turn[block] - 1
        self._use(block, self._now + TURN_S * min(turns, MOST_TURNS))

    def _find_turn(self, reused: Sequence[int], digests: Sequence[bytes]) -> int:
        """The turn whose prompt this one goes on from, also when its blocks were evicted; 0 when there is none."""
        for index in range(len(digests) - 1, len(reused) - 1, -1):
            if (turn := self._tips.get(digests[index])) is not None:
                return turn
        return 0 if not reused or self._is_head(reused[-1]) else self._turn[reused[-1]]

    def _is_head(self, block: int) -> bool:
        return self._children[block] >= HEAD_CHILDREN
