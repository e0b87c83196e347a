"""What the batch lane itself costs: lines per second through one gateway with a runner that answers at once, and bytes
of Redis for a line that waits and for one that is done.

    python -m tests.bench.batch_store [--lines 5000] [--in-flight 32]

Rows have 2 KB and prompts of 60 blocks, of which 50 are one of 20 documents. Results are on disk before they count.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import uvloop
from redis.asyncio import Redis

from engine.protocol import DIGEST_BYTES
from gateway.config import BatchSettings
from gateway.queues.batch.base import Job, LinePlan
from gateway.queues.batch.redis_jobs import RedisJobs, RedisScripts
from gateway.queues.batch.redis_lines import RedisLines
from gateway.storage.redis_calls import connect
from tests.fakes.batches import FakeRunner, Lane
from tests.fakes.redis_process import RedisProcess
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

DOCUMENTS, SHARED_BLOCKS, OWN_BLOCKS, ROW_BYTES = 20, 50, 10, 2000
LIMIT_S = 600.0


class Runner(FakeRunner):
    """Answers at once."""

    def __init__(self) -> None:
        super().__init__()
        source = random.Random(1)
        self._documents = [source.randbytes(DIGEST_BYTES * SHARED_BLOCKS) for _ in range(DOCUMENTS)]

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        told = orjson.loads(row)
        own = random.Random(told["id"]).randbytes(DIGEST_BYTES * OWN_BLOCKS)
        return LinePlan("m", self._documents[told["document"]] + own, 1000)


async def used(redis: Redis) -> int:
    """Bytes of all keys."""
    sizes: list[Any] = [await redis.memory_usage(key, samples=0) for key in await redis.keys("*")]
    return sum(sizes)


async def run(root: Path, lines: int, in_flight: int) -> None:
    settings = tuned(BatchSettings, max_in_flight=in_flight, max_lines=lines, min_free_bytes=0, poll_s=0.02)
    source, fill = random.Random(2), "x" * ROW_BYTES
    rows = [{"id": str(number), "document": source.randrange(DOCUMENTS), "fill": fill} for number in range(lines)]
    with RedisProcess(root, "--appendonly", "yes") as process:
        async with connect(process.url, 5.0) as redis:
            scripts = RedisScripts(redis, timeout_s=5.0)
            lane = Lane(root / "data", settings, lambda one: (RedisJobs(scripts, one), RedisLines(scripts)))
            job, runner = await lane.create(rows), Runner()

            async def all_done() -> bool:
                return (await lane.lines.progress(job.id)).done == lines

            async def has_ended() -> bool:
                return (await lane.found(job)).has_ended

            empty, began = await used(redis), time.perf_counter()
            planner = lane.worker(runner)
            await planner._steps.advance(job.id)
            planned_s, waiting = time.perf_counter() - began, await used(redis)
            began = time.perf_counter()
            async with lane.gateway(runner):
                await until(all_done, LIMIT_S)
                ran_s, done = time.perf_counter() - began, await used(redis)
                began = time.perf_counter()
                await until(has_ended, LIMIT_S)
                written_s = time.perf_counter() - began
    print(f"validated, planned and queued  {lines / planned_s:8.0f} lines/s")
    print(f"run                            {lines / ran_s:8.0f} lines/s, {in_flight} at a time")
    print(f"written                        {lines / written_s:8.0f} lines/s")
    print(f"Redis                          {(waiting - empty) / lines:8.0f} bytes for a line that waits")
    print(f"                               {(done - empty) / lines:8.0f} bytes for a line that is done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--in-flight", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder:
        uvloop.run(run(Path(folder), args.lines, args.in_flight))


if __name__ == "__main__":
    main()
