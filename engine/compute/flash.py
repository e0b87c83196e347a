"""Attention of one step with torch's kernels: flash on the CPU, what scaled_dot_product_attention picks elsewhere.

In fp32 on the CPU the result of a row depends on that row's prefix alone, bit for bit: not on how a prefill was cut, on
what else is in the batch, or on whether the keys were computed now or long ago. Three things would break this in
torch's flash kernel: matrix products with fewer than ROW_MULTIPLE rows and key runs that do not fill whole vectors of
KEY_MULTIPLE, which are rounded up, and sums over more than TILE_ROWS keys that are cut here for one caller and there
for another, so keys are always cut at the beginning of the row's own tile. The tests hold it with torch.equal.

engine/compute/flash_plan.py says once for a step which rows attend together; engine/compute/attention.py asks for each
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.batch import Span
from engine.compute.flash_plan import TILE_ROWS, MaskTemplates, PaddedBatch, SingleRow, make_plan, padded_mask, rounded
from engine.compute.kv_cache import KVCache
from engine.compute.linear import find_operator

FOLD_ROWS: Final = 64  # up to here, rows of heads that share a key head are put together to fill the products
ROW_MULTIPLE: Final = 8


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What the flash kernel computes, where this torch has none: (..., rows, head_dim), and the logarithm of each row's
    sum, (..., rows)."""
    scores = query.float() @ key.float().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    total = scores.logsumexp(-1)
    weight = (scores - total[..., None]).exp().nan_to_num(0.0)  # a row that sees nothing
    return (weight @ value.float()).to(query.dtype), total


_FLASH_CPU: Final[Callable[..., tuple[Tensor, Tensor]]] = (
    find_operator("aten::_scaled_dot_product_flash_attention_for_cpu") or _plain
)


