"""Attention of one step made of torch's plain operations, in float32: the slow twin of attention.c.

Serves where nothing can be compiled, and on other devices than the CPU. A row's bits depend on its own prefix alone:
keys are taken in tiles that begin at multiples of TILE and are always whole, in order, what is hidden from a row is
added to it as zero, and products have multiples of ROW_MULTIPLE rows. Knows spans and blocks;
engine/compute/attention.py asks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.batch import Span
from engine.compute.kv_cache import KVCache

TILE: Final = 128  # keys that are read together
ROWS: Final = 128  # of a sequence that are computed together
ROW_MULTIPLE: Final = 8
PADDED_ROWS: Final = 32  # single rows that are computed together; each brings a copy of TILE keys and values


@dataclass(slots=True)
class _Tile:
    """As many rows of each of some sequences.

    rows       (num_seqs * count,)    rows of the batch
    positions  (num_seqs, count)      position of each row in its sequence
    slots      (num_seqs, keys)       slot of each key; keys is a multiple of TILE, padding is the slot that stays zero
    first      smallest position of all rows
    """

    rows: Tensor
    positions: Tensor
    slots: Tensor
    first: int


class ReferenceAttention:
    """Attention of one step for every layer. See engine.compute.attention.StepAttention.attend."""

    def __init__(self, cache: KVCache, spans: list[Span]) -> None:
        self._cache = cache
        self._tiles = list(_tiles(cache, spans))

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None, out: Tensor
    ) -> None:
        """Fills the step's rows of `out`. query and out: (rows, num_heads, head_dim)."""
        for tile in self._tiles:
            answer = self._attend_tile(tile, layer, query.index_select(0, tile.rows), scale, window, softcap)
            out.index_copy_(0, tile.rows, answer.to(out.dtype))

    def _attend_tile(
        self, tile: _Tile, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """(rows, num_heads, head_dim) of a tile's rows, float32."""
        # 1. The query heads that share a KV head become rows of one product: (num_seqs, kv_heads, group * count, dim).
        num_seqs, count = tile.positions.shape
        kv_heads, dim = self._cache.shape.num_kv_heads, query.shape[2]
        group = query.shape[1] // kv_heads
        asking = query.float().view(num_seqs, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        asking = asking.reshape(num_seqs, kv_heads, group * count, dim) * scale
        asking = functional.pad(asking, (0, 0, 0, -(group * count) % ROW_MULTIPLE))

        # 2. Keys tile by tile; those before all windows are left out.
        sums = torch.zeros_like(asking)
        total = asking.new_zeros((*asking.shape[:3], 1))
        most = torch.full_like(total, -torch.inf)
        begin = 0 if window is None else max(0, tile.first + 1 - window) // TILE * TILE
        for start in range(begin, tile.slots.shape[1], TILE):
            slots = tile.slots[:, start : start + TILE].reshape(-1)
            seen = self._cache.decode(self._cache.layers[layer].index_select(0, slots))
            key, value = seen.view(num_seqs, TILE, 2, kv_heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
            scores = torch.matmul(asking, key.transpose(2, 3))
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            distance = tile.positions[:, :, None] - torch.arange(start, start + TILE, device=query.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            by_head = scores[:, :, : group * count].view(num_seqs, kv_heads, group, count, TILE)
            by_head.masked_fill_(hidden[:, None, None], -torch.inf)
            larger = torch.maximum(most, scores.amax(-1, keepdim=True))
            base = larger.masked_fill(larger == -torch.inf, 0.0)  # of a row that has seen nothing yet
            weight, old = (scores - base).exp_(), (most - base).exp_()
            total = total * old + weight.sum(-1, keepdim=True)
            sums = sums * old + torch.matmul(weight, value)
            most = larger

        # 3. Averages, heads and rows where they were.
        answer = (sums / total)[:, :, : group * count].view(num_seqs, kv_heads, group, count, dim)
        return answer.permute(0, 3, 1, 2, 4).reshape(query.shape)


def _tiles(cache: KVCache, spans: list[Span]) -> Iterator[_Tile]:
    """Single rows together, those of about the same length; longer spans in runs of ROWS."""
    single = sorted((span for span in spans if span.count == 1), key=lambda span: span.end)
    for at in range(0, len(single), PADDED_ROWS):
        yield _tile(cache, single[at : at + PADDED_ROWS])
    for span in spans:
        if span.count > 1:
            for at in range(0, span.count, ROWS):
                count = min(ROWS, span.count - at)
                yield _tile(cache, [Span(span.row + at, count, span.start + at, span.table)])


def _tile(cache: KVCache, spans: list[Span]) -> _Tile:
    """All spans have the same number of rows."""
    size, device = cache.block_size, cache.data.device
    longest = max(span.end for span in spans)
    slots = torch.full((len(spans), longest + -longest % TILE), cache.zero_slot)
    for target, span in zip(slots, spans, strict=True):
        blocks = torch.tensor(span.table[: -(-span.end // size)]) * size
        target[: span.end] = (blocks[:, None] + torch.arange(size)).view(-1)[: span.end]
    offsets = torch.arange(spans[0].count)
    rows = torch.tensor([span.row for span in spans])[:, None] + offsets
    positions = torch.tensor([span.start for span in spans])[:, None] + offsets
    return _Tile(rows.view(-1).to(device), positions.to(device), slots.to(device), min(span.start for span in spans))
