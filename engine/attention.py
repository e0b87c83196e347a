"""The paged cache of keys and values, and attention over it.

transformers' models call `paged_attention` by name through their attention interface; our own fused forward calls
`StepAttention.layer` itself. Both write the step's keys and values into the cache and then read whole prefixes from it.
Knows nothing about tokens or scheduling: engine/batch.py says which rows belong to which blocks, engine/runner.py owns
the cache.

In fp32 on the CPU the result of a row depends on that row's prefix alone, bit for bit: not on how a prefill was cut, on
what else is in the batch, or on whether the keys were computed now or long ago. Two things would break this in torch's
flash kernel, and both are rounded away: matrix products with fewer than ROW_MULTIPLE rows, and key runs that do not
fill whole vectors of KEY_MULTIPLE. The tests hold it with torch.equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from engine.batch import Batch, Span, run_start

ATTENTION_NAME: Final = "kvasir_paged"
TILE_ROWS: Final = 256  # a prefill is computed in tiles of this many rows, to leave out what the causal mask hides
ROW_MULTIPLE: Final = 8
KEY_MULTIPLE: Final = 16
_FLASH_CPU: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001


class UnsupportedAttentionError(ValueError):
    """The model asks for attention that is not implemented here. The message says what."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token's keys and values take."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of all blocks of all layers.

    data  (num_layers, (num_blocks + 1) * block_size, 2, num_kv_heads, head_dim)  keys at [:, :, 0], values at [:, :, 1]

    The extra block at the end belongs to nobody and stays zero: padding is read from it.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape, self.num_blocks, self.block_size = shape, num_blocks, block_size
        slots = (num_blocks + 1) * block_size
        size = (shape.num_layers, slots, 2, shape.num_kv_heads, shape.head_dim)
        self.data = torch.zeros(size, dtype=shape.dtype, device=device)  # calloc: memory is taken when it is touched
        self.layers = list(self.data.unbind(0))
        self.zero_slot = num_blocks * block_size

    def zero(self, blocks: list[int]) -> None:
        """Zeroes whole blocks in all layers, so that what is masked out can never be a NaN somebody else left."""
        by_block = self.data.view(self.shape.num_layers, self.num_blocks + 1, self.block_size, -1)
        if len(blocks) == 1:
            by_block[:, blocks[0]].zero_()
        else:
            by_block.index_fill_(1, torch.tensor(blocks, device=self.data.device), 0)


def count_blocks(shape: CacheShape, block_size: int, budget_bytes: int) -> int:
    """Blocks that fit into a budget, besides the one that padding is read from. May be zero or less."""
    return budget_bytes // (shape.token_bytes * block_size) - 1


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


@dataclass(slots=True)
class _Source:
    """Where one sequence's keys and values are read from.

    views  one (keys, 2, num_kv_heads, head_dim) view for each layer, when the slots are consecutive; else empty
    index  (keys,) slots to gather, when they are not; else empty
    """

    views: tuple[Tensor, ...]
    index: Tensor


