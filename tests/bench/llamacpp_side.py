"""llama.cpp's side of tests/bench/engine_vs_peers.py; runs in llama.cpp's own environment, imports nothing of Kvasir.

Batches as llama.cpp's server does: each pass takes one token of every sequence that generates, and then tokens of
prompts up to 2,048 in all. Every sequence has cells of its own, so that it attends to no others' (the server with
`--parallel N`): sequences that arrive together share nothing, as there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from vllm_side import Times, serve, start

BATCH = 2048


class Side:
    """The model, and a context that is made anew for each measurement, as large as it needs."""

    def __init__(self, file: Path, threads: int) -> None:
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        self._model: Any = api.llama_model_load_from_file(str(file).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"{file}: llama.cpp does not load it")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._threads = threads

    def measure(self, prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> Times:
        cells = -(-(max(map(len, prompts)) + tokens + 1) // 256) * 256
        parameters = api.llama_context_default_params()
        parameters.n_ctx = cells * len(prompts)
        parameters.n_seq_max = len(prompts)
        parameters.kv_unified = False
        parameters.n_batch = BATCH
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context: Any = api.llama_init_from_model(self._model, parameters)
        batch = api.llama_batch_init(BATCH, 0, 1)
        try:
            return self._generate(context, batch, prompts, tokens, clock)
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    def _generate(
        self, context: Any, batch: Any, prompts: list[list[int]], tokens: int, clock: Callable[[], float]
    ) -> Times:
        times: Times = [[] for _ in prompts]
        read = [0] * len(prompts)
        last = [0] * len(prompts)
        began = clock()
        while any(len(one) < tokens for one in times):
            batch.n_tokens = 0
            answers: list[tuple[int, int]] = []  # sequence and its row in the batch
            for seq, prompt in enumerate(prompts):
                if read[seq] == len(prompt) and len(times[seq]) < tokens:
                    answers.append((seq, _add(batch, last[seq], len(prompt) + len(times[seq]) - 1, seq, wanted=True)))
            for seq, prompt in enumerate(prompts):
                while read[seq] < len(prompt) and batch.n_tokens < BATCH:
                    wanted = read[seq] == len(prompt) - 1
                    row = _add(batch, prompt[read[seq]], read[seq], seq, wanted=wanted)
                    read[seq] += 1
                    if wanted:
                        answers.append((seq, row))
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for seq, row in answers:
                pointer = ctypes.cast(api.llama_get_logits_ith(context, row), ctypes.POINTER(ctypes.c_float))
                last[seq] = int(np.ctypeslib.as_array(pointer, shape=(self._vocab,)).argmax())
            now = clock() - began
            for seq, _ in answers:
                times[seq].append(now)
        return times


def _add(batch: Any, token: int, position: int, seq: int, *, wanted: bool) -> int:
    row: int = batch.n_tokens
    batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
    batch.seq_id[row][0], batch.logits[row] = seq, wanted
    batch.n_tokens = row + 1
    return row


@api.llama_log_callback
def _log(level: int, text: bytes, _: Any) -> None:
    if level >= 3:  # warnings and errors
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    arguments, answers = start()
    api.llama_log_set(_log, ctypes.c_void_p(0))
    serve(Side(arguments.model, len(arguments.cores)).measure, answers)


if __name__ == "__main__":
    main()
