"""The paged cache: keys and values of all blocks of all layers, and how many blocks fit into a budget.

Knows blocks and slots, nothing of sequences or attention. engine/compute/attention.py writes and reads it,
engine/compute/runner.py owns it; which block belongs to whom is decided by engine/pool/blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.compute.batch import run_start
from engine.compute.machine import available_bytes, own_bytes
from engine.sequence import Copy

_LINE: Final = 64  # bytes of a cache line, at which the data begins
_SCALE_BYTES: Final = 4
_LEAST: Final = 1e-30  # a largest number below which all are zero
_LOOK_AT: Final = 64  # blocks of a layer that are copied to be looked through


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token's keys and values take; in int8 each has a scale, float32, behind it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scale_at(self) -> int:
        """Elements of a key or value before its scale."""
        return -(-self.head_dim // _SCALE_BYTES) * _SCALE_BYTES

    @property
    def width(self) -> int:
        """Elements of a key or value, its scale included."""
        return self.scale_at + _SCALE_BYTES if self.dtype == torch.int8 else self.head_dim

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.width * self.dtype.itemsize


class KVCache:
    """Keys and values of all blocks of all layers.

    data  (num_layers, (num_blocks + 1) * block_size, 2, num_kv_heads, width)  keys at [:, :, 0], values at [:, :, 1]

    The extra block at the end belongs to nobody and stays zero: padding is read from it.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape, self.num_blocks, self.block_size = shape, num_blocks, block_size
        slots = (num_blocks + 1) * block_size
        size = (shape.num_layers, slots, 2, shape.num_kv_heads, shape.width)
        self.data = _zeros(size, shape.dtype, device)
        self.layers = self.data.unbind(0)  # (slots, 2, num_kv_heads, width) each
        self.blocks = self.data.view(shape.num_layers, num_blocks + 1, -1).unbind(0)  # (num_blocks + 1, elements) each
        self.zero_slot = num_blocks * block_size

    def encode(self, key_value: Tensor) -> Tensor:
        """As the cache stores them: (rows, 2, num_kv_heads, head_dim) -> (rows, 2, num_kv_heads, width).

        In int8 each key and each value is divided by a scale of its own, 1/127 of its largest number, and rounded to
        the nearest even: what a token stores depends on that token alone. What is not finite has such a scale.
        """
        shape = self.shape
        if shape.dtype != torch.int8:
            return key_value
        wide = key_value.float()
        most = wide.abs().amax(-1, keepdim=True)
        stored = torch.zeros(*wide.shape[:-1], shape.width, dtype=torch.int8, device=wide.device)
        stored[..., : shape.head_dim] = (
            wide * torch.where(most > _LEAST, torch.full_like(most, 127) / most, 0)
        ).round_()
        stored[..., shape.scale_at :].view(torch.float32).copy_(most / 127)
        return stored

    def decode(self, stored: Tensor) -> Tensor:
        """Numbers of what the cache stores: (..., width) -> (..., head_dim) float32."""
        shape = self.shape
        if shape.dtype != torch.int8:
            return stored.float()
        return stored[..., : shape.head_dim] * stored[..., shape.scale_at :].view(torch.float32)

    def zero(self, blocks: list[int]) -> None:
        """Zeroes whole blocks in all layers, so that what is masked out can never be a NaN somebody else left."""
        by_block = self.data.view(self.shape.num_layers, self.num_blocks + 1, -1)
        if run_start(blocks, len(blocks)) is not None:
            by_block[:, blocks[0] : blocks[-1] + 1].zero_()
        else:
            by_block.index_fill_(1, torch.tensor(blocks, device=self.data.device), 0)

    def zero_slots(self, table: Sequence[int], positions: range) -> None:
        """Zeroes the slots of some positions of a sequence with this block table."""
        size = self.block_size
        slots = [table[at // size] * size + at % size for at in positions]
        self.data.index_fill_(1, torch.tensor(slots, dtype=torch.int64, device=self.data.device), 0)

    def copy(self, copies: Sequence[Copy]) -> None:
        """The first slots of blocks, in all layers, into others, of which none is also a source."""
        pairs = [(one.source, one.target, slot) for one in copies for slot in range(one.count)]
        sources, targets, slots = torch.tensor(pairs, device=self.data.device).unbind(1)
        taken = self.data.index_select(1, sources * self.block_size + slots)
        self.data.index_copy_(1, targets * self.block_size + slots, taken)

    def find_not_finite(self, blocks: Sequence[int]) -> list[int]:
        """Those that have a number which is not finite, in any layer."""
        found: list[int] = []
        for start in range(0, len(blocks), _LOOK_AT):
            some = list(blocks[start : start + _LOOK_AT])
            index = torch.tensor(some, device=self.data.device)
            largest = torch.stack([self._largest(layer.index_select(0, index)) for layer in self.blocks]).amax(0)
            finite = torch.isfinite(largest).tolist()  # a NaN is the largest number of all
            found += [block for block, is_finite in zip(some, finite, strict=True) if not is_finite]
        return found

    def _largest(self, taken: Tensor) -> Tensor:
        """Of each block of (blocks, elements); in int8 of its scales."""
        if self.shape.dtype == torch.int8:
            numbers = taken.view(len(taken), -1, self.shape.width)
            taken = numbers[..., self.shape.scale_at :].view(torch.float32).flatten(1)
        return taken.abs().amax(1)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """A copy of whole blocks, (len(blocks), block bytes) uint8 on the cache's device, in a layout that does not
        depend on the cache's own: (num_layers, block_size, 2, num_kv_heads, width) of the cache's dtype each."""
        index = torch.tensor(blocks, device=self.data.device)
        taken = self.data.view(self.shape.num_layers, self.num_blocks + 1, -1).index_select(1, index)
        return taken.transpose(0, 1).contiguous().view(torch.uint8).view(len(blocks), -1)

    def write_blocks(self, blocks: Sequence[int], copied: Tensor) -> None:
        """Overwrites whole blocks with what `read_blocks` returned."""
        index = torch.tensor(blocks, device=self.data.device)
        by_layer = copied.view(self.shape.dtype).view(len(blocks), self.shape.num_layers, -1).transpose(0, 1)
        self.data.view(self.shape.num_layers, self.num_blocks + 1, -1).index_copy_(1, index, by_layer)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU memory that is taken page by page as it is written (numpy's calloc; torch's zeros write)."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + _LINE, np.uint8)
    skip = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[skip : skip + num_bytes]).view(dtype).view(size)


STEP_BYTES: Final = 512 << 20
"""Left free for what a step computes with: hidden states of its rows, and logits of all that sample."""

_LEAST_MOST: Final = 2 << 30


def free_bytes(device: torch.device, memory_bytes: int) -> int:
    """Bytes that this process may still take on a device; memory_bytes is its limit in all, 0 for none."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = available_bytes()
    return min(free, max(0, memory_bytes - own_bytes())) if memory_bytes else free


def choose_budget(shape: CacheShape, free: int, tokens: int, share: float = 0.5) -> int:
    """Bytes for keys and values when the settings do not say: a share of what is free once a step has its part, but not
    more than 2 GiB or `tokens` take, whichever is more: a block has its costs in the pool as well."""
    return min(int(max(0, free - STEP_BYTES) * share), max(_LEAST_MOST, tokens * shape.token_bytes))


def count_blocks(shape: CacheShape, block_size: int, budget_bytes: int) -> int:
    """Blocks that fit into a budget, besides the one that padding is read from. May be zero or less."""
    return budget_bytes // (shape.token_bytes * block_size) - 1
