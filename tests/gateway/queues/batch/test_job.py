from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.errors import BadRequestError
from gateway.queues.batch import job as jobs
from gateway.queues.batch.base import Counts, Job, JobError
from gateway.queues.batch.job import next_step
from gateway.queues.batch.lines import Progress

NONE = Progress()
DRAFT = Job("", "a", "openai", "/v1/chat/completions", metadata={"x": "y"}, in_files=True)


def new(**changed: object) -> Job:
    return replace(jobs.created(DRAFT, 100.0, 50.0, "f"), **changed)  # type: ignore[arg-type]


def running() -> Job:
    return jobs.validated(new(), 3, "m", 101.0)


def test_ids_are_in_the_order_in_which_jobs_were_made() -> None:
    ids = [jobs.created(DRAFT, now_s, 1, None).id for now_s in (1.0, 99.5, 1_790_000_000)]
    assert ids == sorted(ids)
    assert {len(one) for one in ids} == {32}


def test_a_job_that_goes_well_reaches_one_state_after_the_other() -> None:
    job = jobs.finalizing(running(), ("o", "e"), 120.0)
    job = jobs.ended(job, "o", None, 130.0)
    assert (job.state, job.output_file_id, job.error_file_id) == ("completed", "o", None)
    assert job.reached == {"validating": 100.0, "in_progress": 101.0, "finalizing": 120.0, "completed": 130.0}
    assert job.has_ended


@pytest.mark.parametrize(
    ("progress", "step"),
    [
        (NONE, "plan"),
        (Progress(2), "plan"),
        (Progress(3), "queue"),
        (Progress(3, 2, Counts(0, 1)), "queue"),
        (Progress(3, 3, Counts(0, 1, 1)), "wait"),
        (Progress(3, 3, Counts(0, 1, 1, 1)), "finalize"),
    ],
)
def test_what_is_next_follows_from_the_job_and_its_lines(progress: Progress, step: str) -> None:
    assert next_step(running(), progress, 149.0) == step
    assert next_step(new(), progress, 149.0) == "validate"


@pytest.mark.parametrize("progress", [NONE, Progress(3, 1), Progress(3, 3, Counts(0, 2))])
def test_past_its_time_or_cancelled_what_has_not_begun_is_dropped(progress: Progress) -> None:
    assert next_step(running(), progress, 150.0) == "drop"
    assert jobs.why_dropped(running(), 150.0) == "expired"
    cancelling = jobs.cancelled(running(), 110.0)
    assert next_step(cancelling, progress, 110.0) == "drop"
    assert jobs.why_dropped(cancelling, 110.0) == "cancelled"
    assert jobs.why_dropped(running(), 149.0) is None


def test_a_job_with_expired_lines_is_expired_and_a_cancelled_one_cancelled_whatever_ran() -> None:
    job = replace(running(), counts=Counts(3, succeeded=1, expired=2))
    assert jobs.ended(jobs.finalizing(job, ("o", "e"), 150.0), "o", "e", 151.0).state == "expired"
    job = jobs.finalizing(jobs.cancelled(job, 120.0), ("o", "e"), 150.0)
    assert job.state == "cancelling"
    assert jobs.ended(job, "o", "e", 151.0).state == "cancelled"


def test_a_job_that_is_cancelled_while_it_is_validated_knows_its_lines_in_the_end() -> None:
    job = jobs.cancelled(new(), 101.0)
    assert next_step(job, NONE, 101.0) == "validate"
    found = jobs.validated(job, 3, "m", 102.0)
    assert (found.state, found.counts.total) == ("cancelling", 3)
    assert next_step(found, NONE, 102.0) == "drop"
    assert jobs.failed(job, [JobError("empty_file", "Empty.")], 102.0).state == "cancelled"


def test_a_job_that_fails_says_why() -> None:
    job = jobs.failed(new(), [JobError("empty_file", "Empty.")], 101.0)
    assert (job.state, job.errors, job.reached["failed"]) == ("failed", (JobError("empty_file", "Empty."),), 101.0)
    assert next_step(job, NONE, 999.0) == "close"


def test_cancelling_twice_is_once_and_what_has_ended_cannot_be_cancelled() -> None:
    job = jobs.cancelled(running(), 110.0)
    assert jobs.cancelled(job, 111.0) is job
    with pytest.raises(BadRequestError, match="it is failed"):
        jobs.cancelled(jobs.failed(new(), [], 101.0), 102.0)
