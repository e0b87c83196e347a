"""One gateway's share of the batch lane. Any number of them work on the same jobs.

    steps   looks for jobs for which something is to be done (steps.py), every batches.poll_s; sweeps now and then
    lines   claims lines and runs them (running.py)
    leases  renews the leases of lines that run

While Redis is away nothing is begun.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from gateway import tasks
from gateway.config import BatchSettings
from gateway.errors import KvasirError, OverloadedError, StorageError
from gateway.native import no_panic
from gateway.queues.batch.base import Runner
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import Jobs
from gateway.queues.batch.lines import Lines
from gateway.queues.batch.running import RunningLines
from gateway.queues.batch.steps import AWAY_S, HELD_UP_S, HeldUpError, Steps
from gateway.queues.batch.store import Files
from gateway.queues.batch.sweep import sweep

log = logging.getLogger(__name__)

STEPS_AT_ONCE: Final = 4
"""Jobs that one gateway validates, plans or writes at a time."""

SWEEP_S: Final = 300.0
CLOSE_TIMEOUT_S: Final = 5.0
CANCEL_S: Final = 1.0


class Worker:
    """`start` and `close` in an event loop."""

    def __init__(
        self,
        jobs: Jobs,
        lines: Lines,
        folder: JobFolder,
        files: Files,
        runner: Runner,
        settings: BatchSettings,
        now: Callable[[], float],
        changed: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is seconds since 1970, for what gateways agree about; `clock` is for its own pauses. `changed` is set
        by whoever gives the worker something to do."""
        owner = secrets.token_hex(16)
        self._jobs = jobs
        self._lines = lines
        self._folder = folder
        self._settings = settings
        self._now = now
        self._changed = changed
        self._clock = clock
        self._steps = Steps(jobs, lines, folder, files, runner, settings, now, owner, clock)
        self._stepping: dict[str, asyncio.Task[None]] = {}
        self._stepped_s: dict[str, float] = {}  # tenant with open jobs -> when one of them was begun with last
        self._running = RunningLines(owner, jobs, lines, folder, runner, settings, now, clock, self._job_done)
        self._not_before: dict[str, float] = {}  # job -> second of the clock at which it may be stepped again
        self._swept_s = float("-inf")
        self._loops: list[asyncio.Task[None]] = []
        self._open_jobs = 0

    def start(self) -> None:
        loops = (("steps", self._look_for_steps), ("lines", self._look_for_lines), ("leases", self._renew))
        self._loops = [tasks.spawn(work(), name=f"batch {name}") for name, work in loops]

    async def close(self) -> None:
        """Lets go of everything; what ran waits again, for others at once."""
        await self.kill()
        with suppress(OverloadedError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._running.let_go()

    async def kill(self) -> None:
        """Stops without telling anybody."""
        left = {*self._loops, *self._stepping.values(), *self._running.tasks()}
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_S)  # see tasks.was_cancelled: some need two

    @property
    def in_flight(self) -> int:
        """Lines that run."""
        return len(self._running)

    def figures(self) -> dict[str, int]:
        """Those of the lines that run here (RunningLines), and the jobs that have not ended, as they were seen last."""
        return self._running.figures() | {"open_jobs": self._open_jobs}

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _look_for_steps(self) -> None:
        while not tasks.was_cancelled():
            self._changed.clear()
            await _while_up(self._begin_steps)
            await _event(self._changed, self._settings.poll_s)

    async def _begin_steps(self) -> None:
        jobs = await self._jobs.open()
        self._open_jobs = len(jobs)
        self._stepped_s = {job.tenant: self._stepped_s.get(job.tenant, 0.0) for job in jobs}
        for job in sorted(jobs, key=lambda job: self._stepped_s[job.tenant]):  # tenants take turns
            if len(self._stepping) >= STEPS_AT_ONCE:
                break
            if job.id in self._stepping or self._is_paused(job.id) or not await self._steps.due(job):
                continue
            self._stepped_s[job.tenant] = self._clock()
            self._stepping[job.id] = tasks.spawn(self._step(job.id), name="batch step")
        if self._clock() >= self._swept_s + SWEEP_S:
            self._swept_s = self._clock()
            await self.sweep()

    async def _step(self, job_id: str) -> None:
        try:
            with no_panic():
                advanced = await self._steps.advance(job_id)
            if not advanced:
                self._pause(job_id, AWAY_S)
        except HeldUpError as error:
            self._pause(job_id, error.retry_s)
        except (OverloadedError, StorageError) as error:
            log.warning("a step of a batch is tried again: %s", error)
            self._pause(job_id, HELD_UP_S if isinstance(error, StorageError) else self._settings.poll_s)
        except Exception:
            log.exception("a step of a batch failed")
            self._pause(job_id, HELD_UP_S)
        finally:
            del self._stepping[job_id]
            self._running.room.set()
            self._changed.set()

    async def sweep(self) -> None:
        """Forgets jobs that are over their time, and what nobody asks for any more."""
        keep_s = self._settings.keep_s
        await sweep(self._jobs, self._lines, self._folder, now_s=self._now(), keep_s=keep_s)
        self._not_before = {name: until_s for name, until_s in self._not_before.items() if until_s > self._clock()}
        self._running.pauses.forget()

    # -- lines --------------------------------------------------------------------------------------------------------

    async def _look_for_lines(self) -> None:
        while not tasks.was_cancelled():
            self._running.room.clear()
            await _while_up(self._running.claim)
            await _event(self._running.room, self._settings.poll_s)

    # -- leases -------------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(self._settings.lease_s / 3)
            await _while_up(self._running.renew)

    # -- small things -------------------------------------------------------------------------------------------------

    def _job_done(self, job_id: str) -> None:
        self._not_before.pop(job_id, None)
        self._changed.set()

    def _pause(self, job_id: str, seconds: float) -> None:
        self._not_before[job_id] = self._clock() + seconds

    def _is_paused(self, job_id: str) -> bool:
        return self._not_before.get(job_id, 0.0) > self._clock()


async def _while_up(work: Callable[[], Awaitable[None]]) -> None:
    """Does it, or finds out that it cannot be done now."""
    try:
        with no_panic():
            await work()
    except OverloadedError as error:
        log.debug("the batch lane waits for Redis: %s", error.__cause__ or error)  # its breaker warns
    except KvasirError as error:
        log.warning("the batch lane tries again: %s", error)
    except Exception:
        log.exception("the batch lane tries again")


async def _event(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
