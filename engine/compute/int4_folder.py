"""Reads folders of safetensors whose linear layers have 4-bit weights of AWQ or GPTQ, which stay what they are.

Both store w = (q - zero) * scale by group of inputs, eight numbers in an int32. AWQ (`gemm`) packs along the outputs,
in the order 0 2 4 6 1 3 5 7; GPTQ along the inputs, with zeros that are one less unless its format is `gptq_v2`. (q -
zero) * scale and q * scale - zero * scale are the same in float32: scales have 11 bits.
Sources: arXiv 2306.00978, 2210.17323, and the kernels of AutoAWQ (WQLinear_GEMM) and AutoGPTQ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from engine.compute.model_files import ModelError
from engine.compute.quantize import Quantized, pack_nibbles
from engine.compute.quantized_layers import Weight

_AWQ_ORDER: Final = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each output
_PACKED: Final = ("qweight", "qzeros", "scales", "g_idx")


def check_int4(config: Any, name: str) -> bool:
    """Whether the model is one of these. Raises ModelError for a quantisation that is not implemented."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        return False
    said = said if isinstance(said, dict) else said.to_dict()
    method = str(said.get("quant_method"))
    wanted = {"quant_method": ("awq", "gptq"), "bits": (4,), "group_size": (32, 64, 128)}
    if method == "awq":
        wanted |= {"version": ("gemm",), "zero_point": (True,)}
    else:
        wanted["checkpoint_format"] = ("gptq", "gptq_v2")
    defaults = {"checkpoint_format": "gptq", "version": "gemm", "zero_point": True}
    for key, values in wanted.items():
        value = said.get(key, defaults.get(key))
        value = getattr(value, "value", value)  # an enum
        if (value.lower() if isinstance(value, str) else value) not in values:
            raise ModelError(
                f"model {name!r}: quantization_config.{key} {value!r} is not implemented; should be "
                f"{' or '.join(map(str, values))}"
            )
    return True


def read_int4(folder: Path, config: Any, name: str) -> Iterator[tuple[str, Weight]]:
    """Weights by the names of transformers' state dict. Raises ModelError for what does not map."""
    from safetensors import safe_open

    said = config.quantization_config
    said = said if isinstance(said, dict) else said.to_dict()
    where: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened: Any = safe_open(file, "pt")
        where |= dict.fromkeys(opened.keys(), opened)

    for key in where:
        stem, _, leaf = key.rpartition(".")
        if f"{stem}.qweight" not in where or leaf not in _PACKED:
            if not key.endswith("rotary_emb.inv_freq"):  # of old files; transformers computes it
                yield key, where[key].get_tensor(key)
            continue
        if leaf != "qweight":
            continue
        parts: Any = [where[own].get_tensor(own) if (own := f"{stem}.{part}") in where else None for part in _PACKED]
        try:
            read: Any = _awq if str(said["quant_method"]) == "awq" else _gptq
            yield f"{stem}.weight", read(*parts, said)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise ModelError(f"model {name!r}: {stem} cannot be read as {said['quant_method']}: {error}") from None


def _unpack(packed: Tensor, order: list[int]) -> Tensor:
    """(rows, n) int32 -> (rows, 8 n) uint8, the nibbles of each in this order, the lowest being 0."""
    shifts = torch.tensor(order, dtype=torch.int32) * 4
    return (packed[..., None] >> shifts & 15).to(torch.uint8).flatten(1)


def _quantized(numbers: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Quantized:
    """numbers (in, out), zeros and scales (in / group, out)"""
    wide = scales.float()
    minima = (zeros.float() * wide).neg()
    return Quantized(4, pack_nibbles(numbers.t().contiguous()), wide.t().contiguous(), minima.t().contiguous(), group)


def _awq(weight: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None, said: dict[str, Any]) -> Quantized:
    """qweight (in, out / 8), qzeros (in / group, out / 8), scales (in / group, out)"""
    return _quantized(_unpack(weight, _AWQ_ORDER), _unpack(zeros, _AWQ_ORDER), scales, said["group_size"])


def _gptq(weight: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None, said: dict[str, Any]) -> Quantized:
    """qweight (in / 8, out), qzeros (in / group, out / 8), scales (in / group, out), g_idx (in,)"""
    group, order = said["group_size"], list(range(8))
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group):
        raise ValueError("its groups are in another order (desc_act), which is not implemented")
    numbers = _unpack(weight.t().contiguous(), order).t()
    stored = _unpack(zeros, order)
    first = 0 if said.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    return _quantized(numbers, (stored + first) & 15 if first else stored, scales, group)
