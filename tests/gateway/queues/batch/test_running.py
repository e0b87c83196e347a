"""Lines that run: how many, whose, in which order, how often, and on which gateway."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.queues.batch.base import NO_USAGE, Counts, Job, LineResult
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.lines import Claim, Result
from gateway.queues.batch.pauses import Pauses
from tests.fakes.batches import QUICK, FakeRunner, Lane, Life, rows, until_holding
from tests.fakes.waiting import until


@pytest.fixture
def lane(tmp_path: Path) -> Lane:
    return Lane(tmp_path)


async def test_lines_that_share_a_prefix_run_together_across_jobs(tmp_path: Path) -> None:
    lane, runner = Lane(tmp_path, QUICK.model_copy(update={"max_in_flight": 1})), FakeRunner()
    made = [await lane.create([{"id": f"{job}{n}", "prefix": n % 3} for n in range(6)]) for job in "ab"]
    steps = lane.worker(runner)
    for job in made:
        assert await steps._steps.advance(job.id)
    async with lane.gateway(runner):
        for job in made:
            await lane.ended(job)
    prefixes = [int(name[1:]) % 3 for name in runner.ran]
    assert prefixes == sorted(prefixes)
    assert len(prefixes) == 12


async def test_rows_of_lines_that_run_are_bounded_in_bytes(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.queues.batch.running.ROW_BYTES", 3_000)
    runner = FakeRunner()
    job = await lane.create([*rows(6, hold=True, text="a" * 1_000), {"id": "large", "text": "a" * 9_000}])
    async with lane.gateway(runner) as worker:
        for _ in range(3):
            await until(lambda: len(runner.holding) == 2)
            await until(lambda: worker.in_flight == min(4, 7 - sum(runner.tries.values()) + 2))
            assert len(runner.holding) == 2
            assert worker._running._apart.row_bytes < 3_000
            first, runner.gate = runner.gate, asyncio.Event()
            runner.holding.clear()
            first.set()
        assert (await lane.ended(job)).counts == Counts(7, succeeded=7)
        assert worker._running._apart.row_bytes == 0


async def test_what_an_engine_failed_is_tried_again_until_that_is_its_result(lane: Lane) -> None:
    runner = FakeRunner()
    job = await lane.create([{"id": "twice", "again": 2}, {"id": "always", "again": 99}, {"id": "later", "later": 5}])
    async with lane.gateway(runner):
        job = await lane.ended(job)
    assert job.counts == Counts(3, succeeded=2, failed=1)
    assert runner.tries == {"twice": 3, "always": 3, "later": 6}


async def test_a_model_without_engines_is_asked_for_again_and_with_single_lines(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.queues.batch.steps.AWAY_S", 0.01)
    runner = FakeRunner()
    job = await lane.create(
        [*rows(66), {"id": "unplanned", "away": 3}, *({"id": f"l{n}", "later": 2} for n in range(4))]
    )
    async with lane.gateway(runner) as worker:
        job = await lane.ended(job)
        assert not worker._running.pauses.is_doubted("m")
        figures = worker.figures()
        assert (figures["succeeded"], figures["put_back"], figures["in_flight"]) == (71, 8, 0)
        assert figures["paused_models"] == 0
    assert job.counts == Counts(71, succeeded=71)
    assert runner.asked["unplanned"] == 3
    assert max(runner.tries.values()) == 3


async def test_lines_of_a_model_that_had_no_room_begin_one_by_one_until_one_is_answered(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, asked = lane.lines.claim, []

    async def claimed(owner: str, model: str, most: int, until_ms: int) -> list[Claim]:
        asked.append(most)
        return await claim(owner, model, most, until_ms)

    monkeypatch.setattr(lane.lines, "claim", claimed)
    runner = FakeRunner()
    job = await lane.create(rows(8, hold=True, later=1))
    async with lane.gateway(runner):
        await until(lambda: len(runner.holding) == 4)
        first, runner.gate = runner.gate, asyncio.Event()
        runner.holding.clear()
        first.set()  # there was no room for any of the four
        await until(lambda: len(runner.holding) == 4)
        assert asked == [4, 1, 1, 1, 1]
        runner.gate.set()
        assert (await lane.ended(job)).counts == Counts(8, succeeded=8)


class OneEngine(FakeRunner):
    """Lines run on one engine. One of them ends it, and with it all that run."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, asyncio.Future[None]] = {}
        self.most_died = 0

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        name = orjson.loads(row)["id"]
        self.tries[name] += 1
        died = self.running[name] = asyncio.get_running_loop().create_future()
        for _ in range(5):  # others come meanwhile
            await asyncio.sleep(0)
        if name == "poison":
            self.most_died = len(self.running)
            for one in self.running.values():
                one.set_result(None)
        del self.running[name]
        if died.done():
            return LineResult(ok=False, body=b"{}", retry="died", retry_after_s=0.001)
        return LineResult(ok=True, body=orjson.dumps({"id": name}))


