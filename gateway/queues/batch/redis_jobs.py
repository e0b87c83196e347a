"""Jobs in Redis, shared by all gateways. The scripts say what they do; see jobs.py for what is promised.

kvasir:{batches}:job:JOB             hash: json, version; tenant, dialect and lines, for the scripts
kvasir:{batches}:of:DIALECT:TENANT   sorted set of jobs, all with the same score, so in the order of their ids
kvasir:{batches}:open                set of jobs for which something is left to do
kvasir:{batches}:ended               sorted set of all others, by the millisecond at which they may be forgotten
kvasir:{batches}:quota               hash: jobs:TENANT and lines:TENANT, of those that are open
kvasir:{batches}:leases              hash: job -> millisecond at which its lease ends, and owner
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from gateway.config import BatchSettings
from gateway.queues.batch.base import Job
from gateway.queues.batch.jobs import read, too_many_jobs, too_many_lines, written
from gateway.queues.batch.redis_scripts import PREFIX, RedisScripts

READ_AT_ONCE: Final = 100


class RedisJobs:
    """See Jobs."""

    def __init__(self, scripts: RedisScripts, settings: BatchSettings) -> None:
        self._scripts = scripts
        self._settings = settings

    async def create(self, job: Job) -> None:
        """See Jobs."""
        settings, lines = self._settings, job.counts.total
        limits = (settings.max_jobs, settings.max_waiting_lines, settings.max_kept)
        kept = await self._scripts.run("create", job.id, written(job), job.tenant, job.dialect, lines, *limits)
        if kept != b"kept":
            raise too_many_jobs(settings) if kept == b"jobs" else too_many_lines(settings)

    async def find(self, job_id: str) -> Job | None:
        """See Jobs."""
        found = await self._read([job_id.encode()])
        return found[0] if found else None

    async def open(self) -> list[Job]:
        """See Jobs."""
        ids: Any = await self._scripts.ask(self._scripts.redis.smembers(f"{PREFIX}open"))
        return await self._read(sorted(ids))

    async def page(self, tenant: str, dialect: str, *, limit: int, after: str | None, before: str | None) -> list[Job]:
        """See Jobs."""
        key, redis = f"{PREFIX}of:{dialect}:{tenant}", self._scripts.redis
        if before is not None:
            ids: Any = await self._scripts.ask(redis.zrangebylex(key, f"({before}", "+", start=0, num=limit))
            return await self._read(ids[::-1])
        end = "+" if after is None else f"({after}"
        newest: Any = await self._scripts.ask(redis.zrevrangebylex(key, end, "-", start=0, num=limit))
        return await self._read(newest)

    async def update(self, job: Job) -> Job | None:
        """See Jobs."""
        kept = await self._scripts.run("update", job.id, job.version, written(job))
        return replace(job, version=job.version + 1) if kept else None

    async def reserve(self, job: Job, lines: int) -> bool:
        """See Jobs."""
        return bool(await self._scripts.run("reserve", job.id, lines, self._settings.max_waiting_lines))

    async def close(self, job: Job, forget_ms: int) -> None:
        """See Jobs."""
        await self._scripts.run("close", job.id, forget_ms)

    async def over(self, now_ms: int, most: int) -> list[Job]:
        """See Jobs."""
        asked = self._scripts.redis.zrangebyscore(f"{PREFIX}ended", "-inf", now_ms, start=0, num=most)
        ids: Any = await self._scripts.ask(asked)
        return await self._read(ids)

    async def forget(self, job: Job) -> None:
        """See Jobs."""
        await self._scripts.run("forget", job.id)

    async def lease(self, job_id: str, owner: str, now_ms: int, until_ms: int) -> bool:
        """See Jobs."""
        return bool(await self._scripts.run("lease", job_id, owner, now_ms, until_ms))

    async def release(self, job_id: str, owner: str) -> None:
        """See Jobs."""
        await self._scripts.run("release", job_id, owner)

    async def _read(self, ids: Sequence[bytes]) -> list[Job]:
        """Those of them that are there."""
        jobs: list[Job] = []
        for start in range(0, len(ids), READ_AT_ONCE):
            asked = self._scripts.redis.pipeline(transaction=False)
            for job_id in ids[start : start + READ_AT_ONCE]:
                asked.hmget(f"{PREFIX}job:{bytes(job_id).decode()}", ["json", "version"])
            found: Any = await self._scripts.ask(asked.execute())
            jobs += [read(body, int(version)) for body, version in found if body is not None]
        return jobs
