"""GGUF files of tiny models, written with the gguf package as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.demo import MODEL_DIR

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{leaf}"
    return f"{_NAMES[stem]}.{leaf}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys in llama.cpp's order."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Blocks of any bytes, with scales that are small and finite: what the quantiser of the package cannot make."""
    generator = np.random.default_rng(seed)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // size
    blocks = generator.integers(0, 256, (count, width), dtype=np.uint8)
    scale = (generator.uniform(-1, 1, (count, 2)) * 0.01).astype(np.float16).view(np.uint8)
    at = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2]}.get(kind.name, [0])
    for index, start in enumerate(at):
        blocks[:, start : start + 2] = scale[:, 2 * index : 2 * index + 2]
    return blocks.reshape(*shape[:-1], -1)


def quantized(weight: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Of this kind; F32 for rows that its blocks do not divide. K-quants are random."""
    wanted = gguf.GGMLQuantizationType[kind]
    if weight.ndim < 2 or weight.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        wanted = gguf.GGMLQuantizationType.F32
    if wanted.name.endswith("_K"):
        return random_blocks(wanted, weight.shape, seed), wanted
    return gguf.quants.quantize(weight, wanted), wanted


def write_gguf(
    path: Path,
    module: Any,
    kinds: dict[str, str],
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> None:
    """Writes the module, and gives it the weights that the file has, dequantised by the package.

    kinds  by the end of a tensor's stem, "" for all others: the type of its blocks
    """
    config, own = module.config, module.state_dict()
    name = architecture or {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = module.model.layers[0].self_attn.head_dim
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _add_tokenizer(writer, config.vocab_size)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key.format(name), value)
    for seed, (path_of, weight) in enumerate(own.items()):
        if path_of == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem = gguf_name(path_of)
        array = weight.float().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stem.split(".")[-2])
        turns = name == "llama" and heads is not None
        kind = next((kinds[end] for end in kinds if end and stem.split(".")[-2] == end), kinds[""])
        data, made = quantized(permuted(array, heads) if turns and heads else array, kind, seed)
        writer.add_tensor(stem, data, raw_dtype=made)
        back = gguf.quants.dequantize(data, made).reshape(array.shape)
        if turns and heads:
            back = back.reshape(heads, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(np.ascontiguousarray(back)))
    for extra, array in (tensors or {}).items():
        writer.add_tensor(extra, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The first tokens of the demo model's, and the merges that they can do with."""
    model = json.loads((MODEL_DIR / "tokenizer.json").read_text())["model"]
    ordered = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [*ordered, *(f"[PAD{number}]" for number in range(vocab_size))][:vocab_size]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    merges = [" ".join(pair) for pair in pairs if {*pair, "".join(pair)} <= set(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (vocab_size - 4))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages[0].content }}")
