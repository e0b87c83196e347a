"""What is over, and what nobody asks for any more, is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.queues.batch.base import Job
from tests.fakes.batches import FakeRunner, Lane, rows


@pytest.fixture
def lane(tmp_path: Path) -> Lane:
    return Lane(tmp_path)


async def test_jobs_are_forgotten_after_a_time_and_folders_of_none_are_swept_away(lane: Lane) -> None:
    job = await lane.create(rows(1))
    orphan = Job("0" * 31 + "1", "a", "openai", "/v1/x", 0.0, 0.0)
    lane.folder.make(orphan).write_bytes(b"x")
    late = Job("0" * 31 + "2", "a", "anthropic", "/v1/x", 0.0, 0.0, state="completed")
    stored = await lane.jobs.put(late)
    assert stored is not None
    await lane.jobs.put(stored, forget_ms=10**15)
    lane.folder.make(late).with_name("results.jsonl").write_bytes(b"x")
    lane.folder.append(late, "late", b"x")
    worker = lane.worker(FakeRunner())
    await worker.sweep()
    assert lane.folder.jobs() == [("a", late.id), ("a", job.id)]
    assert f"a/{late.id}/late.spool" not in lane.on_disk()
    async with lane.gateway(FakeRunner()):
        await lane.ended(job)
    await worker.sweep()
    assert f"a/{job.id}/input.jsonl" in lane.on_disk(), "Redis may lose its end"
    assert await lane.swept() == [f"a/{late.id}/results.jsonl"]
    assert await lane.store.find("a", "openai", job.id) is not None
    lane.now_s += lane.settings.keep_s
    await worker.sweep()
    assert await lane.store.find("a", "openai", job.id) is None
