"""Attention of one step over the paged cache: writes the step's keys and values, then reads whole prefixes.

On the CPU attention.c reads (engine/compute/paged.py), and where it cannot be compiled, or on another device,
engine/compute/reference.py. Our own fused forward calls StepAttention directly. transformers' models call
`paged_attention` by name, which is registered here: everything that a model asks of its attention is either done
or refused; an argument whose meaning is not implemented is never ignored. Knows nothing about tokens or scheduling:
engine/compute/batch.py says which rows belong to which blocks, engine/compute/kv_cache.py holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from engine.compute.batch import Batch, Span, consecutive
from engine.compute.kv_cache import KVCache
from engine.compute.paged import MAX_ROWS, PagedAttention, can_attend
from engine.compute.reference import ReferenceAttention
from engine.sequence import StepGivenUp


class StepAttention:
    """Attention of one step over the paged cache. Made once for a step, used by every layer of it."""

    def __init__(self, cache: KVCache, batch: Batch, unwanted: Callable[[], bool] | None = None) -> None:
        """`unwanted` is asked several times in every layer whether the step is to be given up."""
        self.cache, self.unwanted = cache, unwanted
        self.slots = torch.from_numpy(batch.slots).to(cache.data.device)
        self._run = consecutive(batch.slots)
        self._spans = batch.spans
        # Of the rows that a model is asked for, the last so many are not among the last of a work.
        self.num_scored = len(batch.scored)
        self.adapters = None if batch.adapters is None else torch.from_numpy(batch.adapters)
        self._plan: PagedAttention | ReferenceAttention | None = None  # made for the first layer

    @property
    def asks_every_row(self) -> bool:
        """Whether the logits of every row of the step are wanted: a step of decodes."""
        return all(span.count == span.asked for span in self._spans)

    def asked_rows(self) -> StepAttention:
        """The same step, where only rows whose logits are wanted ask: what a model's last layer needs."""
        other = object.__new__(StepAttention)
        vars(other).update(vars(self))
        rows = accumulate((span.asked for span in self._spans), initial=0)
        other._spans = [
            Span(row, span.asked, span.end - span.asked, span.table, span.asked)
            for row, span in zip(rows, self._spans, strict=False)
        ]
        other._plan = None
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
        if self.unwanted is not None and self.unwanted():
            raise StepGivenUp

    def write(self, layer: int, key_value: Tensor) -> None:
        """Stores the step's keys and values of one layer.

        key_value  (rows, 2, num_kv_heads, head_dim); rows beyond the step's own are padding and left out
        """
        self.go_on()
        rows = len(self.slots)
        if len(key_value) > rows:
            key_value = key_value[:rows]
        key_value, slots = self.cache.encode(key_value), self.cache.layers[layer]
        if self._run is not None:
            slots.narrow(0, self._run, rows).copy_(key_value)
        else:
            slots.index_copy_(0, self.slots, key_value)

    def plan(self, num_heads: int) -> PagedAttention | ReferenceAttention:
        """What attends, in every layer."""
        if self._plan is None:
            cache, spans = self.cache, self._spans
            compiled = can_attend(cache) and num_heads <= MAX_ROWS * cache.shape.num_kv_heads
            self._plan = PagedAttention(cache, spans, num_heads) if compiled else ReferenceAttention(cache, spans)
        return self._plan

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float | None = None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Each row over its own prefix, itself included.

        query    (rows, num_heads, head_dim), the last two contiguous; rows beyond the step's own are padding
        window   a row attends to its last `window` positions, its own included; None is all of them
        cap      scores s become cap * tanh(s / cap); None leaves them as they are
        Returns  (rows, num_heads, head_dim), contiguous; padding rows are zero
        """
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        end = self._spans[-1].row + self._spans[-1].count
        if end < len(out):
            out[end:] = 0
        plan, scale = self.plan(query.shape[1]), query.shape[2] ** -0.5 if scale is None else scale
        plan.attend(layer, query, scale, window, cap, out)
        return out


ATTENTION_NAME: Final = "kvasir_paged"


class UnsupportedAttentionError(ValueError):
    """The model asks for attention that is not implemented here. The message says what."""


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
    softcap: float | None = None,
    kvasir: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' models call (transformers.AttentionInterface).

    query       (1, num_heads, rows, head_dim)
    key, value  (1, num_kv_heads, rows, head_dim); values may be narrower than keys (latent attention)
    softcap     scores s become softcap * tanh(s / softcap)
    kvasir      the StepAttention of this step, or a Probe
    Returns     (1, rows, num_heads, head_dim of the values)
    Raises UnsupportedAttentionError for any argument with a meaning that is not implemented: nothing is ignored.
    """
    _refuse_unknown(others, attention_mask)
    if kvasir is None:
        raise UnsupportedAttentionError("its implementation does not hand keyword arguments on to the attention")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttentionError(f"{type(module).__name__} does not know its layer's number")
    width, narrower = value.shape[-1], key.shape[-1] - value.shape[-1]
    if query.shape[0] != 1 or key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1] or narrower < 0:
        raise UnsupportedAttentionError(
            f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)}"
        )
    if softcap is not None and not softcap > 0:
        raise UnsupportedAttentionError(f"its scores are capped at {softcap}")
    if narrower:  # the cache has one width for both; zeros change no sum
        value = functional.pad(value, (0, narrower))
    key_value = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    rows_first = query[0].transpose(0, 1).contiguous()
    answer = kvasir.layer(layer, rows_first, key_value, scaling, sliding_window, softcap)
    return answer[None, ..., :width], None


def _refuse_unknown(others: dict[str, Any], attention_mask: Tensor | None) -> None:
    if attention_mask is not None:
        raise UnsupportedAttentionError("it builds an attention mask of its own")
    if others.get("is_causal") is False:
        raise UnsupportedAttentionError("its attention is not causal")
    for name, value in others.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise UnsupportedAttentionError(f"its attention takes {name!r}, which is not implemented")


AttentionInterface.register(ATTENTION_NAME, paged_attention)
