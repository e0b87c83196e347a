"""Models from GGUF files: their blocks against the package that defines them, and the whole against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute import model as models
from engine.compute.gguf_file import KINDS, GGUFFile
from engine.compute.kv_cache import STEP_BYTES
from engine.compute.model import LoadedModel, ModelError, load_model
from engine.compute.quantize import dequantize
from engine.compute.quantized_layers import QuantizedEmbedding, QuantizedLinear
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from tests.fakes.gguf_files import random_blocks, write_gguf
from tests.fakes.tiny_models import KINDS as FAMILIES
from tests.fakes.tiny_models import Driver, make_family, random_ids, transformers_generate

SIZES = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
Q4_K_M = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}


def make(kind: str, **changes: Any) -> Any:
    family, own = FAMILIES[kind]
    return make_family(family, {**own, **SIZES, **changes})


def load(path: Path, **changes: Any) -> LoadedModel:
    return load_model(EngineSettings(model=str(path), device="cpu", threads=1, **changes))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), out=st.integers(1, 9), blocks=st.integers(1, 4), seed=st.integers(0, 99))
def test_blocks_are_what_the_package_says_bit_for_bit(kind: str, out: int, blocks: int, seed: int) -> None:
    wanted = gguf.GGMLQuantizationType[kind]
    size, width = gguf.GGML_QUANT_SIZES[wanted]
    data = random_blocks(wanted, (out, blocks * size), seed)
    read = KINDS[kind].read(torch.from_numpy(data).view(out, blocks, width))
    assert np.array_equal(dequantize(read).numpy(), gguf.quants.dequantize(data, wanted))
    assert read.nbytes == out * blocks * size * KINDS[kind].number_bytes


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("llama", Q4_K_M),
        ("qwen2", {"": "Q8_0"}),
        ("qwen3", {"": "Q4_0", "attn_v": "F16", "attn_k": "BF16"}),
        pytest.param("mistral", Q4_K_M, marks=pytest.mark.slow),
    ],
)
def test_a_file_is_the_model_with_its_weights_dequantised(kind: str, blocks: dict[str, str], tmp_path: Path) -> None:
    module, path = make(kind), tmp_path / "tiny-model.gguf"
    write_gguf(path, module, blocks)
    expected = {name: one.float() for name, one in module.state_dict().items()}

    file = GGUFFile(path)
    read = file.load(file.read_config(), torch.float32)
    for name, part in read.named_modules():
        if isinstance(part, QuantizedLinear | QuantizedEmbedding):
            assert torch.equal(dequantize(part.quantized), expected.pop(f"{name}.weight"))
    for name, parameter in read.named_parameters():
        if parameter.numel():
            assert torch.equal(parameter, expected.pop(name))
    assert not expected

    model = load(path)
    assert (model.name, model.is_fused, model.eos_ids, model.dtype) == ("tiny-model", True, (2, 3), torch.float32)
    assert model.cost is not None
    assert model.cost.row_params == 320 * 256
    driver = Driver(ModelRunner(model, EngineSettings(kv_cache_bytes=8 << 20, threads=1)))
    prompt = random_ids(40, 3)
    found, wanted = driver.generate(prompt, 8), transformers_generate(module, prompt, 8)
    assert found[0] == wanted[0]  # later ones may part where activations in 8 bits make a near tie fall otherwise
    assert model.tokenizer.chat_template == "{{ messages[0].content }}"
    assert model.fingerprint == load(path).fingerprint


@pytest.mark.parametrize(
    ("kind", "blocks", "fused"),
    [
        ("llama", {"": "F32"}, True),
        ("qwen2", {"": "F16"}, True),
        ("qwen3", {"": "BF16"}, True),
        ("phi3", Q4_K_M, False),
    ],
)
def test_what_is_computed_in_floating_point_gives_the_tokens_of_transformers(
    kind: str, blocks: dict[str, str], fused: bool, tmp_path: Path
) -> None:
    module = make(kind)
    write_gguf(tmp_path / "m.gguf", module, blocks)
    model = load(tmp_path / "m.gguf")
    assert model.is_fused == fused
    driver = Driver(ModelRunner(model, EngineSettings(kv_cache_bytes=8 << 20, threads=1)))
    prompt = random_ids(40, 3)
    assert driver.generate(prompt, 16) == transformers_generate(module, prompt, 16)


def test_positions_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    for name, rope in (("llama3", scaled), ("linear", linear)):
        module = make("llama", rope_parameters=rope)
        plain = make("llama").model.rotary_emb.inv_freq
        factors = {"rope_freqs.weight": (plain / module.model.rotary_emb.inv_freq).numpy()}
        said = {"{0}.rope.scaling.type": "linear", "{0}.rope.scaling.factor": 4.0}
        path = tmp_path / f"{name}.gguf"
        is_linear = name == "linear"
        write_gguf(
            path, module, {"": "F32"}, metadata=said if is_linear else None, tensors={} if is_linear else factors
        )
        file = GGUFFile(path)
        read = file.load(file.read_config(), torch.float32)
        torch.testing.assert_close(read.model.rotary_emb.inv_freq, module.model.rotary_emb.inv_freq)
        assert not torch.equal(read.model.rotary_emb.inv_freq, plain)


def test_a_file_that_is_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", make("llama"), {"": "Q8_0"})
    whole, path = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "cut.gguf"
    start = GGUFFile(tmp_path / "whole.gguf")._tensors["token_embd.weight"].data_offset
    ends = {0, 3, 4, 8, 23, 24, 30, *range(100, start, start // 23), *range(start, len(whole), len(whole) // 11)}
    for end in (*ends, len(whole) - 32):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf: cannot be read as GGUF, or is cut short") as raised:
            load(path)
        assert "\n" not in str(raised.value)


@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_header_with_a_wrong_byte_is_read_or_refused(at: int, byte: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "wrong-byte"
    folder.mkdir(exist_ok=True)
    if not (folder / "whole.gguf").exists():
        write_gguf(folder / "whole.gguf", make("qwen2", num_hidden_layers=1), {"": "Q8_0"})
    data = bytearray((folder / "whole.gguf").read_bytes())
    data[at] = byte
    (folder / "wrong.gguf").write_bytes(bytes(data))
    try:
        file = GGUFFile(folder / "wrong.gguf")
        file.load(file.read_config(), torch.float32)
    except ModelError:
        pass


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "nothing"}, "architecture 'nothing'"),
        ({"metadata": {"{0}.rope.scaling.type": "longrope"}}, "positions are scaled by 'longrope'"),
        ({"tensors": {"blk.0.strange.weight": np.zeros((2, 2), np.float32)}}, r"layers\.0\.strange\.weight"),
        ({"kinds": {"": "Q5_K"}}, "weights in Q5_K, which are not implemented; should be Q8_0, "),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make("llama"), **{"kinds": {"": "Q8_0"}, **changes})
    with pytest.raises(ModelError, match=reason) as raised:
        load(tmp_path / "m.gguf")
    assert "\n" not in str(raised.value)


def test_a_file_without_one_of_its_weights_is_refused(tmp_path: Path) -> None:
    module = make("llama")
    write_gguf(tmp_path / "m.gguf", module, {"": "Q8_0"})
    file = GGUFFile(tmp_path / "m.gguf")
    del file._tensors["blk.1.ffn_up.weight"], file._tensors["blk.1.ffn_norm.weight"]
    with pytest.raises(ModelError, match=r"it has no weight model\.layers\.1\..*, and 1 more"):
        file.load(file.read_config(), torch.float32)


def test_a_file_that_does_not_fit_is_refused_by_what_its_blocks_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make("llama")
    write_gguf(tmp_path / "m.gguf", module, {"": "Q8_0"})
    need = sum(one.numel() * (1.125 if one.ndim == 2 else 4) for one in module.parameters())
    monkeypatch.setattr(models, "free_bytes", lambda device, limit: STEP_BYTES + need - 1)
    with pytest.raises(ModelError, match="GB are free"):
        load(tmp_path / "m.gguf")


def test_layers_that_a_file_only_counts_are_not_made(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make("llama"), {"": "Q8_0"})
    data, key = bytearray((tmp_path / "m.gguf").read_bytes()), b"llama.block_count"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(bytes(data))
    with pytest.raises(ModelError, match=f"there are no weights of layer {(1 << 30) - 1}"):
        load(tmp_path / "m.gguf")
