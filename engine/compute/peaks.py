"""What a model's steps cost, read from its weights, and what this machine does at best, measured at the start: the two
sides of engine/utilisation.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.compute.kv_cache import CacheShape
from engine.compute.quantized_layers import QuantizedLinear
from engine.utilisation import Cost, Peak

PROBE_S: Final = 0.15
"""For each of three measurements; the best try of those that fit into it counts."""

SIDE: Final = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied."""

READ_BYTES: Final = {"cpu": 128 << 20, "cuda": 2 << 30}
"""That are read: more than caches hold."""

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERT: Final = "experts."
"""In the name of each parameter of an expert, but not of those that every token meets (`shared_experts`)."""


def measure_peak(device: torch.device, dtype: torch.dtype, threads: int) -> Peak:
    """With so many threads: a matrix product in the model's dtype, and a sum over more than any cache holds. Takes half
    a second, and its memory, which it gives back."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        side = SIDE[device.type]
        one = torch.rand(side, side, device=device).to(dtype)
        product_s = _best_s(lambda: one @ one, device)
        data = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
        read_s = min(_best_s(data.sum, device), _best_s(lambda: data.view(-1, side) @ data[:side], device))
        return Peak(2 * side**3 / product_s, data.nbytes / read_s)


def _best_s(work: Callable[[], Tensor], device: torch.device) -> float:
    best_s, now_s = float("inf"), time.perf_counter()
    end_s = now_s + PROBE_S
    while now_s < end_s:
        began_s = now_s
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - began_s)
    return best_s


def find_cost(module: Any, shape: CacheShape, windows: list[int | None]) -> Cost | None:
    """Of a model as transformers loaded it, before its layers are packed. None for one whose experts' number is not
    known."""
    config = module.config.get_text_config()
    head = module.get_output_embeddings()
    if head is None:
        return None
    output = getattr(head, "quantized", head.weight)
    looked_up = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding)} | {id(output)}
    layers = [(name, one.quantized) for name, one in module.named_modules() if isinstance(one, QuantizedLinear)]
    every = [(name, one) for name, one in (*module.named_parameters(), *layers) if id(one) not in looked_up]
    experts = [one for name, one in every if _is_expert(name)]
    rest = [one for name, one in every if not _is_expert(name)]
    share = _expert_share(config) if experts else 1.0
    if share is None:
        return None
    return Cost(
        token_params=sum(prod(one.shape) for one in rest) + share * sum(prod(one.shape) for one in experts),
        row_params=prod(output.shape),
        weight_bytes=sum(one.nbytes for one in rest),
        row_bytes=output.nbytes,
        windows=dict(Counter(windows)),
        pair_flops=4 * config.num_attention_heads * shape.head_dim,
        kv_bytes=shape.token_bytes // shape.num_layers,
        expert_bytes=sum(one.nbytes for one in experts),
        expert_share=share,
    )


def _is_expert(name: str) -> bool:
    return f".{_EXPERT}" in f".{name}"


def _expert_share(config: Any) -> float | None:
    count = next((found for name in _EXPERTS if (found := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / count if count and chosen else None
