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


def test_in_int8_a_number_is_off_by_half_a_step_of_its_own_key_and_what_is_not_finite_is_found() -> None:
    shape = CacheShape(2, 2, 10, torch.int8)
    cache = KVCache(shape, 5, 4, CPU)
    assert cache.data.shape == (2, 6 * 4, 2, 2, 12 + 4)
    assert shape.token_bytes == cache.data[:, 0].nbytes
    numbers = torch.randn(8, 2, 2, 10) * torch.logspace(-6, 6, 8)[:, None, None, None]
    numbers[5] = 0
    stored = cache.encode(numbers)
    most = numbers.abs().amax(-1, keepdim=True)
    assert ((cache.decode(stored) - numbers).abs() <= most / 253).all()
    assert torch.equal(cache.encode(numbers[3:4]), stored[3:4])
    for block, bad in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        numbers[2, 1, 0, 7] = bad
        cache.layers[1][block * 4 + 2] = cache.encode(numbers)[2]
        assert not cache.decode(cache.layers[1][block * 4 + 2]).isfinite().all()
    assert cache.find_not_finite([0, 1, 2, 3, 4]) == [1, 3, 4]
    cache.zero([1, 3, 4])
    assert cache.find_not_finite([0, 1, 2, 3, 4]) == []
    assert not cache.data.any()
