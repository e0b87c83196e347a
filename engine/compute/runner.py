"""Runs a step: zero the fresh blocks, copy shared ones, one pass through the model, one token for whoever samples.

Owns the paged cache. Stateless between steps otherwise: everything it needs to know stands in the step. Called by one
thread at a time (engine/loop.py); torch's thread count is set for whichever thread that is.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from itertools import accumulate, islice

import torch

from engine.compute.attention import StepAttention
from engine.compute.batch import Batch, make_batch
from engine.compute.draft_model import DraftModel
from engine.compute.forward import is_compiled
from engine.compute.kv_cache import KVCache, choose_budget, count_blocks, free_bytes
from engine.compute.machine import choose_threads, usable_cores
from engine.compute.model import LoadedModel
from engine.compute.peaks import measure_peak
from engine.config import ConfigError, EngineSettings
from engine.protocol import Sampling
from engine.sampling.grammar_worker import StepMasks
from engine.sampling.sampler import Row, Sampler, highest, note_prompt_logprobs
from engine.sequence import NOT_FINITE, ROW_FAILED, Result, Sequence, Step, Work
from engine.speculation import accept
from engine.utilisation import Utilisation

LEAST_ROWS = 2  # oneDNN's fp32 kernel for a single row rounds otherwise than the one for two and more


class ModelRunner:
    """The model, as the loop sees it."""

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        *,
        threads: int | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        """Allocates the cache and runs one tiny step, so that the first request finds everything warm.

        threads  CPU threads to compute with; None lets engine/compute/machine.py choose as for the only engine here
        draft    a small model that drafts; its keys and values take a part of the budget
        Raises ConfigError when the budget does not hold two blocks.
        """
        self.model = model
        self._block_size = settings.block_size
        self._threads = threads or choose_threads(settings.threads, usable_cores())
        self._thread_set: int | None = None
        budget = settings.kv_cache_bytes or _choose_budget(model, settings)
        if draft is not None:
            own = model.cache_shape.token_bytes
            budget = budget * own // (own + draft.cache_shape.token_bytes)
        self.num_blocks = count_blocks(model.cache_shape, settings.block_size, budget)
        if self.num_blocks < 2:
            need = model.cache_shape.token_bytes * settings.block_size
            raise ConfigError(f"engine.kv_cache_bytes: {budget} bytes hold less than two blocks of {need} bytes")
        self.cache = KVCache(model.cache_shape, self.num_blocks, settings.block_size, model.device)
        compiled = model.is_fused and is_compiled(model.dtype, model.device)
        self._pads = model.device.type == "cpu" and model.dtype == torch.float32 and not compiled
        self._draft = None if draft is None else DraftModel(draft, self.num_blocks, settings.block_size)
        self._sampler = Sampler()
        self._step_masks = StepMasks(model.vocab_size)
        self._warm_up()

    def run(self, step: Step) -> list[Result]:
        """Computes a step.

        Returns one entry for each work of the step and then for each fork, in order (engine.sequence.Result). The row
        of logits behind a prompt is left with the siblings that want it (Siblings.row), and forks sample from it. A
        work whose hidden state is not finite gets NOT_FINITE, whether it samples or not: the loop fails that sequence
        and registers nothing that the step wrote for it. One whose grammar allows nothing gets NO_TOKEN, one whose mask
        is late MASK_LATE. One whose token or log probabilities cannot be found gets ROW_FAILED, and nothing of it is
        registered either. Any other exception fails the whole step. Log probabilities that a sequence asks for are
        appended to its `logprobs`. Raises StepGivenUp once `unwanted` says so, unless it is about to end: then only
        zeroing and copying are done, and slots that it would have written may hold anything. However it ends, nothing
        of the step is computed any more.
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

    def _run(self, step: Step) -> list[Result]:
        if step.fresh_blocks:
            self.cache.zero(step.fresh_blocks)
        if step.copies:
            self.cache.copy(step.copies)
        if self._draft is not None:
            step = self._draft.fill(step)
        failed, works = set[Sequence](), [work for work in step.work if work.samples]
        sampled = [Row(work.sequence, work.drafts[:count]) for work in works for count in range(work.num_asked)]
        sampled += [Row(fork) for fork in step.forks]
        self._step_masks.begin([row.sequence for row in sampled])
        logits = self._compute(step, failed) if step.work else step.forks[0].row[None][:0]
        results = self._sample(step, logits, sampled)
        if failed:
            results = [ROW_FAILED if s in failed else r for s, r in zip(step.sequences, results, strict=True)]
        return results

    def _compute(self, step: Step, failed: set[Sequence]) -> torch.Tensor:
        """Logits of the batch's asked rows, (num_asked, vocab_size). Those of scored rows are taken note of; sequences
        for which that fails are added to `failed`."""
        batch = make_batch(step, self._block_size)
        logits, num_asked = self._forward(batch, step.unwanted), len(batch.asked)
        if len(logits) > num_asked:
            failed |= note_prompt_logprobs(logits[num_asked:], step)
        return logits[:num_asked]

    def _forward(self, batch: Batch, unwanted: Callable[[], bool] | None = None) -> torch.Tensor:
        """Logits of the asked rows, then of those that are scored, (num_asked + num_scored, vocab_size)."""
        device = self.model.device
        tokens, positions, rows = (
            torch.from_numpy(values).to(device) for values in (batch.tokens, batch.positions, batch.asked)
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

    def _sample(self, step: Step, logits: torch.Tensor, sampled: list[Row]) -> list[Result]:
        """logits (num_asked, vocab_size); `sampled` is what is sampled of works, and then of forks."""
        _keep_rows(step.work, logits)
        firsts = list(accumulate((work.num_asked for work in step.work), initial=0))
        works = list(zip(step.work, firsts, strict=False))
        samples = [row for work, first in works if work.samples for row in range(first, first + work.num_asked)]
        rows = logits if len(samples) == len(logits) else logits[samples]
        if step.forks:
            rows = torch.cat((rows, torch.stack([fork.row for fork in step.forks])))
        tokens = self._sampler.choose(rows, sampled, self._step_masks.take()) if sampled else []
        chosen = iter(zip(sampled, tokens, strict=True))
        finite = highest(logits)[1] if len(samples) < len(logits) else []
        results: list[Result] = []
        for work, first in works:
            if work.samples:
                results.append(self._accept(work, *zip(*islice(chosen, work.num_asked), strict=True)))
            else:
                results.append(None if finite[first] else NOT_FINITE)
        for row, token in chosen:
            _note_logprobs(row)
            results.append(token)
        return results

    def _accept(self, work: Work, rows: tuple[Row, ...], tokens: tuple[int, ...]) -> Result:
        """What was sampled of a work: in place of its drafts, as long as they are right, and behind them."""
        accepted = accept(work.drafts, tokens)
        for row in rows[: len(accepted)]:
            _note_logprobs(row)
        if NOT_FINITE in tokens[1:]:  # what is written behind the answer is masked out, and must be finite
            start, end = work.start + work.count + len(accepted) - 1, work.start + work.num_rows
            self.cache.zero_slots(work.sequence.block_table, range(start, end))
        return accepted if work.drafts and accepted[0] >= 0 else accepted[0]

    def _warm_up(self) -> None:
        """One step of a few tokens, and one of a single token, in blocks that are zeroed before anyone uses them."""
        count = min(self._block_size + 1, self.model.context_tokens - 1)
        tokens, table = array("I", [0] * (count + 1)), array("i", [0, 1])
        sequence = Sequence("", 0, tokens, count, [], Sampling(max_tokens=1, temperature=0.0), block_table=table)
        self.run(Step([Work(sequence, 0, count, samples=True)], [0, 1]))
        self.run(Step([Work(sequence, count, 1, samples=True, wanted=int(self._draft is not None))]))
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


def _note_logprobs(row: Row) -> None:
    if row.logprobs is not None:
        row.sequence.logprobs.append(row.logprobs)


def _keep_rows(work: list[Work], logits: torch.Tensor) -> None:
    """The logits behind a prompt, for the siblings that have no token yet."""
    for item, first in zip(work, accumulate((item.num_asked for item in work), initial=0), strict=False):
        sequence, row = item.sequence, logits[first]
        if sequence.siblings is not None and item.samples and not sequence.num_generated:
            sequence.siblings.row = row.clone() if sequence.siblings.row_wanted else None
