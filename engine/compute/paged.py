"""The compiled attention: plans which rows read which run of keys, once for a step, and makes the calls.

Rows of sequences that begin with the same blocks read those blocks together, then each sequence reads the rest alone
and goes on from the sums so far (cascade: arXiv 2402.05099). Knows spans and blocks; engine/compute/attention.py asks
it where there is something to call, and engine/compute/flash.py elsewhere.

engine/compute/paged_attention.c is compiled with the system's C compiler, once for a machine. The library is kept in
the user's cache folder under a name made of the source and the compiler's flags, so a new version of the source is a
new file. Where anything is missing (the compiler, the processor's instructions, a folder to write to) there is no
library, and the log says once why not. Never raises for that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.compute.batch import Span
from engine.compute.kv_cache import KVCache

MAX_ROWS: Final = 512  # of the source: rows of an item times the heads that share a key head
MAX_HEAD_DIM: Final = 256
DIM_MULTIPLE: Final = 32
CHUNK: Final = 128  # of the source: keys that are packed together, and in whose multiples a common prefix is counted
THREAD_LEAST: Final = 1 << 17  # rows times keys below which waking other threads takes longer than the work
_RESUMES, _PAUSES = 1, 2


def can_attend(cache: KVCache) -> bool:
    """Whether the compiled attention serves this cache. The first call of a machine may take seconds: it compiles."""
    shape = cache.shape
    return (
        cache.data.device.type == "cpu"
        and shape.dtype == torch.bfloat16
        and shape.head_dim % DIM_MULTIPLE == 0
        and shape.head_dim <= MAX_HEAD_DIM
        and load_attend() is not None
    )


@dataclass(slots=True)
class _Items:
    """Items of one call, in the order in which they are made."""

    items: list[Item] = field(default_factory=list)
    rows: list[range] = field(default_factory=list)
    num_rows: int = 0
    work: int = 0  # rows times keys

    def add(self, rows: list[range], keys: tuple[int, int], table: int, flags: int) -> None:
        count = sum(map(len, rows))
        self.items.append(Item(self.num_rows, count, *keys, table, flags, 0))
        self.rows += rows
        self.num_rows += count
        self.work += count * (keys[1] - keys[0])


class PagedAttention:
    """Attention of one step for every layer. See engine.compute.attention.StepAttention.attend for what comes in and
    out."""

    def __init__(self, cache: KVCache, spans: list[Span], num_heads: int) -> None:
        shape = cache.shape
        self._cache, self._num_heads = cache, num_heads
        self._most_rows = MAX_ROWS // (num_heads // shape.num_kv_heads)
        size = cache.block_size

        # 1. Tables one after the other, and the position of each row.
        tables: list[int] = []
        starts: list[int] = []
        for span in spans:
            starts.append(len(tables))
            tables += span.table[: -(-span.end // size)]
        positions = np.empty(spans[-1].row + spans[-1].count, np.int32)
        for span in spans:
            positions[span.row : span.row + span.count] = range(span.start, span.end)

        # 2. Common prefixes first, then what each sequence has to itself.
        common, own = _Items(), _Items()
        prefix = [0] * len(spans)
        for members, keys in find_common(spans, size):
            rows = [range(spans[i].row, spans[i].row + spans[i].count) for i in members]
            for some in _tiles(rows, self._most_rows):
                common.add(some, (0, keys), starts[members[0]], _PAUSES)
            for i in members:
                prefix[i] = keys
        for span, start, keys in zip(spans, starts, prefix, strict=True):
            for row in range(0, span.count, self._most_rows):
                end = min(row + self._most_rows, span.count)
                rows = [range(span.row + row, span.row + end)]
                own.add(rows, (keys, span.start + end), start, _RESUMES if keys else 0)

        # 3. The calls; what differs from layer to layer is filled in later.
        self._kept: list[Any] = [np.array(tables, np.int32), positions]  # arrays that the calls point to
        state = None
        if common.items:
            state = torch.empty(len(positions), num_heads, shape.head_dim + 2)
            self._kept.append(state)
        self._calls = [self._call(items, state) for items in (common, own) if items.items]

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None, out: Tensor) -> None:
        """Fills the step's rows of `out`. query and out: (rows, num_heads, head_dim), the last two contiguous."""
        attend = load_attend()
        assert attend is not None, "there is nothing to call"
        for call, counter, threads in self._calls:
            call.query, call.query_stride = query.data_ptr(), query.stride(0)
            call.out, call.cache = out.data_ptr(), self._cache.layers[layer].data_ptr()
            call.scale, call.window = scale, window or 0
            counter.value = 0
            others = [_threads(threads - 1).submit(attend, call) for _ in range(threads - 1)]
            failed = [attend(call), *(other.result() for other in others)]
            if any(failed):
                raise MemoryError("no memory for the attention")

    def _call(self, items: _Items, state: Tensor | None) -> tuple[Call, ctypes.c_int64, int]:
        """The call, its counter of units, and the threads to make it with."""
        tables, positions = self._kept[:2]
        index = np.concatenate([np.arange(rows.start, rows.stop, dtype=np.int32) for rows in items.rows])
        packed, counter = (Item * len(items.items))(*items.items), ctypes.c_int64(0)
        self._kept += [index, packed]
        shape = self._cache.shape
        call = Call(
            row_index=index.ctypes.data,
            positions=positions.ctypes.data,
            tables=tables.ctypes.data,
            items=ctypes.addressof(packed),
            state=state.data_ptr() if state is not None else None,
            num_items=len(items.items),
            num_heads=self._num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=self._cache.block_size,
            next=ctypes.addressof(counter),
        )
        threads = torch.get_num_threads() if items.work >= THREAD_LEAST else 1
        return call, counter, min(threads, len(items.items) * shape.num_kv_heads)


