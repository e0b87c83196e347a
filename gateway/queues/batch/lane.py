"""The batch lane as one thing: its store for the dialects, and its worker once there is somebody who runs lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from gateway.config import BatchSettings
from gateway.queues.batch.base import Runner
from gateway.queues.batch.folder import JobFolder
from gateway.queues.batch.jobs import Jobs, MemoryJobs
from gateway.queues.batch.lines import Lines, MemoryLines
from gateway.queues.batch.redis_jobs import RedisJobs
from gateway.queues.batch.redis_lines import RedisLines
from gateway.queues.batch.redis_scripts import RedisScripts
from gateway.queues.batch.store import BatchStore, Files
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
        self._jobs: Jobs = MemoryJobs(settings)
        self._lines: Lines = MemoryLines()
        if redis is not None:
            scripts = RedisScripts(redis, timeout_s=settings.redis_timeout_s, breaker=breaker)
            self._jobs, self._lines = RedisJobs(scripts, settings), RedisLines(scripts)
        self._folder = JobFolder(folder, min_free_bytes=settings.min_free_bytes)
        self._files = files
        self._settings = settings
        self._now = now
        self._worker: Worker | None = None
        self.store = BatchStore(self._jobs, self._lines, self._folder, files, settings, now)

    def figures(self) -> dict[str, int]:
        """Those of its worker; empty without one."""
        return {} if self._worker is None else self._worker.figures()

    def worker(self, runner: Runner) -> Worker:
        """Not started."""
        self._worker = Worker(
            self._jobs,
            self._lines,
            self._folder,
            self._files,
            runner,
            self._settings,
            self._now,
            self.store.changed,
        )
        return self._worker
