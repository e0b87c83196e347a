"""How quickly an engine computes, and how much of its machine it uses for that."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from engine.protocol import STATS_PATH, Sampling, StepFrame
from engine.sequence import Sequence, Step, Work
from engine.utilisation import Cost, Peak, Rate, Utilisation
from tests.fakes.small_engine import small_engine

COST = Cost(
    token_params=1000.0, row_params=100, weight_bytes=4000, row_bytes=400, windows={None: 2}, pair_flops=8, kv_bytes=3
)


def test_a_rate_weighs_long_steps_more_and_forgets() -> None:
    rate = Rate()
    assert rate.per_s == 0
    rate.add(1000, 0.1)
    rate.add(1, 0.001)
    assert rate.per_s == pytest.approx(9911, rel=0.01)
    for _ in range(100):
        rate.add(1000, 1.0)
    assert rate.per_s == pytest.approx(1000, rel=0.02)


def work(start: int, count: int, *, samples: bool = False) -> Work:
    sequence = Sequence("o", start, array("I", [1] * (start + count)), start + count, [], Sampling(max_tokens=1))
    return Work(sequence, start, count, samples=samples)


def test_a_step_costs_what_its_tokens_and_their_keys_do() -> None:
    assert COST.of(Step([], forks=[work(4, 1).sequence])) == (0, 0)
    assert COST.of(Step([work(0, 1)])) == (2000 + 2 * 8, 4000 + 2 * 3)
    assert COST.of(Step([work(9, 1, samples=True)])) == (2200 + 2 * 10 * 8, 4400 + 2 * 10 * 3)
    both = COST.of(Step([work(0, 3), work(9, 1, samples=True)]))
    assert both == (4 * 2000 + 200 + 2 * (1 + 2 + 3 + 10) * 8, 4400 + 2 * (3 + 10) * 3)


def test_a_window_hides_what_is_before_it() -> None:
    dice = random.Random(4)
    for _ in range(200):
        start, count, window = dice.randint(0, 50), dice.randint(1, 50), dice.randint(1, 60)
        seen = [range(max(0, at - window + 1), at + 1) for at in range(start, start + count)]
        flops, read = Cost(0.0, 0, 0, 0, {window: 3}, 8, 5).of(Step([work(start, count)]))
        assert flops == 3 * 8 * sum(map(len, seen))
        assert read == 3 * 5 * len(set().union(*seen))


def test_of_experts_those_are_read_that_some_token_meets() -> None:
    cost = Cost(0.0, 0, 0, 0, {}, 0, 0, expert_bytes=1000, expert_share=0.25)
    assert cost.of(Step([work(0, 1)]))[1] == pytest.approx(250)
    assert cost.of(Step([work(0, 2)]))[1] == pytest.approx(437.5)
    assert cost.of(Step([work(0, 100)]))[1] == pytest.approx(1000)


def test_a_step_that_is_quicker_than_the_probe_was_raises_the_peak_of_flops() -> None:
    utilisation = Utilisation(COST, Peak(1e3, 1e3))
    utilisation.add(Step([work(0, 1)]), 1.0)
    stats = utilisation.stats()
    assert (stats["flops"], stats["read_bytes"]) == (2016, 4006)
    assert (stats["peak_flops_per_s"], stats["mfu"]) == (2016, pytest.approx(1.0))
    assert (stats["peak_bytes_per_s"], stats["mbu"]) == (1e3, pytest.approx(4.006))


async def test_an_engine_tells_what_its_steps_took() -> None:
    async with small_engine(utilisation=Utilisation(COST, Peak(1e18, 1e18))) as engine, engine.stream() as stream:

        def is_over(message: Any) -> bool:
            return isinstance(message, StepFrame) and any(update.finish for update in message.updates)

        await stream.send(engine.submit(1, [*range(3, 43)], max_tokens=3))
        await stream.until(is_over)
        async with engine.session.get(STATS_PATH) as answer:
            stats = await answer.json()
    told = stats["utilisation"]
    tokens, attended = 42, sum(range(1, 43))
    assert told["flops"] == 2000 * tokens + 200 * 3 + 2 * 8 * attended
    assert told["read_bytes"] == 3 * 4400 + 2 * 3 * (40 + 41 + 42)
    assert 0 < told["mbu"] < told["mfu"] < 1
    assert stats["busy_s"] > 0
