"""Jobs in Redis, shared by all gateways. jobs.py has the promises.

kvasir:{batches}:job:JOB             hash: json, version
kvasir:{batches}:of:DIALECT:TENANT   sorted set of jobs, all with the same score, so in the order of their ids
kvasir:{batches}:all                 the same of all jobs
kvasir:{batches}:open                set of open jobs
kvasir:{batches}:open:TENANT         hash: open job -> its lines, for the limits
kvasir:{batches}:ended               sorted set of closed jobs, by the millisecond at which they may be forgotten
kvasir:{batches}:leases              hash: job -> millisecond at which its lease ends, and owner

All keys have the same hash tag, so that a script may touch all of them in a cluster, too. None has a time to live:
Redis with the policy volatile-lru never evicts those.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, get_args

from redis.asyncio import Redis

from gateway.config import BatchSettings
from gateway.queues.batch.base import Job, State
from gateway.queues.batch.jobs import from_json, quota_error, to_json
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip

_T = TypeVar("_T")

PREFIX: Final = "kvasir:{batches}:"
STORE: Final = "batches"
"""What they are called where Redis holds something that is none of them."""

SCRIPTS: Final = (
    *("stage", "queue", "claim", "take_over", "renew", "put_back", "complete", "drop"),
    *("put", "lease"),
)

READ_AT_ONCE: Final = 100


class RedisScripts:
    """One Redis. `redis` is the caller's: it is not closed here. `timeout_s` bounds every call."""

    def __init__(self, redis: Redis, *, timeout_s: float, breaker: RedisBreaker | None = None) -> None:
        self.redis = redis
        self.calls = RedisCalls(redis, timeout_s, breaker)
        self._scripts = {name: self.calls.script(__package__, f"scripts/{name}.lua") for name in SCRIPTS}

    async def run(self, script: str, *args: bytes | str | int) -> Any:
        """What the script of this name returns. Raises RedisDownError."""
        return await self.ask(self.call(script, *args))

    def call(self, script: str, *args: bytes | str | int) -> Awaitable[Any]:
        """For `ask`, or one of those that `calls` has."""
        return self._scripts[script](keys=[PREFIX], args=args)

    async def ask(self, call: Awaitable[_T]) -> _T:
        """Raises RedisDownError. What was asked for may have been done all the same."""
        return await self.calls.ask(call)


class RedisJobs:
    """See MemoryJobs. Everything raises OverloadedError while Redis is unreachable; the call may have been executed all
    the same."""

    def __init__(self, scripts: RedisScripts, settings: BatchSettings) -> None:
        self._scripts = scripts
        self._settings = settings

    async def put(self, job: Job, *, forget_ms: int | None = None) -> Job | None:
        settings = self._settings
        end = "" if forget_ms is None else forget_ms
        args = (job.id, job.version, to_json(job), job.tenant, job.dialect, job.counts.total, end)
        limits = (settings.max_jobs, settings.max_waiting_lines, settings.max_kept)
        kept = (await self._scripts.run("put", *args, *limits)).decode()
        if kept in ("jobs", "lines"):
            raise quota_error(kept, settings)
        return replace(job, version=job.version + 1) if kept == "kept" else None

    async def find(self, job_id: str) -> Job | None:
        found = await self._read([job_id.encode()])
        return found[0] if found else None

    async def open(self) -> list[Job]:
        asked: Any = self._scripts.redis.smembers(f"{PREFIX}open")
        ids = await self._scripts.calls.ask_or_skip(STORE, asked, [])
        return await self._read(sorted(ids))

    async def page(
        self, tenant: str | None, dialect: str | None, *, limit: int, after: str | None, before: str | None
    ) -> list[Job]:
        key, redis = PREFIX + ("all" if tenant is None else f"of:{dialect}:{tenant}"), self._scripts.redis
        if before is not None:
            return (await self._take(limit, partial(redis.zrangebylex, key, f"({before}", "+")))[::-1]
        return await self._take(limit, partial(redis.zrevrangebylex, key, f"({after}" if after else "+", "-"))

    async def over(self, now_ms: int, most: int) -> list[Job]:
        return await self._take(most, partial(self._scripts.redis.zrangebyscore, f"{PREFIX}ended", "-inf", now_ms))

    async def _take(self, most: int, fetch: Callable[..., Awaitable[Any]]) -> list[Job]:
        """Up to so many of the jobs that `fetch` lists; those that cannot be read are passed over."""
        found: list[Job] = []
        start = 0
        while len(found) < most:
            num = most - len(found)
            ids = await self._scripts.calls.ask_or_skip(STORE, fetch(start=start, num=num), [])
            found += await self._read(ids)
            if len(ids) < num:
                break
            start += num
        return found

    async def forget(self, job: Job) -> None:
        """The record goes last: what was cut off is done again."""
        pipe = self._scripts.redis.pipeline(transaction=False)
        pipe.srem(f"{PREFIX}open", job.id)
        pipe.hdel(f"{PREFIX}open:{job.tenant}", job.id)
        pipe.zrem(f"{PREFIX}ended", job.id)
        pipe.hdel(f"{PREFIX}leases", job.id)
        pipe.zrem(f"{PREFIX}of:{job.dialect}:{job.tenant}", job.id)
        pipe.zrem(f"{PREFIX}all", job.id)
        pipe.unlink(f"{PREFIX}job:{job.id}")
        await self._scripts.calls.ask_each(STORE, pipe)

    async def lease(self, job_id: str, owner: str, now_ms: int, until_ms: int) -> bool:
        return bool(await self._scripts.run("lease", job_id, owner, now_ms, until_ms))

    async def _read(self, ids: Sequence[bytes]) -> list[Job]:
        """Those of them that are there."""
        jobs: list[Job] = []
        for start in range(0, len(ids), READ_AT_ONCE):
            asked = self._scripts.redis.pipeline(transaction=False)
            some = ids[start : start + READ_AT_ONCE]
            for job_id in some:
                asked.hmget(f"{PREFIX}job:".encode() + bytes(job_id), ["json", "version"])
            for job_id, found in zip(some, await self._scripts.calls.ask_each(STORE, asked), strict=True):
                body, version = found or (None, None)
                job = None if body is None else read_or_skip(STORE, partial(_read, bytes(job_id), body, version))
                jobs += [] if job is None else [job]
        return jobs


def _read(job_id: bytes, body: bytes, version: Any) -> Job:
    """Raises ValueError and others for what is no job, or another one."""
    job = from_json(body, int(version))
    if job.id.encode() != job_id or job.state not in get_args(State):
        raise ValueError("no job")
    return job
