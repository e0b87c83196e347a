"""The batch queue as one thing: its store for the dialects, and its worker once there is a Runner of lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from gateway.config import BatchSettings
from gateway.queues.batch.base import Runner
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import MemoryJobs
from gateway.queues.batch.lines import MemoryLines
from gateway.queues.batch.redis_jobs import RedisJobs, RedisScripts
from gateway.queues.batch.redis_lines import RedisLines
from gateway.queues.batch.store import BatchStore, Files, Stores
from gateway.queues.batch.worker import Worker
from gateway.storage.breaker import RedisBreaker


class BatchLane:
    """Of one gateway. Without a Redis, which is the caller's to close, its jobs end with it."""

    def __init__(
        self,
        redis: Redis | None,
        folder: Path,
        files: Files,
        settings: BatchSettings,
        now: Callable[[], float],
        breaker: RedisBreaker | None = None,
    ) -> None:
        """`now` is seconds since 1970. `breaker` is that of all calls of this gateway."""
        job_folder = JobFolder(folder, min_free_bytes=settings.min_free_bytes)
        if redis is None:
            self._stores = Stores(MemoryJobs(settings), MemoryLines(), job_folder, files, settings, now)
        else:
            scripts = RedisScripts(redis, timeout_s=settings.redis_timeout_s, breaker=breaker)
            jobs, lines = RedisJobs(scripts, settings), RedisLines(scripts)
            self._stores = Stores(jobs, lines, job_folder, files, settings, now)
        self._worker: Worker | None = None
        self.store = BatchStore(self._stores)

    def figures(self) -> dict[str, int]:
        """Those of its worker; empty without one."""
        return {} if self._worker is None else self._worker.figures()

    def worker(self, runner: Runner) -> Worker:
        """Not started."""
        self._worker = Worker(self._stores, runner, self.store.changed)
        return self._worker
