"""The sampler against a slow twin in float64, token by token, and its distribution against the one it should draw
from."""

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
from engine.sampling.grammar_worker import Masks
from engine.sampling.sampler import CANDIDATES, Row, Sampler, draw, edit, highest_of, uniform
from engine.sequence import MASK_LATE, NOT_FINITE, ROW_FAILED, Sequence

VOCABULARY = 60


ENDS = frozenset({7, 20})


def make_sequence(sampling: Sampling, generated: list[int] | None = None, prompt: int = 3) -> Sequence:
    tokens = array("I", [1] * prompt + (generated or []))
    return Sequence("", 0, tokens, prompt, [], sampling, end_ids=ENDS)


def choose(logits: torch.Tensor, sequences: list[Sequence], masks: Masks | None = None) -> list[int]:
    return Sampler().choose(logits, [Row(sequence) for sequence in sequences], masks)


def adjust(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    edited = logits[None].clone()
    edit(edited, [Row(sequence)], {})
    return edited[0]


def reference(logits: np.ndarray, row: Row, mask: np.ndarray | None = None, top_p: float = 1.0) -> np.ndarray:
    """Probabilities of the next token, written down as slowly as the documentation reads."""
    sequence, sampling = row.sequence, row.sequence.sampling
    before = [*sequence.tokens, *row.drafted]
    generated = before[sequence.num_prompt :]
    scores = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(before):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(generated):
        scores[token] -= sampling.frequency_penalty * generated.count(token) + sampling.presence_penalty
    if mask is not None:
        scores[~mask] = -np.inf
    ended = scores.copy()
    ended[[end for end in ENDS if end < len(scores)]] = -np.inf
    if len(generated) < sampling.min_tokens and ended.max() > -np.inf:
        scores = ended
    if sampling.temperature == 0:
        return (np.arange(len(scores)) == scores.argmax()).astype(np.float64)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    if top_p < 1:
        reached = np.cumsum(weights[order])
        weights[order[int((reached < top_p).sum()) + 1 :]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


def is_right(token: int, u: float, logits: np.ndarray, row: Row, mask: np.ndarray | None) -> bool:
    """Whether it is the token that float64 draws at `u`, or would but for the rounding of float32."""
    top_p, rounding = row.sequence.sampling.top_p, 1e-5
    for goal in {top_p, top_p - rounding, min(1.0, top_p + rounding)} if top_p < 1 else {1.0}:
        chances = reference(logits, row, mask, goal)
        reached = np.cumsum(chances)
        if chances[token] > 0 and reached[token] - chances[token] - rounding <= u <= reached[token] + rounding:
            return True
    return False


samplings = st.builds(
    Sampling,
    max_tokens=st.just(10),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([0.0, 0.05, 0.4, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 300, 20_000]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 4.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    min_tokens=st.sampled_from([0, 1, 12]),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-5, 5)), max_size=3).map(
        lambda pairs: tuple(dict(pairs).items())
    ),
    seed=st.integers(-9, 9),
)


asked_rows = st.tuples(
    samplings,
    st.lists(st.integers(0, VOCABULARY - 1), max_size=12),  # generated
    st.lists(st.integers(0, VOCABULARY - 1), max_size=3),  # drafted
    st.sampled_from([None, "any", "ends", MASK_LATE]),
    st.sampled_from([1e-3, 1.0, 8.0]),  # how much logits differ
)


@settings(max_examples=50)
@given(
    st.lists(asked_rows, min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.sampled_from([VOCABULARY, 700, 17 * 2 * CANDIDATES + 5]),
    st.booleans(),
)
def test_every_token_is_that_of_the_slow_twin_alone_and_in_a_batch(
    asked: list[tuple[Sampling, list[int], list[int], str | int | None, float]], seed: int, size: int, tied: bool
) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(len(asked), size)) * np.array([[spread] for *_, spread in asked])
    logits = (np.round(logits * 2) / 2 if tied else logits).astype(np.float32)
    rows, masks = [], {}
    for index, (sampling, generated, drafted, kind, _) in enumerate(asked):
        rows.append(Row(make_sequence(sampling, generated), tuple(drafted)))
        if kind == "any":
            masks[index] = random.random(size) < 0.3
            masks[index][33] = True
        elif kind == "ends":
            masks[index] = np.isin(np.arange(size), list(ENDS))
        elif kind is not None:
            masks[index] = kind
    tokens = Sampler().choose(torch.from_numpy(logits), rows, masks)
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        mask = masks.get(index)
        alone = Sampler().choose(torch.from_numpy(logits[index : index + 1]), [row], {} if mask is None else {0: mask})
        assert alone == [token]
        if isinstance(mask, int):
            assert token == mask
        else:
            u = uniform(row.sequence.sampling.seed or 0, row.sequence.num_tokens + len(row.drafted))
            assert is_right(token, u, logits[index], row, mask)


