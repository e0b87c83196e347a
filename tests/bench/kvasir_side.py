"""Our side of tests/bench/engine_vs_peers.py: the engine's loop, scheduler, pool and runner in one process.

Everything but the wire: what the server would hand to the loop and take from it is made and read here.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from engine.compute.machine import collapse
from engine.compute.model import LoadedModel, prepare
from engine.compute.quantized_layers import quantize_layers
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.loop import EngineLoop
from engine.pool.blocks import BlockPool
from engine.protocol import Sampling, StepFrame, Submit, TokenizerFiles
from engine.scheduler import Scheduler
from tests.bench.vllm_side import Times, serve, start

WAIT_S = 600.0  # for one measurement


class Side:
    """The engine, and the times at which its tokens arrive."""

    def __init__(self, folder: Path, context: int, dtype: torch.dtype, threads: int, quantize: str) -> None:
        settings = EngineSettings(
            threads=threads, kv_cache_bytes=2 << 30, speculation="none"
        )  # random models repeat themselves
        module = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        if quantize != "none":
            quantize_layers(module, 8 if quantize == "int8" else 4, dtype)
        shape, forward, is_fused, _ = prepare(module, "bench", context)
        collapse()  # as engine.model.load_model does
        files = TokenizerFiles("", None, {}, add_bos=False)
        cpu, vocab = torch.device("cpu"), module.config.vocab_size
        model = LoadedModel("bench", forward, cpu, dtype, shape, "bench", context, vocab, (), files, is_fused=is_fused)
        runner = ModelRunner(model, settings)
        runner.cache.data.zero_()  # takes the memory from the system now, as vLLM does when it starts
        pool = BlockPool(runner.num_blocks, settings.block_size)
        namespace = model.namespace(settings.block_size, settings.hash_name)
        scheduler = Scheduler(pool, namespace, settings, context_tokens=context, vocab_size=vocab)
        self._loop = EngineLoop(scheduler, runner, on_frames=self._on_frames, on_blocks=lambda events: None)
        self._loop.start()
        self._times: Times = []
        self._done = threading.Event()
        self._left = 0

    def measure(self, prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> Times:
        packed = [array("I", ids).tobytes() for ids in prompts]
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._done.clear()
        self._times, self._left = [[] for _ in prompts], len(prompts)
        self._clock, self._began = clock, clock()
        for seq, ids in enumerate(packed):
            self._loop.submit("bench", Submit(seq, ids, b"", sampling))
        if not self._done.wait(WAIT_S) or not self._loop.wait_idle(WAIT_S):
            raise TimeoutError(f"{self._left} of {len(prompts)} requests did not end in {WAIT_S:.0f} s")
        return self._times

    def _on_frames(self, frames: dict[str, StepFrame]) -> None:
        now = self._clock() - self._began
        for update in frames["bench"].updates if "bench" in frames else ():
            self._times[update.seq] += [now] * len(update.tokens)
            if update.finish is not None:
                if update.error is not None:
                    print(update.error, file=sys.stderr)
                self._left -= 1
                if not self._left:
                    self._done.set()


def main() -> None:
    arguments, answers = start()
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, arguments.dtype)
    serve(Side(arguments.model, arguments.context, dtype, len(arguments.cores), arguments.quantize).measure, answers)


if __name__ == "__main__":
    main()
