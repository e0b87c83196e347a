"""LoRA adapters as PEFT writes them, with random weights; and a model with one merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from engine.compute.lora import Adapter, read_adapters
from engine.compute.model import ModelError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, module: Any, targets: list[str], seed: int, rank: int = 4, **config: Any) -> Path:
    """Returns the folder. rank_pattern is heeded."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, layer in module.named_modules():
        if path.rpartition(".")[2] in targets:
            own = config.get("rank_pattern", {}).get(path.rpartition(".")[2], rank)
            outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
            sizes = {"A": (own, inputs), "B": (outputs, own)}
            for side, size in sizes.items():
                tensors[f"base_model.model.{path}.lora_{side}.weight"] = 0.3 * torch.randn(size, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(usual | config))
    return folder


def merge(module: Any, adapter: Adapter) -> Any:
    """The module, changed."""
    with torch.no_grad():
        for path, (down, up) in adapter.pairs.items():
            layer = module.get_submodule(path)
            layer.weight += up @ down if isinstance(layer, nn.Linear) else (up @ down).T
    return module


def refusal(folder: Path, module: Any, name: str = "a") -> str:
    """Why it cannot be used."""
    try:
        read_adapters({name: folder}, module, "tiny")
    except ModelError as error:
        return str(error)
    raise AssertionError("it was taken")
