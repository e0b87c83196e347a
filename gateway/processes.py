"""Child processes that are kept running: started, watched, started again when they end, and ended with this one.

Knows neither what they do nor how they are started: engine_processes.py runs engines, vllm_process.py a vLLM,
workers.py the workers of a gateway. A child that never worked and cannot be started is given up; one that worked once
is started again for ever, after waits that grow while it fails soon, because what it needs may come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from gateway import tasks

log = logging.getLogger(__name__)

BAD_SETTING_EXIT: Final = 2
"""Exit status of a child for a setting or model it cannot work with: starting again would not help."""

START_ERROR: Final = 1
"""Counts as the exit status of a process that the system does not start: it may lack memory for it now."""

FIRST_TRIES: Final = 4
"""A child that never worked and ends so often is given up."""

FIRST_RESTART_S, LAST_RESTART_S, STEADY_S = 0.5, 15.0, 60.0


class ChildStartError(RuntimeError):
    """A child ended for a reason that a restart would not change, which is on its stderr."""


@dataclass(slots=True)
class Child:
    """One child, and its process while there is one.

    start    starts a process; called again after each end
    worked   whether it ever did what it is for
    drain_s  that it gets to end by itself, after SIGTERM
    ended    called after each end of its process
    tries    ends after which one that never worked is given up
    why      what its last process said of its end
    """

    name: str
    start: Callable[[], Awaitable[asyncio.subprocess.Process]]
    worked: Callable[[], bool]
    drain_s: float
    ended: Callable[[], None] = lambda: None
    tries: int = FIRST_TRIES
    why: Callable[[], Awaitable[str]] | None = None
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    watcher: asyncio.Task[None] | None = None

    def kill(self) -> None:
        """Ends its process now, whatever it does."""
        with suppress(ProcessLookupError):
            if self.process is not None:
                self.process.kill()


class Children:
    """Async context manager over all of them. `on_fatal` is called once per child that is given up."""

    def __init__(self, children: Sequence[Child], on_fatal: Callable[[ChildStartError], None]) -> None:
        self.children = children
        self._on_fatal = on_fatal

    async def __aenter__(self) -> Self:
        for child in self.children:
            child.watcher = tasks.spawn(self._watch(child), name=f"watch {child.name}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Asks every child to drain, and waits as long as its limit allows."""
        watchers = [child.watcher for child in self.children if child.watcher is not None]
        await asyncio.gather(*map(tasks.cancel, watchers))

    def kill(self) -> None:
        """Ends them now, whatever they do."""
        for child in self.children:
            child.kill()

    async def _watch(self, child: Child) -> None:
        """Its process ends with this task."""
        wait_s = FIRST_RESTART_S
        while True:
            started_s = time.monotonic()
            status = START_ERROR
            try:
                child.process = await child.start()
                status = await child.process.wait()
            except OSError as error:
                log.warning("%s cannot be started: %s", child.name, error)
            finally:
                if child.process is not None and not await tasks.end(child.process, child.drain_s):
                    log.warning("%s did not end in time and was killed", child.name)
                child.process = None
                child.ended()
            said = f": {words}" if child.why is not None and (words := await child.why()) else ""
            if not child.worked() and (why := _hopeless(status, child.restarts + 1, child.tries)):
                self._on_fatal(ChildStartError(f"{child.name} {why}{said}"))
                return
            steady = time.monotonic() - started_s > STEADY_S
            wait_s = FIRST_RESTART_S if steady else min(wait_s * 2, LAST_RESTART_S)
            log.warning("%s ended with status %s; starting it again in %.1f s%s", child.name, status, wait_s, said)
            child.restarts += 1
            await asyncio.sleep(wait_s)


def _hopeless(status: int, ends: int, tries: int) -> str | None:
    """Why a child that never worked will not work the next time either, or None."""
    if status == BAD_SETTING_EXIT:
        return "cannot be started with these settings"
    if ends < tries:
        return None
    return f"ended {ends} times in a row (status {status})" if ends > 1 else f"did not start (status {status})"
