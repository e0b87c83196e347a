"""Which rows of a step attend together when torch's kernels do it, where their keys lie, and additive masks.

Decodes of about the same short length form a padded batch: one call over a copy of their blocks. All other rows
attend alone. Made once for a step. Knows spans and blocks; engine/compute/flash.py makes the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.batch import Span, run_start
from engine.compute.kv_cache import KVCache

PADDED_LEAST: Final = 3  # decodes that are worth a padded copy of their keys, which saves the calls of all but one
PADDED_BYTES: Final = 256 << 10  # of keys and values of one sequence and layer; longer ones are quicker read in place


@dataclass(slots=True)
class SingleRow:
    """One sequence that attends by itself.

    keys   to read, rounded up where bits count
    first  slot, when they are consecutive
    index  (keys,) slots to gather, when they are not
    """

    span: Span
    keys: int
    first: int
    index: Tensor | None


@dataclass(slots=True)
class PaddedBatch:
    """Decodes of about the same short length, which attend in one call over a padded copy of their blocks.

    rows    (num_rows,)                rows of the batch
    blocks  (num_rows * num_blocks,)   blocks to gather; padding is the block that belongs to nobody
    ends    (num_rows, 1)              keys of each row
    """

    rows: Tensor
    blocks: Tensor
    ends: Tensor
    masks: dict[int | None, Tensor]


@dataclass(slots=True)
class Plan:
    """Each work of the step is in one of the two."""

    padded: list[PaddedBatch]
    single: list[SingleRow]


def make_plan(cache: KVCache, spans: list[Span], *, exact: bool) -> Plan:
    """exact  bits count: see engine/compute/flash.py"""
    padded: dict[int, list[Span]] = {}
    alone: list[Span] = []
    longest = PADDED_BYTES // max(1, cache.shape.token_bytes // cache.shape.num_layers)
    if exact:
        longest = min(longest, TILE_ROWS)
    for span in spans:
        if span.count == 1 and span.end <= longest and cache.block_size % KEY_MULTIPLE == 0:
            padded.setdefault((span.end - 1).bit_length(), []).append(span)
        else:
            alone.append(span)
    for size, batch in list(padded.items()):
        if len(batch) < PADDED_LEAST:
            alone += padded.pop(size)
    return Plan(
        [_padded_batch(cache, batch) for batch in padded.values()],
        [_single_row(cache, span, exact=exact) for span in alone],
    )


def rounded(keys: int, *, exact: bool) -> int:
    """How many keys are read for so many: up to whole vectors where bits count."""
    return keys + -keys % KEY_MULTIPLE if exact else keys


def padded_mask(batch: PaddedBatch, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """(num_rows, 1, 1, keys) additive."""
    position = torch.arange(keys, device=batch.ends.device)
    hidden = position >= batch.ends
    if window is not None:
        hidden |= position < batch.ends - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=batch.ends.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None]


def _padded_batch(cache: KVCache, spans: list[Span]) -> PaddedBatch:
    size, device = cache.block_size, cache.data.device
    used = [-(-span.end // size) for span in spans]
    width, nobody = max(used), cache.num_blocks
    blocks = [span.table[:n] + [nobody] * (width - n) for span, n in zip(spans, used, strict=True)]
    return PaddedBatch(
        rows=torch.tensor([span.row for span in spans], device=device),
        blocks=torch.tensor(blocks, device=device).view(-1),
        ends=torch.tensor([[span.end] for span in spans], device=device),
        masks={},
    )


def _single_row(cache: KVCache, span: Span, *, exact: bool) -> SingleRow:
    """A view where the blocks are consecutive, else the slots to gather. Rounding reads zeros, or slots of the
    sequence's own last block, which were zeroed when the block was fresh."""
    size = cache.block_size
    keys = rounded(span.end, exact=exact)
    used = -(-span.end // size)
    first = run_start(span.table, used)
    if first is not None and keys <= used * size:
        return SingleRow(span, keys, first * size, None)
    blocks = torch.tensor(span.table[:used]) * size
    slots = (blocks[:, None] + torch.arange(size)).view(-1)[: span.end]
    slots = functional.pad(slots, (0, keys - span.end), value=cache.zero_slot)
    return SingleRow(span, keys, 0, slots.to(cache.data.device))


TILE_ROWS: Final = 128  # positions of a tile: rows that are computed together where masks or bits matter. On some
# processors (AMD EPYC) the library behind torch's kernel splits sums over 208 keys and more in two
KEY_MULTIPLE: Final = 16  # keys that fill a vector of the processor


class MaskTemplates:
    """Additive causal masks, cut as views from one template per window.

    A mask depends only on (key position - query position), so the mask of any rows over any keys is a rectangle of
    one large template. The template grows by doubling, up to the longest context that was seen.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._templates: dict[int | None, Tensor] = {}

    def mask(self, start: int, rows: int, keys: int, window: int | None) -> Tensor:
        """(rows, keys) view: 0 where the query at start + row attends to the key, -inf elsewhere.

        window  a query attends to the last `window` positions, its own included; None is all of them
        """
        template = self._templates.get(window)
        reach = template.shape[1] - TILE_ROWS - KEY_MULTIPLE if template is not None else 0
        if template is None or start > reach:
            reach = max(2 * reach, start, 1024)
            template = self._templates[window] = self._make(reach, window)
        shift = reach - start
        return template[:rows, shift : shift + keys]

    def _make(self, reach: int, window: int | None) -> Tensor:
        width = reach + TILE_ROWS + KEY_MULTIPLE
        distance = torch.arange(width, device=self._device) - torch.arange(TILE_ROWS, device=self._device)[:, None]
        hidden = distance > reach
        if window is not None:
            hidden |= distance <= reach - window
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(hidden, float("-inf"))
