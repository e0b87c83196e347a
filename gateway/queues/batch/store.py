"""Jobs of tenants, as dialects see them: records, lines and folders together. The worker does what is to be done for a
job; `changed` wakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from redis.asyncio import Redis

from gateway.config import BatchSettings
from gateway.disk import Part
from gateway.errors import BadRequestError, NotFoundError, OverloadedError, QuotaError
from gateway.queues.batch import job as states
from gateway.queues.batch.base import Job
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import MemoryJobs
from gateway.queues.batch.lines import MemoryLines
from gateway.queues.batch.redis_jobs import RedisJobs, RedisScripts
from gateway.queues.batch.redis_lines import RedisLines
from gateway.storage.breaker import RedisBreaker
from gateway.types import StoredFile

CHUNK_BYTES: Final = 1 << 20
MAX_TRIES: Final = 16
"""To change a job that is changed at the same time."""


class Files(Protocol):
    """What batches need of the tenants' files."""

    async def link(self, tenant: str, file_id: str, path: Path) -> bool:
        """Puts its bytes at `path`, too. False if there is no such file."""

    async def add(
        self,
        tenant: str,
        file_id: str,
        filename: str,
        ttl_s: float | None,
        chunks: AsyncIterator[bytes],
    ) -> StoredFile:
        """Stores a file with this id, unless there is one, or was one that was deleted."""


@dataclass(frozen=True)
class Stores:
    """Where jobs are stored. `now` is seconds since 1970, on which gateways agree."""

    jobs: MemoryJobs | RedisJobs
    lines: MemoryLines | RedisLines
    folder: JobFolder
    files: Files
    settings: BatchSettings
    now: Callable[[], float]

    async def forget(self, job: Job) -> None:
        """Removes it. The record goes last: what was cut off is done again."""
        await asyncio.to_thread(self.folder.remove, job.tenant, job.id)
        await self.lines.forget(job.id)
        await self.jobs.forget(job)


def open_stores(
    redis: Redis | None,
    folder: Path,
    files: Files,
    settings: BatchSettings,
    now: Callable[[], float],
    breaker: RedisBreaker | None = None,
) -> Stores:
    """Without Redis, which its owner closes, jobs end with this process. `breaker` is that of all calls of this
    gateway."""
    job_folder = JobFolder(folder, min_free_bytes=settings.min_free_bytes)
    if redis is None:
        return Stores(MemoryJobs(settings), MemoryLines(), job_folder, files, settings, now)
    scripts = RedisScripts(redis, timeout_s=settings.redis_timeout_s, breaker=breaker)
    return Stores(RedisJobs(scripts, settings), RedisLines(scripts), job_folder, files, settings, now)


class Input:
    """The rows of a job, while they arrive."""

    def __init__(self, rows: Part) -> None:
        self.rows = rows
        self._buffer = bytearray()

    async def write(self, data: bytes) -> None:
        """Bytes cut anywhere. Raises StorageFullError, StorageError, and BodyTooLargeError past the limit."""
        self._buffer += data
        if len(self._buffer) >= CHUNK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        await asyncio.to_thread(self.rows.write, data)


