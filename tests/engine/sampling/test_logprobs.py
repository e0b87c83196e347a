"""Log probabilities against numpy in float64, and those of a whole engine against transformers' own logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Sampling
from engine.sampling.sampler import LEAST, Row, Sampler, find_logprobs
from engine.sequence import NOT_FINITE, ROW_FAILED
from tests.engine.sampling.test_sampler import VOCABULARY, make_sequence
from tests.fakes.model_bench import make_model_bench
from tests.fakes.tiny_models import make_module, random_ids


def reference(logits: np.ndarray) -> np.ndarray:
    scores = logits.astype(np.float64)
    return scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    asked=st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    top_k=st.sampled_from([0, 3]),
)
def test_they_are_those_of_the_raw_distribution_whatever_is_sampled_from(
    seed: int, asked: list[int | None], temperature: float, top_k: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 4, (len(asked), VOCABULARY)).astype(np.float32)
    options = {"temperature": temperature, "top_k": top_k, "logit_bias": ((1, 9.0),), "min_p": 0.1}
    rows = [Row(make_sequence(Sampling(max_tokens=1, logprobs=count, **options))) for count in asked]
    tokens = Sampler().choose(torch.from_numpy(logits), rows)
    for row, (count, found) in enumerate(zip(asked, (row.logprobs for row in rows), strict=True)):
        if count is None:
            assert found is None
            continue
        assert found is not None
        expected = reference(logits[row])
        assert found.logprob == pytest.approx(expected[tokens[row]], abs=1e-5)
        assert [token for token, _ in found.top] == np.argsort(-expected)[:count].tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(
            np.sort(expected)[::-1][:count].tolist(), abs=1e-5
        )


@pytest.mark.parametrize("broken", [Sampling(1, logprobs="2"), Sampling(1, seed="s")])
def test_a_row_that_cannot_be_sampled_or_described_fails_alone(broken: Sampling) -> None:
    sequences = [make_sequence(Sampling(1, temperature=0.0, logprobs=2)), make_sequence(broken)]
    sequences.append(make_sequence(Sampling(1, temperature=0.0)))
    logits = torch.arange(3.0 * VOCABULARY).view(3, VOCABULARY)
    rows = [Row(sequence) for sequence in sequences]
    assert Sampler().choose(logits, rows) == [VOCABULARY - 1, ROW_FAILED, VOCABULARY - 1]
    assert [row.logprobs is None for row in rows] == [False, True, True]


def test_what_cannot_come_is_told_as_a_number_that_json_has() -> None:
    (found,) = find_logprobs(torch.tensor([[0.0, -torch.inf, 0.0]]), [1], [3])
    assert found.logprob == LEAST
    assert found.top[-1] == (1, LEAST)


def test_there_are_no_more_of_the_likeliest_than_tokens() -> None:
    (found,) = find_logprobs(torch.zeros(1, 3, dtype=torch.bfloat16), [0], [20])
    assert len(found.top) == 3


def test_numbers_that_are_not_finite_have_none() -> None:
    rows = [Row(make_sequence(Sampling(max_tokens=1, temperature=0.0, logprobs=2))) for _ in range(2)]
    logits = torch.tensor([[float("nan")] * VOCABULARY, [1.0] * VOCABULARY])
    assert Sampler().choose(logits, rows)[0] == NOT_FINITE
    assert [row.logprobs is None for row in rows] == [True, False]


def test_an_engine_tells_with_each_token_what_transformers_computes() -> None:
    prompt = random_ids(37, 2)
    bench = make_model_bench()
    bench.submit(1, prompt, max_tokens=8, seed=5, logprobs=3)
    bench.submit(2, prompt, max_tokens=8, seed=6)
    bench.finish()
    answer = bench.answer(1)
    with torch.no_grad():
        logits = make_module("llama")(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    found = [one for update in bench.of(1) for one in update.logprobs or ()]
    assert len(found) == len(answer) == 8
    for one, token, row in zip(found, answer, logits.numpy(), strict=True):
        expected = reference(row)
        assert one.logprob == pytest.approx(expected[token], abs=1e-3)
        assert [other for other, _ in one.top] == np.argsort(-expected)[:3].tolist()
    assert all(update.logprobs is None for update in bench.of(2))


def test_a_token_that_ends_the_answer_has_none() -> None:
    bench = make_model_bench()
    prompt = random_ids(20, 3)
    bench.submit(1, prompt, max_tokens=5, temperature=0.0)
    bench.finish()
    stop = bench.answer(1)[3]
    bench.submit(2, prompt, max_tokens=5, temperature=0.0, logprobs=0, stop_ids=(stop,))
    bench.finish()
    answer = bench.answer(2)
    assert bench.of(2)[-1].stop_id == stop
    assert [len(update.logprobs or ()) for update in bench.of(2)] == [1] * len(answer) + [0]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_is_scored_whole_however_it_is_cut_and_whatever_is_cached(max_tokens: int) -> None:
    prompt = random_ids(150, 4)
    bench = make_model_bench(step_tokens=64)
    bench.submit(1, prompt, max_tokens=1)
    bench.finish()
    bench.submit(2, random_ids(40, 5), max_tokens=20)
    bench.submit(3, prompt, max_tokens=max_tokens, prompt_logprobs=2, use_cache=False)
    bench.finish()
    first, *later = bench.of(3)
    found = first.prompt_logprobs or []
    with torch.no_grad():
        logits = make_module("llama")(torch.tensor([prompt])).logits[0].numpy()
    assert len(found) == len(prompt) - 1
    for one, token, row in zip(found, prompt[1:], logits, strict=False):
        assert one.logprob == pytest.approx(reference(row)[token], abs=1e-3)
        assert [other for other, _ in one.top] == np.argsort(-row)[:2].tolist()
    assert all(update.prompt_logprobs is None for update in later)


def test_a_preempted_prompt_is_scored_once() -> None:
    prompt = random_ids(60, 6)
    told = []
    for disturbed in (False, True):
        bench = make_model_bench(num_blocks=24, step_tokens=32)
        bench.submit(1, prompt, lane="batch", max_tokens=8, temperature=0.0, prompt_logprobs=1, use_cache=False)
        for _ in range(3):
            bench.step()
        if disturbed:
            bench.submit(2, random_ids(50, 2), max_tokens=20)
        bench.finish()
        assert bool(bench.scheduler.counters.preemptions) == disturbed
        told.append([one for update in bench.of(1) for one in update.prompt_logprobs or ()])
        assert len(told[-1]) == 59
    assert [one.logprob for one in told[0]] == pytest.approx([one.logprob for one in told[1]], abs=1e-4)


def test_a_prompt_that_may_come_from_the_cache_is_not_scored() -> None:
    bench = make_model_bench()
    bench.submit(1, random_ids(9, 1), prompt_logprobs=1)
    assert "use_cache" in (bench.of(1)[0].error or "")


def test_preemption_loses_and_doubles_none() -> None:
    bench = make_model_bench(num_blocks=24)
    bench.submit(1, random_ids(45, 1), lane="batch", max_tokens=30, seed=1, logprobs=1)
    bench.step()
    bench.submit(2, random_ids(20, 2), max_tokens=30)
    bench.finish()
    assert bench.scheduler.counters.preemptions
    assert [len(update.logprobs or ()) for update in bench.of(1)] == [len(update.tokens) for update in bench.of(1)]
