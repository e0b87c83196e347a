"""The proof, at load, that a model under our attention computes what it computes under transformers' own.

First the model runs alone, with transformers' attention, on two short texts. Then the same texts run through the paged
cache as a step would have them: both in one flat batch, cut in the middle, blocks out of order. The logits must agree.
That finds models that ignore position ids, keep a state between tokens, mix the rows of a flat batch, bias their
attention by themselves, or number their layers oddly, without a list of such models. What a short text cannot show
(windows) is read from the arguments the model hands to its attention. Its caller is engine/compute/model.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.attention import ATTENTION_NAME, StepAttention, UnsupportedAttentionError
from engine.compute.batch import make_batch
from engine.compute.kv_cache import CacheShape, KVCache
from engine.compute.quantized_layers import QuantizedLinear
from engine.protocol import Sampling
from engine.sequence import Sequence, Step, Work

TEXT_LENGTHS: Final = (13, 6)  # a start has to run them three times
CUTS: Final = (9, 3)
BLOCK_SIZE: Final = 4
TOLERANCE: Final = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # of the norm of the logits
ROUNDED: Final = 0.1  # where products round activations to 8 bits, one in the last bit of a float may become one in 256


@dataclass(slots=True)
class _Observer:
    """Stands in for StepAttention on one text: plain attention that writes down what it was asked."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def layer(
        self,
        layer: int,
        query: Tensor,
        key_value: Tensor,
        scale: float | None = None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedAttentionError(f"layer {layer} attends more than once")
        self.shapes[layer] = (key_value.shape[2], key_value.shape[3])
        self.windows[layer] = window
        self.dtype = key_value.dtype
        key, value = (part.transpose(0, 1)[None] for part in key_value.unbind(1))
        answer = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return answer[0].transpose(0, 1)


def observe(module: Any, context_tokens: int) -> tuple[CacheShape, list[int | None], list[Tensor]]:
    """Runs the model under transformers' attention, and once under an observer.

    Returns the shape of its cache, the window of each layer (None where it reaches the whole context), and the expected
    logits of the last row of each text, (vocab_size,) each.
    Raises UnsupportedAttentionError for what our attention cannot express. The module is left under ATTENTION_NAME.
    """
    texts = _texts(module)
    expected = [module(input_ids=text[None], use_cache=False).logits[0, -1].float() for text in texts]
    module.set_attn_implementation(ATTENTION_NAME)
    if module.config.get_text_config()._attn_implementation != ATTENTION_NAME:  # noqa: SLF001 - no public getter
        raise UnsupportedAttentionError("its implementation does not take a foreign attention function")
    observer = _Observer()
    text = texts[-1]  # the shortest: of this one only what the layers ask for is looked at
    positions = torch.arange(len(text), device=text.device)
    module(input_ids=text[None], position_ids=positions[None], use_cache=False, kvasir=observer)
    config = module.config.get_text_config()
    layers = config.num_hidden_layers
    if sorted(observer.shapes) != list(range(layers)):
        raise UnsupportedAttentionError(f"{len(observer.shapes)} of its {layers} layers attend through the interface")
    if len(set(observer.shapes.values())) != 1:
        raise UnsupportedAttentionError("its layers have keys of different shapes")
    _check_windows(config, observer.windows, context_tokens)
    asked = [observer.windows[layer] for layer in range(layers)]
    windows = [window if window is not None and window < context_tokens else None for window in asked]
    heads, head_dim = observer.shapes[0]
    return CacheShape(layers, heads, head_dim, observer.dtype), windows, expected


def _check_windows(config: Any, seen: dict[int, int | None], context_tokens: int) -> None:
    """A layer whose mask would be a window must say so to its attention, and one whose mask would not must not."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if getattr(config, "attention_chunk_size", None) and config.attention_chunk_size < context_tokens:
        raise UnsupportedAttentionError("attention in chunks is not implemented")
    kinds = getattr(config, "layer_types", None)
    for layer, asked in seen.items():
        declared = window if kinds is None or kinds[layer] == "sliding_attention" else None
        effective = (declared or context_tokens, asked or context_tokens)
        if min(effective[0], context_tokens) != min(effective[1], context_tokens):
            raise UnsupportedAttentionError(f"layer {layer} declares a window of {declared} and asks for {asked}")


def compare(
    forward: Callable[[Tensor, Tensor, StepAttention, Tensor], Tensor],
    shape: CacheShape,
    module: Any,
    expected: list[Tensor],
) -> None:
    """Runs the texts through the paged cache in two mixed steps; raises UnsupportedAttentionError on other logits."""
    texts = _texts(module)
    device = texts[0].device
    cache = KVCache(shape, num_blocks=16, block_size=BLOCK_SIZE, device=device)
    tables = array("i", [9, 3, 4, 11, 0, 7]), array("i", [1, 14, 2])
    sequences = [
        Sequence("probe", i, array("I", text.tolist()), len(text), [], Sampling(max_tokens=1), block_table=table)
        for i, (text, table) in enumerate(zip(texts, tables, strict=True))
    ]
    logits = torch.empty(0)
    for starts, ends in (((0, 0), CUTS), (CUTS, TEXT_LENGTHS)):
        work = [Work(s, a, b - a, samples=True) for s, a, b in zip(sequences, starts, ends, strict=True)]
        batch = make_batch(Step(work), BLOCK_SIZE)
        tokens, positions, rows = (torch.from_numpy(x).to(device) for x in (batch.tokens, batch.positions, batch.asked))
        logits = forward(tokens, positions, StepAttention(cache, batch), rows)
    if logits.shape != (len(texts), len(expected[0])):
        raise UnsupportedAttentionError(f"it returns logits of shape {tuple(logits.shape)} for {len(texts)} rows")
    rounds = any(isinstance(part, QuantizedLinear) for part in module.modules())
    tolerance = max(TOLERANCE[shape.dtype], ROUNDED * rounds)
    for got, want in zip(logits.float(), expected, strict=True):
        error = ((got - want).norm() / want.norm().clamp_min(1e-6)).item()
        if not error <= tolerance:
            raise UnsupportedAttentionError(
                f"with paged attention its logits are off by {error:.1%}: it attends in a way that is not implemented"
            )


def _texts(module: Any) -> list[Tensor]:
    """Token ids that look like noise and are the same at every start."""
    config = module.config.get_text_config()
    generator = torch.Generator().manual_seed(20)
    low, high = (10, config.vocab_size) if config.vocab_size > 20 else (0, config.vocab_size)
    return [torch.randint(low, high, (n,), generator=generator).to(module.device) for n in TEXT_LENGTHS]
