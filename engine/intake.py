"""How a sequence comes in: at once, or when the grammar that its text has to follow is compiled.

What cannot be taken is answered with an update that ends it, like every other failure. Runs on the loop's thread;
engine/loop.py posts to it, engine/scheduler.py gets what was taken, engine/sampling/grammar_queue.py compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from engine.protocol import Submit
from engine.sampling.grammar import GrammarError, Matcher
from engine.sampling.grammar_queue import GrammarQueue
from engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class Intake:
    """grammars  where sequences with a grammar wait for it; without one they are refused"""

    def __init__(self, scheduler: Scheduler, grammars: GrammarQueue | None) -> None:
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
        return 0 if self._grammars is None else len(self._grammars)

    def take(self, owner: str, message: Submit, arrived_s: float, refusal: str | None) -> None:
        """Queues a sequence at once, or when its grammar is compiled.

        refusal  why it is not to be taken
        """
        try:
            self._queue(owner, message, arrived_s, refusal)
        except Exception:
            self.errors += 1
            log.exception("a sequence could not be taken")
            self._scheduler.submit(owner, message, arrived_s, refusal="the engine had an internal error")

    def _queue(self, owner: str, message: Submit, arrived_s: float, refusal: str | None) -> None:
        scheduler, grammars, matcher = self._scheduler, self._grammars, None
        if message.grammar is not None and refusal is None:
            if grammars is None:
                return scheduler.refuse(owner, message.seq, "this engine has no structured output", grammar_path="")
            if (owner, message.seq) in grammars:
                return scheduler.refuse(owner, message.seq, f"sequence number {message.seq} is in use")
            matcher = grammars.find(message.grammar)
            if matcher is None:
                if not grammars.is_full:
                    deliver = partial(self._compiled, owner, message, arrived_s)
                    return grammars.put(owner, message.seq, message.grammar, deliver)
                refusal = "the engine is full: too many sequences wait for their grammars"
        scheduler.submit(owner, message, arrived_s, refusal=refusal, matcher=matcher)
        return None

    def _compiled(self, owner: str, message: Submit, arrived_s: float, result: Matcher | GrammarError) -> None:
        if isinstance(result, GrammarError):
            self._scheduler.refuse(owner, message.seq, result.reason, grammar_path=result.path)
        else:
            self.take(owner, message, arrived_s, None)  # the grammar is found now

    def abort(self, owner: str, seq: int) -> None:
        """Ends a sequence, wherever it waits or runs, if it is still there."""
        if self._grammars is None or not self._grammars.drop(owner, seq):
            self._scheduler.abort(owner, seq)

    def abort_owner(self, owner: str) -> None:
        """Ends every sequence of a gateway."""
        if self._grammars is not None:
            self._grammars.drop_owner(owner)
        self._scheduler.abort_owner(owner)

    def refuse_all(self, reason: str) -> None:
        """Ends those that wait for their grammars."""
        for owner, seq in self._grammars.drop_all() if self._grammars is not None else ():
            self._scheduler.refuse(owner, seq, reason)

    def close(self) -> None:
        """Ends the compiling thread after what it is at."""
        if self._grammars is not None:
            self._grammars.close()
