"""The paged cache of keys and values, and attention over it.

transformers' models call `paged_attention` by name through their attention interface; our own fused forward calls
`StepAttention.layer` itself. Both write the step's keys and values into the cache and then read whole prefixes from it.
Knows nothing about tokens or scheduling: engine/batch.py says which rows belong to which blocks, engine/runner.py owns
the cache.

In fp32 on the CPU the result of a row depends on that row's prefix alone, bit for bit: not on how a prefill was cut, on
what else is in the batch, or on whether the keys were computed now or long ago. Three things would break this in
torch's flash kernel: matrix products with fewer than ROW_MULTIPLE rows and key runs that do not fill whole vectors of
KEY_MULTIPLE, which are rounded up, and sums over more than TILE_ROWS keys that are cut here for one caller and there
for another, so keys are always cut at the beginning of the row's own tile. The tests hold it with torch.equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from engine.batch import Batch, Span, consecutive, run_start

ATTENTION_NAME: Final = "kvasir_paged"
TILE_ROWS: Final = 256  # positions of a tile: rows that are computed together where masks or bits matter
FOLD_ROWS: Final = 64  # up to here, rows of heads that share a key head are put together to fill the products
ROW_MULTIPLE: Final = 8
KEY_MULTIPLE: Final = 16
HERD_LEAST: Final = 3  # decodes that are worth a padded copy of their keys, which saves the calls of all but one
HERD_BYTES: Final = 256 << 10  # of keys and values of one sequence and layer; longer ones are quicker read in place
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
        self.layers = self.data.unbind(0)  # (slots, 2, num_kv_heads, head_dim) each
        self.blocks = self.data.view(shape.num_layers, num_blocks + 1, -1).unbind(0)  # (num_blocks + 1, elements) each
        self.zero_slot = num_blocks * block_size

    def zero(self, blocks: list[int]) -> None:
        """Zeroes whole blocks in all layers, so that what is masked out can never be a NaN somebody else left."""
        by_block = self.data.view(self.shape.num_layers, self.num_blocks + 1, -1)
        if run_start(blocks, len(blocks)) is not None:
            by_block[:, blocks[0] : blocks[-1] + 1].zero_()
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
class _Lone:
    """One sequence that attends by itself.

    keys, values  for each layer a (1, num_kv_heads, keys, head_dim) view, when the slots are consecutive; else empty
    index         (keys,) slots to gather, when they are not; else empty
    """

    span: Span
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    index: Tensor


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

    def __init__(self, cache: KVCache, masks: MaskTemplates, batch: Batch) -> None:
        self._cache, self._masks = cache, masks
        self._device = cache.data.device
        self._slots = torch.from_numpy(batch.slots).to(self._device)
        self._run = consecutive(batch.slots)
        self._exact = cache.data.dtype == torch.float32 and self._device.type == "cpu"
        self._split = not self._exact and self._device.type == "cpu"
        self._attend: Callable[..., Tensor] = _flash_cpu if self._device.type == "cpu" else _sdpa
        self._spans = batch.spans
        self._plan(batch.spans)

    @property
    def asks_every_row(self) -> bool:
        """Whether every row of the step is the last one of its work: a step of decodes."""
        return all(span.count == 1 for span in self._spans)

    def last_rows(self) -> StepAttention:
        """The same step, where only the last row of each work asks: what a model's last layer needs."""
        other = object.__new__(StepAttention)
        other._cache, other._masks, other._device = self._cache, self._masks, self._device
        other._slots, other._run, other._attend = self._slots, self._run, self._attend
        other._exact, other._split = self._exact, self._split
        other._spans = [Span(row, 1, span.end - 1, span.table) for row, span in enumerate(self._spans)]
        other._plan(other._spans)
        return other

    def layer(
        self, layer: int, query: Tensor, key_value: Tensor, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Writes the step's keys and values of one layer, then attends. Shapes as in `write` and `attend`."""
        self.write(layer, key_value)
        return self.attend(layer, query, scale, window)

    def write(self, layer: int, key_value: Tensor) -> None:
        """Stores the step's keys and values of one layer.

        key_value  (rows, 2, num_kv_heads, head_dim); rows beyond the step's own are padding and left out
        """
        slots, rows = self._cache.layers[layer], len(self._slots)
        if self._run is not None:
            slots[self._run : self._run + rows].copy_(key_value[:rows])
        else:
            slots.index_copy_(0, self._slots, key_value[:rows])

    def attend(self, layer: int, query: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
        """Each row over its own prefix, itself included.

        query    (rows, num_heads, head_dim), contiguous; rows beyond the step's own are padding
        window   a row attends to its last `window` positions, its own included; None is all of them
        Returns  (rows, num_heads, head_dim), contiguous; padding rows are zero
        """
        out = torch.empty_like(query)
        end = self._spans[-1].row + self._spans[-1].count
        if end < len(out):
            out[end:] = 0
        for herd in self._herds:
            self._attend_herd(herd, layer, query, scale, window, out)
        for lone in self._lone:
            if lone.keys:
                key, value = lone.keys[layer], lone.values[layer]
            else:
                gathered = self._cache.layers[layer].index_select(0, lone.index)
                key, value = gathered.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
            if lone.span.count == 1:
                self._attend_row(lone.span, query, key, value, scale, window, out)
            else:
                for positions in self._tiles(lone.span, window):
                    self._attend_tile(lone.span, positions, query, key, value, scale, window, out)
        return out

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

    def _attend_row(
        self,
        span: Span,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        out: Tensor,
    ) -> None:
        """One row: the query heads that share a key head become the rows of one product."""
        kv_heads, _, head_dim = key.shape[1:]
        group = query.shape[1] // kv_heads
        folded = self._fold(query[span.row : span.row + 1], kv_heads)
        if self._exact:
            answer = self._attend_exact(folded, key, value, (span.start, 1), scale, window)
        else:
            if window is not None and window < span.end:
                key, value = key[:, :, span.end - window :], value[:, :, span.end - window :]
            answer = self._attend(folded, key, value, None, scale)
        out[span.row].view(kv_heads, group, head_dim).copy_(answer[0, :, :group])

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
            run = self._cache.data[:, first * size : first * size + keys]
            key, value = run.permute(2, 0, 3, 1, 4).unsqueeze(2).unbind(0)
            return _Lone(span, key.unbind(0), value.unbind(0), self._slots[:0])
        blocks = torch.tensor(span.table[:used]) * size
        slots = (blocks[:, None] + torch.arange(size)).view(-1)[: span.end]
        slots = functional.pad(slots, (0, keys - span.end), value=self._cache.zero_slot)
        return _Lone(span, (), (), slots.to(self._device))


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
