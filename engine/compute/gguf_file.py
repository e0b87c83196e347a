"""Reads models from GGUF files: weights that stay quantised as they are, the configuration, and where they may.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and the blocks of ggml-common.h. A block is a run of
numbers with its scales; each kind below maps to `Quantized` without loss. transformers reads the tokeniser and most of
the configuration; architectures other than Llama, Qwen2 and Qwen3 it reads whole, dequantised.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import Tensor

from engine.compute.model_files import ModelError, first_line
from engine.compute.quantize import Quantized
from engine.compute.quantized_layers import Weight, assemble, take_rows

ARCHITECTURES: Final = {"llama", "qwen2", "qwen3"}
"""That are read as they are. Mistral's files say `llama`."""

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_BROKEN: Final = (ValueError, LookupError, TypeError, OverflowError, MemoryError, OSError, struct.error)


class _Kind(NamedTuple):
    """How a type of block is read. number_bytes: of memory, for each number."""

    read: Callable[[Tensor], Quantized]
    number_bytes: float


def _floats(blocks: Tensor, start: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """The float of each block that begins at a byte, (out, blocks)."""
    return blocks[..., start : start + 2].contiguous().view(dtype)[..., 0].float()


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    return first | second << 4


def _halves(packed: Tensor) -> Tensor:
    """Numbers of which the first half of a run is in the low nibbles and the second in the high ones, in pairs."""
    low, high = packed & 15, packed >> 4
    return torch.cat((_pairs(low[..., ::2], low[..., 1::2]), _pairs(high[..., ::2], high[..., 1::2])), -1)


def _q8_0(blocks: Tensor) -> Quantized:
    """scale f16, 32 x int8"""
    values = blocks[..., 2:].reshape(len(blocks), -1).view(torch.int8)
    return Quantized(8, values, _floats(blocks, 0), None, 32)


def _q4_0(blocks: Tensor) -> Quantized:
    """scale f16, 16 bytes of nibbles; (q - 8) * scale"""
    return Quantized(4, _halves(blocks[..., 2:]).flatten(1), _floats(blocks, 0), None, 32)


def _q4_1(blocks: Tensor) -> Quantized:
    """scale f16, minimum f16, 16 bytes of nibbles"""
    return Quantized(4, _halves(blocks[..., 4:]).flatten(1), _floats(blocks, 0), _floats(blocks, 2), 32)


def _q5_0(blocks: Tensor) -> Quantized:
    """scale f16, 32 fifth bits, 16 bytes of nibbles; (q - 16) * scale. Stands in for Q4_K in narrow rows."""
    low = torch.cat((blocks[..., 6:] & 15, blocks[..., 6:] >> 4), -1)
    fifth = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    values = (low | fifth << 4).view(torch.int8) - 16
    return Quantized(8, values.flatten(1), _floats(blocks, 0), None, 32)


def _q4_k(blocks: Tensor) -> Quantized:
    """Of 256 numbers: scale and minimum f16; for each run of 32 a scale and a minimum of 6 bits; nibbles, of two runs
    in 32 bytes"""
    first, second, mixed = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(-2)
    steps = torch.cat((first & 63, mixed & 15 | first >> 2 & 48), -1)
    lows = torch.cat((second & 63, mixed >> 4 | second >> 2 & 48), -1)
    scales = (_floats(blocks, 0)[..., None] * steps).flatten(1)
    minima = (_floats(blocks, 2)[..., None] * lows).neg().flatten(1)
    return Quantized(4, _halves(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).flatten(1), scales, minima, 32)


def _q6_k(blocks: Tensor) -> Quantized:
    """Of 256 numbers: their low 4 bits, their high 2 bits, 16 x int8 scales, and the scales' scale f16"""
    shape = (*blocks.shape[:2], 2, -1, 32)
    packed, high = blocks[..., :128].reshape(shape), blocks[..., None, 128:192].reshape(shape)
    low = torch.cat((packed & 15, packed >> 4), -2)
    high = high >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
    values = (low | high << 4).view(torch.int8) - 32
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return Quantized(8, values.flatten(1), (_floats(blocks, 208)[..., None] * steps).flatten(1), None, 16)


KINDS: Final = {
    "Q8_0": _Kind(_q8_0, 1 + 4 / 32),
    "Q4_0": _Kind(_q4_0, 0.5 + 4 / 32),
    "Q4_1": _Kind(_q4_1, 0.5 + 8 / 32),
    "Q5_0": _Kind(_q5_0, 1 + 4 / 32),
    "Q4_K": _Kind(_q4_k, 0.5 + 8 / 32),
    "Q6_K": _Kind(_q6_k, 1 + 4 / 16),
}
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile:
    """One model's file, its header read and checked. The rest is mapped, and read as it is needed."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError, in one line, for what is no GGUF, is cut short, or has blocks that cannot be read."""
        from gguf import GGUFReader, dequantize

        self.path, self._dequantize = path, dequantize
        try:
            reader = GGUFReader(path, "c")  # torch wants memory that it may write; nothing does
        except _BROKEN as error:
            raise ModelError(f"{path}: cannot be read as GGUF, or is cut short: {first_line(error)}") from None
        self._tensors = {one.name: one for one in reader.tensors}
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture", ""))
        strange = {one.tensor_type.name for one in reader.tensors} - {*KINDS, *_FLOATS}
        if self.architecture in ARCHITECTURES and strange:
            raise ModelError(
                f"{path}: weights in {', '.join(sorted(strange))}, which are not implemented; should be "
                f"{', '.join((*KINDS, *_FLOATS))} (Q4_K_M files have Q4_K and Q6_K)"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A value of its metadata."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def read_config(self) -> Any:
        """transformers' configuration. Raises ModelError for an architecture that it does not know."""
        try:
            config = transformers.AutoConfig.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except (*_BROKEN, ImportError, AttributeError) as error:
            raise ModelError(f"{self.path}: architecture {self.architecture!r}: {first_line(error)}") from None
        ids = [self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        config.eos_token_id = [one for one in ids if one is not None] or None
        config.pad_token_id = self.get("tokenizer.ggml.padding_token_id")  # not that of another vocabulary
        if self.architecture not in ARCHITECTURES:
            return config
        config.dtype = torch.float32  # what is not quantised
        if hasattr(config, "attention_bias"):
            config.attention_bias = "blk.0.attn_q.bias" in self._tensors
        if head_dim := self.get(f"{self.architecture}.attention.key_length"):
            config.head_dim = head_dim
        kind = self.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind in ("linear", "yarn"):
            names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
            given = {name: self.get(f"{self.architecture}.rope.scaling.{key}") for key, name in names.items()}
            said = {name: value for name, value in given.items() if value is not None}
            config.rope_parameters = {**config.rope_parameters, "rope_type": kind, **said}
        elif kind != "none":
            raise ModelError(f"{self.path}: positions are scaled by {kind!r}, which is not implemented")
        return config

    def weight_bytes(self, number_bytes: float) -> int:
        """Of memory for its weights, when a number that is not kept quantised takes `number_bytes`."""
        kept = KINDS if self.architecture in ARCHITECTURES else {}
        sizes = [
            (one.n_elements, kept[one.tensor_type.name].number_bytes if one.tensor_type.name in kept else number_bytes)
            for one in self._tensors.values()
        ]
        return int(sum(count * size for count, size in sizes))

    def load(self, config: Any, dtype: torch.dtype) -> Any:
        """The model. Raises ModelError when weights are missing, or of a shape that the configuration does not say."""
        if self.architecture in ARCHITECTURES:
            module: Any = assemble(config, dtype, self._weights(config), self.path.name)
            if _ROPE_FACTORS in self._tensors:
                factors = self._read(_ROPE_FACTORS)
                assert isinstance(factors, Tensor)
                module.model.rotary_emb.inv_freq /= factors
            return module
        from transformers import modeling_gguf_pytorch_utils as reading

        try:
            with torch.device("meta"):
                module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            read_all: Any = reading.load_gguf_checkpoint
            read = read_all(str(self.path), return_tensors=True, model_to_load=module, torch_dtype=dtype)
            module = type(module).from_pretrained(None, config=config, state_dict=read["tensors"], dtype=dtype)
        except (*_BROKEN, ImportError, AttributeError, NotImplementedError, RuntimeError) as error:
            raise ModelError(f"{self.path}: architecture {self.architecture!r}: {first_line(error)}") from None
        return module

    def _weights(self, config: Any) -> Iterator[tuple[str, Weight]]:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for name in self._tensors:
            stem, _, leaf = name.rpartition(".")
            if stem.startswith("blk."):
                _, layer, part = stem.split(".", 2)
                path = f"model.layers.{layer}.{_LAYER.get(part, part)}"
            else:
                part, path = stem, _OTHERS.get(stem, stem)
            if name == _ROPE_FACTORS:
                continue
            weight = self._read(name)
            if self.architecture == "llama" and part in heads:
                weight = _unpermute(weight, heads[part])
            yield f"{path}.{leaf}", weight

    def _read(self, name: str) -> Weight:
        one = self._tensors[name]
        data, kind = one.data, one.tensor_type.name
        if kind in KINDS and data.ndim == 2:
            rows = torch.from_numpy(data.view(data.dtype))
            width = data.shape[1] // (int(one.shape[0]) // _block_size(one.tensor_type))
            return KINDS[kind].read(rows.view(len(rows), -1, width))
        if kind in _FLOATS:
            return torch.from_numpy(data.view()).view(torch.uint8).view(_FLOATS[kind])
        return torch.from_numpy(self._dequantize(data, one.tensor_type))


def _block_size(kind: Any) -> int:
    from gguf import GGML_QUANT_SIZES

    return int(GGML_QUANT_SIZES[kind][0])


def _unpermute(weight: Weight, heads: int) -> Weight:
    """Rows of queries and keys in transformers' order: it turns the halves of a head, llama.cpp neighbours."""
    order = torch.arange(weight.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)
    return weight[order] if isinstance(weight, Tensor) else take_rows(weight, order)
