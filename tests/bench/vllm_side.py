"""vLLM's side of tests/bench/engine_vs_peers.py; runs in vLLM's own environment and imports nothing of Kvasir.

Reads one JSON line for each measurement from standard input and answers each with one; see serve(). The side of our own
engine, tests/bench/kvasir_side.py, speaks the same through the same functions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Times = list[list[float]]
"""For each request the seconds since all were submitted at which each of its tokens was there, on both clocks alike."""

Measure = Callable[[list[list[int]], int, Callable[[], float]], Times]
"""(prompts, tokens to generate for each, clock) -> when each token came."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def start() -> tuple[argparse.Namespace, TextIO]:
    """Puts the process and all its later threads on its cores. Returns the side's arguments and where answers go."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cores", type=int, nargs="+", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize", default="none")  # ours
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, arguments.cores)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    return arguments, answers


def serve(measure: Measure, answers: TextIO) -> None:
    """Answers {"prompts", "tokens", "clock"} with {"times"} until standard input ends. Says {"ready"} first."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        times = measure(task["prompts"], task["tokens"], CLOCKS[task["clock"]])
        print(json.dumps({"times": times}), file=answers, flush=True)


def main() -> None:
    arguments, answers = start()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm: Any = LLM(
        model=str(arguments.model),
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        max_model_len=arguments.context,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    engine, serial = llm.llm_engine, 0

    def measure(prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> Times:
        nonlocal serial
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: dict[str, list[float]] = {}
        began = clock()
        for ids in prompts:
            serial += 1
            times[str(serial)] = []
            engine.add_request(str(serial), {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = clock() - began
            for output in outputs:
                times[output.request_id] += [now] * len(output.outputs[0].token_ids)
        return list(times.values())

    serve(measure, answers)


if __name__ == "__main__":
    main()
