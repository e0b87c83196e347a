"""What a step prefills beside decodes is a time that is learned, and short prompts pass long ones. Nothing is measured:
steps take what a formula says."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from engine.config import EngineSettings
from engine.planner import LEAST_TOKENS, Pace
from engine.protocol import Sampling
from engine.sequence import Sequence, Step, Work
from tests.fakes.scheduler_bench import make, prompt

TIMED = {field: getattr(EngineSettings(), field) for field in ("step_ms", "prefill_per_decode")}


class Machine:
    """Decodes take longer the more there are, and prefilled tokens the further back they attend."""

    def __init__(self, decode_s: float, token_s: float) -> None:
        self.decode_s, self.token_s = decode_s, token_s
        self.bench = make(num_blocks=1500, context_tokens=1400, step_tokens=1024, **TIMED)
        self.bench.takes_s = self.takes_s
        self.gaps: list[float] = []  # of steps with decodes
        self._random = np.random.default_rng(1)

    def takes_s(self, step: Step) -> float:
        prefills = [work for work in step.work if work.is_prefill]
        decodes = len(step.work) - len(prefills)
        tokens = sum(work.count * (1 + (work.start + work.count / 2) / 500) for work in prefills)
        noise = 0.95 + 0.1 * self._random.random()
        took_s = self.decode_s * (1 + decodes / 16) * noise + self.token_s * tokens
        if decodes:
            self.gaps.append(took_s)
        return took_s


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.02, 6e-3), (0.3, 8e-2), (0.003, 3e-4)])
@pytest.mark.parametrize("between", [15, 60])
def test_running_sequences_wait_at_most_three_times_as_long_while_long_prompts_arrive(
    decode_s: float, token_s: float, between: int
) -> None:
    machine = Machine(decode_s, token_s)
    bench = machine.bench
    for seq in range(4):
        bench.submit(seq, prompt(30, seq), max_tokens=250, use_cache=False)
    for number in range(240):
        if number % between == between - 1 and bench.scheduler.num_waiting < 3:
            bench.submit(100 + number, prompt(1000, number), max_tokens=2, use_cache=False)
        bench.step()
    median, p99 = np.percentile(machine.gaps, (50, 99))
    assert p99 <= 3 * median
    assert max(machine.gaps) <= 1.6 * machine.decode_s + max(0.2, LEAST_TOKENS * 4 * token_s)
    assert sum(count for step in bench.runner.steps for _, _, count, _ in step if count > 1) > 1000


def step_of(prefilled: int, decodes: int) -> Step:
    sequence = Sequence("", 0, array("I", [0] * 2000), 1500, [], Sampling(max_tokens=1))
    prefills = [Work(sequence, 0, prefilled, samples=False)] if prefilled else []
    return Step([*prefills, *[Work(sequence, 1999, 1, samples=True)] * decodes])


def test_a_step_that_takes_a_hundred_times_as_long_is_soon_forgotten() -> None:
    pace = Pace()
    for _ in range(20):
        pace.learn(step_of(0, 8), 0.02)
        pace.learn(step_of(100, 8), 0.12)
    assert pace.token_s == pytest.approx(0.001)
    pace.learn(step_of(0, 8), 2.0)
    pace.learn(step_of(100, 8), 12.0)
    assert pace.token_s < 0.00125
    assert pace.decode_s(8) < 0.025
    assert pace.decode_s(100) == pace.decode_s(8)
    assert pace.decode_s(1) == 0.0
    pace.learn(step_of(3, 8), 1.0)  # says nothing about a token
    assert pace.token_s < 0.00125


def test_a_machine_that_becomes_slower_is_followed_within_some_steps() -> None:
    pace = Pace()
    for scale in (1.0, 10.0):
        for _ in range(30):
            pace.learn(step_of(0, 8), 0.02 * scale)
            pace.learn(step_of(100, 8), 0.12 * scale)
        assert pace.token_s == pytest.approx(0.001 * scale, rel=0.1)
