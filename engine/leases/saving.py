"""When the leases on disk are written: soon after they have changed, not too often, and when the engine stops.

A change is written at once by the disk tier's thread, or some seconds after the last time. Nothing is written before
the start is over, because that would be the end of what earlier engines promised. Pure bookkeeping on the loop's
thread. engine/tiers/tiers.py owns it, engine/leases/file.py is what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from engine.leases.file import LeaseFile
from engine.leases.leases import Leases
from engine.tiers.tier import Account, Tier, worker_of

WRITE_INTERVAL_S: Final = 3.0
"""Between two writes: so much of what was promised or renewed last is forgotten when an engine is killed."""


class LeaseSaving:
    """Of one tier that has a file of leases."""

    def __init__(self, tier: Tier, file: LeaseFile, leases: Leases, account: Account) -> None:
        self._tier = tier
        self._file = file
        self._leases = leases
        self._account = account
        self._written = leases.revision
        self._next_s: float | None = None  # not before then; None before the first time
        self._writing = False

    @property
    def next_s(self) -> float | None:
        """When there is something to write; None when there is nothing."""
        if self._writing or not self._wanted:
            return None
        return max(self._tier.pause_until_s, self._account.now if self._next_s is None else self._next_s)

    def pump(self) -> None:
        """Begins to write, if it is time."""
        due_s = self.next_s
        if due_s is not None and due_s <= self._account.now:
            self._writing = True
            worker_of(self._tier).run(self._write, partial(self._wrote, self._leases.revision))

    def write_now(self, done: Callable[[Exception | None], object]) -> None:
        """Writes as soon as the tier's thread comes to it, whether something has changed or not. The tier is ready."""
        self._writing, revision = True, self._leases.revision

        def wrote(error: Exception | None) -> None:
            self._wrote(revision, error)
            done(error)

        worker_of(self._tier).run(self._write, wrote)

    def last(self) -> Callable[[], object]:
        """What the tier's thread has to do when the engine stops."""
        wanted = self._wanted

        def close() -> None:
            if wanted:
                self._write()
            self._file.close()

        return close

    @property
    def _wanted(self) -> bool:
        return self._tier.ready and self._written != self._leases.revision

    def _write(self) -> Exception | None:
        """On the tier's thread."""
        try:
            self._file.write(self._leases.kept_below())
        except Exception as error:
            return error
        return None

    def _wrote(self, revision: int, error: Exception | None) -> None:
        self._writing = False
        self._next_s = self._account.now + WRITE_INTERVAL_S
        if error is None:
            self._written = revision
        else:
            self._account.failed(self._tier, 0, error)
