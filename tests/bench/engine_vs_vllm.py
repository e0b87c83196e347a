"""How fast the engine is against vLLM on the same core of the same CPU.

    python -m tests.bench.engine_vs_vllm [--shape 40M 0.5B] [--rows prefill decode shared] [--rounds 5] [--core 1]

Both sides are processes of their own, pinned to one core and given one thread, and hold the same random bfloat16 Qwen2.
They are asked in turns: prefill of 512, 2,048 and 8,192 tokens; decode of 1, 8 and 32 sequences with 128 tokens before
them; and 64 requests that share 2,048 tokens, bring 64 of their own and ask for 64. vLLM is set up in a virtual
environment of its own at the first run (tests/bench/vllm_setup.py) and keeps its defaults. The ratio is the median of
the rounds' ratios, ours to vLLM's in tokens per second; a row whose rounds differ too much is measured again.

On a machine that others use, `--clock cpu` counts the processor time of each side instead of the time that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.bench import vllm_setup

CONTEXT, VOCABULARY = 16_384, 32_000
DECODE_CONTEXT, DECODE_TOKENS = 128, 64
SHARED, OWN, REQUESTS = 2048, 64, 64
SPREAD: Final = 0.15  # of the rounds' ratios (interquartile range over median) above which a row is measured again
SHAPES: Final[dict[str, dict[str, int]]] = {
    "40M": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
}
ROWS: Final = {
    "prefill": [f"prefill {count}" for count in (512, 2048, 8192)],
    "decode": [f"decode {count}" for count in (1, 8, 32)],
    "shared": ["shared"],
}
ROOT: Final = Path(__file__).parents[2]

Times = list[list[float]]


def make_model(shape: str, folder: Path) -> None:
    """Writes the random model of a shape, the same at every call."""
    torch.manual_seed(7)
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Side:
    """A process that measures when it is asked; see serve() in tests/bench/vllm_side.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait_ready(self) -> None:
        self._read()

    def measure(self, prompts: list[list[int]], tokens: int, clock: str) -> Times:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "tokens": tokens, "clock": clock}), file=self._process.stdin, flush=True)
        times: Times = self._read()["times"]
        return times

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended")
        return json.loads(line)


@contextmanager
def started(command: list[str], core: int, environment: dict[str, str], log: Path) -> Iterator[Side]:
    """A side that is ended with the block. What it prints goes to `log`."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    with log.open("a") as errors:
        process = subprocess.Popen(
            [*command, "--core", str(core), "--context", str(CONTEXT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=variables,
        )
    try:
        yield Side(process)
    finally:
        process.kill()
        process.wait()


def tokens_per_s(row: str, side: Side, seed: int, clock: str) -> float:
    """One measurement of one side. Prompts depend on the row and the seed, and share nothing unless the row says so."""
    rng = random.Random(f"{row} {seed}")
    kind, _, size = row.partition(" ")

    def ids(count: int) -> list[int]:
        return rng.choices(range(10, VOCABULARY), k=count)

    if kind == "prefill":
        times = side.measure([ids(int(size))], 1, clock)
        return int(size) / times[0][0]
    if kind == "shared":
        prefix = ids(SHARED)
        times = side.measure([prefix + ids(OWN) for _ in range(REQUESTS)], OWN, clock)
        return REQUESTS * OWN / max(one[-1] for one in times)
    # Decoding is timed from the moment when every sequence has its first token to when the first one ends.
    times = side.measure([ids(DECODE_CONTEXT) for _ in range(int(size))], DECODE_TOKENS + 16, clock)
    began, ended = max(one[0] for one in times), min(one[-1] for one in times)
    return sum(began < moment <= ended for one in times for moment in one) / (ended - began)


def compare(row: str, ours: Side, theirs: Side, rounds: int, clock: str, deadline: float) -> tuple[float, float, float]:
    """Medians of ours, of theirs and of the ratios of the rounds. Prints them as a row of a table."""
    seed = time.time_ns()
    for side in (ours, theirs):  # once for whatever is made at the first use of a size
        tokens_per_s(row, side, seed, clock)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < rounds or (len(pairs) < 2 * rounds and spread(pairs) > SPREAD):
        seed += 1
        order = (ours, theirs) if len(pairs) % 2 else (theirs, ours)
        speeds = {side: tokens_per_s(row, side, seed, clock) for side in order}
        pairs.append((speeds[ours], speeds[theirs]))
        if time.monotonic() > deadline:
            break
    our, their = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(our / their for our, their in pairs)
    shown: Callable[[float], str] = "{:,.0f}".format
    if row == "shared":
        shown = lambda speed: f"{REQUESTS * OWN / speed:.2f} s"  # noqa: E731
    print(f"| {row} | {shown(our)} | {shown(their)} | {ratio:.2f} | {len(pairs)} | {spread(pairs):.0%} |", flush=True)
    return our, their, ratio


def spread(pairs: list[tuple[float, float]]) -> float:
    """Interquartile range of the ratios over their median; 0 of fewer than three."""
    ratios = [our / their for our, their in pairs]
    if len(ratios) < 3:
        return 0.0
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (high - low) / middle


def run_shape(shape: str, python: Path, rows: list[str], arguments: argparse.Namespace, deadline: float) -> None:
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        make_model(shape, folder / "model")
        model = ["--model", str(folder / "model")]
        vllm_environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in the process, as ours is
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(arguments.vllm_venv / "kvasir-cache"),
            "PYTHONPATH": "",
        }
        sides = [
            ([sys.executable, "-m", "tests.bench.kvasir_side", *model], {}),
            ([str(python), str(ROOT / "tests/bench/vllm_side.py"), *model], vllm_environment),
        ]
        log = folder / "log"
        ours, theirs = (
            stack.enter_context(started(command, arguments.core, environment, log)) for command, environment in sides
        )
        try:
            for side in (ours, theirs):
                side.wait_ready()
            print(f"\n| {shape} | Kvasir | {vllm_setup.version(arguments.vllm_venv)} | ratio | rounds | spread |")
            print("| --- | --- | --- | --- | --- | --- |", flush=True)
            for row in rows:
                if time.monotonic() > deadline:
                    print(f"| {row} | not measured: {arguments.minutes} minutes are over | | | | |")
                    continue
                compare(row, ours, theirs, arguments.rounds, arguments.clock, deadline)
        except (RuntimeError, json.JSONDecodeError):
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [row for group in ROWS.values() for row in group]
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help=f"groups ({', '.join(ROWS)}) or rows: {every}")
    parser.add_argument("--rounds", type=int, default=5, help="of each row; up to twice as many when they differ")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further round begins")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="that both sides are pinned to")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: the processor time of each side")
    parser.add_argument("--vllm-venv", type=Path, default=Path.home() / ".cache" / "kvasir" / "vllm")
    arguments = parser.parse_args()
    rows = [row for name in arguments.rows for row in ROWS.get(name, [name])]
    if unknown := set(rows) - set(every):
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    python = vllm_setup.set_up(arguments.vllm_venv)
    deadline = time.monotonic() + 60 * arguments.minutes
    cores = f"core {arguments.core} of {os.cpu_count()}"
    print(f"tokens per second; `shared` in seconds; one thread on {cores}, {arguments.clock} clock")
    for shape in arguments.shape:
        run_shape(shape, python, rows, arguments, deadline)


if __name__ == "__main__":
    main()
