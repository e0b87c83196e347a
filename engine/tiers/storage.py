"""Builds the tiers that an engine's settings ask for: the model's own blocks, host memory, disk.

The one place that knows which store stands behind which tier, and how large each is. Called once, by
engine/building.py.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from engine.compute.kv_cache import KVCache
from engine.compute.numerics import find_numerics
from engine.config import ConfigError, EngineSettings
from engine.pool.blocks import BlockPool
from engine.pool.eviction import LeastRecentlyUsed
from engine.protocol import Namespace
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import CacheStore, HostStore
from engine.tiers.tier import Lasting
from engine.tiers.tiers import Tier, Tiers

COPY_BYTES: Final = 16 << 20
"""That one copy thread has in memory at a time."""

PART_BLOCKS: Final = 64
"""Blocks of which the loop takes note at a time: with 16 tokens each as many as a step of 1,024 computes."""


def build_tiers(settings: EngineSettings, namespace: Namespace, pool: BlockPool, cache: KVCache) -> Tiers:
    """
    namespace  of the engine's blocks, with an empty salt
    Raises ConfigError for a budget that does not hold one block. Touches no disk: Tiers.start does.
    """
    store = CacheStore(cache)
    tiers = [Tier("device", pool, store, store.block_bytes)]
    if settings.host_bytes:
        slots = _slots("host_bytes", settings.host_bytes, store.block_bytes)
        tiers.append(
            Tier("host", BlockPool(slots, pool.block_size), HostStore(slots, store.block_bytes), store.block_bytes),
        )
    if settings.disk_dir is not None and settings.disk_bytes:
        numerics = find_numerics(cache.data.device)
        disk = DiskStore(settings.disk_dir.absolute(), namespace, _layout(cache), store.block_bytes, numerics)
        slots = _slots("disk_bytes", settings.disk_bytes, disk.file_bytes)
        scan = partial(disk.scan, slots, settings.disk_bytes, settings.disk_max_age_s)
        order = LeastRecentlyUsed(slots)
        lasting = Lasting(disk, order, settings.disk_max_age_s)
        below = BlockPool(slots, pool.block_size, order)
        tiers.append(Tier("disk", below, disk, disk.file_bytes, scan, disk.lease_file(), disk.close, lasting))
    at_once = max(1, COPY_BYTES // store.block_bytes)
    return Tiers(
        tiers,
        queue_bytes=settings.copy_queue_bytes,
        part_blocks=PART_BLOCKS,
        at_once=at_once,
    )


def _slots(setting: str, budget_bytes: int, slot_bytes: int) -> int:
    if budget_bytes < slot_bytes:
        raise ConfigError(f"engine.{setting}: {budget_bytes} bytes hold less than one block of {slot_bytes} bytes")
    return budget_bytes // slot_bytes


def _layout(cache: KVCache) -> str:
    shape = cache.shape
    return f"{shape.num_layers}x{cache.block_size}x2x{shape.num_kv_heads}x{shape.head_dim} {shape.dtype}"