def find_common(spans: list[Span], block_size: int) -> Iterator[tuple[list[int], int]]:
    """Spans whose tables begin alike, as (indices, tokens of the common prefix); each span at most once.

    A prefix is whole blocks that lie before the first row of every member, and whole chunks: a row that reads it with
    others goes through its keys in the same steps as alone, and gets the same bits.
    """
    least = math.lcm(CHUNK, block_size) // block_size
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


def _alike(one: list[int], other: list[int], most: int) -> int:
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


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads beside the caller's; made once for each number of them."""
    return ThreadPoolExecutor(count, thread_name_prefix="attention")


log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("paged_attention.c")
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = (
    *("-O3", "-fno-math-errno", "-shared", "-fPIC", "-lm"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
COMPILE_S: Final = 60.0  # seconds that the compiler may take


class Item(ctypes.Structure):
    """item_t of the source."""

    _fields_ = (
        ("first_row", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("begin", ctypes.c_int32),
        ("end", ctypes.c_int32),
        ("table", ctypes.c_int64),
        ("flags", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Call(ctypes.Structure):
    """call_t of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "cache", "row_index", "positions", "tables", "items")),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_items", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        ("query_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("next", ctypes.c_void_p),
    )


@functools.cache
def load_attend() -> ctypes._NamedFuncPointer | None:
    """kvasir_attend of the source; None where it cannot be compiled or run. The first call of a machine compiles."""
    if not _has_instructions():
        return None
    try:
        library = ctypes.CDLL(str(_compiled(default_folder())))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.info("attention is computed with torch: %s", error)
        return None
    attend = library.kvasir_attend
    attend.argtypes, attend.restype = (ctypes.POINTER(Call),), ctypes.c_int
    return attend


def library_digest() -> str:
    """Of the library that computes attention, as it was compiled here; `none` where torch does. Compilers differ."""
    if load_attend() is None:
        return "none"
    return hashlib.sha256(_compiled(default_folder()).read_bytes()).hexdigest()[:16]


def default_folder() -> Path:
    """Where the library is kept. Raises RuntimeError when the user has no home."""
    return Path.home() / ".cache" / "kvasir" / "native"


def _has_instructions() -> bool:
    asks = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(asks and asks())


def _compiled(folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there. Another process may do the same at the same time."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    identity = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:20]
    library = folder / f"paged_attention-{identity}.so"
    if library.is_file():
        return library
    if compiler is None:
        raise OSError(f"there is no C compiler ({', '.join(COMPILERS)})")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        command = [compiler, str(SOURCE), "-o", made, *FLAGS]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)  # noqa: S603
        if ended.returncode:
            raise OSError(f"{compiler} failed: {ended.stderr.strip().splitlines()[:1]}")
        os.replace(made, library)
    finally:
        Path(made).unlink(missing_ok=True)
    return library
