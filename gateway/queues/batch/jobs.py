"""The records of jobs, in memory: the twin of redis_jobs.py, with the promises of both.

    open    something is left to do; counts for its tenant's limits
    closed  it has ended and only its record and what can be read of it are left; forgotten after a time

A record is changed with compare-and-set. A step of a job is done under a lease, so that gateways do not do the same
work; a step that is done twice has to come to the same by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.config import BatchSettings
from gateway.errors import QuotaError
from gateway.queues.batch.base import Counts, Job, JobError
from gateway.types import Usage


@dataclass
class _Record:
    job: Job
    forget_ms: int | None = None  # None: it is open


class MemoryJobs:
    """Jobs in this process: for tests, and where there is no Redis."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._records: dict[str, _Record] = {}
        self._leases: dict[str, tuple[str, int]] = {}

    async def put(self, job: Job, *, forget_ms: int | None = None) -> Job | None:
        """Stores a record in place of its last version; version 0 is a new job. The job with its next version; None
        when it was changed or forgotten meanwhile, or is not new. `forget_ms`: closes it, to be forgotten from then on.
        Raises QuotaError when its tenant would have more open jobs, or lines of open jobs, than allowed."""
        record = self._records.get(job.id)
        if job.version != (record.job.version if record else 0):
            return None
        if record is None or (record.forget_ms is None and forget_ms is None):
            self._check(job, None if record is None else record.job)
        stored = replace(job, version=job.version + 1)
        if record is None:
            record = self._records[job.id] = _Record(stored)
            ids = self._ids(job.tenant, job.dialect)
            for job_id in ids[: max(0, len(ids) - self._settings.max_kept)]:
                if self._records[job_id].forget_ms is not None:
                    self._records[job_id].forget_ms = 0
        record.job = stored
        record.forget_ms = record.forget_ms if forget_ms is None else forget_ms
        return stored

    def _check(self, job: Job, before: Job | None) -> None:
        held = [one.job for one in self._records.values() if one.job.tenant == job.tenant and one.forget_ms is None]
        more = job.counts.total - (before.counts.total if before else 0)
        if before is None and len(held) >= self._settings.max_jobs:
            raise quota_error("jobs", self._settings)
        if more > 0 and sum(one.counts.total for one in held) + more > self._settings.max_waiting_lines:
            raise quota_error("lines", self._settings)

    async def find(self, job_id: str) -> Job | None:
        record = self._records.get(job_id)
        return None if record is None else record.job

    async def open(self) -> list[Job]:
        """All open jobs, the oldest first."""
        return [record.job for _, record in sorted(self._records.items()) if record.forget_ms is None]

    async def page(
        self, tenant: str | None, dialect: str | None, *, limit: int, after: str | None, before: str | None
    ) -> list[Job]:
        """As BatchStore.page, without whether there are more."""
        ids = self._ids(tenant, dialect)
        if before is not None:
            start = bisect_right(ids, before)
            found = ids[start : start + limit]
        else:
            end = len(ids) if after is None else bisect_left(ids, after)
            found = ids[max(0, end - limit) : end]
        return [self._records[job_id].job for job_id in reversed(found)]

    async def over(self, now_ms: int, most: int) -> list[Job]:
        """Closed jobs to forget: by their time, or because their tenant has more than are kept."""
        times = ((one.forget_ms, one.job) for one in self._records.values() if one.forget_ms is not None)
        return [job for _, _, job in sorted((ms, job.id, job) for ms, job in times if ms <= now_ms)][:most]

    async def forget(self, job: Job) -> None:
        self._records.pop(job.id, None)
        self._leases.pop(job.id, None)

    async def lease(self, job_id: str, owner: str, now_ms: int, until_ms: int) -> bool:
        """Whether the job is leased to the owner until then. Its own lease is renewed; `until_ms` 0 releases it."""
        holder, end_ms = self._leases.get(job_id, (owner, 0))
        if holder != owner and end_ms > now_ms:
            return False
        self._leases[job_id] = (owner, until_ms)
        return True

    def _ids(self, tenant: str | None, dialect: str | None) -> list[str]:
        """In the order of creation."""
        jobs = (record.job for record in self._records.values())
        return sorted(job.id for job in jobs if tenant is None or (job.tenant, job.dialect) == (tenant, dialect))


def quota_error(limit: str, settings: BatchSettings) -> QuotaError:
    """The error of a tenant with too many "jobs", or "lines"."""
    if limit == "jobs":
        return QuotaError(
            f"There are {settings.max_jobs} batches that have not ended, as many as there may be (batches.max_jobs)."
        )
    return QuotaError(
        "All batches that have not ended together would have more than "
        f"{settings.max_waiting_lines} requests (batches.max_waiting_lines)."
    )


def to_json(job: Job) -> bytes:
    """Without the version."""
    return orjson.dumps(replace(job, version=0), default=tuple)


def from_json(body: bytes, version: int) -> Job:
    """What `to_json` wrote."""
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