class KilledTwice(FakeRunner):
    """No line ends the engine. An operator kills it when four lines run, and once more when one of them runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.killed: list[int] = []
        self.first = asyncio.Event()

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        name = orjson.loads(row)["id"]
        self.tries[name] += 1
        self.running += 1
        if self.running == 4 or (self.tries[name] == 2 and len(self.killed) == 1):
            self.killed.append(self.running)
            self.first.set()
            died = True
        else:
            died = not self.first.is_set()
            await self.first.wait()
        self.running -= 1
        return LineResult(ok=not died, body=b"{}", retry="died" if died else "no", retry_after_s=0.001)


async def test_a_line_that_ends_two_engines_is_failed_and_those_that_ran_with_it_are_not(lane: Lane) -> None:
    runner = OneEngine()
    job = await lane.create([*rows(6), {"id": "poison"}, *({"id": f"l{n}"} for n in range(6))])
    async with lane.gateway(runner):
        job = await lane.ended(job)
    assert runner.tries["poison"] == 2
    assert job.counts == Counts(13, succeeded=12, failed=1)
    assert runner.most_died == 1, "the second time it was alone"


async def test_a_second_kill_by_an_operator_fails_at_most_the_line_that_ran_alone(lane: Lane) -> None:
    runner = KilledTwice()
    job = await lane.create(rows(8))
    async with lane.gateway(runner):
        job = await lane.ended(job)
    assert runner.killed == [4, 1]
    assert job.counts == Counts(8, succeeded=7, failed=1)


async def test_a_line_that_ends_its_gateway_each_time_is_failed(lane: Lane) -> None:
    runner = FakeRunner()
    job = await lane.create(rows(2))
    steps = lane.worker(runner)
    assert await steps._steps.advance(job.id)
    while await steps._steps.advance(job.id) and not await lane.lines.models(1):
        pass
    (claim,) = await lane.lines.claim("dead", "m", 1, 0)
    for number in range(lane.settings.max_attempts - 1):
        await lane.lines.take_over(f"dead {number}", 1, 0, 0, 1)
    async with lane.gateway(runner):
        job = await lane.ended(job)
    assert job.counts == Counts(2, succeeded=1, failed=1)
    assert str(claim.ref.line) not in runner.ran


async def test_two_gateways_share_the_work_and_one_that_closes_leaves_its_lines_to_the_other(lane: Lane) -> None:
    one, other = FakeRunner(), FakeRunner()
    job = await lane.create(rows(12, hold=True))
    async with lane.gateway(other):
        async with lane.gateway(one):
            await until(lambda: len(one.holding) == len(other.holding) == 4)
            assert not one.holding & other.holding
        other.gate.set()
        job = await lane.ended(job)
    assert job.counts == Counts(12, succeeded=12)
    assert set(other.ran) >= one.holding


async def test_lines_of_a_gateway_that_was_killed_run_elsewhere_when_its_leases_are_over(lane: Lane) -> None:
    dead, runner, life = FakeRunner(), FakeRunner(), Life()
    job = await lane.create(rows(6, hold=True))
    async with lane.gateway(dead, life):
        await until(lambda: len(dead.holding) == 4)
        life.ended = True
    runner.gate.set()
    async with lane.gateway(runner) as worker:
        await until(lambda: worker.figures()["succeeded"] == 2)  # else its own leases were over as well
        lane.now_s += 60.0
        job = await lane.ended(job)
        assert worker.figures()["taken_over"] == 4
    assert job.counts == Counts(6, succeeded=6)
    assert Counter(runner.ran) == Counter(map(str, range(6)))


async def test_a_gateway_stops_what_somebody_else_has_by_now(tmp_path: Path) -> None:
    lane = Lane(tmp_path, QUICK.model_copy(update={"lease_s": 0.03}))
    runner = FakeRunner()
    job = await lane.create(rows(1, hold=True))
    async with lane.gateway(runner) as worker:
        await until_holding(runner, {"0"})
        lane.now_s += 1.0
        (claim,) = await lane.lines.take_over("other", 1, round(lane.now_s * 1e3), round(lane.now_s * 1e3) + 10**6, 1)
        await until(lambda: worker.in_flight == 0)
        assert await lane.lines.complete(claim, Result("failed"), NO_USAGE) == 1
        job = await lane.ended(job)
    assert await lane.results(job) == [{"id": "0", "why": "failed"}], "a result that was lost has one all the same"


async def test_a_line_that_is_claimed_once_more_while_leases_are_renewed_goes_on(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner()
    job = await lane.create([{"id": "1", "hold": True, "later": 1}])

    async def renewed_too_late(*_: Any) -> list[Any]:
        runner.gate.set()  # it waits again, and is claimed
        runner.gate.clear()
        await until(lambda: runner.tries["1"] == 2)
        return []

    async with lane.gateway(runner) as worker:
        await until_holding(runner, {"1"})
        monkeypatch.setattr(lane.lines, "renew", renewed_too_late)
        await worker._running.renew()
        runner.gate.set()
        assert (await lane.ended(job)).counts == Counts(1, succeeded=1)


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_disk_that_is_full_makes_lines_wait_and_none_runs_once_that_is_known(
    in_time: bool, lane: Lane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.queues.batch.running.FULL_S", 0.05)
    full, refused = [True], asyncio.Event()
    loop = asyncio.get_running_loop()

    def check_room(self: JobFolder, num_bytes: int) -> None:
        if full[0] and (in_time or num_bytes):
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, "full")

    job = await lane.create(rows(3))
    steps = lane.worker(FakeRunner())
    assert await steps._steps.advance(job.id)
    monkeypatch.setattr(JobFolder, "check_room", check_room)
    runner = FakeRunner()
    async with lane.gateway(runner):
        async with asyncio.timeout(30):
            await refused.wait()
        assert (await lane.found(job)).counts.processing == 3
        assert bool(runner.ran) != in_time
        full[0] = False
        assert (await lane.ended(job)).counts == Counts(3, succeeded=3)
    assert "no room for results" in caplog.text


async def test_a_model_whose_lines_take_long_leaves_places_to_the_lines_of_others(lane: Lane) -> None:
    runner = FakeRunner()
    slow = await lane.create([row | {"model": "a"} for row in rows(9, hold=True)])
    quick = await lane.create([{"id": f"b{number}", "model": "b"} for number in range(9)])
    steps = lane.worker(runner)
    for job in (slow, quick):
        assert await steps._steps.advance(job.id)
    async with lane.gateway(runner):
        await until(lambda: sum(name.startswith("b") for name in runner.ran) == 9)
        assert len(runner.holding) <= 4
        runner.gate.set()
        assert (await lane.ended(slow)).counts == Counts(9, succeeded=9)


async def test_a_gateway_that_stops_puts_back_what_it_was_about_to_begin(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, claimed = lane.lines.claim, asyncio.Event()

    async def deaf(*args: Any) -> list[Claim]:
        """As redis-py, which may drop a cancellation that comes together with the answer."""
        found = await claim(*args)
        if found:
            claimed.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return found

    job, runner = await lane.create(rows(4, hold=True)), FakeRunner()
    with monkeypatch.context() as patched:
        patched.setattr(lane.lines, "claim", deaf)
        worker = lane.worker(runner)
        worker.start()
        await claimed.wait()
        await worker.close()
    assert worker.in_flight == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "batch line"]
    runner.gate.set()
    async with lane.gateway(runner):
        assert (await lane.ended(job)).counts == Counts(4, succeeded=4)


async def test_names_that_no_engine_has_take_no_place_from_a_model_that_is_served(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.queues.batch.running.MODELS_AT_ONCE", 4)
    now, runner = [0.0], FakeRunner(has_models=True)
    worker = lane.worker(runner, clock=lambda: now[0])
    worker._running.pauses = Pauses(lambda: now[0], most=3)
    made_up = await lane.create([{"id": f"x{number}", "model": f"x{number}", "later": 99} for number in range(30)])
    served = await lane.create([{"id": f"s{number}", "model": "s"} for number in range(40)])
    for job in (served, made_up):
        assert await worker._steps.advance(job.id)
    worker.start()
    try:

        async def all_served() -> bool:
            now[0] += 1.0
            return (await lane.found(served)).counts.succeeded == 40

        await until(all_served, 30.0)
        assert worker.figures()["paused_models"] <= 3
    finally:
        await worker.close()