class FlashAttention:
    """Attention of one step for every layer. See engine.compute.attention.StepAttention.attend for what comes in and
    goes out."""

    def __init__(self, cache: KVCache, masks: MaskTemplates, spans: list[Span]) -> None:
        self._cache, self._masks, self._spans = cache, masks, spans
        on_cpu = cache.data.device.type == "cpu"
        self._exact = on_cpu and cache.data.dtype == torch.float32
        self._split = on_cpu and not self._exact
        self._attend: Callable[..., Tensor] = _flash_cpu if on_cpu else _sdpa
        self._plan = make_plan(cache, spans, exact=self._exact)

    def attend(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """(rows, num_heads, head_dim), contiguous, as `query`; padding rows are zero."""
        if len(query) == 1 and self._plan.single:
            return self._attend_row(self._plan.single[0], layer, query, scale, window).reshape(query.shape)
        out = torch.empty_like(query)
        end = self._spans[-1].row + self._spans[-1].count
        if end < len(out):
            out[end:] = 0
        for batch in self._plan.padded:
            self._attend_padded(batch, layer, query, scale, window, out)
        for single in self._plan.single:
            if single.span.count == 1:
                row = slice(single.span.row, single.span.row + 1)
                answer = self._attend_row(single, layer, query[row], scale, window)
                out[row].view(answer.shape).copy_(answer)
            else:
                key, value = self._read(single, layer)
                for positions in self._tiles(single.span, window):
                    self._attend_tile(single.span, positions, query, key, value, scale, window, out)
        return out

    def _read(self, single: SingleRow, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, (1, num_kv_heads, keys, head_dim) each."""
        cache = self._cache
        if single.index is None:
            key, value = cache.keys[layer], cache.values[layer]
            return key.narrow(2, single.first, single.keys), value.narrow(2, single.first, single.keys)
        gathered = cache.layers[layer].index_select(0, single.index)
        key, value = gathered.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        return key, value

    # -- one call each ------------------------------------------------------------------------------------------------

    def _attend_padded(
        self, batch: PaddedBatch, layer: int, query: Tensor, scale: float | None, window: int | None, out: Tensor
    ) -> None:
        """Many single rows: their blocks side by side, padded to the longest, the padding masked."""
        num_rows = len(batch.rows)
        heads, head_dim = query.shape[1:]
        blocks = self._cache.blocks[layer].index_select(0, batch.blocks)
        kv_heads = self._cache.shape.num_kv_heads
        key, value = blocks.view(num_rows, -1, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mask = batch.masks.get(window)
        if mask is None:
            mask = batch.masks[window] = padded_mask(batch, key.shape[2], window, key.dtype)
        folded = self._fold(query.index_select(0, batch.rows), kv_heads)
        answer = self._attend(folded, key, value, mask, scale)
        out.index_copy_(0, batch.rows, answer[:, :, : heads // kv_heads].reshape(num_rows, heads, head_dim))

    def _attend_row(
        self, single: SingleRow, layer: int, query: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """One row, (1, num_heads, head_dim): the query heads that share a key head become the rows of one product.

        Returns (1, num_kv_heads, group, head_dim).
        """
        key, value = self._read(single, layer)
        end, kv_heads = single.span.end, key.shape[1]
        folded = self._fold(query, kv_heads)
        if self._exact:
            answer = self._attend_exact(folded, key, value, (single.span.start, 1), scale, window)
            return answer[:, :, : query.shape[1] // kv_heads]
        if window is not None and window < end:
            key, value = key[:, :, end - window :], value[:, :, end - window :]
        return self._attend(folded, key, value, None, scale)

    def _attend_tile(
        self,
        span: Span,
        positions: tuple[int, int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Rows at positions start .. end - 1 over keys 0 .. end - 1, each row up to itself."""
        start, end = positions
        kv_heads, head_dim = key.shape[1], key.shape[3]
        group, rows = query.shape[1] // kv_heads, end - start
        first = span.row + start - span.start
        shape = (rows, kv_heads, group, head_dim)
        tile = query[first : first + rows].view(shape).permute(1, 2, 0, 3)
        target = out[first : first + rows].view(shape).permute(1, 2, 0, 3)
        keys = rounded(end, exact=self._exact)
        spread = (kv_heads, group, keys, head_dim)  # the heads of a group read the same keys: no copy is made
        key, value = (part[0, :, :keys].unsqueeze(1).expand(spread) for part in (key, value))
        if self._exact:
            padding = -rows % ROW_MULTIPLE
            tile = functional.pad(tile, (0, 0, 0, padding)) if padding else tile
            answer = self._attend_exact(tile, key, value, (start, rows + padding), scale, window)
            target.copy_(answer[:, :, :rows])
        elif self._split and window is None:
            self._attend_split(tile, key, value, start, scale, target)
        else:
            target.copy_(self._attend(tile, key, value, self._masks.mask(start, rows, keys, window), scale))

    def _attend_exact(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: tuple[int, int],
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Rows of one tile, whose keys are always cut at the tile's first position, whoever asks.

        rows  position of the first row, and number of mask rows (1 serves all rows of the query)
        """
        start, count = rows
        base = start - start % TILE_ROWS
        mask = self._masks.mask(start - base, count, key.shape[2] - base, window)
        recent, recent_sum = _FLASH_CPU(
            query, key[:, :, base:], value[:, :, base:], 0.0, False, attn_mask=mask, scale=scale
        )
        if base == 0 or (window is not None and start - window >= base - 1):
            return recent
        past_mask = None if window is None else self._masks.mask(start, count, base, window)
        past, past_sum = _FLASH_CPU(
            query, key[:, :, :base], value[:, :, :base], 0.0, False, attn_mask=past_mask, scale=scale
        )
        if past_mask is not None:  # the kernel's sum over nothing is not -inf
            past_sum = past_sum.masked_fill(past_mask[:, -1] != 0, float("-inf"))
        share = torch.sigmoid((past_sum - recent_sum).double())  # in float32 its last bit depends on the tensor's size
        return torch.lerp(recent, past, share.float().unsqueeze(-1))

    def _attend_split(
        self, tile: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, target: Tensor
    ) -> None:
        """The past without a mask and the rest with a causal one, which is quicker than one call with a mask; merged by
        their sums (arXiv 2205.14135, section 3.1)."""
        recent, recent_sum = _FLASH_CPU(tile, key[:, :, start:], value[:, :, start:], 0.0, True, scale=scale)
        if start == 0:
            target.copy_(recent)
            return
        kv_heads, group, rows, head_dim = tile.shape
        asking, past_key, past_value = tile, key[:, :, :start], value[:, :, :start]
        if rows <= FOLD_ROWS:
            asking = tile.reshape(1, kv_heads, group * rows, head_dim)
            past_key, past_value = past_key[None, :, 0], past_value[None, :, 0]
        past, past_sum = _FLASH_CPU(asking, past_key, past_value, 0.0, False, scale=scale)
        share = torch.sigmoid(past_sum.view(recent_sum.shape) - recent_sum).to(tile.dtype).unsqueeze(-1)
        torch.lerp(recent, past.view(tile.shape), share, out=target)

    def _tiles(self, span: Span, window: int | None) -> Iterator[tuple[int, int]]:
        """First and last + 1 position of each tile; tiles begin at multiples of TILE_ROWS, where they matter at all."""
        if self._split and window is None:
            yield span.start, span.end
            return
        start = span.start
        while start < span.end:
            end = min(start - start % TILE_ROWS + TILE_ROWS, span.end)
            yield start, end
            start = end

    def _fold(self, query: Tensor, kv_heads: int) -> Tensor:
        """(rows, num_heads, head_dim) -> (rows, num_kv_heads, group, head_dim), the group padded where bits count."""
        rows, heads, head_dim = query.shape
        folded = query.view(rows, kv_heads, heads // kv_heads, head_dim)
        padding = -(heads // kv_heads) % ROW_MULTIPLE if self._exact else 0
        return functional.pad(folded, (0, 0, 0, padding)) if padding else folded


def _flash_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's flash kernel for the CPU, past the dispatcher of scaled_dot_product_attention that would pick it too."""
    out: Tensor = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scale)[0]
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
