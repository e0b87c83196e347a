"""LoRA adapters against models whose weights have them merged in, alone and beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.compute.lora import Adapter, read_adapters
from engine.sequence import Step, Work
from tests.fakes.lora import ALL, merge, refusal, write_adapter
from tests.fakes.tiny_models import Driver, make_module, make_runner, random_ids, transformers_generate

TARGETS = {"llama": ALL, "gpt2": ["c_attn", "c_fc", "c_proj"], "phi3": ["qkv_proj", "down_proj"]}


def read_two(folder: Path, kind: str) -> list[Adapter]:
    """One of all layers, and one of some, with ranks and scales of their own."""
    module, targets = make_module(kind), TARGETS[kind]
    write_adapter(folder / "a", module, targets, 1)
    last = {"rank_pattern": {targets[-1]: 7}, "alpha_pattern": {targets[-1]: 3}, "use_rslora": True}
    write_adapter(folder / "b", module, [targets[0], targets[-1]], 2, rank=3, **last)
    return read_adapters({"a": folder / "a", "b": folder / "b"}, module, "tiny")


@pytest.mark.parametrize("kind", TARGETS)
def test_answers_of_base_and_adapters_in_one_batch_are_those_of_merged_models(kind: str, tmp_path: Path) -> None:
    adapters = read_two(tmp_path, kind)
    pairs = adapters[1].pairs
    assert {down.shape[0] for down, _ in pairs.values()} == {3, 7}
    driver = Driver(make_runner(kind, adapters=adapters))
    prompts = [random_ids(20 + 3 * number, number) for number in range(6)]
    sequences = [driver.sequence(ids, 12, adapter=number % 3) for number, ids in enumerate(prompts)]
    driver.run(*(Work(s, 0, s.num_tokens, samples=True) for s in sequences))
    driver.decode(sequences, 11)
    modules = [make_module(kind), *(merge(make_module(kind), adapter) for adapter in adapters)]
    for number, (ids, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        assert sequence.tokens[len(ids) :].tolist() == transformers_generate(modules[number % 3], ids, 12)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_rows_bits_depend_on_no_other_adapter_and_warm_equals_cold(
    bits: Literal[8, 4] | None, tmp_path: Path
) -> None:
    adapters = read_two(tmp_path, "llama")
    driver = Driver(make_runner("llama", bits=bits, adapters=adapters))
    plain = Driver(make_runner("llama", bits=bits))
    ids = random_ids(600, 5)
    alone = [driver.prefill(driver.sequence(ids, 2, adapter=number)).clone() for number in range(3)]
    assert torch.equal(alone[0], plain.prefill(plain.sequence(ids, 2)))
    assert not any(torch.allclose(alone[a], alone[b], atol=0.1) for a, b in ((0, 1), (0, 2), (1, 2)))

    # Together, in tiles and with other cuts; then warm, each behind a holder's blocks.
    numbers = [1, 0, 2, 1]
    cold = [driver.sequence(ids, 2, adapter=number) for number in numbers]
    driver.run(*(Work(s, 0, 288, samples=False) for s in cold))
    driver.run(*(Work(s, 288, s.num_tokens - 288, samples=True) for s in cold))
    assert all(torch.equal(driver.logits[at], alone[number]) for at, number in enumerate(numbers))
    warm = [driver.sequence(ids, 2, shared=s.block_table[:18], adapter=s.adapter) for s in cold[:3]]
    driver.run(*(Work(s, 288, s.num_tokens - 288, samples=True) for s in warm))
    assert all(torch.equal(driver.logits[at], alone[number]) for at, number in enumerate(numbers[:3]))
    driver.decode(cold, 1)
    together = driver.logits.clone()
    for at, sequence in enumerate(warm):
        driver.decode([sequence], 1)
        assert torch.equal(driver.logits[0], together[at])


def test_a_flipped_bit_is_another_adapter(tmp_path: Path) -> None:
    module = make_module("llama")
    folder = write_adapter(tmp_path, module, ALL, 1)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"

    def fingerprint() -> str:
        return read_adapters({"a": folder}, module, "tiny")[0].fingerprint

    first, data = fingerprint(), bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)
    second = fingerprint()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 7}))
    assert len({first, second, fingerprint()}) == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 5}, "a LoRA of another model"),
        ({"r": "many"}, "invalid literal"),
        ({"target_modules": ["q_proj", "v_proj"]}, "are its files whole?"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    module = make_module("llama")
    said = refusal(write_adapter(tmp_path, module, ["q_proj"], 1, **{"target_modules": ["q_proj"]} | config), module)
    assert reason in said
    assert said.startswith(f"engine.lora: adapter 'a' ({tmp_path})")
    assert "\n" not in said


def test_adapters_of_other_models_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    module = make_module("llama")
    other = write_adapter(tmp_path / "gpt2", make_module("gpt2"), ["c_attn"], 1)
    assert "a LoRA of another model: this one has no linear layer transformer.h.0.attn.c_attn" in refusal(other, module)
    wide = write_adapter(tmp_path / "wide", make_module("qwen3"), ["q_proj"], 1)
    assert "model.layers.0.self_attn.q_proj has the shapes" in refusal(wide, module)
    head = write_adapter(tmp_path / "head", module, ["lm_head"], 1)
    assert "no linear layer lm_head" in refusal(head, module)
    whole = write_adapter(tmp_path / "whole", module, ALL, 1)
    assert "'tiny' is the model's own name" in refusal(whole, module, name="tiny")
    weights = whole / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cut short or damaged" in refusal(whole, module)
    weights.unlink()
    assert "adapter_model.safetensors: No such file or directory" in refusal(whole, module)


def test_drafts_of_an_adapter_are_accepted_while_they_are_what_it_says(tmp_path: Path) -> None:
    driver = Driver(make_runner("llama", adapters=read_two(tmp_path, "llama")))
    ids = random_ids(40, 3)
    said = {number: driver_answer(driver, ids, number) for number in (0, 1)}
    assert said[0] != said[1]
    for number, others in ((0, said[1]), (1, said[0])):
        own, beside = (driver.sequence(ids, 8, adapter=one) for one in (number, 1 - number))
        driver.run(*(Work(s, 0, 40, samples=True) for s in (own, beside)))
        drafts = (*said[number][1:3], others[3])
        mixed = [Work(own, 40, 1, samples=True, drafts=drafts), Work(beside, 40, 1, samples=True)]
        accepted, _ = driver.runner.run(Step(mixed, []))
        assert accepted == said[number][1:4]


def driver_answer(driver: Driver, ids: list[int], adapter: int) -> list[int]:
    sequence = driver.sequence(ids, 8, adapter=adapter)
    driver.prefill(sequence)
    driver.decode([sequence], 4)
    return sequence.tokens[len(ids) :].tolist()
