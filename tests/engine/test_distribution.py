"""Sampled answers of the whole engine are distributed as transformers' own probabilities say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.fakes.model_bench import make_model_bench
from tests.fakes.tiny_models import make_module, random_ids

PROMPT = random_ids(21, 7)
DRAWS = 20_000
TEMPERATURE, TOP_K, TOP_P = 0.8, 6, 0.95


def expected_answers() -> dict[tuple[int, int], float]:
    """Probability of each answer of two tokens, by transformers' model and its logits processors."""
    module = make_module("llama")
    warpers = (TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P))

    def probabilities(ids: list[int]) -> np.ndarray:
        row = torch.tensor([ids])
        with torch.inference_mode():
            scores = module(row).logits[:, -1].double()
        for warp in warpers:
            scores = warp(row, scores)
        result: np.ndarray = scores.softmax(-1)[0].numpy()
        return result

    first = probabilities(PROMPT)
    return {
        (int(one), int(two)): first[one] * second[two]
        for one in first.nonzero()[0]
        for second in [probabilities([*PROMPT, int(one)])]
        for two in second.nonzero()[0]
    }


@pytest.mark.slow
def test_twenty_thousand_answers_pass_a_chi_square_test() -> None:
    bench = make_model_bench(max_sequences=64, max_waiting=DRAWS)
    for seq in range(DRAWS):
        bench.submit(seq, PROMPT, max_tokens=2, seed=seq, temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
    bench.finish(limit=DRAWS)
    seen = Counter(tuple(bench.answer(seq)) for seq in range(DRAWS))

    expected = expected_answers()
    assert set(seen) <= set(expected), "an answer that the filters leave out"
    chi_square = sum((seen[answer] - DRAWS * p) ** 2 / (DRAWS * p) for answer, p in expected.items())
    freedom = len(expected) - 1
    assert freedom > 20
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations; the seeds are fixed
