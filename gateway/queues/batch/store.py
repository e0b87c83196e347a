"""Batches (base.py), as dialects see them: records, lines and folders of jobs made into one. Whatever is to be done for
a job is the worker's; who changes something here tells it with `changed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from gateway.config import BatchSettings
from gateway.disk import Part
from gateway.errors import BadRequestError, NotFoundError, OverloadedError, QuotaError
from gateway.queues.batch import job as states
from gateway.queues.batch.base import Input, Job, Order
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import Jobs
from gateway.queues.batch.lines import Lines
from gateway.types import StoredFile

PIECE_BYTES: Final = 1 << 20
MAX_TRIES: Final = 16
"""To change a job that others change, too."""

FILE_PURPOSE: Final = "batch_output"


class Files(Protocol):
    """What the lane needs of the tenants' files."""

    async def link(self, tenant: str, file_id: str, path: Path) -> bool:
        """Puts its bytes at `path`, too. Whether it was there."""
        ...

    async def add(
        self,
        tenant: str,
        file_id: str,
        filename: str,
        purpose: str,
        ttl_s: float | None,
        pieces: AsyncIterator[bytes],
    ) -> StoredFile:
        """A file with this id, unless it is there already."""
        ...


class RowsInput:
    """An Input."""

    def __init__(self, rows: Part) -> None:
        self.rows = rows
        self._buffer = bytearray()

    async def write(self, data: bytes) -> None:
        """See base.py."""
        self._buffer += data
        if len(self._buffer) >= PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        await asyncio.to_thread(self.rows.write, data)


class BatchStore:
    """See Batches in base.py."""

    def __init__(
        self,
        jobs: Jobs,
        lines: Lines,
        folder: JobFolder,
        files: Files,
        settings: BatchSettings,
        now: Callable[[], float],
    ) -> None:
        """`now` is seconds since 1970."""
        self.changed = asyncio.Event()
        self._jobs = jobs
        self._lines = lines
        self._folder = folder
        self._files = files
        self._settings = settings
        self._now = now

    @asynccontextmanager
    async def input(self, tenant: str) -> AsyncIterator[RowsInput]:
        """See base.py."""
        await self._check_bytes(tenant)
        rows = await asyncio.to_thread(self._folder.begin, tenant, self._settings.max_request_bytes)
        try:
            yield RowsInput(rows)
        finally:
            await asyncio.shield(asyncio.to_thread(rows.discard))

    async def create(self, order: Order, source: Input | str) -> Job:
        """See base.py. Its folder comes first: one without a record is swept away."""
        file_id = source if isinstance(source, str) else None
        job = states.new_job(order, now_s=self._now(), window_s=self._settings.window_s, input_file_id=file_id)
        try:
            if isinstance(source, str):
                await self._check_bytes(order.tenant)
                path = await asyncio.to_thread(self._folder.make, job)
                if not await self._files.link(job.tenant, source, path):
                    raise NotFoundError(f"No file is called '{source[:64]}'.", param="input_file_id")
            else:
                assert isinstance(source, RowsInput), "made by `input`"
                await source.flush()
                await asyncio.to_thread(self._folder.put_input, job, source.rows)
            await self._jobs.create(job)
        except OverloadedError:
            raise  # it may be there all the same
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._folder.remove, job.tenant, job.id))
            raise
        self.changed.set()
        return job

    async def find(self, tenant: str, dialect: str, job_id: str) -> Job | None:
        """See base.py."""
        job = await self._jobs.find(job_id)
        return None if job is None or (job.tenant, job.dialect) != (tenant, dialect) else await self._with_counts(job)

    async def page(
        self, tenant: str, dialect: str, *, limit: int, after: str | None = None, before: str | None = None
    ) -> tuple[list[Job], bool]:
        """See base.py."""
        found = await self._jobs.page(tenant, dialect, limit=limit + 1, after=after, before=before)
        has_more = len(found) > limit
        shown = found[:limit] if before is None else found[-limit:]
        return [await self._with_counts(job) for job in shown], has_more

    async def cancel(self, tenant: str, dialect: str, job_id: str) -> Job | None:
        """See base.py."""
        for _ in range(MAX_TRIES):
            job = await self._jobs.find(job_id)
            if job is None or (job.tenant, job.dialect) != (tenant, dialect):
                return None
            changed = states.cancelled(job, self._now())
            kept = job if changed is job else await self._jobs.update(changed)
            if kept is not None:
                self.changed.set()
                return await self._with_counts(kept)
        raise OverloadedError("The batch is being changed by others.", retry_after_s=1.0)

    async def delete(self, tenant: str, dialect: str, job_id: str) -> bool:
        """See base.py."""
        job = await self.find(tenant, dialect, job_id)
        if job is None:
            return False
        if not job.has_ended:
            raise BadRequestError("The batch cannot be deleted before it has ended; cancel it first.")
        await forget(job, self._jobs, self._lines, self._folder)
        return True

    @asynccontextmanager
    async def results(
        self, tenant: str, dialect: str, job_id: str
    ) -> AsyncIterator[tuple[Job, AsyncIterator[bytes]] | None]:
        """See base.py."""
        job = await self.find(tenant, dialect, job_id)
        if job is None or not job.has_ended or job.in_files:
            yield None
            return
        file = await asyncio.to_thread(self._folder.open_results, job)
        try:
            yield job, _pieces(file)
        finally:
            if file is not None:
                file.close()

    async def _check_bytes(self, tenant: str) -> None:
        """Raises QuotaError when its jobs have as many as they may. Those that are being sent do not count yet."""
        most = self._settings.max_bytes
        if await asyncio.to_thread(self._folder.num_bytes, tenant) >= most:
            raise QuotaError(
                f"All batches together have {most} bytes, as many as there may be (batches.max_bytes). Delete some, or "
                "wait for their end."
            )

    async def _with_counts(self, job: Job) -> Job:
        """A job that has not ended, as far as its lines are."""
        if job.has_ended or not job.validated:
            return job
        counts, usage = await self._lines.tally(job.id)
        return replace(job, counts=replace(counts, total=job.counts.total), usage=usage)


async def forget(job: Job, jobs: Jobs, lines: Lines, folder: JobFolder) -> None:
    """Nothing is left of it. The record goes last: who is killed meanwhile does it again."""
    await asyncio.to_thread(folder.remove, job.tenant, job.id)
    await lines.forget(job.id)
    await jobs.forget(job)


async def _pieces(file: BinaryIO | None) -> AsyncIterator[bytes]:
    while file is not None and (piece := await asyncio.to_thread(file.read, PIECE_BYTES)):
        yield piece
