"""The attention function that transformers' models call by name, over the paged cache.

Registered with transformers when imported. Everything a model asks of its attention is either done or refused: an
argument whose meaning is not implemented is never ignored. engine/compute/attention.py does the work;
engine/compute/probe.py finds out at load what a model asks for.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from engine.compute.capped import MAX_CAP

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
    if softcap is not None and not 0 < softcap <= MAX_CAP:
        raise UnsupportedAttentionError(f"its scores are capped at {softcap}, which should be at most {MAX_CAP}")
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
