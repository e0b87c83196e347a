"""One gateway's share of the batch lane. Any number of them work on the same jobs.

    steps   looks for jobs for which something is to be done (steps.py), every batches.poll_s
    lines   claims lines while fewer than batches.max_in_flight run, of models that are not paused (pauses.py), and runs
            each until it has a result
    leases  renews the leases of lines that run; who lost one stops, because somebody else has the line

A result is on disk before it is told to be one. While Redis is away nothing is begun; what runs waits with its results.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

from gateway import tasks
from gateway.config import BatchSettings
from gateway.errors import KvasirError, OverloadedError, StorageError, StorageFullError
from gateway.queues.batch.base import NO_USAGE, Job, LineResult, Runner
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.job import why_dropped
from gateway.queues.batch.jobs import Jobs
from gateway.queues.batch.lines import Back, Claim, Kind, Lines, Result
from gateway.queues.batch.paths import Ref
from gateway.queues.batch.pauses import Pauses
from gateway.queues.batch.steps import AWAY_S, HELD_UP_S, HeldUpError, Steps
from gateway.queues.batch.store import Files, forget
from gateway.types import Usage

log = logging.getLogger(__name__)

_T = TypeVar("_T")

STEPS_AT_ONCE: Final = 4
"""Jobs that one gateway validates, plans or writes at a time."""

SWEEP_S: Final = 300.0
ORPHAN_S: Final = 3600.0
"""After which a folder without a record is nobody's: its job was being created."""

MODELS_AT_ONCE: Final = 64
"""Whose lines are looked at, at a time, besides those of paused ones."""

