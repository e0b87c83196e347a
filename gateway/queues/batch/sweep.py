"""Forgets jobs that are over their time, and removes what nobody asks for any more. Whoever does it while others do,
does the same.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import Jobs
from gateway.queues.batch.lines import Lines
from gateway.queues.batch.store import forget

FORGET_AT_ONCE: Final = 100

ORPHAN_S: Final = 3600.0
"""After which a folder without a record is nobody's: its job was being created."""


async def sweep(jobs: Jobs, lines: Lines, folder: JobFolder, *, now_s: float, keep_s: float) -> None:
    """`now_s` is seconds since 1970, `keep_s` how long a job is kept once it has ended. Raises OverloadedError and
    StorageError."""
    over = await jobs.over(round(now_s * 1e3), FORGET_AT_ONCE)
    stuck = [job for job in await jobs.open() if now_s >= job.expires_s + keep_s]
    for job in (*over, *stuck):
        await forget(job, jobs, lines, folder)
    for tenant, job_id in await asyncio.to_thread(folder.jobs):
        if _made_s(job_id) < now_s - ORPHAN_S:
            await _sweep_folder(jobs, folder, tenant, job_id)
    await asyncio.to_thread(folder.sweep)


async def _sweep_folder(jobs: Jobs, folder: JobFolder, tenant: str, job_id: str) -> None:
    """Whoever lost a line, and did not know it yet, may have written its result behind the end of the job."""
    job = await jobs.find(job_id)
    if job is None:
        await asyncio.to_thread(folder.remove, tenant, job_id)
    elif job.has_ended:
        await asyncio.to_thread(folder.clean, job)


def _made_s(job_id: str) -> float:
    """When a job was made; any name of a folder may be asked about, and those of no job were made just now."""
    try:
        return int(job_id[:16], 16) / 1e6 if len(job_id) == 32 else float("inf")
    except ValueError:
        return float("inf")
