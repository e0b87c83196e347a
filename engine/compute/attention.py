"""Attention of one step over the paged cache: writes the step's keys and values, then reads whole prefixes.

Three files read, each where it can: on a processor with bfloat16 products the compiled attention of
engine/compute/paged.py, for layers whose scores are capped engine/compute/capped.py, and in all other cases
engine/compute/flash.py with torch's kernels. transformers' models arrive here through
engine/compute/attention_interface.py, our own fused forward directly. Knows nothing about tokens or scheduling:
engine/compute/batch.py says which rows belong to which blocks, engine/compute/kv_cache.py holds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.compute.batch import Batch, Span, consecutive
from engine.compute.capped import CappedAttention
from engine.compute.flash import FlashAttention
from engine.compute.kv_cache import KVCache
from engine.compute.masks import MaskTemplates
from engine.compute.paged import PagedAttention, can_attend
from engine.sequence import StepGivenUp


class StepAttention:
    """Attention of one step over the paged cache. Made once for a step, used by every layer of it."""

    def __init__(
        self, cache: KVCache, masks: MaskTemplates, batch: Batch, unwanted: Callable[[], bool] | None = None
    ) -> None:
        """`unwanted` is asked several times in every layer whether the step is to be given up."""
        self._cache, self._masks, self._unwanted = cache, masks, unwanted
        self._slots = torch.from_numpy(batch.slots).to(cache.data.device)
        self._run = consecutive(batch.slots)
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
            self._flash = FlashAttention(self._cache, self._masks, self._spans)

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
        return self._flash.attend(layer, query, scale, window)

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
