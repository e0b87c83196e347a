"""The batch lane as a whole, with a runner that answers at once: every line one result, whoever is killed when."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import BadRequestError, NotFoundError, QuotaError
from gateway.queues.batch import steps
from gateway.queues.batch.base import Counts, Job, JobError, LinePlan
from gateway.queues.batch.lines import Result
from gateway.queues.batch.steps import LOST_S, PATIENCE_S
from gateway.queues.batch.worker import STEPS_AT_ONCE
from tests.fakes.batches import QUICK, START_S, FakeRunner, Lane, Life, rows, until_holding
from tests.fakes.waiting import until


@pytest.fixture
def lane(tmp_path: Path) -> Lane:
    return Lane(tmp_path)


async def test_a_job_goes_through_all_its_states_and_leaves_nothing_but_its_files(lane: Lane) -> None:
    made = [*rows(70), {"id": "x", "fail": True}]
    job = await lane.create(made, metadata={"k": "v"}, namespace="n", output_ttl_s=3600.0)
    assert (job.state, job.counts.total) == ("validating", 0)
    async with lane.gateway(FakeRunner()):
        job = await lane.ended(job)
    assert job.state == "completed"
    assert job.counts == Counts(71, succeeded=70, failed=1)
    assert job.usage.prompt_tokens == 3 * 71
    assert list(job.reached) == ["validating", "in_progress", "finalizing", "completed"]
    assert (job.metadata, job.namespace, job.model) == ({"k": "v"}, "n", "m")
    assert [row["id"] for row in await lane.file("a", job.output_file_id)] == [row["id"] for row in made[:-1]]
    assert await lane.file("a", job.error_file_id) == [{"id": "x", "ran": True}]
    output = await lane.files.find("a", str(job.output_file_id))
    assert output is not None
    assert (output.purpose, output.filename) == ("batch_output", f"batch_{job.id}_output.jsonl")
    assert output.expires_s == output.created_s + 3600.0
    assert await lane.swept() == []


async def test_a_job_whose_rows_were_sent_has_results_to_read_instead_of_files(lane: Lane) -> None:
    draft = Job("", "a", "anthropic", "/v1/messages", counts=Counts(3))
    async with lane.store.input("a") as sent:
        for piece in (b'{"id":', b'"1"}\n{"id":"2","fail":true}', b'\n{"id":"3"}\n'):
            await sent.write(piece)
        job = await lane.store.create(draft, sent)
    assert job.counts.total == 3
    async with lane.store.results("a", "anthropic", job.id) as none:
        assert none is None
    async with lane.gateway(FakeRunner()):
        job = await lane.ended(job)
    assert (job.state, job.output_file_id, job.error_file_id) == ("completed", None, None)
    assert [row["id"] for row in await lane.results(job)] == ["1", "2", "3"]
    assert await lane.swept() == [f"a/{job.id}/results.jsonl"]
    assert not await lane.store.delete("b", "anthropic", job.id)
    assert await lane.store.delete("a", "anthropic", job.id)
    assert await lane.store.find("a", "anthropic", job.id) is None
    assert lane.on_disk() == []


async def test_few_rows_and_results_are_in_memory_at_a_time(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 200
    monkeypatch.setattr(steps, "CHUNK_BYTES", most)
    read_lines, read = lane.folder.read_lines, lane.folder.read
    at_a_time: list[list[int]] = []

    def lines_read(*args: Any) -> list[bytes]:
        found = read_lines(*args)
        at_a_time.append([len(row) for row in found])
        return found

    def results_read(*args: Any) -> list[bytes | None]:
        found = read(*args)
        at_a_time.append([len(body or b"") for body in found])
        return found

    monkeypatch.setattr(lane.folder, "read_lines", lines_read)
    monkeypatch.setattr(lane.folder, "read", results_read)
    made = [*rows(40), {"id": "x" * 2 * most}, *rows(3, prefix=1), {"id": "y", "fail": True}]
    job = await lane.create(made)
    async with lane.gateway(FakeRunner()):
        job = await lane.ended(job)
    told = [*await lane.file("a", job.output_file_id), *await lane.file("a", job.error_file_id)]
    assert [row["id"] for row in told] == [row["id"] for row in made]
    assert all(sum(sizes) <= most or len(sizes) == 1 for sizes in at_a_time)
    assert any(len(sizes) > 1 for sizes in at_a_time)


async def test_rows_that_became_no_job_are_gone(lane: Lane) -> None:
    async with lane.store.input("a") as sent:
        await sent.write(b"x" * 3_000_000)
        assert len(lane.on_disk()) == 1
    assert lane.on_disk() == []
    with pytest.raises(NotFoundError):
        await lane.store.create(Job("", "a", "openai", "/v1/x"), "0" * 32)
    assert lane.folder.jobs() == []


async def test_a_job_goes_on_without_the_file_that_it_came_from(lane: Lane) -> None:
    job = await lane.create(rows(3))
    assert job.input_file_id is not None
    assert await lane.files.delete("a", job.input_file_id)
    async with lane.gateway(FakeRunner()):
        assert (await lane.ended(job)).counts == Counts(3, succeeded=3)


async def test_a_wrong_input_fails_the_job_with_its_lines(lane: Lane) -> None:
    job = await lane.create(b'{"id":"1"}\n\nbad\n')
    async with lane.gateway(FakeRunner()):
        job = await lane.ended(job)
    assert (job.state, job.errors) == ("failed", (JobError("invalid_json_line", "Bad.", None, 3),))
    assert await lane.files.all_of("a") == [await lane.files.find("a", str(job.input_file_id))]
    assert await lane.swept() == []


async def test_a_fault_of_ours_costs_its_job_or_its_line_and_is_logged(
    lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    job = await lane.create(rows(1))
    async with lane.gateway(FakeRunner(is_broken=True)):
        job = await lane.ended(job)
    assert (job.state, job.errors[0].code) == ("failed", "server_error")
    job, runner = await lane.create([*rows(2), {"id": "b", "broken": True}]), FakeRunner()
    async with lane.gateway(runner):
        job = await lane.ended(job)
    assert (job.state, job.counts) == ("completed", Counts(3, succeeded=2, failed=1))
    assert Counter(runner.ran) == {"0": 1, "1": 1, "b": lane.settings.max_attempts}
    assert await lane.file("a", job.error_file_id) == [{"id": "b", "why": "failed"}]
    for told in ("could not be checked", "could not be planned", "could not be run"):
        assert told in caplog.text


async def test_a_job_whose_model_nobody_serves_says_so_until_somebody_does(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.queues.batch.steps.AWAY_S", 0.01)
    runner = FakeRunner()
    job = await lane.create([{"id": "a", "away": 1_000_000}, {"id": "b", "hold": True}])
    async with lane.gateway(runner):

        async def told() -> bool:
            return bool((await lane.found(job)).errors)

        await until(told)
        found = await lane.found(job)
        assert (found.state, [one.code for one in found.errors]) == ("in_progress", ["model_not_available"])
        runner.asked["a"] = 1_000_000  # it is there
        await until_holding(runner, {"b"})
        assert (await lane.found(job)).errors == ()
        runner.gate.set()
        assert (await lane.ended(job)).counts == Counts(2, succeeded=2)


async def test_a_model_that_nobody_serves_does_not_keep_a_job_from_its_other_models(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.queues.batch.steps.AWAY_S", 0.01)
    runner = FakeRunner(has_models=True)
    job = await lane.create([{"id": "a", "away": 1_000_000, "later": 3}, {"id": "b"}])
    async with lane.gateway(runner):
        await until(lambda: runner.asked["a"] >= 3)
        assert runner.ran == []
        lane.now_s += PATIENCE_S
        assert (await lane.ended(job)).counts == Counts(2, succeeded=2)
    assert runner.tries == {"a": 4, "b": 1}


async def test_cancelling_ends_what_waits_at_once_and_lets_what_runs_end(lane: Lane) -> None:
    runner = FakeRunner()
    job = await lane.create(rows(10, hold=True))
    async with lane.gateway(runner):
        await until(lambda: len(runner.holding) == 4)
        cancelling = await lane.store.cancel("a", "openai", job.id)
        assert cancelling is not None
        assert cancelling.state == "cancelling"
        assert await lane.store.cancel("b", "openai", job.id) is None

        async def dropped() -> bool:
            return (await lane.found(job)).counts.cancelled == 6

        await until(dropped)
        with pytest.raises(BadRequestError):
            await lane.store.delete("a", "openai", job.id)
        runner.gate.set()
        job = await lane.ended(job)
    assert (job.state, job.counts) == ("cancelled", Counts(10, succeeded=4, cancelled=6))
    assert len(runner.ran) == 4
    found = await lane.results(job)
    assert Counter(row.get("why") for row in found) == {None: 4, "cancelled": 6}
    assert len({row["id"] for row in found}) == 10
    with pytest.raises(BadRequestError):
        await lane.store.cancel("a", "openai", job.id)


async def test_a_job_that_is_cancelled_before_it_began_has_results_for_all_its_lines(lane: Lane) -> None:
    async with lane.store.input("a") as sent:
        await sent.write(b'{"id":"1"}\n{"id":"2"}\n')
        job = await lane.store.create(Job("", "a", "anthropic", "/v1/messages"), sent)
    await lane.store.cancel("a", "anthropic", job.id)
    runner = FakeRunner()
    async with lane.gateway(runner):
        job = await lane.ended(job)
    assert (job.state, job.counts, runner.ran) == ("cancelled", Counts(2, cancelled=2), [])
    assert [row["why"] for row in await lane.results(job)] == ["cancelled"] * 2


async def test_when_its_time_is_over_what_has_not_begun_expires_and_what_is_done_is_kept(lane: Lane) -> None:
    runner = FakeRunner()
    job = await lane.create([*rows(3), *({"id": f"h{n}", "hold": True} for n in range(6))], expires_s=START_S + 100.0)
    async with lane.gateway(runner):
        await until(lambda: len(runner.holding) == 4)
        lane.now_s += 50.0
        assert (await lane.found(job)).state == "in_progress"
        lane.now_s += 50.0
        runner.gate.set()
        job = await lane.ended(job)
    assert job.state == "expired"
    assert job.counts.succeeded >= 3 + 4
    assert job.counts.processing == 0
    assert len({row["id"] for row in await lane.results(job)}) == 9


async def test_a_job_of_which_nothing_ran_has_no_files(lane: Lane) -> None:
    job = await lane.create(rows(3), expires_s=START_S + 10.0)
    lane.now_s += 10.0
    async with lane.gateway(FakeRunner()):
        job = await lane.ended(job)
    assert (job.state, job.counts) == ("expired", Counts(3, expired=3))
    assert (job.output_file_id, job.error_file_id) == (None, None)


class SlowPlanner(FakeRunner):
    """Planning a line takes a while by `clock`; for nobody who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.planned: list[str] = []
        self.planning = 0
        self.most_at_once = 0

    def clock(self) -> float:
        return self.now_s

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        self.planning += 1
        self.most_at_once = max(self.most_at_once, self.planning)
        await asyncio.sleep(0)
        self.now_s += 0.01
        self.planned.append(job.tenant)
        self.planning -= 1
        return await super().plan(job, row)


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("comes_back", [True, False])
async def test_results_that_are_missing_are_looked_for_again_before_they_are_given_up(
    lane: Lane, monkeypatch: pytest.MonkeyPatch, in_files: bool, comes_back: bool
) -> None:
    """A fail-over between the counts of a job and its results: the new primary has not heard of the last lines yet."""
    monkeypatch.setattr("gateway.queues.batch.steps.AWAY_S", 0.01)
    whole, looks = lane.lines.results, 0

    async def results(job: str, start: int, count: int) -> list[Result | None]:
        nonlocal looks
        looks += 1
        lane.now_s += LOST_S if looks == 1 else 0  # that it was held up before, for want of disk space, say
        found = await whole(job, start, count)
        return found if comes_back and looks > 3 else [*found[:-1], None]

    monkeypatch.setattr(lane.lines, "results", results)
    job = await lane.create(rows(3), in_files=in_files)
    async with lane.gateway(FakeRunner()):
        await until(lambda: looks >= 3)
        assert comes_back or not (await lane.found(job)).has_ended
        lane.now_s += 0 if comes_back else LOST_S
        job = await lane.ended(job)
    if comes_back:
        assert (job.state, job.counts) == ("completed", Counts(3, succeeded=3))
    else:
        assert (job.state, [error.code for error in job.errors]) == ("failed", ["server_error"])
    assert [row["id"] for row in await lane.results(job)] == (["0", "1", "2"] if comes_back else [])


