"""A thread that copies blocks for one tier, so that the engine's loop never waits for memory or a disk.

Jobs are done one after the other, in the order in which they were handed over; what became of each is told on the
loop's thread. How many there can be is bounded by engine/tiers/tiers.py, which hands over one save at a time and one
restore for each sequence that may run.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0
"""A disk may hang, and the process is to end."""

T = TypeVar("T")
Post = Callable[[Callable[[], object]], None]


class Worker(Protocol):
    """Does jobs elsewhere, in order."""

    def run(self, job: Callable[[], T], done: Callable[[T], object]) -> None:
        """`done` is called with what the job returned, by whoever calls this. A job does not raise."""
        ...

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Finishes the job that is being done and leaves out the rest, but for one that is the last."""
        ...


class CopyThread:
    """The Worker of a running engine."""

    def __init__(self, name: str, post: Post) -> None:
        """post  hands a command to the loop's thread, and does not wait for it"""
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._last: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T], done: Callable[[T], object]) -> None:
        def work() -> None:
            self._post(partial(done, job()))

        self._jobs.put(work)

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Waits for the job that is being done and the last one, for CLOSE_LIMIT_S at most."""
        self._last = last
        self._closing = True
        self._jobs.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None and not self._closing:
            self._do(work)
        if self._last is not None:
            self._do(self._last)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            log.exception("a copy thread's job failed in a way that it should not")
