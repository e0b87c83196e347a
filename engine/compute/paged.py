"""Plans the compiled attention: which rows read which keys together, once for a step; and makes the calls.

An item is some rows and a run of keys. Rows of sequences that begin with the same blocks read those blocks together
(cascade: arXiv 2402.05099), and where there are more threads than sequences, the keys of a sequence are cut among them.
Results of such items are kept by tile and merged by the item of the sequence, in the order of the tiles, so the plan
changes no bit. Knows spans and blocks; engine/compute/attention.py asks it where there is a library, and
engine/compute/reference.py elsewhere.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.compute.batch import Ints, Span
from engine.compute.kernel import Call, Item, find_parallel, kind_of, load_library, supported
from engine.compute.kv_cache import KVCache

TILE: Final = 128  # of the source: keys that are packed together, and in whose multiples a common prefix is counted
MAX_ROWS: Final = 256  # of the source: rows of an item times the query heads that share a KV head
FEW_ROWS: Final = 64  # so many have to pay for packing keys: they share it with others, or their keys are cut
UNITS: Final = 4  # of work for each thread
RESULTS_BYTES: Final = 64 << 20  # of tiles that are kept between the items of a call
THREAD_LEAST: Final = 1 << 22  # multiplications below which waking other threads takes longer than the work


def can_attend(cache: KVCache) -> bool:
    """Whether the compiled attention serves this cache. The first call of a machine may take seconds: it compiles."""
    return cache.data.device.type == "cpu" and bool(supported(cache.shape.dtype, cache.shape.head_dim))


@dataclass(slots=True)
class _Items:
    """Items in the order in which they are made."""

    heads: int  # KV heads
    items: list[tuple[int, ...]] = field(default_factory=list)  # as the fields of Item
    rows: list[range] = field(default_factory=list)
    num_rows: int = 0

    def add(self, rows: list[range], share: int, keys: tuple[int, int], table: int, kept: int = 0) -> None:
        """Few rows take their KV heads together, and read whole blocks; many have an item for each head.

        share  query heads of a KV head
        """
        count = sum(map(len, rows))
        together = max(1, min(self.heads, FEW_ROWS // (count * share)))
        for head in range(0, self.heads, together):
            heads = min(together, self.heads - head)
            self.items.append((table, self.num_rows, count, *keys, kept, head, heads))
        self.rows += rows
        self.num_rows += count


class PagedAttention:
    """Attention of one step for every layer. See engine.compute.attention.StepAttention.attend for what comes in and
    out."""

    def __init__(self, cache: KVCache, spans: list[Span], num_heads: int, variant: int | None = None) -> None:
        """variant  of engine.compute.kernel.VARIANTS; None is the quickest that this processor has"""
        shape = cache.shape
        self._cache = cache
        self._share = num_heads // shape.num_kv_heads
        size = cache.block_size

        # 1. Tables one after the other, and the position of each row.
        tables = array("i")
        starts: list[int] = []
        for span in spans:
            starts.append(len(tables))
            tables += span.table[: -(-span.end // size)]
        positions = np.empty(spans[-1].row + spans[-1].count, np.int32)
        for span in spans:
            positions[span.row : span.row + span.count] = range(span.start, span.end)

        # 2. Threads, and how many keys an item has where they are to have enough of them.
        work = sum(span.count * span.end for span in spans) * num_heads * shape.head_dim
        threads = torch.get_num_threads() if work >= THREAD_LEAST else 1
        units = sum(-(-span.count * self._share // MAX_ROWS) for span in spans) * shape.num_kv_heads
        most_rows, most_keys = MAX_ROWS, 1 << 30
        if threads > 1 and units < UNITS * threads:
            most_rows = max(FEW_ROWS, MAX_ROWS * units // (UNITS * threads))
            keys = sum(span.end for span in spans if self._is_few(span)) * shape.num_kv_heads
            most_keys = max(2, keys // (UNITS * threads * TILE)) * TILE

        # 3. Common prefixes and cut keys, whose results are kept; then what each sequence has to itself.
        room = RESULTS_BYTES // (4 * num_heads * (shape.head_dim + 34))
        keeping, kept, results_at, num_results = self._keep(spans, starts, most_keys, room)
        merging = _Items(shape.num_kv_heads)
        most = max(1, most_rows // self._share)
        for span, start, tiles in sorted(zip(spans, starts, kept, strict=True), key=lambda one: -one[0].end):
            for row in reversed(range(0, span.count, most)):  # the longest first
                end = min(row + most, span.count)
                merging.add([range(span.row + row, span.row + end)], self._share, (0, span.start + end), start, tiles)

        # 4. The call; what differs from layer to layer is filled in later.
        items = keeping.items + [(table, row + keeping.num_rows, *rest) for table, row, *rest in merging.items]
        index = np.concatenate([np.arange(rows.start, rows.stop) for rows in keeping.rows + merging.rows])
        width = -(-shape.head_dim // 32) * 32 + 2
        results = torch.empty(num_results, num_heads, width) if keeping.items else None
        self._held: list[Any] = [  # what the call points to
            index.astype(np.int32),
            positions,
            np.frombuffer(tables, np.int32),
            (Item * len(items))(*(Item(*item) for item in items)),
            results_at,
            results,
        ]
        self.call = Call(
            row_index=self._held[0].ctypes.data,
            positions=positions.ctypes.data,
            tables=self._held[2].ctypes.data,
            items=ctypes.addressof(self._held[3]),
            results_at=results_at.ctypes.data,
            results=None if results is None else results.data_ptr(),
            parallel=find_parallel() if threads > 1 else None,
            num_keeping=len(keeping.items),
            num_items=len(items),
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            width=shape.width,
            block_size=size,
            kind=kind_of(shape.dtype),
            variant=supported(shape.dtype, shape.head_dim)[-1] if variant is None else variant,
            threads=threads,
        )

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None, out: Tensor
    ) -> None:
        """Fills the step's rows of `out`. query and out: (rows, num_heads, head_dim), the last two contiguous."""
        library, call = load_library(), self.call
        assert library is not None, "there is nothing to call"
        asked, answer = query, out
        if query.dtype != torch.float32:
            asked, answer = query.float(), torch.empty(out.shape)
        call.query, call.query_stride = asked.data_ptr(), asked.stride(0)
        call.out, call.cache = answer.data_ptr(), self._cache.layers[layer].data_ptr()
        call.scale, call.softcap, call.window = scale, softcap or 0.0, window or 0
        if library.kvasir_attend(ctypes.byref(call)):
            raise MemoryError("no memory for the attention")
        if answer is not out:
            end = len(self._held[1])
            out[:end].copy_(answer[:end])

    def _is_few(self, span: Span) -> bool:
        return span.count * self._share <= FEW_ROWS

    def _keep(
        self, spans: list[Span], starts: list[int], most_keys: int, room: int
    ) -> tuple[_Items, list[int], Ints, int]:
        """Items whose results are kept, how many tiles of each span they cover, where each row's are, how many in all.

        room  tiles of a row that can be kept
        """
        keeping, kept = _Items(self._cache.shape.num_kv_heads), [0] * len(spans)
        results_at = np.zeros(spans[-1].row + spans[-1].count, np.int64)
        few = [i for i, span in enumerate(spans) if self._is_few(span)]

        # 1. Common prefixes. Each row has room for its own tiles behind them.
        for found, keys in find_common([spans[i] for i in few], self._cache.block_size):
            members = [few[i] for i in found]
            need = keys // TILE * sum(spans[i].count for i in members)
            if need > room:
                continue
            room -= need
            rows = [range(spans[i].row, spans[i].row + spans[i].count) for i in members]
            for some in _tiles(rows, MAX_ROWS // self._share):
                for begin, end in pairwise([*range(0, keys, most_keys), keys]):
                    keeping.add(some, self._share, (begin, end), starts[members[0]])
            for i in members:
                kept[i] = keys // TILE

        # 2. Sequences whose keys are cut.
        for i in few:
            span, begin = spans[i], kept[i] * TILE
            need = (-(-span.end // TILE) - kept[i]) * span.count
            if span.end - begin < 2 * most_keys or need > room:
                continue
            room -= need
            rows = [range(span.row, span.row + span.count)]
            for part in pairwise([*range(begin, span.end, most_keys), span.end]):
                keeping.add(rows, self._share, part, starts[i])
            kept[i] = -(-span.end // TILE)

        # 3. Where they are.
        if not keeping.items:
            return keeping, kept, results_at, 0
        for span, tiles in zip(spans, kept, strict=True):
            results_at[span.row : span.row + span.count] = tiles
        ends = np.cumsum(results_at)
        return keeping, kept, ends - results_at, int(ends[-1])


def find_common(spans: list[Span], block_size: int) -> Iterator[tuple[list[int], int]]:
    """Spans whose tables begin alike, as (indices, tokens of the common prefix); each span at most once.

    A prefix is whole blocks that lie before the first row of every member, and whole tiles: a row that reads it with
    others goes through its keys in the same steps as alone, and gets the same bits.
    """
    least = math.lcm(TILE, block_size) // block_size
    able = [i for i, span in enumerate(spans) if span.start >= least * block_size]
    if len(able) < 2:
        return
    able.sort(key=lambda i: spans[i].table)  # those that begin alike come to stand together
    members: list[int] = []
    blocks = 0
    for i in able:
        reach = spans[i].start // block_size
        if members:
            alike = _alike(spans[members[0]].table, spans[i].table, min(blocks, reach))
            # One that shares little must not cost the others what they share.
            if alike >= (least if len(members) == 1 else max(least, blocks // 2)):
                members.append(i)
                blocks = alike
                continue
            if len(members) > 1:
                yield members, blocks // least * least * block_size
        members, blocks = [i], reach
    if len(members) > 1:
        yield members, blocks // least * least * block_size


def _alike(one: array[int], other: array[int], most: int) -> int:
    """Leading entries that are the same, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tiles(rows: list[range], most: int) -> Iterator[list[range]]:
    """Cuts ranges of rows into lists of at most `most` rows."""
    tile: list[range] = []
    room = most
    for one in rows:
        while one:
            taken, one = one[:room], one[room:]
            tile.append(taken)
            room -= len(taken)
            if not room:
                yield tile
                tile, room = [], most
    if tile:
        yield tile
