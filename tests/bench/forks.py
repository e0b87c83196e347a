"""What forking saves: several answers to one prompt, until each has its first token, with and without it, in turn.

    python -m tests.bench.forks [--answers 8] [--rounds 15] [--prompts 31 303 1007]

Without it the answers share whole blocks as other requests do, and each computes what is behind them. The demo model,
new random tokens in each round, so that nothing is cached. Prints milliseconds until the first answer and until all of
them have their first token (the median of all rounds), the tokens that were computed, and the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

import numpy as np

from engine.compute.model import load_model
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.pool.blocks import BlockPool
from engine.protocol import Group, Namespace, Sampling, Submit
from engine.scheduler import Scheduler


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        model = load_model(settings)
        self.runner = ModelRunner(model, settings)
        pool = BlockPool(self.runner.num_blocks, settings.block_size)
        namespace = Namespace(weights="", dtype="", kv_dtype="", block_size=settings.block_size)
        self.scheduler = Scheduler(
            pool, namespace, settings, context_tokens=model.context_tokens, vocab_size=model.vocab_size
        )
        self.random = np.random.default_rng(1)

    def ask(self, answers: int, prompt: int, *, fork: bool) -> tuple[float, float, int]:
        """Seconds until the first and until all have a token, and tokens computed."""
        tokens = array("I", self.random.integers(10, 4000, prompt).tolist()).tobytes()
        group = Group(1, answers) if fork else None
        computed, waiting, first_s = self.scheduler.counters.prefilled_tokens, set(range(answers)), 0.0
        began_s = time.perf_counter()
        for seq in range(answers):
            sampling = Sampling(max_tokens=4, seed=seq, ignore_eos=True)
            self.scheduler.submit("bench", Submit(seq, tokens, b"", sampling, group=group), began_s)
        while waiting:
            self._step()
            waiting -= {update.seq for update in self._told if update.tokens}
            first_s = first_s or (time.perf_counter() - began_s if len(waiting) < answers else 0.0)
        all_s = time.perf_counter() - began_s
        while self.scheduler.has_work:
            self._step()
        return first_s, all_s, self.scheduler.counters.prefilled_tokens - computed

    def _step(self) -> None:
        step = self.scheduler.schedule(time.perf_counter())
        assert step is not None, "nothing can run"
        self.scheduler.commit(step, self.runner.run(step), time.perf_counter())
        self._told = [update for updates in self.scheduler.take_updates().values() for update in updates]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, nargs="+", default=[31, 303, 1007])
    arguments = parser.parse_args()
    engine = Engine(EngineSettings(threads=1))
    for prompt in arguments.prompts:
        found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
        for _ in range(arguments.rounds + 2):
            for fork in found:
                found[fork].append(engine.ask(arguments.answers, prompt, fork=fork))
        medians = {}
        for fork, rounds in found.items():
            first, every, computed = (statistics.median(column) for column in zip(*rounds[2:], strict=True))
            medians[fork] = every
            print(
                f"{prompt} tokens, {'forked' if fork else 'apart '}: first {first * 1e3:.1f} ms, "
                f"all {every * 1e3:.1f} ms, {computed:.0f} tokens computed"
            )
        print(f"  ratio {medians[False] / medians[True]:.2f}")


if __name__ == "__main__":
    main()
