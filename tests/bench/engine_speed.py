"""How fast the engine's runner is against transformers' generate, on one machine in one run.

    OMP_NUM_THREADS=1 python -m tests.bench.engine_speed --threads 1

A random bfloat16 Qwen2 of 40 million parameters (hidden 512, 8 layers, 8 query and 2 key heads, MLP 1536, vocabulary
32k) reads a prompt of 2,048 tokens, decodes for 1, 8 and 32 sequences, and answers a second request that shares 4,096
tokens with the first. The two sides take turns, and medians and ratios are printed: the ratio is what a noisy machine
can tell. Knows nothing of HTTP or the scheduler: the steps are those the scheduler would make. Makes its own data, with
fixed seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.compute.model import LoadedModel, prepare
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.protocol import Sampling, TokenizerFiles
from engine.sequence import Sequence, Step, Work

BLOCK_SIZE, STEP_TOKENS = 16, 1024
PREFILL, SHARED, TAIL, CONTEXT = 2048, 4096, 32, 8192
DECODE_CONTEXT, DECODE_TOKENS = 128, 32
GREEDY = Sampling(max_tokens=CONTEXT, temperature=0.0)


def make_model(dtype: torch.dtype) -> Any:
    """The random model; the same at every call."""
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1536,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    torch.set_default_dtype(dtype)
    model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def make_runner(dtype: torch.dtype, threads: int, draft: LoadedModel | None = None) -> ModelRunner:
    shape, forward, is_fused, _ = prepare(make_model(dtype), "bench", CONTEXT)
    files = TokenizerFiles("", None, {}, add_bos=False)
    cpu = torch.device("cpu")
    model = LoadedModel("bench", forward, cpu, dtype, shape, "", CONTEXT, 32_000, (), files, is_fused=is_fused)
    settings = EngineSettings(kv_cache_bytes=256 << 20, block_size=BLOCK_SIZE)
    return ModelRunner(model, settings, threads=threads, draft=draft)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(10, 32_000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Ours:
    """The runner, driven as the scheduler drives it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._next_block = 0

    def sequence(self, ids: list[int], room: int = 0, shared: list[int] | None = None) -> Sequence:
        """A sequence with blocks; `shared` are blocks of somebody else that it starts with."""
        table = list(shared or [])
        fresh = -(-(len(ids) + room) // BLOCK_SIZE) - len(table)
        if self._next_block + fresh > self._runner.num_blocks:
            self._next_block = 0
        table += range(self._next_block, self._next_block + fresh)
        self._next_block += fresh
        return Sequence("", 0, array("I", ids), len(ids), [], GREEDY, block_table=array("i", table))

    def prefill(self, sequence: Sequence, start: int = 0) -> None:
        """Computes the rest of a prompt in the scheduler's steps and appends the first token."""
        end = sequence.num_tokens
        fresh = sequence.block_table[start // BLOCK_SIZE :]
        while start < end:
            count = min(STEP_TOKENS, end - start)
            token = self._runner.run(Step([Work(sequence, start, count, start + count == end)], fresh))[0]
            start, fresh = start + count, []
        sequence.tokens.append(token)

    def decode(self, sequences: list[Sequence], count: int) -> None:
        for _ in range(count):
            work = [Work(s, s.num_tokens - 1, 1, samples=True) for s in sequences]
            for sequence, token in zip(sequences, self._runner.run(Step(work)), strict=True):
                sequence.tokens.append(token)


def theirs_generate(model: Any, ids: torch.Tensor, count: int) -> None:
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        pad_token_id=0,
    )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(name: str, tokens: int, ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> float:
    """Times both in turns. Prints the tokens per second of the medians, and the median of the ratios of each turn."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    our, their = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(their / our for our, their in pairs)
    print(f"{name:24} {tokens / our:10,.0f} {tokens / their:14,.0f} {ratio:9.2f}x", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both sides")
    parser.add_argument("--rounds", type=int, default=5, help="times each measurement is repeated")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    dtype, rounds = getattr(torch, arguments.dtype), arguments.rounds
    ours, model = Ours(make_runner(dtype, arguments.threads)), make_model(dtype)
    print(f"{'tokens per second':24} {'kvasir':>10} {'transformers':>14} {'ratio':>10}")

    # 1. Prefill.
    prompt = random_ids(PREFILL, 1)
    compare(
        f"prefill {PREFILL}",
        PREFILL,
        lambda: seconds(lambda: ours.prefill(ours.sequence(prompt, 1))),
        lambda: seconds(lambda: theirs_generate(model, torch.tensor([prompt]), 1)),
        rounds,
    )

    # 2. Decode: transformers' prefill is timed alone and taken off.
    for batch in (1, 8, 32):
        prompts = [random_ids(DECODE_CONTEXT, seed) for seed in range(batch)]

        def our_decode(prompts: list[list[int]] = prompts) -> float:
            sequences = [ours.sequence(ids, DECODE_TOKENS + 2) for ids in prompts]
            for sequence in sequences:
                ours.prefill(sequence)
            return seconds(lambda: ours.decode(sequences, DECODE_TOKENS))

        def their_decode(prompts: list[list[int]] = prompts) -> float:
            ids = torch.tensor(prompts)
            first = seconds(lambda: theirs_generate(model, ids, 1))
            return seconds(lambda: theirs_generate(model, ids, DECODE_TOKENS + 1)) - first

        compare(f"decode, batch {batch}", batch * DECODE_TOKENS, our_decode, their_decode, rounds)

    # 3. A second request with a shared prefix: it computes its tail.
    shared = random_ids(SHARED, 2)
    cold_times, warm_times = [], []
    for seed in range(rounds):
        first = ours.sequence(shared + random_ids(TAIL, 100 + seed), 1)
        cold_times.append(seconds(lambda first=first: ours.prefill(first)))
        prefix = first.block_table[: SHARED // BLOCK_SIZE]
        second = ours.sequence(shared + random_ids(TAIL, 200 + seed), 1, shared=prefix)
        warm_times.append(seconds(lambda second=second: ours.prefill(second, SHARED)))
    cold, warm = statistics.median(cold_times) * 1e3, statistics.median(warm_times) * 1e3
    print(f"first token, {SHARED} shared: cold {cold:.1f} ms, warm {warm:.1f} ms, {warm / cold:.1%} of cold")


if __name__ == "__main__":
    main()
