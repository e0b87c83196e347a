"""Where other threads meet the engine's loop: they hand over sequences and commands, and wait until it is idle.

Has the only lock around the loop, and everything that it guards. Commands are run in the order in which they came, by
the loop's thread, which sleeps here while there is nothing to do. A new sequence is queued at once, or held until the
grammar that its text has to follow is compiled; what cannot be taken is answered with an update that ends it, like
every other failure. engine/loop.py owns it; engine/scheduler.py has the sequences.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.protocol import FinishReason, Submit
from engine.sampling.grammar_pool import GrammarPool
from engine.sampling.grammar_worker import Refusal
from engine.scheduler import Scheduler
from engine.sequence import Sequence

log = logging.getLogger(__name__)

Command = Callable[[], object]


class Intake:
    """Of one loop. What is not said to be for the loop's thread may be called from any, and does not wait for a step.

    grammars     where grammars are compiled; without one, sequences that have one are refused
    max_pending  submits that are posted and not yet looked at; more are refused
    restored     whether everything that can be found is found already
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarPool | None,
        *,
        max_pending: int,
        restored: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False  # these three are also read without the lock, by the loop's thread
        self.stopping = False
        self.online_arrived = False  # a sequence of the online queue is among the commands
        self.errors = 0  # sequences that could not be taken for a reason that was not foreseen
        self._scheduler = scheduler
        self._grammars = grammars
        self._max_pending = max_pending
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._commands: deque[Command] = deque()
        self._pending = 0  # submits among the commands
        self._idle = True
        self._restored = restored

    def post(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def submit(self, owner: str, message: Submit) -> None:
        with self._changed:
            refusal = "the engine is draining and takes nothing new" if self.draining else None
            if self._pending >= self._max_pending:
                refusal = refusal or f"the engine is full: {self._max_pending} sequences have just arrived"
            if refusal is not None:
                message = replace(message, tokens=b"", digests=b"")
            self._pending += 1
            # Together with its command: a step that began without the one would not hear of the other.
            self.online_arrived = self.online_arrived or (message.lane == "online" and refusal is None)
            self.post(partial(self._take, owner, message, self._clock(), refusal))

    def drain(self) -> None:
        """From now on submits are refused."""
        with self._changed:
            self.draining = True

    def stop(self) -> None:
        """The loop's thread is to end."""
        with self._changed:
            self.draining = self.stopping = True
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Blocks until the loop sleeps with nothing left to do, and no command waits. False when it took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle and not self._commands, timeout_s)

    def wait_restored(self, timeout_s: float) -> bool:
        """Blocks until what the last run left can be found. False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._restored or self.stopping, timeout_s)

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load what compiles grammars. Once."""
        if self._grammars is not None:
            self._grammars.start(self.post)

    @property
    def num_held(self) -> int:
        """Sequences that wait for their grammars."""
        return 0 if self._grammars is None else self._grammars.num_waiting

    def take_commands(self) -> deque[Command]:
        """All commands, oldest first."""
        with self._changed:
            commands, self._commands = self._commands, deque()
            self._pending = 0
            self.online_arrived = False
        return commands

    def sleep(self, timeout_s: float | None, *, idle: bool, restored: bool) -> bool:
        """Waits for a command, or for the end. False when none came in time.

        idle      nothing is left to do, to be saved or to be waited for
        restored  what the last run left can be found; once is for good
        """
        with self._changed:
            self._idle = idle
            self._restored = self._restored or restored
            self._changed.notify_all()
            woken = self._changed.wait_for(lambda: self._commands or self.stopping, timeout_s)
            self._idle = False
            return bool(woken)

    def close(self) -> None:
        """No thread waits any more, and nothing is taken. Ends what compiles, at once."""
        if self._grammars is not None:
            self._grammars.close()
        with self._changed:
            self.draining, self._idle, self._restored = True, True, True
            self._commands.clear()
            self._changed.notify_all()

    def _take(self, owner: str, message: Submit, arrived_s: float, refusal: str | None) -> None:
        """refusal  why the sequence is not to be taken"""
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
