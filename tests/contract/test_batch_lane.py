"""The batch lane over a real Redis, which is killed while it works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.config import BatchSettings
from gateway.queues.batch.base import Counts, Job
from gateway.queues.batch.redis_jobs import PREFIX, RedisJobs, RedisScripts
from gateway.queues.batch.redis_lines import RedisLines
from gateway.queues.batch.worker import UNDO_S
from gateway.storage.redis_calls import connect
from tests.fakes.batches import FakeRunner, Lane, rows, until_holding
from tests.fakes.redis_fleet import HOST, RedisNode, keys_of, opened, wait_for
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until


def stores(redis: Redis) -> Callable[[BatchSettings], tuple[RedisJobs, RedisLines]]:
    scripts = RedisScripts(redis, timeout_s=2.0)
    return lambda settings: (RedisJobs(scripts, settings), RedisLines(scripts))


async def _has_no_lease(redis: Redis) -> bool:
    return not await redis.exists(f"{PREFIX}leases")


async def test_a_job_leaves_its_record_alone_in_redis_until_that_is_over_its_time(
    redis_url: str, tmp_path: Path
) -> None:
    async with connect(redis_url, 2.0) as redis:
        lane = Lane(tmp_path, stores=stores(redis))
        job = await lane.create([{"id": str(number), "prefix": number % 3} for number in range(100)])
        async with lane.gateway(FakeRunner()):
            job = await lane.ended(job)
            await until(lambda: _has_no_lease(redis))  # which is let go of when all else is done
        assert job.counts == Counts(100, succeeded=100)
        assert Counter(row["id"] for row in await lane.results(job)) == Counter(map(str, range(100)))
        names = {key.decode().removeprefix(PREFIX).partition(":")[0] for key in await keys_of(redis, f"{PREFIX}*")}
        assert names == {"job", "of", "all", "ended"}
        lane.now_s += lane.settings.keep_s
        await lane.worker(FakeRunner()).sweep()
        assert await keys_of(redis, f"{PREFIX}*") == []


async def test_gateways_on_one_redis_share_the_lines(redis_url: str, tmp_path: Path) -> None:
    async with connect(redis_url, 2.0) as redis:
        lane, runners = Lane(tmp_path, stores=stores(redis)), [FakeRunner(), FakeRunner()]
        job = await lane.create([{"id": str(number), "hold": True} for number in range(30)])
        async with lane.gateway(runners[0]), lane.gateway(runners[1]):
            await until(lambda: len(runners[0].holding) == len(runners[1].holding) == 4)
            for runner in runners:
                runner.gate.set()
            job = await lane.ended(job)
        assert job.counts == Counts(30, succeeded=30)
        assert Counter(runners[0].ran + runners[1].ran) == Counter(map(str, range(30)))


async def test_while_redis_is_away_lines_wait_and_then_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisProcess(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as process:
        async with connect(process.url, 2.0) as redis:
            lane, runner = Lane(tmp_path / "data", stores=stores(redis)), FakeRunner()
            job = await lane.create([{"id": str(number), "hold": number >= 4} for number in range(20)])
            async with lane.gateway(runner) as worker:
                await until(lambda: len(runner.holding) == 4)
                process.kill()
                runner.gate.set()
                await until(lambda: "Redis is unreachable" in caplog.text)
                assert worker.in_flight == 4, "their results are not given up"
                process.start()
                job = await lane.ended(job)
            assert job.counts == Counts(20, succeeded=20)
            assert Counter(runner.ran) == Counter(map(str, range(20)))
            assert caplog.text.count("Redis is unreachable") == 1


@pytest.mark.parametrize("in_files", [True, False])
async def test_a_job_whose_end_a_fail_over_loses_ends_again_with_all_results(tmp_path: Path, in_files: bool) -> None:
    """The replica becomes the primary as it was before the end, which the old primary has until it is killed."""
    sent = [*rows(5), {"id": "last", "hold": True}]
    with (
        RedisNode(tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary,
        RedisNode(tmp_path / "replica", "--replicaof", HOST, str(primary.port)) as replica,
    ):

        def is_behind() -> bool:
            """ROLE: offset of a primary; state and offset of a replica."""
            state, offset = replica.ask("ROLE")[3:5]
            return bool(state != b"connected" or offset < primary.ask("ROLE")[1])

        async with (
            opened(f"redis://{HOST}:{primary.port}") as old,
            opened(f"redis://{HOST}:{replica.port}") as new,
        ):
            before, after = Lane(tmp_path, stores=stores(old)), Lane(tmp_path, stores=stores(new))
            runner = FakeRunner()
            job = await before.create(sent, in_files=in_files)
            async with before.gateway(runner):
                await until_holding(runner, {"last"})
                await until(lambda: _has_succeeded(before, job, 5))
                wait_for(lambda: not is_behind(), "the replica does not follow")
                replica.ask("REPLICAOF", "NO", "ONE")
                runner.gate.set()
                assert (await before.ended(job)).state == "completed"
                before.now_s += UNDO_S
                await before.worker(runner).sweep()
            primary.kill()
            assert (await after.found(job)).state == "in_progress"
            after.now_s += after.settings.lease_s + 1.0
            async with after.gateway(runner):
                job = await after.ended(job)
            assert (job.state, job.counts) == ("completed", Counts(6, succeeded=6))
            assert await after.results(job) == [{"id": row["id"], "ran": True} for row in sent]
            assert await after.swept() == ([] if in_files else [f"a/{job.id}/results.jsonl"])


async def _has_succeeded(lane: Lane, job: Job, lines: int) -> bool:
    return (await lane.found(job)).counts.succeeded == lines
