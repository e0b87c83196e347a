"""Tiny random models of several architectures, and a driver that runs sequences as a scheduler would."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import torch
import transformers

from engine.compute.lora import Adapter
from engine.compute.model import LoadedModel, prepare
from engine.compute.quantized_layers import quantize_layers
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.protocol import Sampling, TokenizerFiles
from engine.sequence import Sequence, Step, Work

VOCABULARY = 211
CONTEXT = 2048
GREEDY = Sampling(max_tokens=CONTEXT, temperature=0.0)

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # so that attention matters to the logits
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_UNTIED = {"tie_word_embeddings": False}  # embeddings times a large factor would make a random model repeat itself
_ALTERNATING = {**_UNTIED, "head_dim": 16, "sliding_window": 60, "query_pre_attn_scalar": 24}
_EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "llama with biases and scaled rope": (
        "Llama",
        {**_GROUPED, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE},
    ),
    "qwen2": ("Qwen2", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2 with windows": (
        "Qwen2",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16}),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": None}),
    "mistral with a window": ("Mistral", {**_GROUPED, "sliding_window": 70}),
    "gpt neox": ("GPTNeoX", _COMMON),
    "gpt2": ("GPT2", {**_COMMON, "n_inner": 96}),
    "opt": ("OPT", {**_COMMON, "word_embed_proj_dim": 64, "ffn_dim": 96}),
    "phi3": ("Phi3", _GROUPED),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "phi3 with a window": ("Phi3", {**_GROUPED, "sliding_window": 90}),
    "phi": ("Phi", _COMMON),
    "gemma": ("Gemma", {**_GROUPED, **_UNTIED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**_GROUPED, **_ALTERNATING, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**_GROUPED, **_ALTERNATING}),
    "olmo2": ("Olmo2", _GROUPED),
    "olmo3": ("Olmo3", {**_GROUPED, "sliding_window": 60}),
    "starcoder2": ("Starcoder2", {**_GROUPED, "use_bias": True, "sliding_window": 80}),
    "cohere": ("Cohere", {**_GROUPED, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**_GROUPED, "sliding_window": 60}),
    "granite": ("Granite", {**_GROUPED, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "gpt bigcode": ("GPTBigCode", {**_COMMON, "n_inner": 96}),
    "glm4": ("Glm4", {**_GROUPED, "head_dim": 16}),
    "exaone4": ("Exaone4", {**_GROUPED, "sliding_window": 60}),
    "smollm3": ("SmolLM3", _GROUPED),
    "qwen2 moe": ("Qwen2Moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3 moe": ("Qwen3Moe", {**_GROUPED, **_EXPERTS, "head_dim": 16}),
    "olmoe": ("Olmoe", {**_GROUPED, **_EXPERTS}),
    "deepseek v2": ("DeepseekV2", {**_COMMON, **_EXPERTS, **_LATENT, "q_lora_rank": None}),
    "deepseek v3": ("DeepseekV3", {**_COMMON, **_EXPERTS, **_LATENT, "n_group": 1, "topk_group": 1}),
}


def make_module(kind: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Any:
    """A transformers model with random weights; the same for the same arguments."""
    family, settings = KINDS[kind]
    return make_family(family, settings, dtype, seed)


def make_family(family: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 3) -> Any:
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        module = model_class(config_class(**settings)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return module


def make_loaded(module: Any, *, fast: bool = True, context: int = CONTEXT, adapters: Seq[Adapter] = ()) -> LoadedModel:
    """Takes the module over: do not use it afterwards."""
    dtype = module.dtype
    shape, forward, is_fused, _ = prepare(module, "tiny", context, fast=fast, adapters=adapters)
    return LoadedModel(
        name="tiny",
        forward=forward,
        device=torch.device("cpu"),
        dtype=dtype,
        cache_shape=shape,
        fingerprint="",
        context_tokens=context,
        vocab_size=VOCABULARY,
        eos_ids=(2,),
        tokenizer=TokenizerFiles("", None, {}, add_bos=False),
        is_fused=is_fused,
    )


def make_runner(
    kind: str,
    dtype: torch.dtype = torch.float32,
    *,
    fast: bool = True,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    bits: Literal[8, 4] | None = None,
    adapters: Seq[Adapter] = (),
) -> ModelRunner:
    """kv_dtype  of the cache; None is the model's
    bits  of quantised weights"""
    settings = EngineSettings(block_size=block_size, kv_cache_bytes=8 << 20, threads=1)
    module = make_module(kind, dtype)
    if bits:
        quantize_layers(module, bits, dtype)
    model = make_loaded(module, fast=fast, adapters=adapters)
    return ModelRunner(replace(model, cache_shape=replace(model.cache_shape, dtype=kv_dtype or dtype)), settings)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """Runs sequences through a runner and keeps the logits of every row that was asked for."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.logits = torch.empty(0)  # of the last step, one row for each work
        self._next_block = 0
        forward = runner._forward

        def spy(*given: Any) -> torch.Tensor:
            self.logits = forward(*given)
            return self.logits

        runner._forward = spy  # type: ignore[method-assign]

    def sequence(
        self,
        ids: list[int],
        room: int = 0,
        *,
        sampling: Sampling = GREEDY,
        shared: list[int] | None = None,
        scattered: bool = False,
        adapter: int = 0,
    ) -> Sequence:
        """A sequence with blocks for `room` more tokens, zeroed as the runner would; `shared` blocks come first."""
        size = self.runner._block_size
        table = list(shared or [])
        fresh = list(range(self._next_block, self._next_block - (-(len(ids) + room) // size) - len(table)))
        self._next_block += len(fresh)
        assert self._next_block <= self.runner.num_blocks
        if scattered:
            fresh = fresh[::2][::-1] + fresh[1::2]
        self.runner.cache.zero(fresh) if fresh else None
        blocks = array("i", table + fresh)
        return Sequence("", 0, array("I", ids), len(ids), [], sampling, adapter=adapter, block_table=blocks)

    def run(self, *work: Work, fresh: list[int] | None = None) -> list[int | None]:
        """One step; appends what was sampled."""
        tokens = self.runner.run(Step(list(work), fresh or []))
        for item, token in zip(work, tokens, strict=True):
            if item.samples and token is not None and token >= 0:
                item.sequence.tokens.append(token)
        return tokens

    def prefill(self, sequence: Sequence, start: int = 0, cuts: list[int] | None = None) -> torch.Tensor:
        """Computes a prompt from `start` with the given cuts and samples. Returns the last row's logits."""
        end = sequence.num_tokens
        for stop in [*(cut for cut in cuts or [] if start < cut < end), end]:
            self.run(Work(sequence, start, stop - start, samples=stop == end))
            start = stop
        return self.logits[0]

    def decode(self, sequences: list[Sequence], count: int) -> None:
        for _ in range(count):
            self.run(*(Work(s, s.num_tokens - 1, 1, samples=True) for s in sequences))

    def generate(self, ids: list[int], count: int) -> list[int]:
        sequence = self.sequence(ids, count)
        self.prefill(sequence)
        self.decode([sequence], count - 1)
        return list(sequence.tokens[len(ids) :])


def transformers_generate(module: Any, ids: list[int], count: int) -> list[int]:
    """Greedy, exactly `count` tokens."""
    prompt = torch.tensor([ids])
    output = module.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=transformers.GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
        ),
    )
    return output[0, len(ids) :].tolist()
