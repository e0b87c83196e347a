"""Evicts the cached leaf that promises the fewest hits for the time it would take up its place.

What a block promises follows from its class and from how long it has not been used. A class is what is known of the
request that made or last used the block: its turn in a conversation, how much of its prompt was new, how long its
answer was. A head, from which different prompts go on, is classed by its hits instead. How soon blocks of a class are
used again is learned while it happens, also from blocks that were evicted.

The order of eviction is that of the scores, nearly: each second the least recently used leaf of each class is scored,
and every new leaf when it comes; the lowest goes, and the next of its class is scored.

No clock, no tokens, no references: engine/pool/blocks.py drives it; engine/pool/reuse_rates.py watches and learns.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from engine.pool.eviction import Origin
from engine.pool.reuse_rates import MAX_RECORDS, Lifetimes, Record, ReuseRates

_TURNS: Final = (1, 2, 4, 8)  # the last turn of each class but the open one
_NEW_TOKENS: Final = (1_000, 4_000, 12_000)  # a class ends below these
_OUTPUT_TOKENS: Final = (30, 300)
_UNKNOWN_OUTPUT: Final = 1  # the middle class: a request that has been aborted, or whose blocks came from elsewhere
_HEAD_HITS: Final = 8  # classes of heads: 0 or 1 hits, 2 or 3, 4 to 7, ...

_PER_TURN: Final = (len(_NEW_TOKENS) + 1) * (len(_OUTPUT_TOKENS) + 1)
_ORDINARY: Final = (len(_TURNS) + 1) * _PER_TURN
NUM_CLASSES: Final = _ORDINARY + _HEAD_HITS
"""Ordinary ones, and heads."""

HEAD_CHILDREN: Final = 2
"""Different blocks of prompts that follow upon a block, from which on it is a head."""

MAX_TIPS: Final = 1 << 14
"""Ends of prompts that are remembered with their turn, so that a conversation is known again without its blocks."""


WARM_SHARE: Final = 4
"""Before a quarter of the pool has been evicted once, too little is known and the least recently used leaf goes."""


def _parents() -> list[int]:
    """The tree of classes: class -> turn -> all; heads -> all."""
    turns = len(_TURNS) + 1
    heads, root = NUM_CLASSES + turns, NUM_CLASSES + turns + 1
    parents = [NUM_CLASSES + number // _PER_TURN for number in range(_ORDINARY)]
    return parents + [heads] * _HEAD_HITS + [root] * turns + [root, -1]


def _place(value: int, ends: Sequence[int]) -> int:
    return sum(value >= end for end in ends)


class HitDensity:
    """An EvictionPolicy for blocks of block_size tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, max_records: int = MAX_RECORDS) -> None:
        self._block_size = block_size
        self._rates = ReuseRates(_parents())
        self._lifetimes = Lifetimes(self._rates, max_records)
        self._now = 0.0
        self._until_warm = num_blocks // WARM_SHARE  # evictions

        self._origin: list[Origin] = [_NOBODY] * num_blocks  # the request that made or last used the block
        self._record: list[Record | None] = [None] * num_blocks  # of blocks in the sample
        self._hits = [0] * num_blocks
        self._first_child: list[bytes | None] = [None] * num_blocks
        self._children = [0] * num_blocks  # the first one, and each time another was stored that differs from it
        self._used = [0.0] * num_blocks  # second of the last use
        self._class = [0] * num_blocks

        self._candidate = bytearray(num_blocks)
        self._size = self._stale = 0  # candidates, and entries of `_oldest` that are none any more, at most
        self._oldest: list[list[tuple[float, int]]] = [[] for _ in range(NUM_CLASSES)]  # heaps, lazily deleted
        self._queue: list[tuple[float, float, int, int]] = []  # heap of (score now, used, block, class), likewise
        self._scored = False  # the queue is that of this second

        self._tips: OrderedDict[bytes, int] = OrderedDict()  # digest -> turn

    # -- what requests do ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        self._now = now
        self._scored = False
        self._lifetimes.advance(now)
        self._rates.settle()

    def begin(self, origin: Origin, reused: Sequence[int], digests: Sequence[bytes]) -> None:
        if origin.turn:
            return  # it was preempted: its own blocks are no news
        known, turn = self._find_known(reused, digests)
        origin.turn = turn + 1
        origin.new_tokens = origin.prompt_tokens - known * self._block_size
        origin.unstored = len(digests) - len(reused)
        if known < len(digests):
            self._tips[digests[-1]] = origin.turn
            self._tips.move_to_end(digests[-1])
            if len(self._tips) > MAX_TIPS:
                self._tips.popitem(last=False)
        hits, origins, records = self._hits, self._origin, self._record
        for block in reused:
            hits[block] += 1
            origins[block] = origin
            record = records[block]
            if record is not None:
                self._lifetimes.end(record, self._now)

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        self._origin[block] = origin or _NOBODY
        self._hits[block] = self._children[block] = 0
        self._first_child[block] = None
        if parent >= 0 and (origin is None or origin.unstored > 0):  # an answer is no other prompt
            first = self._first_child[parent]
            if first is None:
                self._first_child[parent] = digest
            self._children[parent] += first != digest
        if origin is not None:
            origin.unstored -= 1
        record = self._record[block] = self._lifetimes.watch(digest)
        if record is not None and record.since_s >= 0:
            self._hits[block] = record.hits + (record.cohort is not None)
            self._children[block], self._first_child[block] = record.children, record.first_child
            self._lifetimes.end(record, self._now)

    def touch(self, block: int) -> None:
        self._used[block] = self._now
        number = self._class[block] = self._classify(block)
        record = self._record[block]
        if record is not None:
            record.hits = self._hits[block]
            record.turn = self._origin[block].turn
            record.children, record.first_child = self._children[block], self._first_child[block]
            self._lifetimes.begin(record, number, self._now)

    def _find_known(self, reused: Sequence[int], digests: Sequence[bytes]) -> tuple[int, int]:
        """How many leading blocks of a prompt were there before, cached or not, and the turn that they were then; 0
        if they are nothing but a head."""
        nameless = bool(reused) and self._origin[reused[-1]] is _NOBODY  # it came back from a lower tier
        for index in range(len(digests) - 1, len(reused) - 1 - nameless, -1):
            turn = self._tips.get(digests[index])
            if turn is not None:
                return index + 1, turn
            record = self._lifetimes.find(digests[index])
            if record is not None:
                return index + 1, 0 if record.children >= HEAD_CHILDREN else record.turn
        if not reused or self._children[reused[-1]] >= HEAD_CHILDREN:
            return len(reused), 0
        return len(reused), self._origin[reused[-1]].turn

    def _classify(self, block: int) -> int:
        if self._children[block] >= HEAD_CHILDREN:
            return _ORDINARY + min(max(self._hits[block].bit_length() - 1, 0), _HEAD_HITS - 1)
        origin = self._origin[block]
        if origin.number < 0 or origin.numbered_output != origin.output_tokens:
            output = origin.output_tokens
            origin.numbered_output = output
            origin.number = (
                _PER_TURN * _place(origin.turn - 1, _TURNS)
                + (len(_OUTPUT_TOKENS) + 1) * _place(origin.new_tokens, _NEW_TOKENS)
                + (_UNKNOWN_OUTPUT if output is None else _place(output, _OUTPUT_TOKENS))
            )
        return origin.number

    # -- candidates ---------------------------------------------------------------------------------------------------

    def add(self, block: int) -> None:
        assert not self._candidate[block], f"block {block} is a candidate already"
        self._candidate[block] = 1
        self._size += 1
        heapq.heappush(self._oldest[self._class[block]], (self._used[block], block))
        if self._scored:
            self._enqueue(block)

    def discard(self, block: int) -> None:
        assert self._candidate[block], f"block {block} is not a candidate"
        self._candidate[block] = 0
        self._size -= 1
        self._stale += 1
        if self._stale > self._size + 64:
            self._tidy()

    def pop(self) -> int:
        if not self._size:
            raise IndexError("there is no candidate")
        if not self._scored:
            self._scored, self._queue = True, []
            for number in range(NUM_CLASSES):
                self._enqueue_oldest(number)
        while True:
            _, used, block, number = heapq.heappop(self._queue)
            is_candidate = self._candidate[block] and self._used[block] == used
            if is_candidate:
                self.discard(block)
            self._enqueue_oldest(number)
            if is_candidate:
                self._until_warm -= 1
                return block

    def __len__(self) -> int:
        return self._size

    def score(self, block: int) -> float:
        """Hits per second that keeping a cached block promises; 0 for all of them while too little is known."""
        if self._until_warm > 0:
            return 0.0
        return self._rates.score(self._class[block], self._now - self._used[block])

    def _enqueue(self, block: int) -> None:
        heapq.heappush(self._queue, (self.score(block), self._used[block], block, self._class[block]))

    def _enqueue_oldest(self, number: int) -> None:
        """The least recently used candidate of a class."""
        heap = self._oldest[number]
        while heap:
            used, block = heap[0]
            if self._candidate[block] and self._used[block] == used and self._class[block] == number:
                self._enqueue(block)
                return
            heapq.heappop(heap)

    def _tidy(self) -> None:
        self._stale = 0
        for number, heap in enumerate(self._oldest):
            live = {(used, b) for used, b in heap if self._candidate[b] and self._used[b] == used}
            self._oldest[number] = sorted(entry for entry in live if self._class[entry[1]] == number)


_NOBODY: Final = Origin(turn=1)
"""The origin of blocks that came from elsewhere."""
