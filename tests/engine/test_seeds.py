"""The same seed gives the same text: alone, in a batch of 32, after preemption, with the prefix cached and cold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.model_bench import make_model_bench
from tests.fakes.scheduler_bench import SIZE
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


def test_among_eight_answers_to_one_prompt_which_is_computed_once(sampling: dict[str, Any]) -> None:
    bench = make_model_bench()
    for seq in range(8):
        bench.submit(seq, PROMPT, **{**sampling, "seed": sampling["seed"] - 3 + seq})
    bench.finish()
    assert bench.answer(3) == alone(sampling)
    counters = bench.scheduler.counters
    behind = len(PROMPT) % SIZE + SIZE  # what each of the others computes again, at most
    assert counters.prefilled_tokens <= len(PROMPT) + 7 * behind
    assert counters.shared_tokens >= 7 * (len(PROMPT) - behind)


def test_after_preemption(sampling: dict[str, Any]) -> None:
    bench = make_model_bench(num_blocks=24)
    first = bench.submit(1, PROMPT, lane="batch", **sampling)
    assert first is not None
    bench.step()
    bench.step()
    bench.submit(2, random_ids(20, 2), max_tokens=30)
    bench.finish()
    assert first.preemptions >= 1
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
