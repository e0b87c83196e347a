"""Where other threads meet the engine's loop: they post commands, and wait until it is idle.

Has the only lock around the loop, and everything that it guards. Commands are run in the order in which they arrived,
by the loop's thread. engine/loop.py owns it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Command = Callable[[], object]


class Intake:
    """Of one loop. Unless noted, methods may be called from any thread, and do not wait for a step.

    max_pending  submits that are posted and not yet taken; more are refused
    restored     whether everything that can be found is found already
    """

    def __init__(self, *, max_pending: int, restored: bool) -> None:
        self.draining = False  # these three are also read without the lock, by the loop's thread
        self.stopping = False
        self.online_arrived = False  # a sequence of the online queue is among the commands
        self._max_pending = max_pending
        self._changed = threading.Condition()  # guards what follows
        self._commands: deque[Command] = deque()
        self._pending = 0  # submits among the commands
        self._idle = True
        self._restored = restored

    def post(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def submit(self, take: Callable[[str | None], object], *, online: bool) -> None:
        """Posts a command that takes a sequence, or refuses it for the reason that it is given."""
        with self._changed:
            refusal = "the engine is draining and takes nothing new" if self.draining else None
            if self._pending >= self._max_pending:
                refusal = refusal or f"the engine is full: {self._max_pending} sequences have just arrived"
            self._pending += 1
            # Together with its command: a step that began without the one would not hear of the other.
            self.online_arrived = self.online_arrived or (online and refusal is None)
            self.post(lambda: take(refusal))

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

    def take_commands(self) -> deque[Command]:
        """All commands, oldest first."""
        with self._changed:
            commands, self._commands = self._commands, deque()
            self._pending = 0
            self.online_arrived = False
        return commands

    def sleep(self, timeout_s: float | None, *, idle: bool, restored: bool) -> bool:
        """Waits for a command, or for the end. False when none arrived in time.

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
        """No thread waits any more, and nothing is taken."""
        with self._changed:
            self.draining, self._idle, self._restored = True, True, True
            self._commands.clear()
            self._changed.notify_all()
