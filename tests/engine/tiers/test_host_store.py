"""Blocks in memory: a copy out of the cache and into it is the same bytes, and touches no other block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.compute.kv_cache import CacheShape, KVCache
from engine.tiers.copying import BlockKey, Copied, Payload, copy_blocks
from engine.tiers.storage import CacheStore, HostStore

CPU = torch.device("cpu")
NUM_BLOCKS = 9


def key(index: int) -> BlockKey:
    return BlockKey(bytes([index]) * 16, None, index, "", b"")


def keys(count: int) -> list[BlockKey]:
    return [key(index) for index in range(count)]


def filled(dtype: torch.dtype, seed: int) -> KVCache:
    """A cache with random bits in every block, NaNs among them."""
    cache = KVCache(CacheShape(3, 2, 8, dtype), NUM_BLOCKS, 4, CPU)
    generator = torch.Generator().manual_seed(seed)
    bits = cache.data.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8))
    return cache


def bits(cache: KVCache, block: int) -> list[int]:
    slots = cache.data[:, block * 4 : block * 4 + 4].contiguous()
    return slots.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_go_down_and_come_back_bit_for_bit_anywhere_else(dtype: torch.dtype) -> None:
    source, target = filled(dtype, 1), filled(dtype, 2)
    before = [bits(target, block) for block in range(NUM_BLOCKS + 1)]
    device, host = CacheStore(source), HostStore(5, CacheStore(source).block_bytes)
    assert copy_blocks(device, [7, 1, 2], host, [4, 0, 3], keys(3), 2) == Copied(3)
    assert copy_blocks(host, [4, 0, 3], CacheStore(target), [0, 8, 5], keys(3), 2) == Copied(3)
    moved = {0: 7, 8: 1, 5: 2}
    for block in range(NUM_BLOCKS + 1):
        assert bits(target, block) == (bits(source, moved[block]) if block in moved else before[block])


def test_a_payload_is_laid_out_as_it_is_promised() -> None:
    cache = KVCache(CacheShape(3, 2, 8, torch.float32), NUM_BLOCKS, 4, CPU)
    cache.layers[1][5 * 4 + 2, 1, 0, 3] = 7.0
    row = CacheStore(cache).read([5], keys(1))[0]
    assert row.view(np.float32).reshape(3, 4, 2, 2, 8)[1, 2, 1, 0, 3] == 7.0
    assert np.count_nonzero(row.view(np.float32)) == 1


class Faulty:
    """A store that is not sound or fails from some block on."""

    def __init__(self, sound: int = 100, fails: int = 100) -> None:
        self.sound, self.fails = sound, fails
        self.at_once: list[int] = []

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        self.at_once.append(len(keys))
        return np.zeros((max(0, min(len(keys), self.sound - keys[0].index)), 8), np.uint8)

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        if keys[-1].index >= self.fails:
            raise OSError("no room")

    def drop(self, digests: Sequence[bytes]) -> None:
        raise AssertionError("not asked for")


def test_a_copy_says_how_far_it_came_and_has_few_blocks_in_memory() -> None:
    host = HostStore(10, 8)
    slots = [*range(10)]
    for sound in range(11):
        source = Faulty(sound)
        assert copy_blocks(source, slots, host, slots, keys(10), 4) == Copied(sound)
        assert max(source.at_once) <= 4
    failed = copy_blocks(host, slots, Faulty(fails=5), slots, keys(10), 4)
    assert failed.count == 4
    assert str(failed.error) == "no room"
