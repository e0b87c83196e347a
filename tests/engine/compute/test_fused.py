"""The fused forward against transformers' own forward over the same cache."""

from __future__ import annotations

from itertools import count
from typing import Literal

import pytest
import torch
from torch.nn import functional

from engine.compute import forward
from engine.compute.forward import is_compiled, rms_norm, turn
from engine.compute.fused import fuse
from engine.compute.model import load_model
from engine.compute.quantize import quantize
from engine.compute.quantized_layers import QuantizedLinear, quantize_layers
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.protocol import Sampling
from engine.sequence import Step, StepGivenUp, Work
from tests.fakes.tiny_models import (
    CONTEXT,
    KINDS,
    Driver,
    make_family,
    make_loaded,
    make_module,
    make_runner,
    random_ids,
)

FUSED = [kind for kind, (family, _) in KINDS.items() if family in ("Llama", "Mistral", "Qwen2", "Qwen3")]


@pytest.mark.parametrize("kind", FUSED)
def test_logits_are_those_of_transformers_layers(kind: str) -> None:
    quick, slow = Driver(make_runner(kind)), Driver(make_runner(kind, fast=False))
    assert quick.runner.model.is_fused
    assert not slow.runner.model.is_fused
    ids = random_ids(600, 1)
    got, want = (driver.prefill(driver.sequence(ids, 3), cuts=[256, 512]) for driver in (quick, slow))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(
        quick.runner.cache.data[..., :600, :, :, :], slow.runner.cache.data[..., :600, :, :, :], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["llama with biases and scaled rope", "qwen2 with windows", "qwen3"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_one_call_for_all_layers_computes_the_bits_of_one_call_for_each_part(
    kind: str, bits: Literal[8, 4] | None, kv_dtype: torch.dtype | None
) -> None:
    whole, parts = (Driver(make_runner(kind, bits=bits, kv_dtype=kv_dtype)) for _ in range(2))
    if whole.runner.model.forward._compiled is None:
        pytest.skip("no C compiler")
    parts.runner.model.forward._compiled = None
    scored = Sampling(max_tokens=9, temperature=0.0, prompt_logprobs=1)
    seen = []
    for driver in (whole, parts):
        one = driver.sequence(random_ids(600, 1), 3, sampling=scored)
        driver.prefill(one, cuts=[570])
        two = driver.sequence(random_ids(90, 2), 3)
        driver.run(Work(two, 0, 90, samples=True), Work(one, one.num_tokens - 1, 1, samples=True))
        driver.decode([one, two], 2)
        seen.append((one.prompt_logprobs, driver.logits.clone(), driver.runner.cache.data))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(got, want) for got, want in zip(seen[0][1:], seen[1][1:], strict=True))


def test_weights_of_several_kinds_side_by_side_are_one_call_too() -> None:
    module, plain = make_module("llama"), make_module("llama")
    quantize_layers(module, 4, torch.float32)
    for layer, other in zip(module.model.layers, plain.model.layers, strict=True):
        layer.self_attn.k_proj = other.self_attn.k_proj
        layer.self_attn.v_proj = QuantizedLinear(quantize(other.self_attn.v_proj.weight, 8), None, torch.float32)
    model = make_loaded(module)
    driver = Driver(ModelRunner(model, EngineSettings(kv_cache_bytes=8 << 20, threads=1)))
    compiled, model.forward._compiled = model.forward._compiled, None
    want = driver.prefill(driver.sequence(random_ids(600, 1)))
    model.forward._compiled = compiled
    assert torch.equal(driver.prefill(driver.sequence(random_ids(600, 1))), want)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_threads_stay_together_for_a_step_and_change_no_bit(quantize: Literal["none", "int8"]) -> None:
    """Also more of them than there are processors, and behind a step that was given up."""
    settings = EngineSettings(model="demo", dtype="float32", kv_cache_bytes=32 << 20, quantize=quantize)
    seen = []
    for threads in (1, 2, 5):
        driver = Driver(ModelRunner(load_model(settings), settings, threads=threads))
        one = driver.sequence(random_ids(600, 1), 3)
        asks = count()
        with pytest.raises(StepGivenUp):
            driver.runner.run(Step([Work(one, 0, 600, samples=True)], unwanted=lambda asks=asks: next(asks) == 5))
        driver.prefill(one, cuts=[570])
        driver.decode([one], 2)
        seen.append((driver.logits.clone(), driver.runner.cache.data))
    for logits, cache in seen[1:]:
        assert torch.equal(logits, seen[0][0])
        assert torch.equal(cache, seen[0][1])


@pytest.mark.parametrize("kind", ["gpt2", "gpt neox", "phi3", "mixtral", "gemma3"])
def test_other_models_keep_their_own_forward(kind: str) -> None:
    module = make_module(kind)
    assert fuse(module, CONTEXT, [None] * 3) is None


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_a_relative_with_unusual_parts_keeps_its_own_forward(change: dict[str, object]) -> None:
    module = make_family("Llama", {**KINDS["llama"][1], **change})
    assert fuse(module, CONTEXT, [None] * 3) is None


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute norms and turns; the first where there is a compiler."""
    if not request.param:
        monkeypatch.setattr(forward, "is_compiled", lambda dtype, device: False)
    elif not is_compiled(torch.float32, torch.device("cpu")):
        pytest.skip("no C compiler")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [16, 20, 64, 512])
def test_the_norm_is_torchs(size: int) -> None:
    rows, weight = torch.randn(70, size), torch.rand(size)
    want = functional.rms_norm(rows, (size,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(rows, weight * size**0.5, 1e-5), want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dim", [8, 24, 64])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_turned_by_their_position_and_values_are_left(dim: int, has_norm: bool) -> None:
    state, norm = torch.randn(70, 5, dim), torch.rand(3, dim) * dim**0.5 if has_norm else None
    positions = torch.arange(100, 30, -1)
    angles = torch.outer(torch.arange(101.0), torch.rand(dim // 2)).repeat(1, 2)
    sign = torch.ones(dim).index_fill_(0, torch.arange(dim // 2), -1)
    before = state[:, :3] if norm is None else rms_norm(state[:, :3], norm, 1e-5)
    cos, sin = (table[positions][:, None] for table in (angles.cos(), angles.sin() * sign))
    want = torch.cat((before * cos + before.roll(dim // 2, -1) * sin, state[:, 3:]), 1)
    alone = state[7:8].clone()
    turn(state, 3, norm, 1e-5, (angles.cos(), angles.sin() * sign), positions)
    torch.testing.assert_close(state, want, atol=1e-5, rtol=1e-5)
    turn(alone, 3, norm, 1e-5, (angles.cos(), angles.sin() * sign), positions[7:8].expand(1))
    torch.testing.assert_close(alone, state[7:8], atol=0 if is_compiled(torch.float32, state.device) else 1e-6, rtol=0)


def test_the_norm_does_not_change_its_argument() -> None:
    rows = torch.randn(4, 32)
    before = rows.clone()
    rms_norm(rows, torch.ones(32), 1e-5)
    assert torch.equal(rows, before)