class BatchStore:
    """Jobs of tenants. Everything raises OverloadedError while Redis is unreachable."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def input(self, tenant: str) -> AsyncIterator[Input]:
        """Where rows are written that do not come from a file; removed if no job was created with them. Raises
        QuotaError when the tenant's jobs have as many bytes as they may."""
        await self._check_bytes(tenant)
        most = self.stores.settings.max_request_bytes
        rows = await asyncio.to_thread(self.stores.folder.begin, tenant, most)
        try:
            yield Input(rows)
        finally:
            await asyncio.shield(asyncio.to_thread(rows.discard))

    async def create(self, draft: Job, source: Input | str) -> Job:
        """Durable when this returns. `source` are its rows, or the id of the tenant's file that has them, which may be
        deleted from then on. Raises NotFoundError without such a file, QuotaError, StorageFullError and StorageError.
        The folder is created first: a sweep removes one without a record."""
        stores, file_id = self.stores, source if isinstance(source, str) else None
        job = states.created(draft, stores.now(), stores.settings.window_s, file_id)
        try:
            if isinstance(source, str):
                await self._check_bytes(job.tenant)
                path = await asyncio.to_thread(stores.folder.make, job)
                if not await stores.files.link(job.tenant, source, path):
                    raise NotFoundError(f"No file is called '{source[:64]}'.", param="input_file_id")
            else:
                await source.flush()
                await asyncio.to_thread(stores.folder.put_input, job, source.rows)
            await stores.jobs.put(job)
        except OverloadedError:
            raise  # it may be stored all the same
        except BaseException:
            await asyncio.shield(asyncio.to_thread(stores.folder.remove, job.tenant, job.id))
            raise
        self.changed.set()
        return job

    async def find(self, tenant: str, dialect: str, job_id: str) -> Job | None:
        """`job_id` may be any string."""
        job = await self._own(tenant, dialect, job_id)
        return None if job is None else await self._with_counts(job)

    async def page(
        self,
        tenant: str | None,
        dialect: str | None,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
    ) -> tuple[list[Job], bool]:
        """Of a tenant in a dialect, or of all where both are None. Newest first, and whether there are more: after a
        job, which may be forgotten, or the `limit` right before one."""
        found = await self.stores.jobs.page(tenant, dialect, limit=limit + 1, after=after, before=before)
        has_more = len(found) > limit
        shown = found[:limit] if before is None else found[-limit:]
        return [await self._with_counts(job) for job in shown], has_more

    async def cancel(self, tenant: str | None, dialect: str | None, job_id: str) -> Job | None:
        """The job as it is now, of any tenant where both are None; None without one. Running lines go on. Raises
        BadRequestError when it has ended."""
        for _ in range(MAX_TRIES):
            if (job := await self._own(tenant, dialect, job_id)) is None:
                return None
            changed = states.cancelled(job, self.stores.now())
            stored = job if changed is job else await self.stores.jobs.put(changed)
            if stored is not None:
                self.changed.set()
                return await self._with_counts(stored)
        raise OverloadedError("The batch is being changed by others.", retry_after_s=1.0)

    async def delete(self, tenant: str, dialect: str, job_id: str) -> bool:
        """Whether it existed. Its files stay. Raises BadRequestError when it has not ended."""
        if (job := await self._own(tenant, dialect, job_id)) is None:
            return False
        if not job.has_ended:
            raise BadRequestError("The batch cannot be deleted before it has ended; cancel it first.")
        await self.stores.forget(job)
        return True

    @asynccontextmanager
    async def results(
        self, tenant: str, dialect: str, job_id: str
    ) -> AsyncIterator[tuple[Job, AsyncIterator[bytes]] | None]:
        """A job and its results, JSONL cut anywhere, in the order of its lines. None when there is no job, when it has
        not ended, or when its results became files."""
        job = await self._own(tenant, dialect, job_id)
        if job is None or not job.has_ended or job.in_files:
            yield None
            return
        file = await asyncio.to_thread(self.stores.folder.open_results, job)
        try:
            yield job, _chunks(file)
        finally:
            if file is not None:
                file.close()

    async def _own(self, tenant: str | None, dialect: str | None, job_id: str) -> Job | None:
        job = await self.stores.jobs.find(job_id)
        is_own = job is not None and (tenant is None or (job.tenant, job.dialect) == (tenant, dialect))
        return job if is_own else None

    async def _check_bytes(self, tenant: str) -> None:
        """Raises QuotaError when its jobs have as many as they may. Arriving rows do not count yet."""
        most = self.stores.settings.max_bytes
        if await asyncio.to_thread(self.stores.folder.num_bytes, tenant) >= most:
            raise QuotaError(
                f"All batches together have {most} bytes, as many as there may be (batches.max_bytes). Delete some, or "
                "wait for their end."
            )

    async def _with_counts(self, job: Job) -> Job:
        """A job that has not ended gets the counts of its lines."""
        if job.has_ended or not job.validated:
            return job
        progress = await self.stores.lines.progress(job.id)
        return replace(job, counts=replace(progress.counts, total=job.counts.total), usage=progress.usage)


async def _chunks(file: BinaryIO | None) -> AsyncIterator[bytes]:
    while file is not None and (chunk := await asyncio.to_thread(file.read, CHUNK_BYTES)):
        yield chunk
