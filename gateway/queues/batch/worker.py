"""One gateway's share of the batch queue. Any number of gateways work on the same jobs, in three loops:

    steps   every batches.poll_s, does the next step of jobs (steps.py); sweeps now and then
    lines   claims lines and runs them (running.py)
    leases  renews the leases of running lines

While Redis is unreachable nothing is begun.
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
from gateway.errors import KvasirError, OverloadedError, StorageError
from gateway.native import no_panic
from gateway.queues.batch.base import Runner
from gateway.queues.batch.running import RunningLines
from gateway.queues.batch.steps import AWAY_S, HELD_UP_S, HeldUpError, Steps
from gateway.queues.batch.store import Stores

log = logging.getLogger(__name__)

STEPS_AT_ONCE: Final = 4
"""Jobs that one gateway validates, plans or writes at a time."""

NEVER_S: Final = float("-inf")

SWEEP_S: Final = 300.0
FORGET_AT_ONCE: Final = 100
ORPHAN_S: Final = 3600.0
"""After which a folder without a record is removed: its job was being created."""
UNDO_S: Final = 60.0
"""After a job's end until its rows and spools are removed. A Redis that fails over may lose the end, as replication is
asynchronous: the job then runs again, and needs them."""

CLOSE_TIMEOUT_S: Final = 5.0
CANCEL_S: Final = 1.0


class Worker:
    """`start` and `close` in an event loop."""

    def __init__(
        self,
        stores: Stores,
        runner: Runner,
        changed: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is for its own pauses. `changed` is set when there is something to do."""
        owner = secrets.token_hex(16)
        self._stores, self._settings = stores, stores.settings
        self._changed = changed
        self._clock = clock
        self._steps = Steps(stores, runner, owner, clock)
        self._stepping: dict[str, asyncio.Task[None]] = {}
        self._stepped_s: dict[str, float] = {}  # tenant with open jobs -> when one of them was begun with last
        self._running = RunningLines(stores, runner, owner, clock, self._job_done)
        self._not_before: dict[str, float] = {}  # job -> second of the clock at which it may be stepped again
        self._swept_s = float("-inf")
        self._loops: list[asyncio.Task[None]] = []
        self._open_jobs = 0

    def start(self) -> None:
        poll_s, lease_s = self._settings.poll_s, self._settings.lease_s
        self._loops = [
            tasks.spawn(_repeat(self._begin_steps, self._changed, poll_s), name="batch steps"),
            tasks.spawn(_repeat(self._running.claim, self._running.room, poll_s), name="batch lines"),
            tasks.spawn(_repeat(self._running.renew, asyncio.Event(), lease_s / 3), name="batch leases"),
        ]

    async def close(self) -> None:
        """Stops; what ran waits again, for other gateways at once."""
        await self.kill()
        with suppress(OverloadedError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._running.put_all_back()

    async def kill(self) -> None:
        """Stops without putting lines back."""
        while left := [task for task in self._tasks() if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=CANCEL_S)  # see tasks.was_cancelled: some need two, and begin others first

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._loops, *self._stepping.values(), *self._running.tasks()]

    @property
    def in_flight(self) -> int:
        """Lines that run."""
        return len(self._running)

    def figures(self) -> dict[str, int]:
        """See RunningLines.figures; and the open jobs at the last look."""
        return self._running.figures() | {"open_jobs": self._open_jobs}

    async def _begin_steps(self) -> None:
        jobs = await self._stores.jobs.open()
        self._open_jobs = len(jobs)
        self._stepped_s = {job.tenant: self._stepped_s.get(job.tenant, NEVER_S) for job in jobs}
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
        """Forgets jobs whose time is over, and removes what belongs to none. Other gateways may do so at the same time.
        Raises OverloadedError and StorageError."""
        stores, now_s = self._stores, self._stores.now()
        over = await stores.jobs.over(round(now_s * 1e3), FORGET_AT_ONCE)
        stuck = [job for job in await stores.jobs.open() if now_s >= job.expires_s + self._settings.keep_s]
        for job in (*over, *stuck):
            await stores.forget(job)
        for tenant, job_id in await asyncio.to_thread(stores.folder.jobs):
            await self._sweep_folder(tenant, job_id, now_s)
        await asyncio.to_thread(stores.folder.sweep)
        self._not_before = {name: until_s for name, until_s in self._not_before.items() if until_s > self._clock()}

    async def _sweep_folder(self, tenant: str, job_id: str, now_s: float) -> None:
        job = await self._stores.jobs.find(job_id)
        if job is None:
            if _created_s(job_id) < now_s - ORPHAN_S:
                await asyncio.to_thread(self._stores.folder.remove, tenant, job_id)
        elif job.has_ended and job.reached.get(job.state, job.created_s) < now_s - UNDO_S:
            await asyncio.to_thread(self._stores.folder.clean, job)

    def _job_done(self, job_id: str) -> None:
        self._not_before.pop(job_id, None)
        self._changed.set()

    def _pause(self, job_id: str, seconds: float) -> None:
        self._not_before[job_id] = self._clock() + seconds

    def _is_paused(self, job_id: str) -> bool:
        return self._not_before.get(job_id, 0.0) > self._clock()


def _created_s(job_id: str) -> float:
    """When a job was created, from its id; never for the name of a folder that is none."""
    is_id = len(job_id) == 32 and set(job_id) <= set("0123456789abcdef")
    return int(job_id[:16], 16) / 1e6 if is_id else float("inf")


async def _repeat(work: Callable[[], Awaitable[None]], event: asyncio.Event, every_s: float) -> None:
    """Does it again and again: at each event, and every so many seconds. A failure is logged."""
    while not tasks.was_cancelled():
        event.clear()
        try:
            with no_panic():
                await work()
        except OverloadedError as error:
            log.debug("the batch queue waits for Redis: %s", error.__cause__ or error)  # its breaker warns
        except KvasirError as error:
            log.warning("the batch queue tries again: %s", error)
        except Exception:
            log.exception("the batch queue tries again")
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await event.wait()
