"""What is done for a job besides running its lines: it is validated, planned and queued; its lines are dropped when its
time is over; its results are written. The next step follows from its record (job.py), so another gateway goes on after
a kill, and a step that is done twice comes to the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Final, NoReturn

from gateway.errors import KvasirError, NativeError, OverloadedError, QuotaError, StorageError
from gateway.native import no_panic
from gateway.queues.batch import job as states
from gateway.queues.batch.base import Checked, Job, JobError, LinePlan, Runner, Unrun
from gateway.queues.batch.folder import num_fitting
from gateway.queues.batch.job import Step, new_id, next_step, why_dropped
from gateway.queues.batch.lines import KINDS, Kind, Progress, Result
from gateway.queues.batch.store import Stores

log = logging.getLogger(__name__)

PLAN_AT_ONCE: Final = 64
QUEUE_AT_ONCE: Final = 500
DROP_AT_ONCE: Final = 500
WRITE_AT_ONCE: Final = 200

CHUNK_BYTES: Final = 1 << 20
"""Of rows or results that are in memory at a time; one alone may have more."""

SLICE_S: Final = 0.5
"""Of planning one job, before those of other tenants have their turn."""

LOST_S: Final = 600.0
"""That a job waits for results of lines that are done, before it fails."""

MAX_MISSED: Final = 1024
"""Jobs of which it is known since when they wait so; the oldest is forgotten first, and waits anew."""

HELD_UP_S: Final = 30.0
"""Until a job is tried again that found no room."""

AWAY_S: Final = 2.0
"""Until a job is tried again whose lines could not be planned, or that another gateway has."""

PATIENCE_S: Final = 300.0
"""That a job with several models waits for a model without an engine, so that its lines can be put in order."""

NO_ENGINE: Final = JobError("model_not_available", "No engine or upstream serves its model now.")
"""The error of a job whose lines cannot be planned."""


class HeldUpError(Exception):
    """A job cannot go on now, for want of disk space, say. It is tried again after `retry_s`."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class _MissingError(HeldUpError):
    """Fewer lines have a result than were counted."""


_LOST: Final = JobError("server_error", "Results of this batch were lost, for a fault of the server.")
_UNREADABLE: Final = JobError("server_error", "The input could not be read, for a fault of the server.")


