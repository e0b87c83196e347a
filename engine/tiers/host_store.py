"""Blocks in memory: those of the model's own cache, and those of the host tier beside it.

Both are stores of engine/tiers/stores.py, over bytes that are written and read by copy threads. The cache's blocks are
only read while a reference keeps them as they are, and only written while they belong to nobody else;
engine/tiers/tiers.py sees to that. Neighbours: engine/compute/kv_cache.py has the layout, engine/tiers/disk_store.py is
the store below.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from engine.compute.kv_cache import KVCache
from engine.tiers.stores import BlockKey, Payload


class CacheStore:
    """The blocks of the model's cache, copied beside the steps that run meanwhile.

    On a CPU a copy takes one thread and no lock. On a GPU it goes through a stream of its own and a few pinned pages
    that torch keeps for it, so that neither the host tier has to be pinned nor a step's stream waits.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._device = cache.data.device
        self._own = threading.local()  # what each copy thread has set up for itself

    @property
    def block_bytes(self) -> int:
        return self._cache.shape.token_bytes * self._cache.block_size

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        if self._device.type == "cpu":
            self._take_one_thread()
            return self._cache.read_blocks(slots).numpy()
        with torch.cuda.stream(self._stream()):
            blocks = self._cache.read_blocks(slots)
            pinned = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
            pinned.copy_(blocks, non_blocking=True)
            self._stream().synchronize()
        return pinned.numpy()

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        blocks = torch.from_numpy(payload)
        if self._device.type == "cpu":
            self._take_one_thread()
            self._cache.write_blocks(slots, blocks)
            return
        with torch.cuda.stream(self._stream()):
            self._cache.write_blocks(slots, blocks.pin_memory().to(self._device, non_blocking=True))
            self._stream().synchronize()

    def drop(self, digests: Sequence[bytes]) -> None:
        """Nothing is kept besides the slots."""

    def _take_one_thread(self) -> None:
        """The model computes on the others. torch keeps the number for each calling thread."""
        if not getattr(self._own, "is_set", False):
            torch.set_num_threads(1)
            self._own.is_set = True

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._own.stream
        return stream


class HostStore:
    """One row of memory for each slot, taken from the system as it is first written."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self._rows = np.zeros((num_slots, block_bytes), np.uint8)

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        return np.take(self._rows, slots, axis=0)

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        self._rows[slots] = payload

    def drop(self, digests: Sequence[bytes]) -> None:
        """Nothing is kept besides the slots."""
