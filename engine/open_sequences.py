"""Sequences that are not finished, by owner, and what their owners are to be told.

The only way out for a sequence is here: it takes it out of everything that it is in. Pure bookkeeping;
engine/scheduler.py adds sequences and aborts them, engine/results.py ends them with what a step computed.
"""

from __future__ import annotations

from engine.counters import Counters
from engine.forks import Forks
from engine.lanes import Lanes
from engine.leases.claims import Claims
from engine.protocol import FinishReason, SequenceUpdate
from engine.sequence import Sequence, Status
from engine.tables import BlockTables


class OpenSequences:
    """An owner is the connection of a gateway; (owner, seq) is unique."""

    def __init__(self, lanes: Lanes, forks: Forks, tables: BlockTables, claims: Claims, counters: Counters) -> None:
        self._lanes = lanes
        self._forks = forks
        self._tables = tables
        self._claims = claims
        self._counters = counters
        self._by_owner: dict[str, dict[int, Sequence]] = {}
        self._updates: dict[str, list[SequenceUpdate]] = {}

    def add(self, sequence: Sequence) -> None:
        self._by_owner.setdefault(sequence.owner, {})[sequence.seq] = sequence

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
        """It is gone, and is told nothing more."""
        self._updates.pop(owner, None)

    def take_updates(self) -> dict[str, list[SequenceUpdate]]:
        """What has to be told to each owner since the last call."""
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
            self._lanes.remove(sequence)
        if sequence.matcher is not None:
            sequence.matcher.close()
        self._forks.leave(sequence)
        self._claims.close(sequence)
        sequence.finish = reason
        self._counters.finished[reason] += 1
