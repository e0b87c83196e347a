"""What the results of a step mean: blocks become findable, tokens are appended, sequences come to their end.

Pure bookkeeping: no model, no clock. engine/scheduler.py hands over steps and results, engine/open_sequences.py ends
sequences and tells their owners. An error in one sequence's result ends that sequence alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from engine.counters import Counters
from engine.leases.claims import Claims
from engine.open_sequences import OpenSequences
from engine.plan import is_prefill
from engine.protocol import SequenceUpdate
from engine.sequence import MASK_LATE, NO_TOKEN, NOT_FINITE, ROW_FAILED, Fork, Sequence, Status, Step, Work
from engine.tables import BlockTables

log = logging.getLogger(__name__)


class Results:
    """context_tokens  prompt and completion together"""

    def __init__(
        self, sequences: OpenSequences, tables: BlockTables, claims: Claims, counters: Counters, *, context_tokens: int
    ) -> None:
        self._sequences = sequences
        self._tables = tables
        self._claims = claims
        self._counters = counters
        self._context_tokens = context_tokens

    def take(self, step: Step, results: list[int | None], now: float) -> None:
        """One result for each work and fork of a step that succeeded; see engine.sequence.Runner."""
        assert len(results) == step.num_results, f"{len(results)} results for {step.num_results} works and forks"
        sequences = step.sequences
        for sequence, result in zip(sequences, results, strict=True):
            if result == NOT_FINITE:
                self._guard(sequence, self._fail_not_finite, sequence)
            elif result == ROW_FAILED:
                self._guard(sequence, self._fail_row, sequence)
        late = {s for s, result in zip(sequences, results, strict=True) if result == MASK_LATE}
        for work in step.work:
            self._guard(work.sequence, self._take_computed, work, now, work.sequence in late)
        for fork in step.forks:
            self._guard(fork.sequence, self._take_forked, fork, now)
        for sequence, result in zip(sequences, results, strict=True):
            if result == NO_TOKEN:
                self._guard(sequence, self._fail_grammar, sequence)
            elif result is not None and result != MASK_LATE:
                self._guard(sequence, self._append, sequence, result, now)

    def _guard(self, sequence: Sequence, take: Callable[..., None], *values: Any) -> None:
        """Takes a result of a sequence, unless it has failed or was aborted since it was scheduled. An error ends that
        sequence alone; what the step wrote for it and is not registered yet never is."""
        if sequence.status is not Status.RUNNING:
            return
        try:
            take(*values)
        except Exception:
            log.exception("a result of a step could not be taken (request %s)", sequence.request_id or "-")
            if sequence.status is Status.RUNNING:
                self._fail_row(sequence)

    def _take_computed(self, work: Work, now: float, again: bool) -> None:
        """`again`: its last token is computed once more, because nothing could be sampled behind it."""
        sequence = work.sequence
        if again:
            self._counters.masks_late += 1
        if is_prefill(work):
            self._counters.prefilled_tokens += work.count
        else:
            self._counters.decoded_tokens += not again
        sequence.num_computed = work.start + work.count - again
        self._tables.register(sequence)
        self._claims.register(sequence, now)
        if work.samples and is_prefill(work):
            self._tables.save(sequence)

    def _take_forked(self, fork: Fork, now: float) -> None:
        self._tables.follow(fork.sequence, fork.source)
        self._claims.register(fork.sequence, now)
        fork.sequence.prompt_logprobs = fork.source.prompt_logprobs

    def _append(self, sequence: Sequence, token: int, now: float) -> None:
        update = SequenceUpdate(sequence.seq)
        if not sequence.num_generated:
            self._sequences.describe_start(sequence, update, now)
            if sequence.sampling.prompt_logprobs is not None:
                update.prompt_logprobs = sequence.prompt_logprobs
        sampling = sequence.sampling
        if not sampling.max_tokens:  # the prompt is computed, and that is all
            self._sequences.finish(sequence, "length", update)
            return
        if token in sequence.end_ids:
            update.stop_id = token
            self._sequences.finish(sequence, "stop", update)
            return
        sequence.tokens.append(token)
        update.tokens.append(token)
        if sequence.siblings is not None:
            sequence.siblings.settle()
        if sampling.logprobs is not None:
            update.logprobs, sequence.logprobs = sequence.logprobs, []
        if sequence.num_generated >= sampling.max_tokens or sequence.num_tokens >= self._context_tokens:
            self._sequences.finish(sequence, "length", update)
        else:
            self._sequences.update(sequence.owner, update)

    def _fail_grammar(self, sequence: Sequence) -> None:
        failure = sequence.matcher.failure if sequence.matcher is not None else None
        if failure is None:
            self._sequences.fail(sequence, "the grammar became too complex to go on with", "")
        else:
            self._sequences.fail(sequence, failure.reason, failure.path)

    def _fail_not_finite(self, sequence: Sequence) -> None:
        self._counters.not_finite += 1
        forgotten = self._tables.quarantine(sequence)
        self._claims.leases.drop_lost()
        log.error(
            "numbers that are not finite: sequence ended, %d blocks unregistered (request %s)",
            forgotten,
            sequence.request_id or "-",
        )
        self._sequences.fail(sequence, "the model computed numbers that are not finite")

    def _fail_row(self, sequence: Sequence) -> None:
        self._counters.failed_rows += 1
        self._sequences.fail(sequence, "the engine had an internal error with this sequence")
