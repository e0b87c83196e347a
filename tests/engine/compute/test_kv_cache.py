"""The paged cache: its layout, and that memory is taken only where it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.compute.kv_cache import CacheShape, KVCache, count_blocks
from engine.sequence import Copy

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_and_blocks_are_views_of_the_same_zeros(dtype: torch.dtype) -> None:
    cache = KVCache(CacheShape(3, 2, 8, dtype), 5, 4, CPU)
    assert cache.data.shape == (3, 6 * 4, 2, 2, 8)
    assert cache.data.dtype == dtype
    assert cache.data.is_contiguous()
    assert cache.data.data_ptr() % 64 == 0
    assert not cache.data.any()
    cache.blocks[1][2] = 1
    assert cache.layers[1][8:12].all()
    assert cache.data.sum() == 4 * 2 * 2 * 8


@pytest.mark.parametrize("blocks", [[1, 2, 3], [3, 0]])
def test_zeroing_takes_whole_blocks_of_all_layers_and_no_others(blocks: list[int]) -> None:
    cache = KVCache(CacheShape(2, 1, 4, torch.float32), 5, 4, CPU)
    cache.data.fill_(1)
    cache.zero(blocks)
    for block in range(6):
        part = cache.data[:, block * 4 : block * 4 + 4]
        assert bool(part.any()) == (block not in blocks)
        assert bool(part.all()) == (block not in blocks)


def test_a_copy_takes_the_first_slots_of_all_layers_and_nothing_else() -> None:
    cache = KVCache(CacheShape(3, 2, 4, torch.bfloat16), 6, 4, CPU)
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape) % 251)
    wanted = cache.data.clone()
    for source, target, count in ((1, 4, 3), (1, 0, 3), (3, 5, 1)):
        wanted[:, target * 4 : target * 4 + count] = wanted[:, source * 4 : source * 4 + count]
    cache.copy([Copy(1, 4, 3), Copy(1, 0, 3), Copy(3, 5, 1)])
    assert cache.data.equal(wanted)


def test_memory_is_taken_only_where_the_cache_is_written() -> None:
    shape = CacheShape(1, 8, 64, torch.float32)
    budget = 1 << 30
    num_blocks = count_blocks(shape, 16, budget)
    before = resident_bytes()
    cache = KVCache(shape, num_blocks, 16, CPU)
    assert cache.data.nbytes == budget
    cache.zero([0, 1, num_blocks - 1])
    assert resident_bytes() - before < budget // 4
