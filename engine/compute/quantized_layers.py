"""Layers of a transformers model whose weights are narrower than its numbers: quantised, or bfloat16 in a model that
computes in float32; and a model that is put together of them.

engine/compute/gguf_file.py and engine/compute/int4_folder.py read files into tensors by transformers' names; `assemble`
makes a model of these without ever having its weights in floating point. `quantize_layers` quantises any other.
engine/compute/fused.py takes the layers out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine.compute.forward import PanelWeight
from engine.compute.linear import PackedWeight, pack_weight
from engine.compute.model_files import ModelError
from engine.compute.quantize import Quantized, QuantizedWeight, dequantize, quantize

_PLACE: Final = re.compile(r"\.(\d+)\.")  # of a decoder layer, in the path of its parts
PART_NUMBERS: Final = 1 << 18  # of a weight that are widened at a time
LEAST_SIDE: Final = 32  # inputs and outputs of a linear layer that is worth it

Bits = Literal[16, 8, 4]
Weight = Tensor | Quantized
Product = PanelWeight | PackedWeight | QuantizedWeight


class QuantizedLinear(nn.Module):
    """Stands where a linear layer stood: computes with the dequantised weight, which proves the model, until `pack`.

    quantized  or a bfloat16 weight
    """

    def __init__(self, quantized: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized: Any = quantized  # None when it is packed or released
        self.out_features, self.in_features = quantized.shape
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # models ask it for its dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self._product: Product | None = None

    def pack(self) -> None:
        """From now on computes with the packed weight, and has nothing else of it."""
        self._product, self.quantized = weight_of(self), None

    def forward(self, rows: Tensor) -> Tensor:
        if self._product is not None:
            return self._product(rows)
        if not isinstance(self.quantized, Tensor):
            return functional.linear(rows, dequantize(self.quantized).to(rows.dtype), self.bias)
        # In parts that stay near: the whole in float32 would be memory that the system has to find for every layer.
        parts = torch.split(self.quantized, max(1, PART_NUMBERS // self.in_features))
        answer = torch.cat([functional.linear(rows, part.to(rows.dtype)) for part in parts], -1)
        return answer if self.bias is None else answer + self.bias


class QuantizedExperts(nn.Module):
    """Stands where transformers keeps all experts of a layer in two parameters: gate_up_proj (experts, 2 * width, in)
    and down_proj (experts, in, width)."""

    def __init__(self, experts: Any, bits: Literal[8, 4], dtype: torch.dtype) -> None:
        super().__init__()

        def layers(weights: Tensor) -> nn.ModuleList:
            return nn.ModuleList(QuantizedLinear(quantize(one, bits), None, dtype) for one in weights)

        self.gate, self.up = (layers(half) for half in experts.gate_up_proj.chunk(2, 1))
        self.down = layers(experts.down_proj)
        self._activation = experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Experts add in the order of their numbers, whatever rows are there."""
        answer = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            row, place = torch.where(top_k_index == expert)
            rows = hidden_states[row]
            some = self.down[expert](self._activation(self.gate[expert](rows)) * self.up[expert](rows))
            answer.index_add_(0, row, (some * top_k_weights[row, place, None]).to(answer.dtype))
        return answer


