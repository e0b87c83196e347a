"""How a sequence comes in: into a lane at once, or held until the grammar that its text has to follow is compiled.

What cannot be taken is answered with an update that ends it, like every other failure. Runs on the loop's thread;
engine/loop.py posts to it, engine/scheduler.py has the sequences, engine/sampling/grammar_pool.py compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from engine.protocol import FinishReason, Submit
from engine.sampling.grammar_pool import GrammarPool
from engine.sampling.grammar_worker import Refusal
from engine.scheduler import Scheduler
from engine.sequence import Sequence

log = logging.getLogger(__name__)


class Intake:
    """grammars  where grammars are compiled; without one, sequences that have one are refused"""

    def __init__(self, scheduler: Scheduler, grammars: GrammarPool | None) -> None:
        self.errors = 0  # sequences that could not be taken for a reason that nobody thought of
        self._scheduler = scheduler
        self._grammars = grammars

    def start(self, post: Callable[[Callable[[], object]], None]) -> None:
        """Begins to load what compiles. `post` brings a call to the loop's thread. Once."""
        if self._grammars is not None:
            self._grammars.start(post)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their grammars."""
        return 0 if self._grammars is None else self._grammars.num_waiting

    def take(self, owner: str, message: Submit, arrived_s: float, refusal: str | None) -> None:
        """Queues a sequence at once, or when its grammar is compiled.

        refusal  why it is not to be taken
        """
        try:
            self._queue(owner, message, arrived_s, refusal)
        except Exception:
            self.errors += 1
            log.exception("a sequence could not be taken")
            self._scheduler.abort(owner, message.seq)
            self._scheduler.submit(owner, message, arrived_s, refusal="the engine had an internal error")

    def _queue(self, owner: str, message: Submit, arrived_s: float, refusal: str | None) -> None:
        scheduler, grammars, grammar = self._scheduler, self._grammars, message.grammar
        if grammar is None or refusal is not None:
            scheduler.submit(owner, message, arrived_s, refusal=refusal)
            return
        if grammars is None:
            scheduler.refuse(owner, message.seq, "this engine has no structured output", grammar_path="")
            return
        known = scheduler.has(owner, message.seq)  # that is the worse mistake
        full = None if known else grammars.find_refusal(message.tenant, grammar)
        sequence = scheduler.submit(owner, message, arrived_s, refusal=full, held=True)
        if sequence is not None:
            matcher = grammars.open(grammar, tenant=message.tenant, salt=message.salt, lane=message.lane)
            sequence.matcher = matcher
            matcher.compile(partial(self._compiled, sequence))

    def _compiled(self, sequence: Sequence, refusal: Refusal | None) -> None:
        if refusal is None:
            self._scheduler.release(sequence)
        else:
            finish: FinishReason = "abort" if refusal.path is None else "error"  # an abort may be tried elsewhere
            self._scheduler.refuse_held(sequence, finish, refusal.reason, refusal.path)

    def abort(self, owner: str, seq: int) -> None:
        """Ends a sequence, wherever it waits or runs, if it is still there."""
        self._scheduler.abort(owner, seq)

    def abort_owner(self, owner: str) -> None:
        """Ends every sequence of a gateway."""
        self._scheduler.abort_owner(owner)

    def close(self) -> None:
        """Ends what compiles, at once."""
        if self._grammars is not None:
            self._grammars.close()
