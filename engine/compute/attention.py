"""Attention of one step over the paged cache: writes the step's keys and values, then reads whole prefixes.

On a processor with bfloat16 products the compiled attention of engine/compute/paged.py does the reading in that dtype;
in all other cases torch's operations do. Layers whose scores are capped go to engine/compute/capped.py. transformers'
models arrive here through engine/compute/attention_interface.py, our own fused forward directly. Knows nothing about
tokens or scheduling: engine/compute/batch.py says which rows belong to which blocks, engine/compute/kv_cache.py holds
them.

In fp32 on the CPU the result of a row depends on that row's prefix alone, bit for bit: not on how a prefill was cut, on
what else is in the batch, or on whether the keys were computed now or long ago. Three things would break this in
torch's flash kernel: matrix products with fewer than ROW_MULTIPLE rows and key runs that do not fill whole vectors of
KEY_MULTIPLE, which are rounded up, and sums over more than TILE_ROWS keys that are cut here for one caller and there
for another, so keys are always cut at the beginning of the row's own tile. The tests hold it with torch.equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.batch import Batch, Span, consecutive, run_start
from engine.compute.capped import CappedAttention
from engine.compute.kv_cache import KVCache
from engine.compute.masks import KEY_MULTIPLE, TILE_ROWS, MaskTemplates
from engine.compute.paged import PagedAttention, can_attend
from engine.sequence import StepGivenUp

FOLD_ROWS: Final = 64  # up to here, rows of heads that share a key head are put together to fill the products
ROW_MULTIPLE: Final = 8
HERD_LEAST: Final = 3  # decodes that are worth a padded copy of their keys, which saves the calls of all but one
HERD_BYTES: Final = 256 << 10  # of keys and values of one sequence and layer; longer ones are quicker read in place
_FLASH_CPU: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001


@dataclass(slots=True)
class _Lone:
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
class _Herd:
    """Decodes of about the same short length, which attend in one call over a padded copy of their blocks.

    rows    (num_rows,)                rows of the batch
    blocks  (num_rows * num_blocks,)   blocks to gather; padding is the block that belongs to nobody
    ends    (num_rows, 1)              keys of each row
    """

    rows: Tensor
    blocks: Tensor
    ends: Tensor
    masks: dict[int | None, Tensor]


class StepAttention:
    """Attention of one step over the paged cache. Made once for a step, used by every layer of it."""

    def __init__(
        self, cache: KVCache, masks: MaskTemplates, batch: Batch, unwanted: Callable[[], bool] | None = None
    ) -> None:
        """`unwanted` is asked several times in every layer whether the step is to be given up."""
        self._cache, self._masks, self._unwanted = cache, masks, unwanted
        self._device = cache.data.device
        self._slots = torch.from_numpy(batch.slots).to(self._device)
        self._run = consecutive(batch.slots)
        self._exact = cache.data.dtype == torch.float32 and self._device.type == "cpu"
        self._split = not self._exact and self._device.type == "cpu"
        self._attend: Callable[..., Tensor] = _flash_cpu if self._device.type == "cpu" else _sdpa
        self._spans = batch.spans
        # Of the rows that a model is asked for, the last so many are not the last of a work.
        self.num_scored = len(batch.scored)
        self._compiled = can_attend(cache)
        self._prepare()

    def _prepare(self) -> None:
        """What depends on the spans."""
        self._paged: PagedAttention | None = None
        self._capped: CappedAttention | None = None
        if not self._compiled:
            self._plan(self._spans)

    @property
    def asks_every_row(self) -> bool:
        """Whether every row of the step is the last one of its work: a step of decodes."""
        return all(span.count == 1 for span in self._spans)

    def last_rows(self) -> StepAttention:
        """The same step, where only the last row of each work asks: what a model's last layer needs."""
        other = object.__new__(StepAttention)
        vars(other).update(vars(self))
        other._spans = [Span(row, 1, span.end - 1, span.table) for row, span in enumerate(self._spans)]
        other._prepare()
        return other

    def layer(
        self,
        layer: int,
        query: Tensor,
        key_value: Tensor,
        scale: float | None = None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Writes the step's keys and values of one layer, then attends. Shapes as in `write` and `attend`."""
        self.write(layer, key_value)
        return self.attend(layer, query, scale, window, cap)

    def go_on(self) -> None:
        """Raises StepGivenUp if the step is not wanted any more. Asked wherever some milliseconds have passed."""
        if self._unwanted is not None and self._unwanted():
            raise StepGivenUp

    def write(self, layer: int, key_value: Tensor) -> None:
        """Stores the step's keys and values of one layer.

        key_value  (rows, 2, num_kv_heads, head_dim); rows beyond the step's own are padding and left out
        """
        self.go_on()
        rows = len(self._slots)
        if len(key_value) > rows:
            key_value = key_value[:rows]
        slots = self._cache.layers[layer]
        if self._run is not None:
            slots.narrow(0, self._run, rows).copy_(key_value)
        else:
            slots.index_copy_(0, self._slots, key_value)

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float | None = None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Each row over its own prefix, itself included.

        query    (rows, num_heads, head_dim), contiguous; rows beyond the step's own are padding
        window   a row attends to its last `window` positions, its own included; None is all of them
        cap      scores s become cap * tanh(s / cap); None leaves them as they are
        Returns  (rows, num_heads, head_dim), contiguous; padding rows are zero
        """
        if cap is not None:
            return self._attend_capped(layer, query, scale, window, cap)
        if self._compiled:
            return self._attend_compiled(layer, query, scale, window)
        if len(query) == 1 and self._lone:
            return self._attend_row(self._lone[0], layer, query, scale, window).reshape(query.shape)
        out = torch.empty_like(query)
        end = self._spans[-1].row + self._spans[-1].count
        if end < len(out):
            out[end:] = 0
        for herd in self._herds:
            self._attend_herd(herd, layer, query, scale, window, out)
        for lone in self._lone:
            if lone.span.count == 1:
                row = slice(lone.span.row, lone.span.row + 1)
                answer = self._attend_row(lone, layer, query[row], scale, window)
                out[row].view(answer.shape).copy_(answer)
            else:
                key, value = self._read(lone, layer)
                for positions in self._tiles(lone.span, window):
                    self._attend_tile(lone.span, positions, query, key, value, scale, window, out)
        return out

    def _attend_capped(self, layer: int, query: Tensor, scale: float | None, window: int | None, cap: float) -> Tensor:
        if self._capped is None:
            self._capped = CappedAttention(self._cache, self._spans)
        out = torch.zeros_like(query)
        self._capped.attend(layer, query, query.shape[2] ** -0.5 if scale is None else scale, window, cap, out)
        return out

    def _attend_compiled(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        num_heads, head_dim = query.shape[1:]
        if self._paged is None:
            self._paged = PagedAttention(self._cache, self._spans, num_heads)
        out = query.new_empty(query.shape)
        end = self._spans[-1].row + self._spans[-1].count
        if end < len(out):
            out[end:] = 0
        self._paged.attend(layer, query, head_dim**-0.5 if scale is None else scale, window, out)
        return out

    def _read(self, lone: _Lone, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, (1, num_kv_heads, keys, head_dim) each."""
        cache = self._cache
        if lone.index is None:
            key, value = cache.keys[layer], cache.values[layer]
            return key.narrow(2, lone.first, lone.keys), value.narrow(2, lone.first, lone.keys)
        gathered = cache.layers[layer].index_select(0, lone.index)
        key, value = gathered.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        return key, value

    # -- one call each ------------------------------------------------------------------------------------------------

    def _attend_herd(
        self, herd: _Herd, layer: int, query: Tensor, scale: float | None, window: int | None, out: Tensor
    ) -> None:
        """Many single rows: their blocks side by side, padded to the longest, the padding masked."""
        num_rows = len(herd.rows)
        heads, head_dim = query.shape[1:]
        blocks = self._cache.blocks[layer].index_select(0, herd.blocks)
        kv_heads = self._cache.shape.num_kv_heads
        key, value = blocks.view(num_rows, -1, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mask = herd.masks.get(window)
        if mask is None:
            mask = herd.masks[window] = self._herd_mask(herd, key.shape[2], window)
        folded = self._fold(query.index_select(0, herd.rows), kv_heads)
        answer = self._attend(folded, key, value, mask, scale)
        out.index_copy_(0, herd.rows, answer[:, :, : heads // kv_heads].reshape(num_rows, heads, head_dim))

    def _attend_row(self, lone: _Lone, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """One row, (1, num_heads, head_dim): the query heads that share a key head become the rows of one product.

        Returns (1, num_kv_heads, group, head_dim).
        """
        key, value = self._read(lone, layer)
        end, kv_heads = lone.span.end, key.shape[1]
        folded = self._fold(query, kv_heads)
        if self._exact:
            answer = self._attend_exact(folded, key, value, (lone.span.start, 1), scale, window)
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
        keys = self._rounded(end)
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
            return recent  # type: ignore[no-any-return]
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

    # -- the plan of the step -----------------------------------------------------------------------------------------

    def _plan(self, spans: list[Span]) -> None:
        """Who attends alone and who in a herd."""
        herds: dict[int, list[Span]] = {}
        alone: list[Span] = []
        longest = HERD_BYTES // max(1, self._cache.shape.token_bytes // self._cache.shape.num_layers)
        if self._exact:
            longest = min(longest, TILE_ROWS)
        for span in spans:
            if span.count == 1 and span.end <= longest and self._cache.block_size % KEY_MULTIPLE == 0:
                herds.setdefault((span.end - 1).bit_length(), []).append(span)
            else:
                alone.append(span)
        for size, herd in list(herds.items()):
            if len(herd) < HERD_LEAST:
                alone += herds.pop(size)
        self._herds = [self._herd(herd) for herd in herds.values()]
        self._lone = [self._source(span) for span in alone]

    def _rounded(self, keys: int) -> int:
        return keys + -keys % KEY_MULTIPLE if self._exact else keys

    def _herd(self, spans: list[Span]) -> _Herd:
        size = self._cache.block_size
        used = [-(-span.end // size) for span in spans]
        width, nobody = max(used), self._cache.num_blocks
        blocks = [span.table[:n] + [nobody] * (width - n) for span, n in zip(spans, used, strict=True)]
        return _Herd(
            rows=torch.tensor([span.row for span in spans], device=self._device),
            blocks=torch.tensor(blocks, device=self._device).view(-1),
            ends=torch.tensor([[span.end] for span in spans], device=self._device),
            masks={},
        )

    def _herd_mask(self, herd: _Herd, keys: int, window: int | None) -> Tensor:
        """(num_rows, 1, 1, keys) additive."""
        position = torch.arange(keys, device=self._device)
        hidden = position >= herd.ends
        if window is not None:
            hidden |= position < herd.ends - window
        mask = torch.zeros(hidden.shape, dtype=self._cache.data.dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _source(self, span: Span) -> _Lone:
        """A view where the blocks are consecutive, else the slots to gather. Rounding reads zeros, or slots of the
        sequence's own last block, which were zeroed when the block was fresh."""
        size = self._cache.block_size
        keys = self._rounded(span.end)
        used = -(-span.end // size)
        first = run_start(span.table, used)
        if first is not None and keys <= used * size:
            return _Lone(span, keys, first * size, None)
        blocks = torch.tensor(span.table[:used]) * size
        slots = (blocks[:, None] + torch.arange(size)).view(-1)[: span.end]
        slots = functional.pad(slots, (0, keys - span.end), value=self._cache.zero_slot)
        return _Lone(span, keys, 0, slots.to(self._device))


def _flash_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's flash kernel for the CPU, past the dispatcher of scaled_dot_product_attention that would pick it too."""
    out: Tensor = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scale)[0]
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
