"""Evicts the cached leaf that promises the fewest hits for the time it would take up its place.

What a block promises follows from its class and from how long it has not been used. A class is what is known of the
request that made or last used the block: its turn in a conversation, how much of its prompt was new, how long its
answer was, whether the client marked the place with a breakpoint. A head, from which different prompts go on, is
classed by its hits instead. How soon blocks of a class are used again is learned while it happens, also from blocks
that were evicted. The scores of a group (a prompt_cache_key, a tenant) are scaled by how often its requests go on.

The order of eviction is that of the scores, nearly: `pop` looks at the least recently used leaf of all, that of one
class after the other, a few random ones and the lowest it has seen before, among them every new leaf when it comes.

No clock, no tokens, no references: engine/pool/blocks.py drives it. engine/pool/reuse_rates.py watches,
engine/pool/reuse_rates.py learns.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from random import Random
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
NUM_CLASSES: Final = 2 * _ORDINARY + _HEAD_HITS
"""Ordinary ones, those under a breakpoint, and heads."""

HEAD_CHILDREN: Final = 2
"""Different blocks of prompts that follow upon a block, from which on it is a head."""

MAX_TIPS: Final = 1 << 14
"""Ends of prompts that are remembered with their turn, so that a conversation is known again without its blocks."""

_NO_FLOOR: Final = (-1.0, 0.0)

MAX_GROUPS: Final = 4096
_GROUP_WEIGHT: Final = 4.0
"""Requests of its own after which a group counts as much as all requests together."""

WARM_SHARE: Final = 4
"""Before a quarter of the pool has been evicted once, too little is known and the least recently used leaf goes."""

_RANDOM_LOOKS: Final = 2
_MAX_SEEN: Final = 256
_KEPT: Final = 128


def _parents() -> list[int]:
    """The tree of classes: class -> turn under a breakpoint or not -> turn -> all; heads -> all."""
    turns = len(_TURNS) + 1
    plain, marked = NUM_CLASSES, NUM_CLASSES + turns
    heads, root = marked + turns, marked + turns + 1
    parents = [plain + number // _PER_TURN for number in range(_ORDINARY)]
    parents += [marked + number // _PER_TURN for number in range(_ORDINARY)]
    parents += [heads] * _HEAD_HITS + [root] * turns + [plain + turn for turn in range(turns)] + [root, -1]
    return parents


def _place(value: int, ends: Sequence[int]) -> int:
    return sum(value >= end for end in ends)


class HitDensity:
    """An EvictionPolicy for blocks of block_size tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, max_records: int = MAX_RECORDS, seed: int = 0) -> None:
        self._block_size = block_size
        self._rates = ReuseRates(_parents())
        self._lifetimes = Lifetimes(self._rates, max_records)
        self._random = Random(seed)  # noqa: S311 - a sample, not a secret
        self._now = 0.0
        self._until_warm = num_blocks // WARM_SHARE  # evictions

        self._origin: list[Origin] = [_NOBODY] * num_blocks  # the request that made or last used the block
        self._record: list[Record | None] = [None] * num_blocks  # of blocks in the sample
        self._hits = [0] * num_blocks
        self._first_child: list[bytes | None] = [None] * num_blocks
        self._children = [0] * num_blocks  # the first one, and each time another was stored that differs from it
        self._depth = [0] * num_blocks
        self._used = [0.0] * num_blocks  # second of the last use
        self._class = [0] * num_blocks

        self._leaves: list[int] = []
        self._place = [-1] * num_blocks  # where a candidate stands among the leaves
        self._oldest: list[list[tuple[float, int]]] = [[] for _ in range(NUM_CLASSES)]  # heaps, lazily deleted
        self._oldest_of_all: list[tuple[float, int]] = []
        self._seen: list[tuple[float, float, int]] = []  # heap of (score when looked at, used, block)
        self._looked = self._last_class = 0  # classes: the one whose turn it is, the last victim's
        self._floor = _NO_FLOOR  # score and time of use of the last victim, as long as the time stands still

        self._tips: OrderedDict[bytes, int] = OrderedDict()  # digest -> turn
        self._groups: OrderedDict[str, list[int]] = OrderedDict()  # -> requests, those that went on
        self._all_requests = [0, 0]

    # -- what requests do ---------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        self._now = now
        self._floor = _NO_FLOOR
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
        if origin.group:
            origin.weight = self._weigh(origin)
        hits, origins, records = self._hits, self._origin, self._record
        for block in reused:
            hits[block] += 1
            origins[block] = origin
            record = records[block]
            if record is not None:
                self._lifetimes.end(record, self._now)

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        self._origin[block] = origin or _NOBODY
        self._hits[block] = self._children[block] = self._depth[block] = 0
        self._first_child[block] = None
        if parent >= 0:
            self._depth[block] = self._depth[parent] + 1
            if origin is None or origin.unstored > 0:  # an answer is no other prompt
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

    def _weigh(self, origin: Origin) -> float:
        """How much more often requests of this one's group go on with what is there than all requests do."""
        group = self._groups.setdefault(origin.group, [0, 0])
        self._groups.move_to_end(origin.group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        for counts in (group, self._all_requests):
            counts[0] += 1
            counts[1] += origin.turn > 1
        usual = (self._all_requests[1] + 1) / (self._all_requests[0] + 1)
        return (group[1] + _GROUP_WEIGHT * usual) / (group[0] + _GROUP_WEIGHT) / usual

    def _classify(self, block: int) -> int:
        if self._children[block] >= HEAD_CHILDREN:
            return 2 * _ORDINARY + min(max(self._hits[block].bit_length() - 1, 0), _HEAD_HITS - 1)
        origin = self._origin[block]
        if origin.number < 0 or origin.numbered_output != origin.output_tokens:
            output = origin.output_tokens
            origin.numbered_output = output
            origin.number = (
                _PER_TURN * _place(origin.turn - 1, _TURNS)
                + (len(_OUTPUT_TOKENS) + 1) * _place(origin.new_tokens, _NEW_TOKENS)
                + (_UNKNOWN_OUTPUT if output is None else _place(output, _OUTPUT_TOKENS))
            )
        return origin.number + (_ORDINARY if self._depth[block] < origin.marked_blocks else 0)

    # -- candidates ---------------------------------------------------------------------------------------------------

    def add(self, block: int) -> None:
        assert self._place[block] < 0, f"block {block} is a candidate already"
        self._place[block] = len(self._leaves)
        self._leaves.append(block)
        entry = (self._used[block], block)
        heapq.heappush(self._oldest[self._class[block]], entry)
        heapq.heappush(self._oldest_of_all, entry)
        self._look(block)

    def discard(self, block: int) -> None:
        place = self._place[block]
        assert place >= 0, f"block {block} is not a candidate"
        self._place[block] = -1
        last = self._leaves.pop()
        if last != block:
            self._leaves[place] = last
            self._place[last] = place
        if len(self._oldest_of_all) > 2 * len(self._leaves) + _MAX_SEEN:
            self._tidy()

    def pop(self) -> int:
        if not self._leaves:
            raise IndexError("there is no candidate")
        if not self._seen or self._seen[0][:2] > self._floor or self._place[self._seen[0][2]] < 0:
            self._look_around()  # else it is what the last victim hung from, and as low
        block = self._take_lowest()
        self._floor = (self.score(block), self._used[block])
        self.discard(block)
        self._last_class = self._class[block]
        self._until_warm -= 1
        return block

    def __len__(self) -> int:
        return len(self._leaves)

    def score(self, block: int) -> float:
        """Hits per second that keeping a cached block promises; 0 for all of them while too little is known."""
        if self._until_warm > 0:
            return 0.0
        return self._rates.score(self._class[block], self._now - self._used[block]) * self._origin[block].weight

    def _look(self, block: int) -> None:
        heapq.heappush(self._seen, (self.score(block), self._used[block], block))
        if len(self._seen) > _MAX_SEEN:
            candidates = {entry[2]: entry for entry in self._seen if self._place[entry[2]] >= 0}
            self._seen = heapq.nsmallest(_KEPT, candidates.values())  # sorted, so a heap

    def _look_around(self) -> None:
        self._look_at_oldest(self._oldest_of_all, None)
        for number in (self._looked, self._last_class):
            self._look_at_oldest(self._oldest[number], number)
        self._looked = (self._looked + 1) % NUM_CLASSES
        for _ in range(_RANDOM_LOOKS):
            self._look(self._leaves[int(self._random.random() * len(self._leaves))])

    def _look_at_oldest(self, heap: list[tuple[float, int]], number: int | None) -> None:
        while heap:
            used, block = heap[0]
            if self._place[block] >= 0 and self._used[block] == used and number in (None, self._class[block]):
                self._look(block)
                return
            heapq.heappop(heap)

    def _take_lowest(self) -> int:
        """The lowest of what was looked at, by what it scores now; there is a candidate among it."""
        seen = self._seen
        while True:
            block = heapq.heappop(seen)[2]
            if self._place[block] < 0:
                continue
            entry = (self.score(block), self._used[block], block)
            if not seen or entry <= seen[0]:
                return block
            heapq.heappush(seen, entry)

    def _tidy(self) -> None:
        self._oldest = [[] for _ in range(NUM_CLASSES)]
        self._oldest_of_all = [(self._used[block], block) for block in self._leaves]
        for block in self._leaves:
            self._oldest[self._class[block]].append((self._used[block], block))
        for heap in (self._oldest_of_all, *self._oldest):
            heapq.heapify(heap)


_NOBODY: Final = Origin(turn=1)
