"""The free blocks of a pool, as runs of consecutive ids.

Attention on a CPU reads a sequence without a copy when its blocks are consecutive, so blocks are handed out in runs,
and a new run is placed where both it and its left neighbour have room to grow. Knows ids only; engine/pool/blocks.py
asks.
"""

from __future__ import annotations

from collections.abc import Sequence

_LOOKED_AT = 16
"""Runs of one bucket that are compared before one is taken: a limit on the cost of a good fit."""

_LONG_RUN = 64
"""Ids. In a shorter run, room is left for a left neighbour only if that is in use at this moment."""

_ROOM_SHARE = 8
"""Room that is left at most: so many times the ids that are taken, or a long run. Half of all that is free would spread
a few short sequences over the whole cache, and make most of its large pages resident."""


class FreeRuns:
    """A set of block ids, kept as maximal runs. Adding one id and taking a run are O(1) per id.

    Boundary tags make coalescing cheap: the length of a run stands at its first id, its first id stands at its last.
    Runs are bucketed by the bit length of their length, so a run of the greatest magnitude is found at once.
    """

    def __init__(self, num_blocks: int, references: Sequence[int]) -> None:
        """references  the pool's own count by id: an id that is in use may want to grow into the run behind it"""
        self._references = references
        self._free = bytearray(num_blocks + 2)  # index block + 1: a taken border on both sides
        self._length = [0] * num_blocks
        self._first = [0] * num_blocks
        self._place = [0] * num_blocks  # where the run that starts here stands in its bucket
        self._buckets: list[list[int]] = [[] for _ in range(num_blocks.bit_length() + 1)]
        self._filled = 0  # bit i: bucket i holds a run
        self._size = num_blocks
        if num_blocks:
            self._free[1 : num_blocks + 1] = b"\x01" * num_blocks
            self._put(0, num_blocks)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return bool(self._free[block + 1])

    def fits(self, count: int, after: int | None = None) -> bool:
        """Whether `take` would answer with consecutive ids, and take no sequence's room to grow for that. May miss a
        run that is hardly longer than `count`."""
        if after is not None and self._free[after + 2] and self._length[after + 1] >= count:
            return True
        return bool(self._size) and self._suits(self._pick(count), count)

    def add(self, block: int) -> None:
        """Puts an id back."""
        assert not self._free[block + 1], f"block {block} is freed twice"
        start, length = block, 1
        if self._free[block]:
            start = self._first[block - 1]
            length += self._length[start]
            self._remove(start)
        if self._free[block + 2]:
            length += self._length[block + 1]
            self._remove(block + 1)
        self._free[block + 1] = 1
        self._size += 1
        self._put(start, length)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` ids, of which there must be enough.

        Right behind `after` when all of them are free there; else consecutive when a run is long enough for that;
        else out of few runs.
        """
        assert count <= self._size, f"{count} of {self._size} free blocks"
        if after is not None and self._free[after + 2] and self._length[after + 1] >= count:
            return self._cut(after + 1, 0, count)
        taken: list[int] = []
        while count:
            start = self._pick(count)
            length = self._length[start]
            part = min(count, length)
            taken += self._cut(start, self._room(start, length - part), part)
            count -= part
        return taken

    def _pick(self, count: int) -> int:
        """A run of the greatest magnitude: one that suits if there is one among the first few, else a long one."""
        bucket = self._buckets[self._filled.bit_length() - 1]
        best = bucket[-1]
        if not self._suits(best, count):
            for start in bucket[-_LOOKED_AT:]:
                if self._suits(start, count):
                    return start
                if self._length[start] > self._length[best]:
                    best = start
        return best

    def _suits(self, start: int, count: int) -> bool:
        length = self._length[start]
        return length >= count and (length >= _LONG_RUN or not start or not self._references[start - 1])

    def _room(self, start: int, spare: int) -> int:
        """How much of the spare ids is left to the sequence that ends right before a run; 0 before the first one."""
        if start and (self._references[start - 1] or spare >= _LONG_RUN):
            taken = len(self._references) - self._size
            return min(spare // 2, max(_ROOM_SHARE * taken, _LONG_RUN))
        return 0

    def _cut(self, start: int, offset: int, count: int) -> list[int]:
        length = self._length[start]
        self._remove(start)
        if offset:
            self._put(start, offset)
        first, rest = start + offset, length - offset - count
        if rest:
            self._put(first + count, rest)
        self._free[first + 1 : first + count + 1] = bytes(count)
        self._size -= count
        return list(range(first, first + count))

    def _put(self, start: int, length: int) -> None:
        self._length[start] = length
        self._first[start + length - 1] = start
        bucket = self._buckets[length.bit_length()]
        self._place[start] = len(bucket)
        bucket.append(start)
        self._filled |= 1 << length.bit_length()

    def _remove(self, start: int) -> None:
        number = self._length[start].bit_length()
        bucket = self._buckets[number]
        last = bucket.pop()
        if last != start:
            place = self._place[start]
            bucket[place] = last
            self._place[last] = place
        if not bucket:
            self._filled &= ~(1 << number)
