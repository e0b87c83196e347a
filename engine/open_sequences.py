"""Sequences that are not finished, by owner: results of steps, updates for their owners, how they end.

Sequences of one group are siblings if they really have the same prompt. The first of them computes it. The others wait
for that, take its blocks, and sample from the same row of logits, each with its own seed; so does one that arrives
later, as long as one of them runs. Without a source a sequence is admitted like any other.

Pure bookkeeping: no model, no clock. The only way out for a sequence is here: it takes it out of everything that it is
in. engine/scheduler.py adds sequences, aborts them, and hands over steps and results. An error in the result of one
sequence ends that sequence alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from engine.leases.claims import Claims
from engine.protocol import FinishReason, Group, SequenceUpdate
from engine.queues import Queues
from engine.sequence import (
    MASK_LATE,
    NO_TOKEN,
    NOT_FINITE,
    ROW_FAILED,
    Counters,
    Result,
    Sequence,
    Siblings,
    Status,
    Step,
    Work,
)
from engine.tables import BlockTables

log = logging.getLogger(__name__)


class OpenSequences:
    """An owner is the connection of a gateway; (owner, seq) is unique.

    context_tokens  prompt and completion together
    """

    def __init__(
        self, queues: Queues, tables: BlockTables, claims: Claims, counters: Counters, *, context_tokens: int
    ) -> None:
        self._queues = queues
        self._tables = tables
        self._claims = claims
        self._counters = counters
        self._context_tokens = context_tokens
        self._by_owner: dict[str, dict[int, Sequence]] = {}
        self._siblings: dict[tuple[str, int], Siblings] = {}
        self._updates: dict[str, list[SequenceUpdate]] = {}

    @property
    def num_groups(self) -> int:
        """Prompts with more than one answer."""
        return len(self._siblings)

    def add(self, sequence: Sequence, group: Group | None) -> None:
        """One that differs from those it is said to belong to stays alone."""
        self._by_owner.setdefault(sequence.owner, {})[sequence.seq] = sequence
        if group is None or group.size < 2:
            return
        key = (sequence.owner, group.number)
        siblings = self._siblings.get(key)
        if siblings is None:
            siblings = self._siblings[key] = Siblings(key, group.size)
        elif not _alike(sequence, next(iter(siblings.members))):
            return
        siblings.members[sequence] = None
        siblings.arrived += 1
        sequence.siblings = siblings

    def find(self, owner: str, seq: int) -> Sequence | None:
        return self._by_owner.get(owner, {}).get(seq)

    def of(self, owner: str) -> list[Sequence]:
        return list(self._by_owner.get(owner, {}).values())

    def all(self) -> list[Sequence]:
        return [sequence for by_seq in self._by_owner.values() for sequence in by_seq.values()]

    # -- updates ------------------------------------------------------------------------------------------------------

    def update(self, owner: str, update: SequenceUpdate) -> None:
        self._updates.setdefault(owner, []).append(update)

    def drop_updates(self, owner: str) -> None:
        """Of an owner that is gone."""
        self._updates.pop(owner, None)

    def take_updates(self) -> dict[str, list[SequenceUpdate]]:
        """Updates for each owner since the last call."""
        updates, self._updates = self._updates, {}
        return updates

    def describe_start(self, sequence: Sequence, update: SequenceUpdate, now: float | None) -> None:
        """What the first update of a sequence says of its prompt; `now` is when its first token was there."""
        update.cached_tokens = sequence.cached_tokens
        self._claims.describe(sequence, update)
        if sequence.scheduled_s is not None:
            update.queue_ms = max(0.0, (sequence.scheduled_s - sequence.arrived_s) * 1000)
            if now is not None:
                update.prefill_ms = max(0.0, (now - sequence.scheduled_s) * 1000)

    # -- results of a step --------------------------------------------------------------------------------------------

    def take(self, step: Step, results: list[Result], now: float) -> None:
        """One result for each work and fork of a step that succeeded."""
        assert len(results) == step.num_results, f"{len(results)} results for {step.num_results} works and forks"
        sequences = step.sequences
        for sequence, result in zip(sequences, results, strict=True):
            if result == NOT_FINITE:
                self._guard(sequence, self._fail_not_finite, sequence)
            elif result == ROW_FAILED:
                self._guard(sequence, self._fail_row, sequence)
        late = {s for s, result in zip(sequences, results, strict=True) if result == MASK_LATE}
        for work, result in zip(step.work, results, strict=False):
            if isinstance(result, list):
                self._guard(work.sequence, self._take_drafts, work, result)
            accepted = len(result) - 1 if isinstance(result, list) else 0
            self._guard(work.sequence, self._take_computed, work, now, work.sequence in late, accepted)
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

    def _take_drafts(self, work: Work, tokens: list[int]) -> None:
        """Drafts that were sampled are computed already; the token behind them is not."""
        self._counters.drafted_tokens += len(work.drafts) or work.wanted
        if work.wanted and work.sequence.drafter is not None:
            work.sequence.drafter.followed(len(tokens) - 1, work.wanted)
            work.sequence.follow_end += min(len(tokens) - 1, work.wanted - 1)  # it went on with these itself
        self._counters.accepted_tokens += len(tokens) - 1
        self._counters.decoded_tokens += len(tokens) - 1
        work.sequence.tokens.extend(tokens[:-1])

    def _take_computed(self, work: Work, now: float, again: bool, accepted: int) -> None:
        """`again`: its last token is computed once more, because nothing could be sampled behind it."""
        sequence = work.sequence
        if again:
            self._counters.masks_late += 1
        if work.is_prefill:
            self._counters.prefilled_tokens += work.count
        else:
            self._counters.decoded_tokens += not again
        sequence.num_computed = work.start + work.count + accepted - again
        self._tables.register(sequence)
        self._claims.register(sequence, now)
        if work.samples and work.is_prefill:
            self._tables.save(sequence)

    def _append(self, sequence: Sequence, result: int | list[int], now: float) -> None:
        *accepted, token = result if isinstance(result, list) else [result]
        update = SequenceUpdate(sequence.seq, accepted)
        if not sequence.num_generated:
            self.describe_start(sequence, update, now)
            if sequence.sampling.prompt_logprobs is not None:
                update.prompt_logprobs = sequence.prompt_logprobs
        sampling = sequence.sampling
        if not sampling.max_tokens:  # the prompt is computed, and that is all
            self.finish(sequence, "length", update)
            return
        if token in sequence.end_ids:
            update.stop_id = token
            if accepted and sampling.logprobs is not None:
                update.logprobs = sequence.logprobs[: len(accepted)]
            self.finish(sequence, "stop", update)
            return
        sequence.tokens.append(token)
        update.tokens.append(token)
        if sequence.siblings is not None:
            sequence.siblings.settle()
        if sampling.logprobs is not None:
            update.logprobs, sequence.logprobs = sequence.logprobs, []
        if sequence.num_generated >= sampling.max_tokens or sequence.num_tokens >= self._context_tokens:
            self.finish(sequence, "length", update)
        else:
            self.update(sequence.owner, update)

    def _fail_grammar(self, sequence: Sequence) -> None:
        failure = sequence.matcher.failure if sequence.matcher is not None else None
        if failure is None:
            self.fail(sequence, "the grammar became too complex to go on with", "")
        else:
            self.fail(sequence, failure.reason, failure.path)

    def _fail_not_finite(self, sequence: Sequence) -> None:
        self._counters.not_finite += 1
        forgotten = self._tables.quarantine(sequence)
        self._claims.leases.drop_lost()
        log.error(
            "numbers that are not finite: sequence ended, %d blocks unregistered (request %s)",
            forgotten,
            sequence.request_id or "-",
        )
        self.fail(sequence, "the model computed numbers that are not finite")

    def _fail_row(self, sequence: Sequence) -> None:
        self._counters.failed_rows += 1
        self.fail(sequence, "the engine had an internal error with this sequence")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def fail(self, sequence: Sequence, error: str, grammar_path: str | None = None) -> None:
        update = SequenceUpdate(sequence.seq, error=error, grammar_path=grammar_path)
        self.finish(sequence, "error", update)

    def finish(self, sequence: Sequence, reason: FinishReason, update: SequenceUpdate | None = None) -> None:
        """Ends a sequence and tells its owner."""
        update = update or SequenceUpdate(sequence.seq)
        update.finish = reason
        if not sequence.num_generated and update.cached_tokens is None:
            self.describe_start(sequence, update, None)
        self.end(sequence, reason)
        self.update(sequence.owner, update)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The only way out: takes a sequence out of everything it is in, and its blocks with it."""
        by_seq = self._by_owner[sequence.owner]
        del by_seq[sequence.seq]
        if not by_seq:
            del self._by_owner[sequence.owner]
        if sequence.status is Status.RUNNING:
            self._tables.release(sequence)
        if sequence.status is Status.HELD:
            sequence.status = Status.FINISHED
        else:
            self._queues.remove(sequence)
        if sequence.matcher is not None:
            sequence.matcher.close()
        self._leave_siblings(sequence)
        self._claims.close(sequence)
        sequence.finish = reason
        self._counters.finished[reason] += 1

    def _leave_siblings(self, sequence: Sequence) -> None:
        siblings, sequence.siblings = sequence.siblings, None
        if siblings is None:
            return
        del siblings.members[sequence]
        if not siblings.members:
            del self._siblings[siblings.key]
        siblings.settle()


def _alike(one: Sequence, other: Sequence) -> bool:
    full = len(one.digests)
    return (
        (one.salt, one.lane, one.use_cache) == (other.salt, other.lane, other.use_cache)
        and one.sampling.prompt_logprobs == other.sampling.prompt_logprobs
        and one.tokens == other.tokens[: other.num_prompt]
        and one.digests == other.digests[:full]
    )
