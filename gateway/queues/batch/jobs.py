"""The records of jobs: the promises, and the twin of redis_jobs.py in memory.

    open    something is left to do for it; counts for its tenant's limits
    closed  it has ended and nothing but its record (and what can be read of it) is left; forgotten after a time

A record is changed with compare-and-set. Who does a step of a job holds a lease on it, so that gateways do not do the
same work; that a step is not done twice is up to the step itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from gateway.config import BatchSettings
from gateway.errors import QuotaError
from gateway.queues.batch.base import Counts, Job, JobError
from gateway.types import Usage


class Jobs(Protocol):
    """Everything raises OverloadedError while Redis is away; what was asked for may have been done all the same."""

    async def create(self, job: Job) -> None:
        """It is open. Raises QuotaError when its tenant has as many jobs, or lines of jobs, as it may. One that is
        there stays as it is."""

    async def find(self, job_id: str) -> Job | None: ...

    async def open(self) -> list[Job]:
        """All that are."""

    async def page(self, tenant: str, dialect: str, *, limit: int, after: str | None, before: str | None) -> list[Job]:
        """As BatchStore.page, without whether there are more."""

    async def update(self, job: Job) -> Job | None:
        """The job as it is kept now, with its next version; None when it was changed or forgotten meanwhile."""

    async def reserve(self, job: Job, lines: int) -> bool:
        """It has so many lines. False when its tenant would have more than it may, or the job is forgotten."""

    async def close(self, job: Job, forget_ms: int) -> None:
        """It may be forgotten from then on."""

    async def over(self, now_ms: int, most: int) -> list[Job]:
        """Closed jobs that may be forgotten: by their time, or because their tenant has more than are kept."""

    async def forget(self, job: Job) -> None: ...

    async def lease(self, job_id: str, owner: str, now_ms: int, until_ms: int) -> bool:
        """Whether the job is the owner's until then. Its own lease is renewed."""

    async def release(self, job_id: str, owner: str) -> None:
        """The job is nobody's, if it was the owner's."""


@dataclass
class _Record:
    job: Job
    lines: int
    forget_ms: int | None = None  # None: it is open


class MemoryJobs:
    """Jobs in this process: for tests, and where there is no Redis."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._records: dict[str, _Record] = {}
        self._leases: dict[str, tuple[str, int]] = {}

    async def create(self, job: Job) -> None:
        if job.id in self._records:
            return
        settings = self._settings
        held = [one for one in self._records.values() if one.job.tenant == job.tenant and one.forget_ms is None]
        if len(held) >= settings.max_jobs:
            raise too_many_jobs(settings)
        if sum(one.lines for one in held) + job.counts.total > settings.max_waiting_lines:
            raise too_many_lines(settings)
        self._records[job.id] = _Record(job, job.counts.total)
        ids = self._ids(job.tenant, job.dialect)
        for job_id in ids[: max(0, len(ids) - settings.max_kept)]:
            if self._records[job_id].forget_ms is not None:
                self._records[job_id].forget_ms = 0

    async def find(self, job_id: str) -> Job | None:
        record = self._records.get(job_id)
        return None if record is None else record.job

    async def open(self) -> list[Job]:
        return [record.job for _, record in sorted(self._records.items()) if record.forget_ms is None]

    async def page(self, tenant: str, dialect: str, *, limit: int, after: str | None, before: str | None) -> list[Job]:
        ids = self._ids(tenant, dialect)
        if before is not None:
            start = bisect_right(ids, before)
            found = ids[start : start + limit]
        else:
            end = len(ids) if after is None else bisect_left(ids, after)
            found = ids[max(0, end - limit) : end]
        return [self._records[job_id].job for job_id in reversed(found)]

    async def update(self, job: Job) -> Job | None:
        record = self._records.get(job.id)
        if record is None or record.job.version != job.version:
            return None
        record.job = replace(job, version=job.version + 1)
        return record.job

    async def reserve(self, job: Job, lines: int) -> bool:
        record = self._records.get(job.id)
        if record is None:
            return False
        held = [one for one in self._records.values() if one.job.tenant == job.tenant and one.forget_ms is None]
        most = self._settings.max_waiting_lines
        if lines > record.lines and sum(one.lines for one in held) + lines - record.lines > most:
            return False
        record.lines = lines
        return True

    async def close(self, job: Job, forget_ms: int) -> None:
        record = self._records.get(job.id)
        if record is not None and record.forget_ms is None:
            record.forget_ms = forget_ms

    async def over(self, now_ms: int, most: int) -> list[Job]:
        times = ((one.forget_ms, one.job) for one in self._records.values() if one.forget_ms is not None)
        return [job for _, _, job in sorted((ms, job.id, job) for ms, job in times if ms <= now_ms)][:most]

    async def forget(self, job: Job) -> None:
        self._records.pop(job.id, None)
        self._leases.pop(job.id, None)

    async def lease(self, job_id: str, owner: str, now_ms: int, until_ms: int) -> bool:
        holder, end_ms = self._leases.get(job_id, (owner, 0))
        if holder != owner and end_ms > now_ms:
            return False
        self._leases[job_id] = (owner, until_ms)
        return True

    async def release(self, job_id: str, owner: str) -> None:
        if self._leases.get(job_id, ("", 0))[0] == owner:
            del self._leases[job_id]

    def _ids(self, tenant: str, dialect: str) -> list[str]:
        """In the order in which they were made."""
        jobs = (record.job for record in self._records.values())
        return sorted(job.id for job in jobs if (job.tenant, job.dialect) == (tenant, dialect))


def too_many_jobs(settings: BatchSettings) -> QuotaError:
    return QuotaError(
        f"There are {settings.max_jobs} batches that have not ended, as many as there may be (batches.max_jobs)."
    )


def too_many_lines(settings: BatchSettings) -> QuotaError:
    return QuotaError(
        "All batches that have not ended together would have more than "
        f"{settings.max_waiting_lines} requests (batches.max_waiting_lines)."
    )


def written(job: Job) -> bytes:
    """JSON, without the version."""
    return orjson.dumps(replace(job, version=0), default=tuple)


def read(body: bytes, version: int) -> Job:
    """What `written` wrote."""
    fields: dict[str, Any] = orjson.loads(body)
    usage = fields["usage"]
    return Job(
        **fields
        | {
            "counts": Counts(**fields["counts"]),
            "usage": Usage(**usage | {"lease_writes": ()}),
            "errors": tuple(JobError(*error) for error in fields["errors"]),
            "file_ids": None if fields["file_ids"] is None else tuple(fields["file_ids"]),
            "version": version,
        }
    )