class StepAttention:
    """Attention of one step over the paged cache. Made once for a step, used by every layer of it."""

    def __init__(self, cache: KVCache, masks: MaskTemplates, batch: Batch) -> None:
        device = cache.data.device
        self._cache, self._masks, self._batch = cache, masks, batch
        self._slots = torch.from_numpy(batch.slots).to(device)
        self._exact = cache.data.dtype == torch.float32 and device.type == "cpu"
        self._attend: Callable[..., Tensor] = _flash_cpu if device.type == "cpu" else _sdpa
        self._sources = [self._source(span) for span in batch.spans]

    def layer(
        self, layer: int, query: Tensor, key_value: Tensor, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Writes the step's keys and values of one layer, then attends.

        query      (rows, num_heads, head_dim)             rows beyond the batch's are padding
        key_value  (rows, 2, num_kv_heads, head_dim)
        Returns    (rows, num_heads, head_dim), contiguous; padding rows are zero
        """
        rows = self._batch.num_tokens
        self._cache.layers[layer].index_copy_(0, self._slots, key_value[:rows])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[rows:] = 0
        for span, source in zip(self._batch.spans, self._sources, strict=True):
            kv = source.views[layer] if source.views else self._cache.layers[layer].index_select(0, source.index)
            if span.count == 1:
                self._decode(span, query, kv, scale, window, out)
            else:
                for start in range(span.start, span.end, TILE_ROWS):
                    self._tile(span, start, min(start + TILE_ROWS, span.end), query, kv, scale, window, out)
        return out

    def _decode(
        self, span: Span, query: Tensor, kv: Tensor, scale: float | None, window: int | None, out: Tensor
    ) -> None:
        """One row: the query heads that share a key head become the rows of one product."""
        heads, head_dim = query.shape[1:]
        kv_heads = kv.shape[2]
        group = heads // kv_heads
        first, mask = 0, None
        if self._exact:
            mask = self._masks.mask(span.start, 1, kv.shape[0], window)
        elif window is not None:
            first = max(0, span.end - window)
        folded = query[span.row].view(1, kv_heads, group, head_dim)
        if self._exact and group % ROW_MULTIPLE:
            folded = functional.pad(folded, (0, 0, 0, -group % ROW_MULTIPLE))
        key, value = kv[first:].permute(1, 2, 0, 3).unbind(0)
        answer = self._attend(folded, key[None], value[None], mask, scale)
        out[span.row].view(kv_heads, group, head_dim).copy_(answer[0, :, :group])

    def _tile(
        self,
        span: Span,
        start: int,
        end: int,
        query: Tensor,
        kv: Tensor,
        scale: float | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Rows at positions start .. end - 1 over keys 0 .. end - 1, each row up to itself."""
        heads, head_dim = query.shape[1:]
        kv_heads = kv.shape[2]
        group, rows = heads // kv_heads, end - start
        first_row = span.row + start - span.start
        keys = self._rounded(end) if self._exact else end
        tile = query[first_row : first_row + rows].view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        mask = self._masks.mask(start, rows, keys, window)
        if self._exact and rows % ROW_MULTIPLE:
            padded = rows + -rows % ROW_MULTIPLE
            tile = functional.pad(tile, (0, 0, 0, padded - rows))
            mask = self._masks.mask(start, padded, keys, window)
        key, value = (
            part.unsqueeze(1).expand(kv_heads, group, keys, head_dim) for part in kv[:keys].permute(1, 2, 0, 3)
        )
        answer = self._attend(tile, key, value, mask, scale)
        target = out[first_row : first_row + rows].view(rows, kv_heads, group, head_dim)
        target.copy_(answer[:, :, :rows].permute(2, 0, 1, 3))

    def _rounded(self, keys: int) -> int:
        return keys + -keys % KEY_MULTIPLE

    def _source(self, span: Span) -> _Source:
        """A view where the blocks are consecutive, else the slots to gather. Rounding reads zeros, or slots of the
        sequence's own last block, which were zeroed when the block was fresh."""
        size = self._cache.block_size
        keys = self._rounded(span.end) if self._exact else span.end
        used = -(-span.end // size)
        first = run_start(span.table, used)
        if first is not None and keys <= used * size:
            base = first * size
            return _Source(self._cache.data[:, base : base + keys].unbind(0), self._slots[:0])
        blocks = torch.tensor(span.table[:used]) * size
        slots = (blocks[:, None] + torch.arange(size)).view(-1)[: span.end]
        slots = functional.pad(slots, (0, keys - span.end), value=self._cache.zero_slot)
        return _Source((), slots.to(self._cache.data.device))


def _flash_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's flash kernel for the CPU, past the dispatcher of scaled_dot_product_attention that would pick it too."""
    out: Tensor = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scale)[0]
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


# ---------------------------------------------------------------------------------------------------------------------
# transformers' side
# ---------------------------------------------------------------------------------------------------------------------

_HARMLESS = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}
)
"""Arguments that models pass along and that change nothing here; `is_causal=False` is looked at separately."""


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kvasir: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' models call (transformers.AttentionInterface).

    query       (1, num_heads, rows, head_dim)
    key, value  (1, num_kv_heads, rows, head_dim)
    kvasir      the StepAttention of this step, or a Probe
    Returns     (1, rows, num_heads, head_dim)
    Raises UnsupportedAttentionError for any argument with a meaning that is not implemented: nothing is ignored.
    """
    _refuse_unknown(others, attention_mask)
    if kvasir is None:
        raise UnsupportedAttentionError("its implementation does not hand keyword arguments on to the attention")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttentionError(f"{type(module).__name__} does not know its layer's number")
    if query.shape[0] != 1 or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise UnsupportedAttentionError(
            f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)}"
        )
    key_value = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    return kvasir.layer(layer, query[0].transpose(0, 1).contiguous(), key_value, scaling, sliding_window)[None], None


def _refuse_unknown(others: dict[str, Any], attention_mask: Tensor | None) -> None:
    if attention_mask is not None:
        raise UnsupportedAttentionError("it builds an attention mask of its own")
    if others.get("is_causal") is False:
        raise UnsupportedAttentionError("its attention is not causal")
    for name, value in others.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise UnsupportedAttentionError(f"its attention takes {name!r}, which is not implemented")


AttentionInterface.register(ATTENTION_NAME, paged_attention)
