"""What a schema costs a step: 8 sequences decode with and without one, in turn, on the demo model.

    python -m tests.bench.grammar_cost [--batch 8] [--tokens 150] [--rounds 9]

Prints the milliseconds of a decode step of each kind and their ratio, by the clock and in CPU time of the engine's own
threads, without the processes of the grammars: on a machine that others use, the clock also counts who else had its
turn. The quicker half of all steps is averaged. Wanted: at most 1.15 at 8 sequences. Free and constrained steps
alternate, so that a machine whose speed drifts does not decide.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

from engine.compute.model import load_model
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.protocol import Grammar, Sampling
from engine.sequence import MASK_LATE, Sequence, Step, Work
from tests.fakes.grammars import GrammarDesk

PROMPT_TOKENS = 64
GRAMMARS = {
    "any object": Grammar("json_object"),
    "four properties, repeated": Grammar(
        "json_schema",
        """{"type": "array", "minItems": 500, "items": {"type": "object", "properties": {"name": {"type": "string",
        "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "kind": {"enum": ["a", "b", "c"]},
        "score": {"type": "number"}}, "required": ["name", "age", "kind", "score"], "additionalProperties": false}}""",
    ),
    "hexadecimal": Grammar("regex", "([0-9a-f]{4} )+"),
}


class Row:
    """Sequences that decode together."""

    def __init__(self, runner: ModelRunner, first_block: int, batch: int, tokens: int, sampling: Sampling) -> None:
        self.runner = runner
        blocks = -(-(PROMPT_TOKENS + tokens + 1) // 16)
        self.sequences = [
            Sequence(
                "",
                index,
                array("I", range(10 + index, 10 + index + PROMPT_TOKENS)),
                PROMPT_TOKENS,
                [],
                sampling,
                end_ids=frozenset((0, 2)),
                block_table=list(range(first_block + index * blocks, first_block + (index + 1) * blocks)),
            )
            for index in range(batch)
        ]
        self.num_blocks = batch * blocks
        self.late = 0  # rows whose mask was not there in time, and that are computed again

    def prefill(self) -> None:
        self._run([Work(s, 0, PROMPT_TOKENS, samples=True) for s in self.sequences])

    def decode(self) -> tuple[float, float]:
        """One step; its seconds, and those of CPU time."""
        began, busy = time.perf_counter(), time.process_time()
        ready = [s for s in self.sequences if s.can_sample]
        self.late += len(self.sequences) - len(ready)
        if ready:
            self._run([Work(s, s.num_tokens - 1, 1, samples=True) for s in ready])
        return time.perf_counter() - began, time.process_time() - busy

    def _run(self, work: list[Work]) -> None:
        for item, token in zip(work, self.runner.run(Step(work)), strict=True):
            assert token is not None
            if token == MASK_LATE:
                self.late += 1
                continue
            assert token >= 0
            # A text that is complete begins again, so that every step has all rows.
            if token in item.sequence.end_ids:
                token = item.sequence.tokens[-1]
                if item.sequence.matcher is not None:
                    item.sequence.matcher.close()
                item.sequence.matcher = None
            item.sequence.tokens.append(token)


Times = tuple[list[tuple[float, float]], list[tuple[float, float]]]


def compare(
    runner: ModelRunner, grammars: GrammarDesk, grammar: Grammar, sampling: Sampling, batch: int, tokens: int
) -> Times:
    """Seconds of each step, by the clock and of CPU time: of free ones, of constrained ones."""
    free = Row(runner, 0, batch, tokens, sampling)
    bound = Row(runner, free.num_blocks, batch, tokens, sampling)
    for sequence in bound.sequences:
        sequence.matcher = grammars.compile(grammar)
    free.prefill()
    bound.prefill()
    times: Times = ([], [])
    for step in range(tokens - 1):
        rows = ((0, free), (1, bound))
        for index, row in rows if step % 2 else rows[::-1]:
            late = bound.late
            seconds = row.decode()
            if late == bound.late:
                times[index].append(seconds)
        grammars.pool.pump()
        for sequence in bound.sequences:
            if sequence.matcher is None:
                sequence.matcher = grammars.compile(grammar)
                sequence.num_prompt = sequence.num_tokens
    print(f"  late: {bound.late} of {batch * (tokens - 1)} masks")
    return times


def quicker_half(seconds: list[float]) -> float:
    """Mean milliseconds of the quicker half."""
    return statistics.mean(sorted(seconds)[: len(seconds) // 2]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = load_model(EngineSettings())
    runner = ModelRunner(model, EngineSettings(kv_cache_bytes=256 << 20), threads=1)
    with GrammarDesk() as grammars:
        measure(runner, grammars, options)


def measure(runner: ModelRunner, grammars: GrammarDesk, options: argparse.Namespace) -> None:
    print(f"{options.batch} sequences, {options.tokens} tokens each, {options.rounds} rounds, one thread")
    print(f"{'grammar':26} {'sampling':8} {'free ms':>8} {'bound ms':>9} {'ratio':>6} {'ratio of CPU time':>18}")
    for name, grammar in GRAMMARS.items():
        for title, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            sampling = Sampling(max_tokens=options.tokens, temperature=temperature, seed=7)
            times: Times = ([], [])
            for _ in range(options.rounds):
                for every, some in zip(times, _compare(runner, grammars, grammar, sampling, options), strict=True):
                    every.extend(some)
            (free, free_cpu), (bound, bound_cpu) = (
                [quicker_half([one[kind] for one in kinds]) for kind in (0, 1)] for kinds in times
            )
            print(
                f"{name:26} {title:8} {free:8.3f} {bound:9.3f} {bound / free:6.3f} {bound_cpu / free_cpu:18.3f}",
                flush=True,
            )


def _compare(
    runner: ModelRunner, grammars: GrammarDesk, grammar: Grammar, sampling: Sampling, options: argparse.Namespace
) -> Times:
    return compare(runner, grammars, grammar, sampling, options.batch, options.tokens)


if __name__ == "__main__":
    main()
