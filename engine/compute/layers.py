"""All layers of a step in one call of layers.c, so that nothing comes between the products of a decode.

Serves float32 models whose weights are all in the order of forward.c or products.c, for steps without adapters;
engine/compute/fused.py computes the same, bit for bit, part by part where this cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from engine.compute.attention import StepAttention
from engine.compute.forward import PanelWeight
from engine.compute.kernel import (
    UNWANTED,
    Decoder,
    DecoderStep,
    Layer,
    Linear,
    find_parallel,
    load_library,
    load_products,
    supported,
)
from engine.compute.lora import AdaptedWeight
from engine.compute.paged import PagedAttention
from engine.compute.quantize import QuantizedWeight
from engine.compute.quantized_layers import JoinedWeight
from engine.sequence import StepGivenUp

TILE_ROWS: Final = 512  # of layers.c: rows of activations that are taken through a layer's products together
_GIVEN_UP: Final = 2  # of layers.c
_NORMS: Final = ("input_norm", "qk_norm", "mlp_norm")
_PRODUCTS: Final = ("qkv", "output", "gate", "up", "down")


class CompiledLayers:
    """The layers of a model and its output layer, described to layers.c."""

    def __init__(
        self,
        layers: Sequence[Any],
        head: Any,
        final_norm: Tensor,
        tables: tuple[Tensor, Tensor],
        heads: tuple[int, int, int],
        scale: float,
        epsilon: float,
    ) -> None:
        """layers  engine.compute.fused's; heads  of queries, of keys, elements of one

        Raises TypeError for a weight that layers.c does not multiply with.
        """
        self._held: list[Any] = [layers, head, final_norm, tables]  # what the descriptions point to
        self._heads, self._kv_heads, self._head_dim = heads
        self._inner, self._vocab = layers[0].gate.out_features, head.out_features
        library = load_products()
        described = (Layer * len(layers))()
        for layer, to in zip(layers, described, strict=True):
            for name in _NORMS:
                norm = getattr(layer, name)
                setattr(to, name, None if norm is None else norm.data_ptr())
            for name in _PRODUCTS:
                setattr(to, name, self._describe([getattr(layer, name)]))
            to.window = layer.window or 0
        self._held.append(described)
        self._decoder = Decoder(
            layers=ctypes.addressof(described),
            head=self._describe([head]),
            final_norm=final_norm.data_ptr(),
            cos=tables[0].data_ptr(),
            sin=tables[1].data_ptr(),
            products=None if library is None else ctypes.cast(library.kvasir_products, ctypes.c_void_p).value,
            num_layers=len(layers),
            hidden=len(final_norm),
            inner=self._inner,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            epsilon=epsilon,
            scale=scale,
            variant=supported(torch.float32, 1)[-1],
        )

    def _describe(self, products: list[Any]) -> int:
        """Address of the description of products whose outputs stand side by side."""
        product = products[0].base if isinstance(products[0], AdaptedWeight) else products[0]
        if isinstance(product, JoinedWeight):
            return self._describe([*product.parts, *products[1:]])
        made = Linear(outputs=product.out_features)
        if isinstance(product, PanelWeight):
            made.panels = ctypes.addressof(product.call)
        elif isinstance(product, QuantizedWeight) and product.blocks is not None:
            made.quantized = ctypes.addressof(product.blocks)
        else:
            raise TypeError(f"layers.c does not multiply with {type(product).__name__}")
        if products[1:]:
            made.beside = self._describe(products[1:])
        self._held.append(made)
        return ctypes.addressof(made)

    def __call__(
        self,
        gaps: tuple[int, int],
        hidden: Tensor,
        state: Tensor,
        attended: Tensor,
        positions: Tensor,
        attention: StepAttention,
        plan: PagedAttention,
        logits: Tensor | None = None,
    ) -> None:
        """From gap to gap between layers, gap 0 being before the first, with the attentions between them.

        hidden     (rows, hidden) float32, changed in place
        state      (rows, heads + 2 * kv_heads, head_dim), filled with what the last gap projects
        attended   (rows, heads * head_dim), read by a first gap that is not 0
        positions  (rows,) int64
        logits     (rows, vocab_size), filled; None: not wanted
        Raises StepGivenUp, and MemoryError without memory.
        """
        library, cache, rows = load_library(), attention.cache, len(hidden)
        assert library is not None, "there is nothing to call"
        tile = torch.empty(min(rows, TILE_ROWS), hidden.shape[1] + self._inner)
        call = DecoderStep(
            attention=plan.call,
            hidden=hidden.data_ptr(),
            state=state.data_ptr(),
            attended=attended.data_ptr(),
            tile=tile.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            positions=positions.data_ptr(),
            slots=attention.slots.data_ptr(),
            parallel=find_parallel(),
            num_rows=rows,
            layer_bytes=cache.data.stride(0) * cache.data.itemsize,
            first=gaps[0],
            last=gaps[1],
            threads=torch.get_num_threads(),
        )
        call.attention.cache = cache.data.data_ptr()
        if attention.unwanted is not None:
            call.unwanted = UNWANTED(attention.unwanted)
        failed = library.kvasir_layers(ctypes.byref(self._decoder), ctypes.byref(call))
        if failed == _GIVEN_UP:
            raise StepGivenUp
        if failed:
            raise MemoryError("no memory for a step")
