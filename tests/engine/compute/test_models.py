"""docs/models.md is held to what is tested: the families that are served, how, and those that are refused, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.compute.model import ModelError, prepare
from engine.sequence import Work
from tests.fakes.tiny_models import CONTEXT, KINDS, Driver, make_family, make_module, make_runner, random_ids

PAGE = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Cells of the rows whose first one names a class."""
    chapter = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [
        [cell.strip(" `") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*$", chapter, re.MULTILINE)
    ]


def class_of(kind: str) -> str:
    family = KINDS[kind][0]
    return f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"


SERVED = {name: (forward, bits) for name, _, forward, bits in table("Served")}
REFUSED = dict(table("Refused"))
EXACT = [kind for kind in KINDS if SERVED.get(class_of(kind), ("", ""))[1] == "equal"]

_GROUPED = KINDS["llama"][1]
_TINY = {"vocab_size": 211, "hidden_size": 64}
REFUSALS: dict[str, dict[str, Any]] = {
    "GptOss": {**_GROUPED, "head_dim": 8, "num_local_experts": 4},
    "Bloom": {**_TINY, "n_layer": 2, "n_head": 4},
    "Falcon": {**_GROUPED, "alibi": True},
    "GPTJ": {**_GROUPED, "n_inner": 96, "rotary_dim": 4},
    "Rwkv": {**_TINY, "num_hidden_layers": 2},
    "StableLm": _GROUPED,
    "Nemotron": _GROUPED,
    "Mamba": {**_TINY, "num_hidden_layers": 2},
    "MiniMax": _GROUPED,
    "RecurrentGemma": _GROUPED,
    "DiffLlama": _GROUPED,
    "Llama4": {**_GROUPED, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2},
}


def test_the_page_lists_what_is_tested_and_nothing_else() -> None:
    assert set(SERVED) == {class_of(kind) for kind in KINDS}
    assert set(REFUSED) == {f"{family}ForCausalLM" for family in REFUSALS}


@pytest.mark.parametrize("kind", EXACT)
def test_warm_answers_and_batches_of_different_lengths_equal_cold_ones_alone(kind: str) -> None:
    driver = Driver(make_runner(kind))
    assert type(make_module(kind)).__name__ == class_of(kind)
    assert SERVED[class_of(kind)][0] == ("fused" if driver.runner.model.is_fused else "own")
    check_warm_answers(driver)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt2", "gemma3", "mixtral", "qwen2 moe"])
def test_with_quantised_weights_warm_answers_equal_cold_ones(kind: str, bits: Literal[8, 4]) -> None:
    quick, slow = (Driver(make_runner(kind, bits=bits, fast=fast)) for fast in (True, False))
    if kind in EXACT:
        check_warm_answers(quick)
    ids = random_ids(40, 3)
    got, want = (driver.prefill(driver.sequence(ids)) for driver in (quick, slow))
    assert (got - want).norm() < 0.08 * want.norm()  # activations are rounded to 8 bits
    assert not torch.equal(got, Driver(make_runner(kind)).prefill(quick.sequence(ids)))


def check_warm_answers(driver: Driver) -> None:
    shared = random_ids(300, 1)
    holder = driver.sequence(shared)
    driver.prefill(holder, cuts=[128, 256])
    ids = [shared[:288] + random_ids(tail, tail) for tail in (4, 17, 60)]
    cold = []
    for one in ids:
        before = driver._next_block
        cold.append(driver.prefill(driver.sequence(one), cuts=[256]))
        driver._next_block = before
    warm = [driver.sequence(one, shared=holder.block_table[:18]) for one in ids]
    driver.run(*(Work(s, 288, s.num_tokens - 288, samples=True) for s in warm))
    assert all(torch.equal(got, want) for got, want in zip(driver.logits, cold, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXACT])
def test_experts_have_transformers_own_forward(kind: str) -> None:
    assert SERVED[class_of(kind)] == ("own", "close")
    assert not make_runner(kind).model.is_fused


@pytest.mark.parametrize("family", REFUSALS)
def test_what_is_not_supported_is_refused_for_the_reason_on_the_page(family: str) -> None:
    with pytest.raises(ModelError, match=re.escape(REFUSED[f"{family}ForCausalLM"])):
        prepare(make_family(family, REFUSALS[family]), "tiny", CONTEXT * 8)
