"""How a job goes from state to state. Pure: a job and a time in, the next job out.

    validating ──> failed
        │
        └──> in_progress ──> finalizing ──> completed, or expired when some lines never ran for want of time
                  │               │
                  └─> cancelling <┘ ──> cancelled

A job that is cancelled while it is validated is validated first, so that all of its lines are known to be cancelled.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gateway.errors import BadRequestError
from gateway.queues.batch.base import Counts, Job, JobError, State
from gateway.queues.batch.lines import Progress

Step = Literal["validate", "plan", "queue", "drop", "finalize", "close", "wait"]


def new_id(now_s: float) -> str:
    """Of a job or a file; later than those of jobs and files that were created before."""
    return f"{round(now_s * 1e6):016x}{secrets.token_hex(8)}"


def created(draft: Job, now_s: float, window_s: float, input_file_id: str | None) -> Job:
    """The job of a draft."""
    return replace(
        draft,
        id=new_id(now_s),
        created_s=now_s,
        expires_s=draft.expires_s or now_s + window_s,
        input_file_id=input_file_id,
        reached={"validating": now_s},
    )


def next_step(job: Job, progress: Progress, now_s: float) -> Step:
    """What to do for a job next."""
    if job.has_ended:
        return "close"
    if not job.validated:
        return "validate"
    if progress.done >= job.counts.total:
        return "finalize"
    if why_dropped(job, now_s) is not None:
        return "drop"
    if progress.planned < job.counts.total:
        return "plan"
    return "queue" if progress.queued < job.counts.total else "wait"


def why_dropped(job: Job, now_s: float) -> Literal["cancelled", "expired"] | None:
    """Why lines that have not begun never will; None when they will."""
    if job.state == "cancelling":
        return "cancelled"
    return "expired" if now_s >= job.expires_s else None


def validated(job: Job, num_lines: int, model: str | None, now_s: float) -> Job:
    """Its lines are known."""
    changed = replace(job, validated=True, counts=Counts(num_lines), model=model)
    return changed if job.state == "cancelling" else _to(changed, "in_progress", now_s)


def failed(job: Job, errors: Sequence[JobError], now_s: float) -> Job:
    """None of its lines will run. A job that was cancelled meanwhile is cancelled."""
    state: State = "cancelled" if job.state == "cancelling" else "failed"
    return _to(replace(job, errors=tuple(errors)), state, now_s)


def held_up(job: Job, error: JobError | None) -> Job:
    """It has the error that keeps it from going on; None: it goes on."""
    return replace(job, errors=() if error is None else (error,))


def cancelled(job: Job, now_s: float) -> Job:
    """Raises BadRequestError when it has ended. A job that is being cancelled stays as it is."""
    if job.has_ended:
        raise BadRequestError(f"The batch cannot be cancelled: it is {job.state}.")
    return job if job.state == "cancelling" else _to(job, "cancelling", now_s)


def finalizing(job: Job, file_ids: tuple[str, str], now_s: float) -> Job:
    """Every line is done; the files will have these ids."""
    changed = replace(job, file_ids=file_ids)
    return changed if job.state == "cancelling" else _to(changed, "finalizing", now_s)


def ended(job: Job, output_file_id: str | None, error_file_id: str | None, now_s: float) -> Job:
    """All of its results are written."""
    state: State = "cancelled" if job.state == "cancelling" else "expired" if job.counts.expired else "completed"
    return _to(replace(job, errors=(), output_file_id=output_file_id, error_file_id=error_file_id), state, now_s)


def _to(job: Job, state: State, now_s: float) -> Job:
    return replace(job, state=state, reached={**job.reached, state: now_s})
