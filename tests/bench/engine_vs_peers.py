"""How fast the engine is against vLLM and llama.cpp on the same cores of the same CPU.

    python -m tests.bench.engine_vs_peers [--against vllm-f32 llama.cpp-f32 llama.cpp-q8_0 llama.cpp-q4_0 vllm-bf16]
                                          [--shape 40M 0.5B] [--rows prefill decode shared] [--rounds 5] [--cores 1]

The sides are processes of their own, pinned to the same cores with a thread on each, and hold the same random Qwen2.
They are asked in turns: prefill of 512, 2,048 and 8,192 tokens; decode of 1, 8 and 32 sequences with 128 tokens before
them; and 64 requests that share 2,048 tokens, bring 64 of their own and ask for 64. The ratio is the median of the
rounds' ratios, ours to theirs in tokens per second; a row whose rounds differ too much is measured again.

A peer's weights say what ours are: q8_0 is against our int8 and q4_0 against our int4 (llama.cpp's embedding, which is
its output layer, is q8_0 in both), f32 float32, and bf16 what `auto` takes here. All numbers of the model are bfloat16,
as those of most models are. Peers keep their defaults, and are set up in environments of their own at the first run
(tests/bench/vllm_setup.py, llamacpp_setup.py). llama.cpp's `shared` is measured once, because it takes minutes. On a
machine that others use, `--clock cpu` counts the processor time of each side instead of the time that passed.
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

from engine.compute.linear import is_bfloat16_quicker
from tests.bench import llamacpp_setup, vllm_setup
from tests.fakes.gguf_files import write_gguf

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
PEERS: Final = ("vllm-f32", "llama.cpp-f32", "llama.cpp-q8_0", "llama.cpp-q4_0")
QUANTIZED: Final = {"q8_0": "int8", "q4_0": "int4"}
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


def write_peer_file(folder: Path, file: Path, weights: str) -> None:
    """The model of a folder as llama.cpp reads it: matrices as `weights` says, norms and biases in float32."""
    module: Any = Qwen2ForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    kind = weights.upper()
    write_gguf(file, module, {"": kind, "token_embd": "Q8_0" if weights.startswith("q") else kind})


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
def started(command: list[str], cores: list[int], environment: dict[str, str], log: Path) -> Iterator[Side]:
    """A side that is ended with the block. What it prints goes to `log`."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1", **environment}
    with log.open("a") as errors:
        process = subprocess.Popen(
            [*command, "--cores", *map(str, cores), "--context", str(CONTEXT)],
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
    # Those that came first go on beside the prefills of the others, so that many need more tokens until then.
    tokens = DECODE_TOKENS + 16 * int(size)
    times = side.measure([ids(DECODE_CONTEXT) for _ in range(int(size))], tokens, clock)
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


def command_of(peer: str, model: Path, folder: Path, arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """How a peer's side is started, and with which environment."""
    name, weights = peer.rsplit("-", 1)
    if name == "vllm":
        python = vllm_setup.set_up(arguments.vllm_venv)
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in the process, as ours is
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(arguments.vllm_venv / "kvasir-cache"),
            "PYTHONPATH": "",
        }
        dtype = {"f32": "float32", "bf16": "bfloat16"}[weights]
        return [str(python), str(ROOT / "tests/bench/vllm_side.py"), "--model", str(model), "--dtype", dtype], variables
    python, file = llamacpp_setup.set_up(arguments.llamacpp_venv), folder / f"{weights}.gguf"
    write_peer_file(model, file, weights)
    return [str(python), str(ROOT / "tests/bench/llamacpp_side.py"), "--model", str(file)], {"PYTHONPATH": ""}


def run_peer(peer: str, model: Path, rows: list[str], arguments: argparse.Namespace, deadline: float) -> None:
    weights = peer.rsplit("-", 1)[1]
    own = [sys.executable, "-m", "tests.bench.kvasir_side", "--model", str(model), "--dtype"]
    own += ["bfloat16" if weights == "bf16" and is_bfloat16_quicker() else "float32"]
    own += ["--quantize", QUANTIZED.get(weights, "none")]
    folder = model.parent
    log = folder / "log"
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(started(command, arguments.cores, environment, log))
            for command, environment in ((own, {}), command_of(peer, model, folder, arguments))
        )
        try:
            for side in (ours, theirs):
                side.wait_ready()
            print(f"\n| {model.name} | Kvasir | {peer} | ratio | rounds | spread |")
            print("| --- | --- | --- | --- | --- | --- |", flush=True)
            for row in rows:
                if time.monotonic() > deadline:
                    print(f"| {row} | not measured: {arguments.minutes} minutes are over | | | | |")
                    continue
                once = row == "shared" and peer.startswith("llama")
                compare(row, ours, theirs, 1 if once else arguments.rounds, arguments.clock, deadline)
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
    parser.add_argument("--cores", type=int, default=1, help="that the sides are pinned to, a thread on each")
    parser.add_argument("--against", nargs="+", default=list(PEERS), choices=[*PEERS, "vllm-bf16"])
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: the processor time of each side")
    parser.add_argument("--llamacpp-venv", type=Path, default=Path.home() / ".cache" / "kvasir" / "llamacpp")
    parser.add_argument("--vllm-venv", type=Path, default=Path.home() / ".cache" / "kvasir" / "vllm")
    arguments = parser.parse_args()
    rows = [row for name in arguments.rows for row in ROWS.get(name, [name])]
    if unknown := set(rows) - set(every):
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arguments.cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    deadline = time.monotonic() + 60 * arguments.minutes
    cores = f"cores {arguments.cores} of {os.cpu_count()}"
    print(f"tokens per second; `shared` in seconds; a thread on each of {cores}, {arguments.clock} clock")
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as name:
            make_model(shape, Path(name) / shape)
            for peer in arguments.against:
                run_peer(peer, Path(name) / shape, rows, arguments, deadline)


if __name__ == "__main__":
    main()
