"""Builds the tiers that an engine's settings ask for: the model's own blocks, and the disk.

The one place that knows which store stands behind which tier, and how large each is. Called once, by engine/serving.py.
Has the store of the cache's blocks, which are only read while a reference keeps them as they are, and only
written while they belong to no sequence; engine/tiers/tiers.py sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch

from engine.compute.kv_cache import KVCache
from engine.compute.numerics import find_numerics
from engine.config import ConfigError, EngineSettings
from engine.pool.blocks import BlockPool
from engine.pool.eviction import LeastRecentlyUsed
from engine.protocol import Namespace
from engine.tiers.copying import BlockKey, Payload
from engine.tiers.disk_store import DiskStore
from engine.tiers.tier import Lasting
from engine.tiers.tiers import Tier, Tiers

PART_BYTES: Final = 16 << 20
"""Of blocks that one copy has in memory, at most."""

PART_BLOCKS: Final = 64
"""Blocks of one copy, at most: with 16 tokens each as many as a step of 1,024 computes."""


def build_tiers(settings: EngineSettings, namespace: Namespace, pool: BlockPool, cache: KVCache) -> Tiers:
    """
    namespace  of the engine's blocks, with an empty salt
    Raises ConfigError for a budget that does not hold one block. Touches no disk: Tiers.start does.
    """
    store = CacheStore(cache)
    device = Tier("device", pool, store, store.block_bytes)
    if settings.disk_dir is None or not settings.disk_bytes:
        return Tiers(device)
    numerics = find_numerics(cache.data.device)
    files = DiskStore(settings.disk_dir.absolute(), namespace, _layout(cache), store.block_bytes, numerics)
    budget_bytes, max_age_s = settings.disk_bytes, settings.disk_max_age_s
    if budget_bytes < files.file_bytes:
        raise ConfigError(
            f"engine.disk_bytes: {budget_bytes} bytes hold less than one block of {files.file_bytes} bytes"
        )
    slots = budget_bytes // files.file_bytes
    scan, order = partial(files.scan, slots, budget_bytes, max_age_s), LeastRecentlyUsed(slots)
    below, lasting = BlockPool(slots, pool.block_size, order), Lasting(files, order, max_age_s)
    disk = Tier("disk", below, files, files.file_bytes, scan, files.lease_file(), files.close, lasting)
    part_blocks = min(PART_BLOCKS, max(1, PART_BYTES // store.block_bytes))
    return Tiers(device, disk, queue_bytes=settings.copy_queue_bytes, part_blocks=part_blocks)


def _layout(cache: KVCache) -> str:
    shape = cache.shape
    return f"{shape.num_layers}x{cache.block_size}x2x{shape.num_kv_heads}x{shape.head_dim} {shape.dtype}"


class CacheStore:
    """The blocks of the model's cache, copied with one thread and without a lock beside the steps that run meanwhile.
    On a GPU copies and steps follow one another."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @property
    def block_bytes(self) -> int:
        return self._cache.shape.token_bytes * self._cache.block_size

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        torch.set_num_threads(1)  # of this thread: the model computes on the others
        return self._cache.read_blocks(slots).cpu().numpy()

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        torch.set_num_threads(1)
        self._cache.write_blocks(slots, torch.from_numpy(payload).to(self._cache.data.device))

    def drop(self, digests: Sequence[bytes]) -> None:
        """Nothing is kept besides the slots."""
