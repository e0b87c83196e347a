"""The same seed gives the same text: alone, in a batch of 32, among forks, after preemption, with the prefix cached and
cold."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import Tensor

from engine.compute.runner import ModelRunner
from engine.sampling.sampler import Row
from tests.fakes.model_bench import make_model_bench
from tests.fakes.scheduler_bench import Bench
from tests.fakes.tiny_models import random_ids

PROMPT = random_ids(45, 1)
CONTROLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 10},
}


@pytest.fixture(params=CONTROLS.values(), ids=CONTROLS)
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"seed": 1234, "max_tokens": 30, **request.param}


def alone(sampling: dict[str, Any], **options: Any) -> list[int]:
    bench = make_model_bench()
    bench.submit(1, PROMPT, **options, **sampling)
    bench.finish()
    return bench.answer(1)


def test_in_a_batch_of_32_whoever_else_is_in_it(sampling: dict[str, Any]) -> None:
    bench = make_model_bench()
    for seq in range(2, 20):
        bench.submit(seq, random_ids(5 + 3 * seq, seq), max_tokens=40, seed=None if seq % 2 else seq)
    for _ in range(4):
        bench.step()
    bench.submit(1, PROMPT, **sampling)
    for seq in range(20, 33):
        bench.submit(seq, random_ids(5 + 2 * seq, seq), max_tokens=40)
    bench.finish()
    assert bench.answer(1) == alone(sampling)
    assert len(set(bench.answer(1))) > 10


def record_rows(bench: Bench) -> dict[tuple[int, int], bytes]:
    """(seq, position) -> the very bits of the logits that its token was chosen from."""
    rows: dict[tuple[int, int], bytes] = {}
    sampler = cast("ModelRunner", bench.runner)._sampler
    choose = sampler.choose

    def spy(logits: Tensor, asked: list[Row], masks: Any = None) -> list[int]:
        for values, row in zip(logits, asked, strict=True):
            rows[row.sequence.seq, row.sequence.num_tokens + len(row.drafted)] = values.numpy().tobytes()
        return choose(logits, asked, masks)

    sampler.choose = spy  # type: ignore[method-assign]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [3, 45, 48, 300])
def test_eight_answers_that_fork_are_those_of_eight_requests(
    sampling: dict[str, Any], length: int, temperature: float
) -> None:
    prompt, bench = random_ids(length, 1), make_model_bench()
    wanted_rows = record_rows(bench)
    for seq in range(8):  # one after the other, each cold
        bench.submit(seq, prompt, use_cache=False, **{**sampling, "temperature": temperature, "seed": 1234 + seq})
        bench.finish()
    wanted = [bench.answer(seq) for seq in range(8)]
    bench = make_model_bench()
    rows = record_rows(bench)
    for seq in range(8):
        bench.submit(seq, prompt, group=(1, 8), **{**sampling, "temperature": temperature, "seed": 1234 + seq})
        if seq == 5:  # the last two come later, when the others have answered a part
            for _ in range(5):
                bench.step()
    bench.finish()
    assert [bench.answer(seq) for seq in range(8)] == wanted
    assert rows == wanted_rows
    counters = bench.scheduler.counters
    assert (counters.prefilled_tokens, counters.forks) == (length, 7)


def test_forks_that_are_preempted_and_crowded_get_the_same_texts(sampling: dict[str, Any]) -> None:
    bench = make_model_bench(num_blocks=40, max_sequences=5)
    for seq in range(8):
        bench.submit(seq, PROMPT, group=(1, 8), lane="batch", **{**sampling, "seed": 1234 + seq})
        if seq == 3:
            bench.step()
    bench.step()
    bench.submit(20, random_ids(60, 2), max_tokens=30)
    bench.finish()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler.counters.forks > 2
    assert bench.answer(0) == alone(sampling)
    assert bench.answer(7) == alone({**sampling, "seed": 1241})


def test_forks_of_a_prompt_that_is_scored_are_told_its_scores_and_their_own() -> None:
    bench = make_model_bench()
    for seq in range(3):
        bench.submit(seq, PROMPT, group=(1, 3), max_tokens=5, seed=seq, logprobs=2, prompt_logprobs=2, use_cache=False)
    bench.finish()
    told = [bench.of(seq)[0].prompt_logprobs for seq in range(3)]
    assert [len(one or ()) for one in told] == [len(PROMPT) - 1] * 3
    assert told[0] == told[1] == told[2]
    for seq in range(3):
        other = make_model_bench()
        other.submit(seq, PROMPT, max_tokens=5, seed=seq, logprobs=2)
        other.finish()
        assert [u.logprobs for u in bench.of(seq)] == [u.logprobs for u in other.of(seq)]
    assert bench.scheduler.counters.prefilled_tokens == len(PROMPT)


def test_after_preemption(sampling: dict[str, Any]) -> None:
    bench = make_model_bench(num_blocks=24)
    bench.submit(1, PROMPT, lane="batch", **sampling)
    bench.step()
    bench.step()
    bench.submit(2, random_ids(20, 2), max_tokens=30)
    bench.finish()
    assert bench.scheduler.counters.preemptions >= 1
    assert bench.answer(1) == alone(sampling)


def test_with_the_prefix_cached_and_cold(sampling: dict[str, Any]) -> None:
    bench = make_model_bench()
    cached = []
    for seq in (1, 2):
        bench.submit(seq, PROMPT, **sampling)
        bench.finish()
        cached.append(bench.of(seq)[0].cached_tokens)
    assert cached == [0, 40]
    assert bench.answer(1) == bench.answer(2) == alone(sampling, use_cache=False)


def test_another_seed_gives_another_text(sampling: dict[str, Any]) -> None:
    assert alone(sampling) != alone({**sampling, "seed": 1235})


def test_a_sequence_does_not_end_before_min_tokens() -> None:
    """Greedy, with the end of text made the token that would come first."""
    free = alone({"max_tokens": 12, "temperature": 0.0})
    for options in ({"eos_ids": (free[0],)}, {}):
        bench = make_model_bench(**options)
        stop_ids = () if options else (free[0],)
        bench.submit(1, PROMPT, max_tokens=12, min_tokens=5, temperature=0.0, stop_ids=stop_ids)
        bench.submit(2, PROMPT, max_tokens=12, temperature=0.0, stop_ids=stop_ids)
        bench.finish()
        assert bench.answer(2) == []
        assert len(bench.answer(1)) >= 5
        assert free[0] not in bench.answer(1)