async def test_large_jobs_of_one_tenant_do_not_keep_the_job_of_another_from_being_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, runner = Lane(tmp_path), SlowPlanner()
    for _ in range(STEPS_AT_ONCE + 1):
        await lane.create(rows(500))
    other = await lane.create(rows(1), tenant="b")
    worker = lane.worker(runner, clock=runner.clock)
    advance, begun = worker._steps.advance, []

    async def noted(job_id: str) -> bool:
        begun.append(job_id)
        return await advance(job_id)

    monkeypatch.setattr(worker._steps, "advance", noted)
    worker.start()
    await lane.ended(other)
    await worker.close()
    assert begun.index(other.id) <= STEPS_AT_ONCE, "the first step that is free is for the other tenant"
    assert runner.most_at_once == 1, "the rest of the event loop is for others"


async def test_a_tenant_without_room_for_the_results_is_told_and_gets_them_when_there_is(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.queues.batch.steps.HELD_UP_S", 0.05)
    job = await lane.create(rows(3))
    limits = lane.file_folder._settings
    lane.file_folder._settings = limits.model_copy(update={"max_files": 1})
    async with lane.gateway(FakeRunner()):

        async def held_up() -> bool:
            return bool((await lane.found(job)).errors)

        await until(held_up)
        found = await lane.found(job)
        assert (found.state, found.errors[0].code) == ("finalizing", "quota_exceeded")
        assert found.output_file_id is None
        lane.file_folder._settings = limits
        job = await lane.ended(job)
    assert (job.state, job.errors, len(await lane.results(job))) == ("completed", (), 3)


async def test_a_tenant_with_too_many_lines_has_its_job_failed(tmp_path: Path) -> None:
    lane = Lane(tmp_path, QUICK.model_copy(update={"max_waiting_lines": 5, "max_jobs": 2}))
    first, runner = await lane.create(rows(4, hold=True)), FakeRunner()
    async with lane.gateway(runner):
        await until(lambda: len(runner.holding) == 4)
        second = await lane.create(rows(2, hold=True))
        second = await lane.ended(second)
        assert (second.state, second.errors[0].code) == ("failed", "too_many_requests")
        runner.gate.set()
        await lane.ended(first)


async def test_a_tenant_with_too_many_jobs_gets_none_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    lane = Lane(tmp_path, QUICK.model_copy(update={"max_jobs": 1}))
    await lane.create(rows(1))
    with pytest.raises(QuotaError):
        await lane.create(rows(1))
    await lane.create(rows(1), "b")
    assert len(lane.folder.jobs()) == 2


async def test_a_tenant_whose_jobs_have_all_the_bytes_they_may_gets_no_more_until_some_are_gone(tmp_path: Path) -> None:
    lane = Lane(tmp_path, QUICK.model_copy(update={"max_bytes": 50}))
    draft = Job("", "a", "anthropic", "/v1/messages", counts=Counts(2))
    async with lane.store.input("a") as sent:
        await sent.write(b'{"id":"1"}\n{"id":"2","text":"' + b"x" * 50 + b'"}\n')
        job = await lane.store.create(draft, sent)
    with pytest.raises(QuotaError, match="max_bytes"):
        async with lane.store.input("a"):
            pass
    with pytest.raises(QuotaError, match="max_bytes"):
        await lane.create(rows(1))
    assert [job_id for _, job_id in lane.folder.jobs()] == [job.id]
    await lane.create(rows(1), tenant="b")
    async with lane.gateway(FakeRunner()):
        job = await lane.ended(job)
    assert await lane.store.delete("a", "anthropic", job.id)
    async with lane.store.input("a"):
        pass


async def test_pages_say_whether_there_are_more(lane: Lane) -> None:
    made = []
    for _ in range(3):
        made.append((await lane.create(rows(1))).id)
        lane.now_s += 1

    async def page(**named: Any) -> tuple[list[int], bool]:
        found, more = await lane.store.page("a", "openai", **named)
        return [made.index(job.id) for job in found], more

    assert await page(limit=2) == ([2, 1], True)
    assert await page(limit=2, after=made[1]) == ([0], False)
    assert await page(limit=1, before=made[0]) == ([1], True)
    assert await page(limit=2, before=made[0]) == ([2, 1], False)


MIXED = [*rows(5), {"id": "f", "fail": True}, {"id": "again", "again": 1}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_files", "behind", "stride"),
    [(True, True, 1), (True, False, 3), (False, True, 3), (False, False, 3)],
    ids=["files-behind", "files-before", "results-behind", "results-before"],
)
async def test_a_gateway_may_be_cut_off_at_any_call_and_another_one_goes_on(
    tmp_path: Path, in_files: bool, behind: bool, stride: int
) -> None:
    dies_at, survived = 0, False
    while not survived:
        dies_at += stride
        # A line may be tried in vain by each gateway, and end the lease of one.
        lane = Lane(tmp_path / str(dies_at), QUICK.model_copy(update={"max_attempts": 4}))
        job = await lane.create(MIXED, in_files=in_files)
        life = Life(dies_at, behind=behind)
        async with lane.gateway(FakeRunner(), life):

            async def over(lane: Lane = lane, life: Life = life) -> bool:
                return life.ended or not await lane.jobs.open()

            await until(over)
        survived = not life.ended
        lane.now_s += 61.0
        async with lane.gateway(FakeRunner()):
            job = await lane.ended(job)
        assert job.counts.succeeded == 6, dies_at
        found = Counter(row["id"] for row in await lane.results(job))
        assert found == Counter(row["id"] for row in MIXED), f"killed at call {dies_at}"
        expected = 3 if in_files else 1
        assert len(await lane.files.all_of("a")) == expected, "input, output, errors; nobody's file is none"
        assert await lane.swept() == ([] if in_files else [f"a/{job.id}/results.jsonl"])
    assert dies_at > 30, "it was cut off often"
