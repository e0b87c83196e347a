"""A batch lane without engines: jobs and lines of memory or Redis, a runner that answers at once, a clock that is set,
and gateways that are cut off at any call."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from engine.protocol import DIGEST_BYTES
from gateway.config import BatchSettings, FileSettings
from gateway.errors import OverloadedError
from gateway.files.folder import Folder
from gateway.files.store import FileStore
from gateway.queues.batch.base import Checked, Job, JobError, Line, LinePlan, LineResult, Unrun
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import MemoryJobs
from gateway.queues.batch.lines import MemoryLines
from gateway.queues.batch.redis_jobs import RedisJobs
from gateway.queues.batch.redis_lines import RedisLines
from gateway.queues.batch.store import BatchStore, Stores
from gateway.queues.batch.worker import UNDO_S, Worker
from gateway.types import StoredFile, Usage
from tests.fakes.panic import Panic
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

START_S = 1_790_000_000.0
LIMIT_S = 30.0
QUICK = tuned(BatchSettings, poll_s=0.01, max_in_flight=4, lease_s=60.0, min_free_bytes=0, max_attempts=3)


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    """Of a job; see FakeRunner."""
    return [{"id": str(number), **more} for number in range(count)]


class FakeRunner:
    """Rows are JSON: {"id", "model"?, "fail"?, "again"?: times, "later"?: times, "away"?: times, "hold"?: true,
    "broken"?: true, "panics"?: true}."""

    def __init__(self, *, is_broken: bool = False, has_models: bool = False) -> None:
        """`has_models`: jobs may ask several."""
        self.is_broken = is_broken
        self.has_models = has_models
        self.ran: list[str] = []
        self.gate = asyncio.Event()  # rows that hold wait for it
        self.holding: set[str] = set()
        self.tries: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()  # for plans that could not be told

    def check(self, job: Job, rows: BinaryIO) -> Checked:
        if self.is_broken:
            raise RuntimeError("broken")
        lines, errors, offset = [], [], 0
        for number, row in enumerate(rows, 1):
            if row.startswith(b"bad"):
                errors.append(JobError("invalid_json_line", "Bad.", None, number))
            elif row.strip():
                lines.append(Line(offset, len(row)))
            offset += len(row)
        return Checked(lines, errors, None if errors or self.has_models else "m")

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        told = orjson.loads(row)
        if told.get("broken"):
            raise RuntimeError("broken")
        if told.get("panics"):
            raise Panic(told["id"])
        if told.get("away", 0) > self.asked[told["id"]]:
            self.asked[told["id"]] += 1
            return None
        return LinePlan(told.get("model", "m"), bytes([told.get("prefix", 0)]) * DIGEST_BYTES, 10)

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        told = orjson.loads(row)
        name = told["id"]
        self.ran.append(name)
        if told.get("broken"):
            raise RuntimeError("broken")
        if told.get("panics"):
            raise Panic(told["id"])
        self.tries[name] += 1
        if told.get("hold"):
            self.holding.add(name)
            await self.gate.wait()
        else:
            await asyncio.sleep(0)
        body = orjson.dumps({"id": name, "ran": True})
        for retry in ("again", "later"):
            if self.tries[name] <= told.get(retry, 0):
                return LineResult(ok=False, body=body, retry=retry, retry_after_s=0.001)  # type: ignore[arg-type]
        return LineResult(ok=not told.get("fail"), body=body, usage=Usage(3, 2, 1))

    def unrun(self, job: Job, row: bytes, why: Unrun) -> bytes:
        return orjson.dumps({"id": orjson.loads(row)["id"] if row else None, "why": why})


class Mortal:
    """Something that a gateway calls, until it is cut off: before or behind its `dies_at`-th call of all."""

    def __init__(self, inner: Any, life: Life) -> None:
        self._inner = inner
        self._life = life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found
        if asyncio.iscoroutinefunction(found):

            async def called(*args: Any, **named: Any) -> Any:
                with self._life.call():
                    return await found(*args, **named)

            return called

        def called_at_once(*args: Any, **named: Any) -> Any:
            with self._life.call():
                return found(*args, **named)

        return called_at_once


class Life:
    """Of one gateway. `ended` when it was cut off."""

    def __init__(self, dies_at: int | None = None, *, behind: bool = False) -> None:
        self.calls = 0
        self.ended = False
        self._dies_at = dies_at
        self._behind = behind

    @contextmanager
    def call(self) -> Iterator[None]:
        self.calls += 1
        last = self.calls == self._dies_at
        self.ended = self.ended or (last and not self._behind)
        if self.ended:
            raise OverloadedError("this gateway is cut off")
        yield
        if last:
            self.ended = True
            raise OverloadedError("this gateway is cut off")


class Lane:
    """What gateways share, and gateways."""

    def __init__(
        self,
        root: Path,
        settings: BatchSettings = QUICK,
        stores: Callable[[BatchSettings], tuple[RedisJobs, RedisLines]] | None = None,
    ) -> None:
        self.settings = settings
        self.now_s = START_S
        self.jobs: MemoryJobs | RedisJobs = MemoryJobs(settings)
        self.lines: MemoryLines | RedisLines = MemoryLines()
        if stores is not None:
            self.jobs, self.lines = stores(settings)
        file_settings = tuned(FileSettings, min_free_bytes=0)
        self.file_folder = Folder(root / "files", file_settings, self.now)
        self.files = FileStore(self.file_folder, file_settings)
        self.root = root / "batches"
        self.folder = JobFolder(self.root, min_free_bytes=settings.min_free_bytes)
        self.store = BatchStore(self.stores())

    def now(self) -> float:
        return self.now_s

    def worker(
        self, runner: FakeRunner, life: Life | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Worker:
        return Worker(self.stores(life), runner, self.store.changed, clock)

    def stores(self, life: Life | None = None) -> Stores:
        """All of them, or as a gateway has them that is cut off."""
        shared: tuple[Any, ...] = (self.jobs, self.lines, self.folder, self.files)
        if life is not None:
            shared = tuple(Mortal(one, life) for one in shared)
        return Stores(*shared, self.settings, self.now)

    @asynccontextmanager
    async def gateway(self, runner: FakeRunner, life: Life | None = None) -> AsyncIterator[Worker]:
        """Closed in order, or killed when it was cut off."""
        worker = self.worker(runner, life)
        worker.start()
        try:
            yield worker
        finally:
            await (worker.kill() if life is not None and life.ended else worker.close())

    async def upload(self, rows: list[dict[str, Any]] | bytes, tenant: str = "a") -> StoredFile:
        data = rows if isinstance(rows, bytes) else b"".join(orjson.dumps(row) + b"\n" for row in rows)
        async with self.files.upload(tenant) as upload:
            upload.purpose = "batch"
            await upload.write(data)
            return await upload.finish("in.jsonl", "application/jsonl", None)

    async def create(self, rows: list[dict[str, Any]] | bytes, tenant: str = "a", **fields: Any) -> Job:
        stored = await self.upload(rows, tenant)
        whole: dict[str, Any] = {"dialect": "openai", "endpoint": "/v1/x", "in_files": True} | fields
        return await self.store.create(Job("", tenant, **whole), stored.id)

    async def found(self, job: Job) -> Job:
        found = await self.store.find(job.tenant, job.dialect, job.id)
        assert found is not None
        return found

    async def ended(self, job: Job) -> Job:
        """As soon as it has, and nothing is left to do for it."""

        async def has() -> bool:
            return (await self.found(job)).has_ended and job.id not in [one.id for one in await self.jobs.open()]

        await until(has, LIMIT_S)
        return await self.found(job)

    async def file(self, tenant: str, file_id: str | None) -> list[dict[str, Any]]:
        """The rows of a file; none when there is no id."""
        if file_id is None:
            return []
        async with self.files.reading(tenant, file_id) as found:
            assert found is not None
            return [orjson.loads(row) for row in b"".join([piece async for piece in found[1]]).splitlines()]

    async def results(self, job: Job) -> list[dict[str, Any]]:
        """Those of its files, or those that became none."""
        if job.in_files:
            files = (job.output_file_id, job.error_file_id)
            return [row for file_id in files for row in await self.file(job.tenant, file_id)]
        async with self.store.results(job.tenant, job.dialect, job.id) as found:
            assert found is not None
            return [orjson.loads(row) for row in b"".join([piece async for piece in found[1]]).splitlines()]

    async def swept(self) -> list[str]:
        """What is on disk when the ends so far can no longer be lost."""
        self.now_s += UNDO_S + 1.0
        await self.worker(FakeRunner()).sweep()
        return self.on_disk()

    def on_disk(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())


async def until_holding(runner: FakeRunner, names: set[str]) -> None:
    await until(lambda: runner.holding >= names)