class QuantizedEmbedding(nn.Module):
    """Stands where an embedding stood: dequantises the rows that are looked up, and never the whole."""

    def __init__(self, quantized: Quantized, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized = quantized
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = dequantize(take_rows(self.quantized, tokens.reshape(-1)))
        return rows.view(*tokens.shape, -1).to(self.weight.dtype)


class JoinedWeight:
    """Weights of one input whose outputs stand side by side, where they are not quantised alike."""

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = parts
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)

    def __call__(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        return torch.cat([part(rows) for part in self.parts], -1)


def weight_of(*linears: Any) -> Any:
    """The packed or quantised weight of linear layers with the same input, which are one product where they can be."""
    kept = [one.quantized for one in linears if isinstance(one, QuantizedLinear)]
    kinds = {None if isinstance(q, Tensor) else (q.bits, q.group, q.minima is None, q.rotated) for q in kept}
    if len(linears) > 1 and (len(kinds) > 1 or len(kept) not in (0, len(linears))):
        return JoinedWeight([weight_of(one) for one in linears])
    biases = [one.bias for one in linears if one.bias is not None]
    bias = torch.cat(biases) if biases else None
    if not kept:
        return pack_weight(torch.cat([one.weight for one in linears]), bias)
    if isinstance(kept[0], Tensor):
        return PanelWeight(torch.cat(kept), bias)
    if len(kept) == 1:
        return QuantizedWeight(kept[0], bias)
    values, scales, minima = zip(*((q.values, q.scales, q.minima) for q in kept), strict=True)
    joined = replace(
        kept[0],
        values=torch.cat(values),
        scales=torch.cat(scales),
        minima=None if minima[0] is None else torch.cat(minima),
    )
    return QuantizedWeight(joined, bias)


def release(linear: Any) -> None:
    """Frees a layer's weight, which another has taken over."""
    linear.weight = linear.quantized = None


def pack_quantized(module: nn.Module) -> None:
    """Packs what `release` has not freed."""
    for part in module.modules():
        if isinstance(part, QuantizedLinear) and part.quantized is not None:
            part.pack()


def quantize_layers(module: Any, bits: Bits, dtype: torch.dtype) -> None:
    """Quantises a loaded model layer by layer, in place: linear layers and experts in so many bits; in 8 those of the
    first and the last decoder layer, which an answer depends on most, and the output layer. With 16 bits linear layers
    keep their weights, and experts do not. All else becomes `dtype`: the table of tokens, norms, and what is too small
    to matter (gates of experts)."""
    head, last = module.get_output_embeddings(), module.config.get_text_config().num_hidden_layers - 1
    for path, layer in list(module.named_modules()):
        kind, place = type(layer), _PLACE.search(path)
        matters = layer is head or (place and int(place[1]) in (0, last))
        most: Literal[8, 4] | None = None if bits == 16 else 8 if matters else bits
        made: nn.Module
        if kind in (nn.Linear, Conv1D) and min(layer.weight.shape) >= LEAST_SIDE:
            weight = layer.weight.t() if kind is Conv1D else layer.weight
            made = QuantizedLinear(weight.detach() if most is None else quantize(weight, most), layer.bias, dtype)
        elif most is not None and _has_experts(layer):
            made = QuantizedExperts(layer, most, dtype)
        else:
            continue
        module.set_submodule(path, made)
    module.to(dtype)


def _has_experts(layer: Any) -> bool:
    weights = [getattr(layer, name, None) for name in ("gate_up_proj", "down_proj")]
    usual = {"is_transposed": False, "has_bias": False, "has_gate": True, "is_concatenated": True}
    return all(isinstance(one, nn.Parameter) and one.dim() == 3 for one in weights) and all(
        getattr(layer, name, value) == value for name, value in usual.items()
    )


def take_rows(q: Quantized, index: Tensor) -> Quantized:
    """The outputs `index` of a weight, in that order."""
    minima = None if q.minima is None else q.minima[index]
    return replace(q, values=q.values[index], scales=q.scales[index], minima=minima)


def assemble(config: Any, dtype: torch.dtype, weights: Iterable[tuple[str, Weight]], name: str) -> Any:
    """A transformers model of these weights.

    weights  by the names of transformers' state dict; tensors become `dtype`, quantised weights stay what they are
    Raises ModelError for weights that are missing, of another shape or that the model has not.
    """
    with torch.device("meta"):
        module: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    shapes = {path: tuple(one.shape) for path, one in module.state_dict().items()}
    given = set[str]()
    for path, weight in weights:
        if shapes.get(path) != tuple(weight.shape):
            raise ModelError(
                f"model {name!r}: its weight {path} has the shape {tuple(weight.shape)}; should be {shapes.get(path)}"
            )
        given.add(path)
        _put(module, path, weight, dtype)
    if config.tie_word_embeddings and "lm_head.weight" not in given:
        table = module.model.embed_tokens
        shared = table.quantized if isinstance(table, QuantizedEmbedding) else table.weight
        _put(module, "lm_head.weight", shared, dtype)
    _fill_biases(module)
    left = sorted(path for path, one in module.named_parameters() if one.is_meta)
    if left:
        raise ModelError(
            f"model {name!r}: it has no weight {left[0]}" + f", and {len(left) - 1} more" * (len(left) > 1)
        )
    for part in module.modules():  # tables that are computed, not read: of positions
        if any(one.is_meta for one in part.buffers(recurse=False)):
            part.to_empty(device="cpu", recurse=False)
            module._init_weights(part)  # noqa: SLF001 - what from_pretrained calls as well
    return module.eval()


def _put(module: nn.Module, path: str, weight: Weight, dtype: torch.dtype) -> None:
    owner, _, leaf = path.rpartition(".")
    layer: Any = module.get_submodule(owner)
    if isinstance(weight, Tensor):
        layer.register_parameter(leaf, nn.Parameter(weight.to(dtype), requires_grad=False))
    elif isinstance(layer, nn.Embedding):
        module.set_submodule(owner, QuantizedEmbedding(weight, dtype))
    else:
        made = QuantizedLinear(weight, None, dtype)
        made.bias = layer.bias  # perhaps not there yet
        module.set_submodule(owner, made)


def _fill_biases(module: nn.Module) -> None:
    """A bias that came after its weight."""
    for path, layer in list(module.named_modules()):
        if isinstance(layer, QuantizedLinear) and layer.bias is not None and not layer.bias.is_meta:
            module.set_submodule(path, QuantizedLinear(layer.quantized, layer.bias.detach(), layer.weight.dtype))