FORGET_AT_ONCE: Final = 100
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
        self.owner = secrets.token_hex(16)
        self._jobs = jobs
        self._lines = lines
        self._folder = folder
        self._runner = runner
        self._settings = settings
        self._now = now
        self._changed = changed
        self._clock = clock
        self._steps = Steps(jobs, lines, folder, files, runner, settings, now, self.owner, clock)
        self._stepping: dict[str, asyncio.Task[None]] = {}
        self._stepped_s: dict[str, float] = {}  # tenant with open jobs -> when one of them was begun with last
        self._running: dict[Ref, tuple[Claim, asyncio.Task[None]]] = {}
        self._room = asyncio.Event()  # lines may be claimed
        self._pauses = Pauses(clock)
        self._no_room_until_s = float("-inf")  # for results, by the clock
        self._not_before: dict[str, float] = {}  # job -> second of the clock at which it may be stepped again
        self._swept_s = float("-inf")
        self._took_over_s = float("-inf")
        self._loops: list[asyncio.Task[None]] = []
        self._down: set[str] = set()  # loops that found Redis away when they asked it last
        self._counted: Counter[str] = Counter()
        self._open_jobs = 0

    def start(self) -> None:
        loops = (("steps", self._look_for_steps), ("lines", self._look_for_lines), ("leases", self._renew))
        self._loops = [tasks.spawn(work(), name=f"batch {name}") for name, work in loops]

    async def close(self) -> None:
        """Lets go of everything; what ran waits again, for others at once."""
        await self.kill()
        with suppress(OverloadedError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for claim, _ in self._running.values():
                    await self._lines.put_back(self.owner, claim, 0)
        self._running.clear()

    async def kill(self) -> None:
        """Stops without telling anybody."""
        left = {*self._loops, *self._stepping.values(), *(task for _, task in self._running.values())}
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_S)  # see tasks.was_cancelled: some need two

    @property
    def in_flight(self) -> int:
        """Lines that run."""
        return len(self._running)

    def figures(self) -> dict[str, int]:
        """What became of lines here since the start: results by kind, those that were put back, and those that another
        gateway had lost; how many run, the models that are paused, and the jobs that have not ended, as they were seen
        last."""
        kinds: tuple[Kind, ...] = ("succeeded", "failed", "cancelled", "expired")
        outcomes = (*kinds, "put_back", "taken_over")
        return {
            "in_flight": self.in_flight,
            "paused_models": self._pauses.num_paused(),
            "open_jobs": self._open_jobs,
        } | {name: self._counted[name] for name in outcomes}

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _look_for_steps(self) -> None:
        while not tasks.was_cancelled():
            self._changed.clear()
            await self._while_up("steps", self._begin_steps)
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
            if not await self._steps.advance(job_id):
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
            self._room.set()
            self._changed.set()

    async def sweep(self) -> None:
        """Forgets jobs that are over their time, and what nobody asks for any more."""
        now_s = self._now()
        over = await self._jobs.over(round(now_s * 1e3), FORGET_AT_ONCE)
        stuck = [job for job in await self._jobs.open() if now_s >= job.expires_s + self._settings.keep_s]
        for job in (*over, *stuck):
            await forget(job, self._jobs, self._lines, self._folder)
        for tenant, job_id in await asyncio.to_thread(self._folder.jobs):
            if _made_s(job_id) < now_s - ORPHAN_S:
                await self._sweep_folder(tenant, job_id)
        await asyncio.to_thread(self._folder.sweep)
        self._not_before = {name: until_s for name, until_s in self._not_before.items() if until_s > self._clock()}
        self._pauses.forget()

    async def _sweep_folder(self, tenant: str, job_id: str) -> None:
        """Whoever lost a line, and did not know it yet, may have written its result behind the end of the job."""
        job = await self._jobs.find(job_id)
        if job is None:
            await asyncio.to_thread(self._folder.remove, tenant, job_id)
        elif job.has_ended:
            await asyncio.to_thread(self._folder.clean, job)

    # -- lines --------------------------------------------------------------------------------------------------------

    async def _look_for_lines(self) -> None:
        while not tasks.was_cancelled():
            self._room.clear()
            await self._while_up("lines", self._claim)
            await _event(self._room, self._settings.poll_s)

    async def _claim(self) -> None:
        if self._clock() < self._no_room_until_s or self._room_for() <= 0:
            return
        if self._clock() >= self._took_over_s + self._settings.poll_s:
            self._took_over_s = self._clock()
            if not await asyncio.to_thread(self._folder.has_room):  # what runs now, would run for nothing
                self._wait_for_room()
                return
            now_ms = round(self._now() * 1e3)
            claims = await self._lines.take_over(self.owner, self._room_for(), now_ms, self._until_ms())
            self._counted["taken_over"] += len(claims)
            self._begin(claims)
        found = await self._lines.models(MODELS_AT_ONCE + self._pauses.num_paused())
        running = Counter(_model_of(claim) for claim, _ in self._running.values())
        models = self._pauses.open(found, running)
        models.sort(key=lambda model: running[model])  # one whose lines take long leaves room for the others
        for number, model in enumerate(models):
            share = -(-self._room_for() // (len(models) - number))  # what one does not use, the others have
            if self._pauses.is_doubted(model):
                share = min(share, 1)
            if share > 0:
                claims = await self._lines.claim(self.owner, model, share, self._until_ms())
                self._begin(claims)
                if not claims:
                    self._pauses.idle(model)

    def _begin(self, claims: list[Claim]) -> None:
        for claim in claims:
            if claim.ref not in self._running:
                self._running[claim.ref] = (claim, tasks.spawn(self._answer(claim), name="batch line"))

    async def _answer(self, claim: Claim) -> None:
        try:
            job = await self._surely(lambda: self._jobs.find(claim.ref.job))
            if job is None:  # it is forgotten, and this line with it
                await self._surely(lambda: self._lines.complete(claim, Result("failed"), NO_USAGE))
                await self._surely(lambda: self._lines.forget(claim.ref.job))
            elif (why := why_dropped(job, self._now())) is not None:
                await self._done(job, claim, Result(why), NO_USAGE)
            else:
                await self._run(job, claim)
        except StorageFullError:
            self._wait_for_room()
            await self._back(claim, 0)
        except Exception as error:
            if not isinstance(error, StorageError):  # which was logged
                log.exception("a line of a batch could not be run")
            if await self._back(claim, self._settings.max_attempts) == "exhausted":
                await self._surely(lambda: self._lines.complete(claim, Result("failed"), NO_USAGE))
        self._running.pop(claim.ref, None)
        self._room.set()

    async def _back(self, claim: Claim, most_attempts: int) -> Back:
        back = await self._surely(lambda: self._lines.put_back(self.owner, claim, most_attempts))
        self._counted["put_back"] += back == "waits"
        return back

    async def _run(self, job: Job, claim: Claim) -> None:
        (row,) = await asyncio.to_thread(self._folder.read_lines, job, claim.ref.line, 1)
        answer = await self._asked(job, row)
        model = _model_of(claim)
        if answer.retry == "later" or (answer.retry == "again" and answer.retry_after_s is not None):
            self._pauses.pause(model, answer.retry_after_s, job.expires_s - self._now())
        else:
            self._pauses.answered(model)
        if answer.retry != "no":
            attempts = self._settings.max_attempts if answer.retry == "again" else 0
            if await self._back(claim, attempts) != "exhausted":
                return
        body = answer.body
        offset = await asyncio.to_thread(self._folder.append, job, self.owner, body)
        result = Result("succeeded" if answer.ok else "failed", self.owner, offset, len(body))
        await self._done(job, claim, result, answer.usage)

    async def _asked(self, job: Job, row: bytes) -> LineResult:
        try:
            return await self._runner.run(job, row, f"req_{secrets.token_hex(16)}")
        except Exception:
            log.exception("a line of a batch could not be run")
            return LineResult(ok=False, body=self._runner.unrun(job, row, "failed"), retry="again")

    async def _done(self, job: Job, claim: Claim, result: Result, usage: Usage) -> None:
        done = await self._surely(lambda: self._lines.complete(claim, result, usage))
        self._counted[result.kind] += done is not None
        if done is not None and done >= job.counts.total:
            self._not_before.pop(job.id, None)
            self._changed.set()

    # -- leases -------------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(self._settings.lease_s / 3)
            await self._while_up("leases", self._renew_once)

    async def _renew_once(self) -> None:
        asked = dict(self._running)
        ours = set(await self._lines.renew(self.owner, list(asked), self._until_ms())) if asked else set()
        for ref, held in asked.items():
            if ref not in ours and self._running.get(ref) is held:  # else it ended, and may have been claimed once more
                del self._running[ref]
                held[1].cancel()
                self._room.set()

    # -- small things -------------------------------------------------------------------------------------------------

    def _room_for(self) -> int:
        return self._settings.max_in_flight - len(self._running)

    def _until_ms(self) -> int:
        return round((self._now() + self._settings.lease_s) * 1e3)

    def _pause(self, job_id: str, seconds: float) -> None:
        self._not_before[job_id] = self._clock() + seconds

    def _wait_for_room(self) -> None:
        if self._clock() >= self._no_room_until_s:  # the lines that ran together are told once
            log.warning("lines of batches wait for %g s: their disk has no room for results", HELD_UP_S)
            self._no_room_until_s = self._clock() + HELD_UP_S

    def _is_paused(self, job_id: str) -> bool:
        return self._not_before.get(job_id, 0.0) > self._clock()

    async def _while_up(self, loop: str, work: Callable[[], Awaitable[None]]) -> None:
        """Does it, or finds out that it cannot be done now. One loop may have nothing to ask of a Redis that is away,
        or may do what a full one still does, while another one waits."""
        try:
            await work()
        except OverloadedError as error:
            if not self._down:
                log.warning("the batch lane waits for Redis: %s", error.__cause__ or error)
            self._down.add(loop)
        except KvasirError as error:
            log.warning("the batch lane tries again: %s", error)
        except Exception:
            log.exception("the batch lane tries again")
        else:
            if self._down == {loop}:
                log.info("the batch lane goes on")
            self._down.discard(loop)

    async def _surely(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """What `call` returns, however long Redis is away."""
        while True:
            try:
                return await call()
            except OverloadedError:
                await asyncio.sleep(self._settings.poll_s)


async def _event(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _model_of(claim: Claim) -> str:
    """As Lines.models tells it."""
    return claim.lane.partition(":")[2]


def _made_s(job_id: str) -> float:
    """When a job was made; any name of a folder may be asked about, and those of no job were made just now."""
    try:
        return int(job_id[:16], 16) / 1e6 if len(job_id) == 32 else float("inf")
    except ValueError:
        return float("inf")
