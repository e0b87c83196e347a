"""Folders with 4-bit weights of AWQ and GPTQ, packed here as their tools do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.compute.int4_folder import _awq, _gptq
from engine.compute.model import LoadedModel, ModelError, load_model
from engine.compute.quantize import dequantize
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.demo import MODEL_DIR
from tests.fakes.tiny_models import KINDS, Driver, make_family, random_ids, transformers_generate

GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}


def pack(numbers: Tensor, order: list[int]) -> Tensor:
    """(rows, 8 n) of 0 .. 15 -> (rows, n) int32: nibble i of each holds number order[i] of eight."""
    eights = numbers.long().view(len(numbers), -1, 8)[..., order]
    words = (eights << torch.arange(8) * 4).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def packed(inputs: int, outputs: int, said: dict[str, Any], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, and its weight (out, in)."""
    generator = torch.Generator().manual_seed(seed)
    group = said["group_size"]
    numbers = torch.randint(0, 16, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, 16, (inputs // group, outputs), generator=generator)
    scales = (torch.rand((inputs // group, outputs), generator=generator) * 0.1).half()
    weight = ((numbers - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)).t()
    if said["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {"qweight": pack(numbers, order), "qzeros": pack(zeros, order), "scales": scales}, weight
    plain, less = list(range(8)), 0 if said.get("checkpoint_format") == "gptq_v2" else 1
    own = {"qweight": pack(numbers.t(), plain).t().contiguous(), "qzeros": pack(zeros - less, plain), "scales": scales}
    return own | {"g_idx": torch.arange(inputs, dtype=torch.int32) // group}, weight


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([AWQ, GPTQ, {**GPTQ, "checkpoint_format": "gptq_v2"}]),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_a_layer_is_read_without_loss(said: dict[str, Any], group: int, groups: int, eights: int, seed: int) -> None:
    said = {**said, "group_size": group}
    own, weight = packed(group * groups, 8 * eights, said, seed)
    read = _awq if said["quant_method"] == "awq" else _gptq
    found = read(own["qweight"], own["qzeros"], own["scales"], own.get("g_idx"), said)
    assert torch.equal(dequantize(found), weight)


def save(folder: Path, said: dict[str, Any], kind: str = "qwen2", **tensors: Tensor | None) -> Any:
    """A model with such layers, all but the embeddings and the head. Returns transformers' with the same weights."""
    family, own = KINDS[kind]
    module = make_family(family, {**own, "num_hidden_layers": 2})
    module.save_pretrained(folder)
    weights = {name: one for name, one in module.state_dict().items() if name != "lm_head.weight"}
    for seed, (name, layer) in enumerate(module.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            made, weight = packed(layer.in_features, layer.out_features, said, seed)
            del weights[f"{name}.weight"]
            weights |= {f"{name}.{leaf}": one for leaf, one in made.items()}
            with torch.no_grad():
                layer.weight.copy_(weight)
    if not module.config.tie_word_embeddings:
        weights["lm_head.weight"] = module.lm_head.weight.detach()
    weights |= {name: one for name, one in tensors.items() if one is not None}
    save_file(
        {name: one.clone() for name, one in weights.items() if name not in tensors or tensors[name] is not None},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder)
    return module


def load(folder: Path) -> LoadedModel:
    return load_model(EngineSettings(model=str(folder), device="cpu", threads=1))


@pytest.mark.parametrize(("said", "kind"), [(AWQ, "qwen2"), (GPTQ, "llama")])
def test_a_folder_is_the_model_with_its_weights_dequantised(said: dict[str, Any], kind: str, tmp_path: Path) -> None:
    module = save(tmp_path, said, kind)
    model = load(tmp_path)
    assert model.is_fused
    driver = Driver(ModelRunner(model, EngineSettings(kv_cache_bytes=8 << 20, threads=1)))
    prompt = random_ids(40, 3)
    assert driver.generate(prompt, 3) == transformers_generate(module, prompt, 3)


KEY = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("said", "tensors", "reason"),
    [
        ({**AWQ, "bits": 8}, {}, r"quantization_config\.bits 8 is not implemented; should be 4"),
        ({**AWQ, "version": "gemv"}, {}, r"version 'gemv' is not implemented; should be gemm"),
        ({**AWQ, "zero_point": False}, {}, r"zero_point False"),
        ({**GPTQ, "checkpoint_format": "marlin"}, {}, r"checkpoint_format 'marlin'"),
        ({**GPTQ, "group_size": -1}, {}, r"group_size -1 is not implemented; should be 32 or 64 or 128"),
        ({"quant_method": "fp8"}, {}, r"quant_method 'fp8' is not implemented; should be awq or gptq"),
        (GPTQ, {f"{KEY}g_idx": torch.zeros(64, dtype=torch.int32)}, r"up_proj cannot be read as gptq: .* \(desc_act\)"),
        (AWQ, {f"{KEY}scales": None}, "up_proj cannot be read as awq"),
        (AWQ, {f"{KEY}qweight": torch.zeros(64, 3, dtype=torch.int32)}, "up_proj"),
        (AWQ, {"model.norm.weight": None}, r"it has no weight model\.norm\.weight$"),
        (AWQ, {"model.other.weight": torch.zeros(3)}, r"model\.other\.weight has the shape \(3,\)"),
    ],
)
def test_what_does_not_map_is_refused(
    said: dict[str, Any], tensors: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    save(tmp_path, {**(GPTQ if said["quant_method"] == "gptq" else AWQ)}, **tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    with pytest.raises(ModelError, match=reason) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)
