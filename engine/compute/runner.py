"""Runs a step: zero the fresh blocks, copy shared ones, one pass through the model, one token for whoever samples.

Owns the paged cache. Stateless between steps otherwise: everything it needs to know stands in the step. Called by one
thread at a time (engine/loop.py); torch's thread count is set for whichever thread that is.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import torch

from engine.compute.attention import StepAttention
from engine.compute.batch import Batch, make_batch
from engine.compute.forward import is_compiled
from engine.compute.kv_cache import KVCache, choose_budget, count_blocks, free_bytes
from engine.compute.machine import choose_threads, usable_cores
from engine.compute.model import LoadedModel
from engine.compute.peaks import measure_peak
from engine.config import ConfigError, EngineSettings
from engine.protocol import Sampling
from engine.sampling.grammar_worker import StepMasks
from engine.sampling.sampler import Row, Sampler, highest, note_prompt_logprobs
from engine.sequence import NOT_FINITE, ROW_FAILED, Sequence, Step, Work
from engine.utilisation import Utilisation

LEAST_ROWS = 2  # oneDNN's fp32 kernel for a single row rounds otherwise than the one for two and more


class ModelRunner:
    """The model, as the loop sees it."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, threads: int | None = None) -> None:
        """Allocates the cache and runs one tiny step, so that the first request finds everything warm.

        threads  CPU threads to compute with; None lets engine/compute/machine.py choose as for the only engine here
        Raises ConfigError when the budget does not hold two blocks.
        """
        self.model = model
        self._block_size = settings.block_size
        self._threads = threads or choose_threads(settings.threads, usable_cores())
        self._thread_set: int | None = None
        budget = settings.kv_cache_bytes or _choose_budget(model, settings)
        self.num_blocks = count_blocks(model.cache_shape, settings.block_size, budget)
        if self.num_blocks < 2:
            need = model.cache_shape.token_bytes * settings.block_size
            raise ConfigError(f"engine.kv_cache_bytes: {budget} bytes hold less than two blocks of {need} bytes")
        self.cache = KVCache(model.cache_shape, self.num_blocks, settings.block_size, model.device)
        compiled = model.is_fused and is_compiled(model.dtype, model.device)
        self._pads = model.device.type == "cpu" and model.dtype == torch.float32 and not compiled
        self._sampler = Sampler()
        self._step_masks = StepMasks(model.vocab_size)
        self._warm_up()

    def run(self, step: Step) -> list[int | None]:
        """Computes a step.

        Returns one entry for each work of the step and then for each fork, in order: the sampled token id, or None for
        work that does not sample. The row of logits behind a prompt is left with the siblings that want it
        (Siblings.row), and forks sample from it. A work whose hidden state is not finite gets NOT_FINITE, whether it
        samples or not: the loop fails that sequence and registers nothing that the step wrote for it. One whose
        grammar allows nothing gets NO_TOKEN, one whose mask is late MASK_LATE. One whose token or log probabilities
        cannot be found gets ROW_FAILED, and nothing of it is registered either. Any other exception fails the whole
        step. Log probabilities that a sequence asks for are appended to its `logprobs`. Raises StepGivenUp once
        `unwanted` says so, unless it is about to end: then only zeroing and copying are done, and slots that it would
        have written may hold anything. However it ends, nothing of the step is computed any more.
        """
        self._set_threads()
        try:
            with torch.inference_mode():
                return self._run(step)
        except Exception:
            _wait_for(self.model.device)
            raise

    def measure(self) -> Utilisation | None:
        """What counts how much of this machine its steps use; None where it is not known what they cost. The machine is
        measured now, which takes half a second."""
        model = self.model
        if model.cost is None:
            return None
        return Utilisation(model.cost, measure_peak(model.device, model.dtype, self._threads))

    def find_not_finite(self, blocks: list[int]) -> list[int]:
        """Those of the blocks in which a key or value is not finite. Reads them as one step that attends to them."""
        with torch.inference_mode():
            return self.cache.find_not_finite(blocks)

    def _run(self, step: Step) -> list[int | None]:
        if step.fresh_blocks:
            self.cache.zero(step.fresh_blocks)
        if step.copies:
            self.cache.copy(step.copies)
        self._step_masks.begin(step.sampled)
        failed = set[Sequence]()
        results = self._sample(step, self._compute(step, failed) if step.work else step.forks[0].row[None][:0])
        if failed:
            results = [ROW_FAILED if s in failed else r for s, r in zip(step.sequences, results, strict=True)]
        return results

    def _compute(self, step: Step, failed: set[Sequence]) -> torch.Tensor:
        """Logits of the last row of each work, (num_work, vocab_size). Those of scored rows are taken note of;
        sequences for which that fails are added to `failed`."""
        logits, num_works = self._forward(make_batch(step, self._block_size), step.unwanted), len(step.work)
        if len(logits) > num_works:
            failed |= note_prompt_logprobs(logits[num_works:], step)
        return logits[:num_works]

    def _forward(self, batch: Batch, unwanted: Callable[[], bool] | None = None) -> torch.Tensor:
        """Logits of the last row of each work, then of those that are scored, (num_work + num_scored, vocab_size)."""
        device = self.model.device
        tokens, positions, rows = (
            torch.from_numpy(values).to(device) for values in (batch.tokens, batch.positions, batch.last_rows)
        )
        if len(batch.scored):
            rows = torch.cat((rows, torch.from_numpy(batch.scored).to(device)))
        wanted = len(rows)
        attention = StepAttention(self.cache, batch, unwanted)
        if self._pads and len(rows) < LEAST_ROWS:  # repeat a row: what it computes is not written and not read
            rows = rows.expand(LEAST_ROWS)
            if len(tokens) < LEAST_ROWS:
                tokens, positions = tokens.expand(LEAST_ROWS), positions.expand(LEAST_ROWS)
        return self.model.forward(tokens, positions, attention, rows)[:wanted]

    def _sample(self, step: Step, logits: torch.Tensor) -> list[int | None]:
        _keep_rows(step.work, logits)
        samples, sampled = [index for index, item in enumerate(step.work) if item.samples], step.sampled
        rows = logits if len(samples) == len(step.work) else logits[samples]
        if step.forks:
            rows = torch.cat((rows, torch.stack([fork.row for fork in step.forks])))
        asked = [Row(sequence) for sequence in sampled]
        chosen = self._sampler.choose(rows, asked, self._step_masks.take()) if asked else []
        for row in asked:
            if row.logprobs is not None:
                row.sequence.logprobs.append(row.logprobs)
        if len(samples) == len(step.work):
            return list(chosen)
        results = [None if finite else NOT_FINITE for finite in highest(logits)[1]]
        for index, token in zip(samples, chosen, strict=False):
            results[index] = token
        return [*results, *chosen[len(samples) :]]

    def _warm_up(self) -> None:
        """One step of a few tokens, and one of a single token, in blocks that are zeroed before anyone uses them."""
        count = min(self._block_size + 1, self.model.context_tokens - 1)
        tokens = array("I", [0] * (count + 1))
        sequence = Sequence("", 0, tokens, count, [], Sampling(max_tokens=1, temperature=0.0), block_table=[0, 1])
        self.run(Step([Work(sequence, 0, count, samples=True)], [0, 1]))
        self.run(Step([Work(sequence, count, 1, samples=True)]))
        self.cache.zero([0, 1])

    def _set_threads(self) -> None:
        """OpenMP keeps the number of threads for each calling thread."""
        if self._thread_set != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._thread_set = threading.get_ident()


def _choose_budget(model: LoadedModel, settings: EngineSettings) -> int:
    """Bytes for keys and values beside the loaded model. A GPU is nobody else's; on a CPU others want memory, too."""
    free = free_bytes(model.device, settings.memory_bytes)
    tokens = settings.max_sequences * model.context_tokens
    return choose_budget(model.cache_shape, free, tokens, 0.9 if model.device.type == "cuda" else 0.5)


def _wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given. Blocks of a step that did not end may be somebody else's at once, and the
    streams of copies between tiers do not wait for the step's."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _keep_rows(work: list[Work], logits: torch.Tensor) -> None:
    """The logits behind a prompt, for the siblings that have no token yet."""
    for item, row in zip(work, logits, strict=True):
        sequence = item.sequence
        if sequence.siblings is not None and item.samples and not sequence.num_generated:
            sequence.siblings.row = row.clone() if sequence.siblings.row_wanted else None
