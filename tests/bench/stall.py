"""How long running sequences wait for their next token while long prompts arrive.

    python -m tests.bench.stall [--model demo] [--decodes 8] [--prompt 8000] [--every 40] [--seconds 30] [--threads 1]

The engine alone, in process, in real time. Prints milliseconds between tokens without long prompts and with them (the
median, the 99th percentile and their ratio), and the prompts' tokens per second beside the decodes.
"""

from __future__ import annotations

import argparse
import time
from array import array

import numpy as np

from engine.config import EngineSettings
from engine.protocol import Sampling, Submit
from tests.bench import forks


class Engine(forks.Engine):
    def submit(self, seq: int, length: int, max_tokens: int) -> None:
        tokens = array("I", self.random.integers(10, 4000, length).tolist()).tobytes()
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.submit("bench", Submit(seq, tokens, b"", sampling, use_cache=False), time.monotonic())

    def step(self) -> float:
        """Seconds."""
        began_s = time.monotonic()
        step = self.scheduler.schedule(began_s)
        assert step is not None, "nothing can run"
        self.scheduler.commit(step, self.runner.run(step), time.monotonic())
        took_s = time.monotonic() - began_s
        self.scheduler.learn(step, took_s)
        self.scheduler.take_updates()
        return took_s


def report(name: str, gaps: list[float]) -> None:
    median, p99 = np.percentile(gaps, (50, 99)) * 1000
    print(f"{name}: median {median:.1f} ms, p99 {p99:.1f} ms, {p99 / median:.2f}x, {len(gaps)} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--every", type=int, default=40, help="steps between arrivals")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = EngineSettings(model=options.model, threads=options.threads, kv_cache_bytes=2 << 30, speculation="none")
    engine = Engine(settings)
    for seq in range(options.decodes):
        engine.submit(seq, 30, 20_000)
    for _ in range(20):
        engine.step()
    report("decodes alone", [engine.step() for _ in range(200)])
    gaps, counters, number = list[float](), engine.scheduler.counters, options.decodes
    before, began_s = counters.prefilled_tokens, time.monotonic()
    while time.monotonic() < began_s + options.seconds:
        if len(gaps) % options.every == 0 and not engine.scheduler.load().prefill_backlog:
            engine.submit(number := number + 1, options.prompt, 1)
        gaps.append(engine.step())
    report("with prompts", gaps)
    print(f"{(counters.prefilled_tokens - before) / (time.monotonic() - began_s):.0f} prefilled tokens/s")


if __name__ == "__main__":
    main()
