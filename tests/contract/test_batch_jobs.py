"""The promises of queues/batch/jobs.py in both stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.config import BatchSettings
from gateway.errors import QuotaError
from gateway.queues.batch.base import Counts, Job, JobError
from gateway.queues.batch.jobs import MemoryJobs
from gateway.queues.batch.redis_jobs import PREFIX, RedisJobs, RedisScripts
from gateway.types import Usage
from tests.fakes.redis_fleet import keys_of, opened
from tests.fakes.tuned import tuned

Jobs = MemoryJobs | RedisJobs
LIMITS = tuned(BatchSettings, max_jobs=3, max_waiting_lines=10, max_kept=3)


@pytest.fixture(params=["memory", "redis"])
async def jobs(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Jobs]:
    if request.param == "memory":
        yield MemoryJobs(LIMITS)
        return
    async with opened(redis_url) as redis:
        yield RedisJobs(RedisScripts(redis, timeout_s=5.0), LIMITS)


def job(number: int, tenant: str = "a", dialect: str = "openai", lines: int = 0) -> Job:
    return Job(f"{number:032x}", tenant, dialect, "/v1/x", 1.5, 2.5, counts=Counts(lines))


async def test_a_job_comes_back_as_it_was_kept(jobs: Jobs) -> None:
    whole = replace(
        job(1),
        namespace="n",
        metadata={"metadata": {"é": "\u2028"}, "x": None},
        in_files=True,
        output_ttl_s=3600.0,
        input_file_id="f",
        state="finalizing",
        reached={"validating": 1.5, "finalizing": 2.25},
        model="m",
        validated=True,
        counts=Counts(7, 1, 2, 3, 1),
        usage=Usage(5, 6, 7, 8),
        errors=(JobError("code", "message", None, 3),),
        output_file_id="o",
        error_file_id="e",
        file_ids=("o", "e"),
    )
    stored = await jobs.put(whole)
    assert stored == replace(whole, version=1)
    assert await jobs.find(whole.id) == stored
    assert await jobs.find("x") is None
    assert await jobs.open() == [stored]


async def made(jobs: Jobs, number: int, tenant: str = "a", dialect: str = "openai", lines: int = 0) -> Job:
    stored = await jobs.put(job(number, tenant, dialect, lines))
    assert stored is not None
    return stored


async def test_of_two_who_change_a_job_one_does(jobs: Jobs) -> None:
    first = await made(jobs, 1)
    assert await jobs.put(job(1)) is None, "there is one already"
    changed = await jobs.put(replace(first, model="m"))
    assert changed == replace(first, model="m", version=2)
    assert await jobs.put(replace(first, model="other")) is None
    assert await jobs.find(first.id) == changed
    assert await jobs.put(replace(changed, model="n")) is not None
    assert await jobs.put(replace(job(9), version=1)) is None


async def test_pages_are_newest_first_and_of_one_tenant_and_dialect(jobs: Jobs) -> None:
    for number in (2, 1, 3):
        await made(jobs, number)
    others = [await made(jobs, 4, "b"), await made(jobs, 5, "b", "anthropic")]

    async def page(limit: int, after: int | None = None, before: int | None = None) -> list[int]:
        ids = [None if one is None else job(one).id for one in (after, before)]
        found = await jobs.page("a", "openai", limit=limit, after=ids[0], before=ids[1])
        return [int(one.id, 16) for one in found]

    assert await page(9) == [3, 2, 1]
    assert await page(2) == [3, 2]
    assert await page(2, after=2) == [1]
    assert await page(1, after=3) == [2]
    assert await page(9, after=1) == []
    assert await page(1, before=1) == [2]
    assert await page(9, before=0) == [3, 2, 1]
    assert await page(9, before=3) == []
    assert await jobs.page("b", "openai", limit=9, after="zz", before=None) == others[:1]
    assert await jobs.page("b", "anthropic", limit=9, after=None, before=None) == others[1:]


async def test_pages_of_all_tenants_have_every_job_until_it_is_forgotten(jobs: Jobs) -> None:
    owners = {2: ("a", "openai"), 1: ("b", "anthropic"), 3: ("a", "anthropic")}
    made_jobs = [await made(jobs, number, *owner) for number, owner in owners.items()]

    async def page(limit: int, after: int | None = None, before: int | None = None) -> list[int]:
        ids = [None if one is None else job(one).id for one in (after, before)]
        found = await jobs.page(None, None, limit=limit, after=ids[0], before=ids[1])
        return [int(one.id, 16) for one in found]

    assert (await page(9), await page(2), await page(2, after=2)) == ([3, 2, 1], [3, 2], [1])
    await jobs.forget(made_jobs[0])
    assert await page(9) == [3, 1]


async def test_a_tenant_has_so_many_jobs_and_lines_that_have_not_ended(jobs: Jobs) -> None:
    first, second = await made(jobs, 1, lines=4), await made(jobs, 2)
    second = await jobs.put(replace(second, counts=Counts(6))) or second
    with pytest.raises(QuotaError, match=r"batches\.max_waiting_lines"):
        await jobs.put(replace(second, counts=Counts(7)))
    assert await jobs.find(second.id) == second
    with pytest.raises(QuotaError, match=r"batches\.max_waiting_lines"):
        await jobs.put(job(3, lines=1))
    await made(jobs, 3)
    with pytest.raises(QuotaError, match=r"batches\.max_jobs"):
        await jobs.put(job(4))
    await made(jobs, 4, "b")
    assert await jobs.put(first, forget_ms=100)
    assert await jobs.put(first, forget_ms=100) is None
    fifth = await made(jobs, 5, lines=4)
    await jobs.forget(fifth)
    await made(jobs, 6, lines=4)
    assert [int(one.id, 16) for one in await jobs.open()] == [2, 3, 4, 6]


async def test_jobs_are_forgotten_when_they_have_been_closed_for_a_while(jobs: Jobs) -> None:
    first, second = await made(jobs, 1), await made(jobs, 2)
    assert await jobs.over(10**12, 9) == []
    closed = await jobs.put(first, forget_ms=100)
    assert closed is not None
    assert await jobs.find(first.id) == closed
    assert await jobs.over(99, 9) == []
    assert await jobs.over(100, 9) == [closed]
    await jobs.forget(closed)
    await jobs.forget(closed)
    assert await jobs.find(first.id) is None
    assert await jobs.over(100, 9) == []
    assert await jobs.page("a", "openai", limit=9, after=None, before=None) == [second]


async def test_past_so_many_the_oldest_that_have_ended_are_forgotten(jobs: Jobs) -> None:
    first = [await made(jobs, number) for number in range(1, 4)]
    closed = [await jobs.put(one, forget_ms=10**9) for one in first[1:]]
    for number in (4, 5):
        await made(jobs, number)
    assert await jobs.over(1, 9) == closed[:1], "1 is open, and 5 - 3 are too many"


async def test_a_job_is_leased_to_one_at_a_time(jobs: Jobs) -> None:
    assert await jobs.lease("j", "x", 0, 10)
    assert not await jobs.lease("j", "y", 9, 19)
    assert await jobs.lease("j", "x", 9, 20)
    assert not await jobs.lease("j", "y", 19, 29)
    assert await jobs.lease("j", "y", 20, 30)
    await jobs.lease("j", "x", 20, 0)
    assert not await jobs.lease("j", "x", 21, 31)
    await jobs.lease("j", "y", 20, 0)
    assert await jobs.lease("j", "x", 21, 31)


async def test_nothing_is_left_in_redis_of_jobs_that_are_forgotten(redis_url: str) -> None:
    async with opened(redis_url) as redis:
        jobs = RedisJobs(RedisScripts(redis, timeout_s=5.0), LIMITS)
        for number in (1, 2):
            await made(jobs, number, lines=1)
            await jobs.lease(job(number).id, "x", 0, 1)
        await jobs.put(replace(job(1), version=1), forget_ms=5)
        for number in (1, 2):
            await jobs.forget(job(number))
        assert await keys_of(redis, f"{PREFIX}*") == []
