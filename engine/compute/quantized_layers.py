"""Layers of a transformers model whose weights are quantised in their file, and a model that is put together of them.

engine/compute/gguf_file.py and engine/compute/int4_folder.py read files into tensors by transformers' names; `assemble`
makes a model of these without ever having its weights in floating point. engine/compute/fused.py takes the layers out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from engine.compute.forward import PanelWeight
from engine.compute.linear import PackedWeight, pack_weight
from engine.compute.model_files import ModelError
from engine.compute.quantize import Quantized, QuantizedWeight, dequantize

Weight = Tensor | Quantized
Product = PanelWeight | PackedWeight | QuantizedWeight


class QuantizedLinear(nn.Module):
    """Stands where a linear layer stood."""

    def __init__(self, quantized: Quantized, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized: Any = quantized  # None when it is released, as is the product
        self.out_features, self.in_features = quantized.shape
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # models ask it for its dtype
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.product: Any = QuantizedWeight(quantized, bias)

    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = self.product(rows)
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
        self._parts = parts
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)

    def __call__(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        return torch.cat([part(rows) for part in self._parts], -1)


def weight_of(*linears: Any) -> Any:
    """The packed or quantised weight of linear layers with the same input, which are one product where they can be."""
    kept = [one.quantized for one in linears if isinstance(one, QuantizedLinear)]
    kinds = {(q.bits, q.group, q.minima is None) for q in kept}
    if len(linears) > 1 and (len(kinds) > 1 or len(kept) not in (0, len(linears))):
        return JoinedWeight([weight_of(one) for one in linears])
    if kept and len(linears) == 1:
        return linears[0].product
    biases = [one.bias for one in linears if one.bias is not None]
    bias = torch.cat(biases) if biases else None
    if not kept:
        return pack_weight(torch.cat([one.weight for one in linears]), bias)
    values, scales, minima = zip(*((q.values, q.scales, q.minima) for q in kept), strict=True)
    joined = Quantized(
        kept[0].bits,
        torch.cat(values),
        torch.cat(scales),
        None if minima[0] is None else torch.cat(minima),
        kept[0].group,
    )
    return QuantizedWeight(joined, bias)


def release(linear: Any) -> None:
    """Frees a layer's weight, which another has taken over."""
    linear.weight = linear.quantized = linear.product = None


def take_rows(q: Quantized, index: Tensor) -> Quantized:
    """The outputs `index` of a weight, in that order."""
    minima = None if q.minima is None else q.minima[index]
    return Quantized(q.bits, q.values[index], q.scales[index], minima, q.group)


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