@pytest.mark.parametrize("size", [100, 9000, 20_003])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.001}])
def test_a_row_is_drawn_alike_alone_and_among_others_with_any_number_of_threads(
    size: int, filters: dict[str, float]
) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 4, (5, size)).astype(np.float32))
    rows = [Row(make_sequence(Sampling(max_tokens=1, seed=7, **filters), [1] * i)) for i in range(5)]
    before = torch.get_num_threads()
    try:
        told = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            told.append(Sampler().choose(logits, rows))
            told.append([Sampler().choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(5)])
    finally:
        torch.set_num_threads(before)
    assert all(one == told[0] for one in told)


@pytest.mark.parametrize("count", [1, 7, CANDIDATES])
def test_the_highest_of_a_row_are_those_of_topk(count: int) -> None:
    for size in (CANDIDATES // 2, 9000, 17 * 2 * CANDIDATES + 3):
        logits = torch.from_numpy(np.random.default_rng(size).permutation(3 * size).reshape(3, size).astype(np.float32))
        values, ids = highest_of(logits, count)
        assert torch.equal(logits.gather(1, ids), values)
        assert torch.equal(values.sort(descending=True).values, logits.topk(min(count, size)).values)


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
    expected = reference(logits.numpy(), Row(sequence), None, sampling.top_p)
    assert_drawn(adjust(logits, sequence), sampling, expected, 5000)


def assert_drawn(logits: torch.Tensor, sampling: Sampling, expected: np.ndarray, count: int) -> None:
    """By chi-square; draws are fixed."""
    chosen = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]
    controls = torch.tensor([[*chosen, uniform(11, position)] for position in range(count)], dtype=torch.float64)
    seen = np.bincount(draw(logits.expand(count, -1), controls).numpy(), minlength=len(logits))
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - count * expected)[possible] ** 2 / (count * expected)[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations


@pytest.mark.slow
def test_a_large_vocabulary_is_drawn_from_by_its_distribution() -> None:
    """By groups of ids, whose chances differ: from the whole of it, and from what a wide nucleus keeps."""
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 3, size=9000).astype(np.float32))
    count = 400
    for top_p in (1.0, 0.999):
        sampling = Sampling(max_tokens=1, top_p=top_p)
        expected = reference(logits.numpy(), Row(make_sequence(sampling)), None, top_p)
        controls = torch.tensor([[1.0, 0, top_p, 0, uniform(3, i)] for i in range(count)], dtype=torch.float64)
        tokens = np.concatenate([draw(logits.expand(50, -1), part).numpy() for part in controls.split(50)])  # type: ignore[no-untyped-call]
        assert (expected[tokens] > 0).all()
        seen, chances = np.bincount(tokens // 450, minlength=20), expected.reshape(20, 450).sum(1)
        chi_square = ((seen - count * chances) ** 2 / (count * chances)).sum()
        assert chi_square < 19 + 4 * np.sqrt(2 * 19)


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch() -> None:
    logits = torch.from_numpy(np.random.default_rng(6).normal(size=(40, VOCABULARY)).astype(np.float32))

    def text(neighbours: int, row: int) -> list[int]:
        sequence = make_sequence(Sampling(max_tokens=40, seed=123))
        others = [make_sequence(Sampling(max_tokens=40, seed=None if i % 2 else i)) for i in range(neighbours)]
        batch = [*others[:row], sequence, *others[row:]]
        for step in range(40):
            rows = torch.stack([logits[step] if s is sequence else logits[i] for i, s in enumerate(batch)])
            sequence.tokens.append(choose(rows, batch)[row])
        return list(sequence.tokens)

    assert text(0, 0) == text(5, 3) == text(9, 9)


def test_different_seeds_give_different_texts_and_no_seed_never_repeats_itself() -> None:
    logits = torch.zeros(1, 5000)

    def text(seed: int | None) -> tuple[int, ...]:
        sequence, sampler = make_sequence(Sampling(max_tokens=8, seed=seed)), Sampler()
        for _ in range(8):
            sequence.tokens.append(sampler.choose(logits, [Row(sequence)])[0])
        return tuple(sequence.tokens)

    assert len({text(seed) for seed in (0, 1, -1, 2**63, 2**64 + 5, None, None)}) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_first_of_the_highest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.5, -1.0]], dtype=dtype)
    greedy = make_sequence(Sampling(max_tokens=1, temperature=0.0))
    assert choose(logits, [greedy, greedy]) == [1, 0]


