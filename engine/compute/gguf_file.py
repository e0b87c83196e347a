"""Reads models from GGUF files: weights that stay quantised as they are, the configuration, and where they may.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and the blocks of ggml-common.h. A block is a run of
numbers with its scales; each kind below maps to `Quantized` without loss. transformers reads the tokeniser, and
architectures other than Llama, Qwen2 and Qwen3 as a whole, dequantised.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from engine.compute.model_files import ModelError, first_line
from engine.compute.quantize import Quantized
from engine.compute.quantized_layers import Weight, assemble, take_rows

ARCHITECTURES: Final[dict[str, Any]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
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
_LENGTH: Final = struct.Struct("<Q")
_ARRAY: Final = struct.Struct("<IQ")  # type and number of its elements
_ROPE_FACTORS: Final = "rope_freqs.weight"
_BROKEN: Final = (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, OSError, struct.error)


class _Kind(NamedTuple):
    """How a type of block is read. number_bytes: of memory, for each number."""

    read: Callable[[Tensor], Quantized]
    number_bytes: float


def _floats(blocks: Tensor, start: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """The float of each block that begins at a byte, (out, blocks)."""
    return blocks[..., start : start + 2].contiguous().view(dtype)[..., 0].float()


def _halves(packed: Tensor) -> Tensor:
    """Numbers of which the first half of a run is in the low nibbles and the second in the high ones, in pairs. Two
    bytes at a time: 0xdbca becomes 0xba, and 0xdc behind the other low ones."""
    twos = packed.contiguous().view(torch.int16)
    low, high = twos & 15 | twos >> 4 & 0xF0, twos >> 4 & 15 | twos >> 8 & 0xF0
    return torch.cat((low.to(torch.uint8), high.to(torch.uint8)), -1)


def _q8_0(blocks: Tensor) -> Quantized:
    """scale f16, 32 x int8"""
    values = blocks.view(torch.int16)[..., 1:].flatten(1).view(torch.int8)  # two bytes at a time
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


@functools.cache
def _reader() -> Any:
    """The package's reader, made to pass over arrays: it takes 10 s for a vocabulary of 150,000."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            mapped: Any = memoryview(self.data.view(np.ndarray))  # type: ignore[arg-type]
            (kind, count), end = _ARRAY.unpack_from(mapped, orig_offs), orig_offs + _ARRAY.size
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    end += _LENGTH.size + _LENGTH.unpack_from(mapped, end)[0]
            else:
                end += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
            if end > len(mapped):
                raise ValueError("an array ends behind the file")
            return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(kind)]

    return Reader


class GGUFFile:
    """One model's file, its header read and checked. The rest is mapped, and read as it is needed."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError, in one line, for what is no GGUF, is cut short, or has blocks that cannot be read."""
        from gguf import dequantize

        self.path, self._dequantize = path, dequantize
        try:
            reader = _reader()(path, "c")  # torch wants memory that it may write; nothing does
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
        """transformers' configuration. Raises ModelError for an architecture that it does not know, and for metadata
        that are missing."""
        ids = [self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        tokens = {
            "eos_token_id": [one for one in ids if one is not None] or None,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }
        try:
            if self.architecture in ARCHITECTURES:
                return ARCHITECTURES[self.architecture](**self._settings(), **tokens)
            config = transformers.AutoConfig.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except Exception as error:  # what a configuration raises for a value of a wrong kind is no error of its own
            raise ModelError(f"{self.path}: architecture {self.architecture!r}: {first_line(error)}") from None
        for name, value in tokens.items():
            setattr(config, name, value)
        return config

    def _settings(self) -> dict[str, Any]:
        """Of the configuration of one of ARCHITECTURES. Raises KeyError when one is missing."""

        def say(key: str, default: Any = None) -> Any:
            value = self.get(f"{self.architecture}.{key}", default)
            if value is None:
                raise ValueError(f"{self.architecture}.{key} is missing")
            return value

        heads, width = say("attention.head_count"), say("embedding_length")
        rope = {"rope_type": "default", "rope_theta": say("rope.freq_base", 10000.0)}
        kind = say("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(f"positions are scaled by {kind!r}, which is not implemented")
        if kind != "none":
            rope |= {"rope_type": kind, "factor": say("rope.scaling.factor")}
            if kind == "yarn":
                rope["original_max_position_embeddings"] = say("rope.scaling.original_context_length")
        layers = say("block_count")
        if f"blk.{layers - 1}.attn_norm.weight" not in self._tensors:  # before a model of so many is made
            raise ValueError(f"there are no weights of layer {layers - 1}")
        return {
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": width,
            "intermediate_size": say("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": say("attention.head_count_kv", heads),
            "head_dim": say("attention.key_length", width // heads),
            "max_position_embeddings": say("context_length"),
            "rms_norm_eps": say("attention.layer_norm_rms_epsilon"),
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "dtype": torch.float32,  # what is not quantised
        }

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
            try:
                module: Any = assemble(config, dtype, self._weights(config), self.path.name)
            except ModelError:
                raise
            except (*_BROKEN, RuntimeError) as error:  # numbers that do not go together
                raise ModelError(f"{self.path}: its configuration makes no model: {first_line(error)}") from None
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
