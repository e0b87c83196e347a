"""The sampler against a plain numpy twin, and its distribution against the one it should draw from."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.protocol import Sampling
from engine.sampling.sampler import Sampler, adjust, draw, uniform, weigh
from engine.sequence import NOT_FINITE, Sequence

VOCABULARY = 60


ENDS = frozenset({7, 20})


def make_sequence(sampling: Sampling, generated: list[int] | None = None, prompt: int = 3) -> Sequence:
    tokens = array("I", [1] * prompt + (generated or []))
    return Sequence("", 0, tokens, prompt, [], sampling, end_ids=ENDS)


def reference(logits: np.ndarray, sequence: Sequence) -> np.ndarray:
    """Probabilities of the next token, written down as slowly as the documentation reads."""
    sampling = sequence.sampling
    scores = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(sequence.tokens):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(sequence.tokens[sequence.num_prompt :]):
        count = list(sequence.tokens[sequence.num_prompt :]).count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sequence.num_generated < sampling.min_tokens:
        scores[list(ENDS)] = -np.inf
    if sampling.temperature == 0:
        return (np.arange(len(scores)) == scores.argmax()).astype(np.float64)
    scores = scores / sampling.temperature
    if sampling.top_k:
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        total, kept = 0.0, []
        for token in order:
            kept.append(token)
            total += weights[token]
            if total >= sampling.top_p:
                break
        mask = np.zeros_like(weights)
        mask[kept] = 1
        weights = weights * mask / (weights * mask).sum()
    weights = np.where(weights >= sampling.min_p * weights.max(), weights, 0)
    return weights / weights.sum()


samplings = st.builds(
    Sampling,
    max_tokens=st.just(10),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, VOCABULARY]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 4.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    min_tokens=st.sampled_from([0, 1, 12]),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-5, 5)), max_size=3).map(
        lambda pairs: tuple(dict(pairs).items())
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    sampling=samplings,
    seed=st.integers(0, 2**32),
    generated=st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
)
def test_probabilities_are_those_of_the_slow_twin(sampling: Sampling, seed: int, generated: list[int]) -> None:
    # Multiples of 1/32 that differ: sums are exact in both, and ties cannot be broken differently.
    # A third is below zero, where a repetition penalty multiplies.
    logits = (np.random.default_rng(seed).permutation(VOCABULARY).astype(np.float32) - VOCABULARY // 3) / 8
    sequence = make_sequence(sampling, generated)
    expected = reference(logits, sequence)
    adjusted = adjust(torch.from_numpy(logits), sequence)
    if sampling.temperature == 0:
        assert expected[int(adjusted.argmax())] == 1
        return
    weights, ids = weigh(adjusted, sampling)
    got = np.zeros(VOCABULARY)
    got[np.arange(VOCABULARY) if ids is None else ids.numpy()] = (weights / weights.sum()).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1),
        Sampling(max_tokens=1, temperature=0.5),
        Sampling(max_tokens=1, top_p=0.8),
        Sampling(max_tokens=1, top_k=4),
        Sampling(max_tokens=1, temperature=1.3, top_k=12, top_p=0.9, logit_bias=((3, 1.0),)),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=20).astype(np.float32))
    sequence = make_sequence(sampling)
    expected = reference(logits.numpy(), sequence)
    weights, ids = weigh(adjust(logits, sequence), sampling)
    count = 5000
    seen = np.bincount([draw(weights, ids, uniform(11, position)) for position in range(count)], minlength=20)
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - count * expected)[possible] ** 2 / (count * expected)[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations, and the draws are fixed


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch() -> None:
    logits = torch.from_numpy(np.random.default_rng(6).normal(size=(40, VOCABULARY)).astype(np.float32))

    def text(neighbours: int, row: int) -> list[int]:
        sequence = make_sequence(Sampling(max_tokens=40, seed=123))
        others = [make_sequence(Sampling(max_tokens=40, seed=None if i % 2 else i)) for i in range(neighbours)]
        batch = [*others[:row], sequence, *others[row:]]
        for step in range(40):
            rows = torch.stack([logits[step] if s is sequence else logits[i] for i, s in enumerate(batch)])
            sequence.tokens.append(Sampler().choose(rows, batch)[row])
        return list(sequence.tokens)

    assert text(0, 0) == text(5, 3) == text(9, 9)


def test_different_seeds_give_different_texts_and_no_seed_never_repeats_itself() -> None:
    logits = torch.zeros(1, 5000)

    def text(seed: int | None) -> tuple[int, ...]:
        sequence, sampler = make_sequence(Sampling(max_tokens=8, seed=seed)), Sampler()
        for _ in range(8):
            sequence.tokens.append(sampler.choose(logits, [sequence])[0])
        return tuple(sequence.tokens)

    assert len({text(seed) for seed in (0, 1, -1, 2**63, 2**64 + 5, None, None)}) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_first_of_the_highest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.5, -1.0]], dtype=dtype)
    greedy = make_sequence(Sampling(max_tokens=1, temperature=0.0))
    assert Sampler().choose(logits, [greedy, greedy]) == [1, 0]


def test_rows_that_are_not_finite_are_told_apart() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, nan, 2.0], [inf, 0.0, 0.0], [-inf, 0.0, -inf], [-inf, -inf, -inf]])
    sequences = [make_sequence(Sampling(max_tokens=1, temperature=t)) for t in (0.0, 1.0, 0.0, 1.0, 1.0)]
    assert Sampler().choose(logits, sequences) == [2, NOT_FINITE, NOT_FINITE, 1, NOT_FINITE]


def test_a_tiny_temperature_is_greedy_and_overflows_nothing() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9]])
    sequence = make_sequence(Sampling(max_tokens=1, temperature=1e-6, seed=1))
    assert Sampler().choose(logits, [sequence]) == [1]


def test_a_wide_nucleus_keeps_more_than_the_first_guess() -> None:
    logits = torch.zeros(5000)
    weights, ids = weigh(logits, Sampling(max_tokens=1, top_p=0.5))
    assert ids is not None
    assert len(weights) == len(ids) == 2500


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(1, VOCABULARY)
    before = logits.clone()
    sampling = Sampling(max_tokens=1, logit_bias=((2, 5.0),), presence_penalty=1.0, top_p=0.5, top_k=3)
    Sampler().choose(logits, [make_sequence(sampling, [2, 2, 7])])
    assert torch.equal(logits, before)


def test_no_end_is_chosen_before_min_tokens_and_any_is_after() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7], logits[0, 20], logits[0, 33] = 9.0, 8.0, 1.0
    for temperature in (0.0, 0.1):
        sampling = Sampling(max_tokens=9, temperature=temperature, min_tokens=2, seed=0)
        chosen = [Sampler().choose(logits, [make_sequence(sampling, [5] * count)])[0] for count in range(4)]
        assert chosen == [33, 33, 7, 7]


def test_a_sequence_ends_early_when_nothing_but_its_end_can_come() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 7] = 1.0
    for temperature in (0.0, 1.0):
        sequence = make_sequence(Sampling(max_tokens=9, temperature=temperature, min_tokens=5))
        assert Sampler().choose(logits, [sequence]) == [7]


def test_a_token_that_came_many_times_is_penalised_once_for_repetition() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    sequence = Sequence("", 0, array("I", [0, 0, 1, 0, 1]), 2, [], Sampling(max_tokens=1, repetition_penalty=2.0))
    assert adjust(logits, sequence).tolist() == [1.0, -4.0, 1.0]


WARPED = [
    Sampling(max_tokens=1, repetition_penalty=1.3),
    Sampling(max_tokens=1, temperature=0.7, top_k=9, top_p=0.85, min_p=0.05, repetition_penalty=1.5, min_tokens=9),
]


@pytest.mark.parametrize("sampling", WARPED)
def test_twenty_thousand_draws_follow_what_transformers_makes_of_the_same_logits(sampling: Sampling) -> None:
    sequence = make_sequence(sampling, [3, 4, 4])
    logits = torch.from_numpy(np.random.default_rng(8).normal(0, 2, size=VOCABULARY).astype(np.float32))
    ids, scores = torch.tensor([list(sequence.tokens)]), logits[None].clone()
    processors = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
    ]
    if sampling.min_tokens:
        length = MinNewTokensLengthLogitsProcessor(sequence.num_prompt, sampling.min_tokens, sorted(ENDS), device="cpu")
        processors.insert(1, length)
        processors += [
            TopKLogitsWarper(sampling.top_k),
            TopPLogitsWarper(sampling.top_p),
            MinPLogitsWarper(sampling.min_p),
        ]
    for processor in processors:
        scores = processor(ids, scores)
    expected = scores[0].double().softmax(-1).numpy()

    weights, kept = weigh(adjust(logits, sequence), sampling)
    count = 20_000
    seen = np.bincount([draw(weights, kept, uniform(3, position)) for position in range(count)], minlength=VOCABULARY)
    possible = expected > 0
    assert set(seen.nonzero()[0]) <= set(possible.nonzero()[0])
    chi_square = ((seen - count * expected)[possible] ** 2 / (count * expected)[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_a_bias_on_a_token_that_does_not_exist_is_left_out() -> None:
    sampling = Sampling(max_tokens=1, temperature=0.0, logit_bias=((VOCABULARY + 5, 100.0), (4, 50.0)))
    assert Sampler().choose(torch.zeros(1, VOCABULARY), [make_sequence(sampling)]) == [4]


def test_a_draw_at_the_very_end_is_a_token_that_can_be_drawn() -> None:
    weights = torch.tensor([0.1, 0.2, 0.0, 0.0], dtype=torch.float64)
    assert draw(weights, None, 1.0) == 1
    assert draw(weights, None, 0.0) == 0
    assert draw(torch.tensor([0.0, 0.3], dtype=torch.float64), None, 0.0) == 1