def test_rows_that_are_not_finite_are_told_apart() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, nan, 2.0], [inf, 0.0, 0.0], [-inf, 0.0, -inf], [-inf, -inf, -inf]])
    sequences = [make_sequence(Sampling(max_tokens=1, temperature=t)) for t in (0.0, 1.0, 0.0, 1.0, 1.0)]
    assert choose(logits, sequences) == [2, NOT_FINITE, NOT_FINITE, 1, NOT_FINITE]


def test_a_tiny_temperature_is_greedy_and_overflows_nothing() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9]])
    sequence = make_sequence(Sampling(max_tokens=1, temperature=1e-6, seed=1))
    assert choose(logits, [sequence]) == [1]


def test_a_wide_nucleus_keeps_more_than_the_candidates() -> None:
    controls = torch.tensor([[1.0, 0, 0.5, 0, i / 99] for i in range(99)], dtype=torch.float64)
    assert draw(torch.zeros(99, 5000), controls).unique().tolist() == [2500 * i // 99 for i in range(99)]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(1, VOCABULARY)
    before = logits.clone()
    sampling = Sampling(max_tokens=1, logit_bias=((2, 5.0),), presence_penalty=1.0, top_p=0.5, top_k=3)
    choose(logits, [make_sequence(sampling, [2, 2, 7])])
    assert torch.equal(logits, before)


def test_no_end_is_chosen_before_min_tokens_and_any_is_after() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7], logits[0, 20], logits[0, 33] = 9.0, 8.0, 1.0
    for temperature in (0.0, 0.1):
        sampling = Sampling(max_tokens=9, temperature=temperature, min_tokens=2, seed=0)
        chosen = [choose(logits, [make_sequence(sampling, [5] * count)])[0] for count in range(4)]
        assert chosen == [33, 33, 7, 7]


def test_a_sequence_ends_early_when_nothing_but_its_end_can_come() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 7] = 1.0
    for temperature in (0.0, 1.0):
        sequence = make_sequence(Sampling(max_tokens=9, temperature=temperature, min_tokens=5))
        assert choose(logits, [sequence]) == [7]


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

    assert_drawn(adjust(logits, sequence), sampling, expected, 20_000)


def test_a_bias_on_a_token_that_does_not_exist_is_left_out() -> None:
    sampling = Sampling(max_tokens=1, temperature=0.0, logit_bias=((VOCABULARY + 5, 100.0), (4, 50.0)))
    assert choose(torch.zeros(1, VOCABULARY), [make_sequence(sampling)]) == [4]


def test_a_draw_at_the_very_end_is_a_token_that_can_be_drawn() -> None:
    rows = torch.tensor([[-torch.inf, 0.0, 0.7, -torch.inf]]).expand(4, -1)
    least, most = 0.0, float(np.nextafter(1, 0))
    filters = [(0, 1.0, least), (0, 1.0, most), (3, 0.99999, least), (3, 0.99999, most)]
    controls = torch.tensor([[1.0, k, p, 0.0, u] for k, p, u in filters], dtype=torch.float64)
    assert draw(rows, controls).tolist() == [1, 2, 1, 2]


def test_a_row_whose_grammar_allows_only_what_the_model_rules_out_fails_alone() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0], [3.0, 1.0, 2.0], [-torch.inf, 1.0, 2.0]])
    sequences = [make_sequence(Sampling(max_tokens=1, temperature=t, seed=1)) for t in (0.0, 0.01, 1.0)]
    masks: Masks = {i: np.array([True, False, False]) for i in (0, 2)}
    assert choose(logits, sequences, masks) == [ROW_FAILED, 0, ROW_FAILED]