class Steps:
    """Those of one gateway, whose leases are in the name of `owner`."""

    def __init__(self, stores: Stores, runner: Runner, owner: str, clock: Callable[[], float]) -> None:
        """`clock` measures durations."""
        self._jobs, self._lines, self._folder = stores.jobs, stores.lines, stores.folder
        self._files, self._settings, self._now = stores.files, stores.settings, stores.now
        self._runner = runner
        self._owner = owner
        self._clock = clock
        self._missed_s: dict[str, float] = {}  # job -> when results of it were first missed
        self._planning = asyncio.Lock()  # one job at a time, which leaves time of the loop to requests
        self._do: Mapping[Step, Callable[[Job, Progress], Awaitable[None]]] = {
            "validate": self._validate,
            "plan": self._plan,
            "queue": self._queue,
            "drop": self._drop,
            "finalize": self._finalize,
        }

    async def due(self, job: Job) -> bool:
        """Whether there is something to do for it besides running its lines."""
        return next_step(job, await self._lines.progress(job.id), self._now()) != "wait"

    async def advance(self, job_id: str) -> bool:
        """Does what there is to do for a job. False when looking again at once is useless: another gateway does it, or
        its last lines run. Planning stops after SLICE_S. Raises HeldUpError, OverloadedError and StorageError; what was
        done until then stays done."""
        if not await self._lease(job_id):
            return False
        dropped, until_s = False, self._clock() + SLICE_S
        while (job := await self._jobs.find(job_id)) is not None and await self._lease(job_id):
            progress = await self._lines.progress(job_id)
            step = next_step(job, progress, self._now())
            if step == "close":
                await self._close(job)
                break
            if step == "wait" or (step == "drop" and dropped):
                break
            await self._do[step](job, progress)
            dropped = step == "drop"
            if step == "plan" and self._clock() >= until_s:
                break
        await self._jobs.lease(job_id, self._owner, round(self._now() * 1e3), 0)
        return not dropped

    async def _lease(self, job_id: str) -> bool:
        now_ms = round(self._now() * 1e3)
        return await self._jobs.lease(job_id, self._owner, now_ms, now_ms + round(self._settings.lease_s * 1e3))

    # -- in the beginning ---------------------------------------------------------------------------------------------

    async def _validate(self, job: Job, _: Progress) -> None:
        checked = await asyncio.to_thread(self._check, job)
        errors, now_s = list(checked.errors), self._now()
        if not errors:
            await asyncio.to_thread(self._folder.put_lines, job, checked.lines)
            try:
                await self._jobs.put(states.validated(job, len(checked.lines), checked.model, now_s))
            except QuotaError as error:
                errors = [JobError("too_many_requests", error.message)]
        if errors:
            await self._jobs.put(states.failed(job, errors, now_s))

    def _check(self, job: Job) -> Checked:
        try:
            with no_panic(), self._folder.rows(job) as rows:
                return self._runner.check(job, rows)
        except NativeError:
            return Checked([], [_UNREADABLE])
        except KvasirError:
            raise
        except Exception:  # would be the same the next time
            log.exception("the input of a batch could not be checked")
            return Checked([], [_UNREADABLE])

    async def _planned(self, job: Job, row: bytes) -> LinePlan | None:
        """None: later."""
        try:
            with no_panic():
                plan = await self._runner.plan(job, row)
        except NativeError:
            return LinePlan(job.model or "")
        except Exception:
            log.exception("a line of a batch could not be planned")
            return LinePlan(job.model or "")
        waited_s = self._now() - job.reached.get("in_progress", job.created_s)
        if plan is None and job.model is None and waited_s >= PATIENCE_S:
            return LinePlan("")  # the job asks several models: the lines of the others need not wait for this one
        return plan

    async def _plan(self, job: Job, progress: Progress) -> None:
        """Leaves half of the event loop's time to requests."""
        count = min(PLAN_AT_ONCE, job.counts.total - progress.planned)
        async with self._planning:
            rows = await asyncio.to_thread(self._folder.read_lines, job, progress.planned, count, CHUNK_BYTES)
            plans = []
            for row in rows:
                began_s = self._clock()
                if (plan := await self._planned(job, row)) is None:
                    break
                plans.append(plan)
                await asyncio.sleep(self._clock() - began_s)
            if plans:
                await self._lines.stage(job.id, progress.planned, plans)
        if len(plans) < len(rows):
            await self._hold_up(job, NO_ENGINE, AWAY_S)
        elif job.errors:
            await self._jobs.put(states.held_up(job, None))

    async def _queue(self, job: Job, _: Progress) -> None:
        while await self._lines.queue(job.id, job.tenant, QUEUE_AT_ONCE):
            await self._lease(job.id)

    # -- in the end ---------------------------------------------------------------------------------------------------

    async def _drop(self, job: Job, _: Progress) -> None:
        kind = why_dropped(job, self._now())
        assert kind is not None, "the step is for those"
        for lane in ("", *await self._lines.lanes(job.id)):
            after = b""
            while after := await self._lines.drop(job.id, job.counts.total, kind, lane, after, DROP_AT_ONCE):
                await self._lease(job.id)

    async def _finalize(self, job: Job, progress: Progress) -> None:
        """The ids of its files are stored before the files are written, so that there never are two of one."""
        if job.file_ids is None:
            await self._jobs.put(states.finalizing(job, (new_id(self._now()), new_id(self._now())), self._now()))
            return
        counts = replace(progress.counts, total=job.counts.total)
        output, errors = job.file_ids
        job = replace(job, counts=counts, usage=progress.usage)
        has_output = job.in_files and counts.succeeded > 0
        has_errors = job.in_files and counts.succeeded + counts.failed > 0 and counts.succeeded < counts.total
        try:
            if has_output:
                await self._add(job, output, "output", KINDS[:1])
            if has_errors:
                await self._add(job, errors, "errors", KINDS[1:])
            if not job.in_files:
                await self._put_results(job)
        except OverloadedError:
            raise
        except _MissingError:
            waited_s = self._now() - self._missed_s.setdefault(job.id, self._now())
            if len(self._missed_s) > MAX_MISSED:
                del self._missed_s[next(iter(self._missed_s))]
            if waited_s < LOST_S:
                raise
            del self._missed_s[job.id]
            log.error("a batch of %s fails: Redis does not have the results of all its lines", job.tenant)
            await self._jobs.put(states.failed(job, [_LOST], self._now()))
            return
        except (QuotaError, StorageError) as error:
            await self._hold_up(job, JobError(error.code or "storage_error", error.message), HELD_UP_S)
        self._missed_s.pop(job.id, None)
        ids = (output if has_output else None, errors if has_errors else None)
        await self._jobs.put(states.ended(job, *ids, self._now()))

    async def _add(self, job: Job, file_id: str, name: str, kinds: Collection[Kind]) -> None:
        async with aclosing(self._results(job, kinds)) as chunks:
            filename = f"batch_{job.id}_{name}.jsonl"
            await self._files.add(job.tenant, file_id, filename, job.output_ttl_s, chunks)

    async def _put_results(self, job: Job) -> None:
        with self._folder.writing(job) as part:
            async with aclosing(self._results(job, KINDS)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(part.write, chunk)
            await asyncio.to_thread(self._folder.put_results, job, part)

    async def _results(self, job: Job, kinds: Collection[Kind]) -> AsyncGenerator[bytes]:
        """JSON lines, in the order of the job's. Lines without a result were dropped, as many as were counted. There
        are more of them when Redis failed over after the counts were read, or another gateway has closed the job: then
        its record and counts are to be read again. Raises HeldUpError."""
        counts, start = job.counts, 0
        dropped = Result("cancelled" if counts.cancelled else "expired")
        missing = -counts.cancelled - counts.expired
        while start < counts.total:
            if not await self._lease(job.id):
                raise HeldUpError("another gateway writes its results", AWAY_S)
            count = min(WRITE_AT_ONCE, counts.total - start)
            results = [one or dropped for one in await self._lines.results(job.id, start, count)]
            del results[num_fitting([one.num_bytes for one in results], CHUNK_BYTES) :]
            missing += sum(one.kind in ("cancelled", "expired") for one in results)
            if missing > 0:
                raise _MissingError("results of lines that are done are missing", AWAY_S)
            if chunk := await asyncio.to_thread(self._written, job, start, results, kinds):
                yield chunk
            start += len(results)

    def _written(self, job: Job, start: int, results: list[Result], kinds: Collection[Kind]) -> bytes:
        wanted = [(line, one) for line, one in enumerate(results, start) if one.kind in kinds]
        ran = [(one.spool, one.offset, one.num_bytes) for _, one in wanted if one.spool]
        bodies = iter(self._folder.read(job, ran))
        written = []
        for line, one in wanted:
            body = next(bodies) if one.spool else None
            if body is None:
                why: Unrun = one.kind if one.kind in ("cancelled", "expired") else "failed"
                body = self._runner.unrun(job, self._row(job, line), why)
            written.append(body + b"\n")
        return b"".join(written)

    def _row(self, job: Job, line: int) -> bytes:
        """Empty when it is lost, so that a job ends all the same."""
        try:
            return self._folder.read_lines(job, line, 1)[0]
        except StorageError:
            return b""

    async def _hold_up(self, job: Job, error: JobError, retry_s: float) -> NoReturn:
        if job.errors != (error,):
            log.warning("a batch of %s waits: %s", job.tenant, error.message)
            await self._jobs.put(states.held_up(job, error))
        raise HeldUpError(error.message, retry_s)

    async def _close(self, job: Job) -> None:
        """A sweep cleans its folder later (UNDO_S): Redis may lose this end."""
        await self._lines.forget(job.id)
        await self._jobs.put(job, forget_ms=round((self._now() + self._settings.keep_s) * 1e3))
