"""Lines in Redis, shared by all gateways. lines.py has the promises.

kvasir:{batches}:staged:JOB      list: plans of lines that are not queued yet, in their order
kvasir:{batches}:waiting:LANE    sorted set of places, all with the same score, so in byte order
kvasir:{batches}:models          set: models that lines may wait for
kvasir:{batches}:turns:MODEL     sorted set: tenants with lines, by the tokens that they had
kvasir:{batches}:clock, last     hashes: model -> tokens at the begin of the last turn, and its tenant
kvasir:{batches}:cursors         hash: lane -> place of the line that was claimed last
kvasir:{batches}:claims          sorted set: running lines, by the millisecond at which their lease ends
kvasir:{batches}:claimed         hash: line -> owner, lane and place
kvasir:{batches}:tries           hash: line -> how often it was tried in vain, and how many engines died at work on it
kvasir:{batches}:lanes:JOB       set: lanes in which the job had lines
kvasir:{batches}:results:JOB     hash: number of a line -> its result
kvasir:{batches}:counts:JOB      hash: planned, queued, done by kind, tokens
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from gateway.queues.batch.base import Counts, LinePlan
from gateway.queues.batch.lines import KINDS, MODEL_CHARS, QUANTUM_TOKENS, Claim, Kind, Progress, Result
from gateway.queues.batch.paths import MAX_TOKENS, Ref, path_of, ref_at, ref_bytes, ref_of
from gateway.queues.batch.redis_jobs import PREFIX, STORE, RedisScripts
from gateway.storage.redis_calls import read_or_skip
from gateway.types import Usage

TOKENS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens", "cache_write_tokens")
LOOK_AT: Final = 1000
"""Lines whose lease is over that are looked at to find those which may be taken over."""


class RedisLines:
    """See MemoryLines. Everything raises OverloadedError while Redis is unreachable; the call may have been executed
    all the same."""

    def __init__(self, scripts: RedisScripts) -> None:
        self._scripts = scripts

    async def stage(self, job: str, start: int, plans: Sequence[LinePlan]) -> int:
        return int(await self._scripts.run("stage", job, start, *map(_plan, plans)))

    async def queue(self, job: str, tenant: str, most: int) -> int:
        return int(await self._scripts.run("queue", job, bytes.fromhex(job), tenant, most))

    async def models(self, most: int) -> list[str]:
        asked: Any = self._scripts.redis.srandmember(f"{PREFIX}models", most)
        models = _texts(await self._scripts.calls.ask_or_skip(STORE, asked, []))
        random.shuffle(models)  # Redis chooses at random, and returns them in the order of its table
        return models

    async def claim(self, owner: str, model: str, most: int, until_ms: int) -> list[Claim]:
        asked = self._scripts.call("claim", owner, model, most, until_ms, QUANTUM_TOKENS)
        return _claims(await self._scripts.calls.ask_or_skip(STORE, asked, []))

    async def take_over(self, owner: str, most: int, now_ms: int, until_ms: int, tried: int) -> list[Claim]:
        asked = self._scripts.call("take_over", owner, most, now_ms, until_ms, tried, LOOK_AT)
        return _claims(await self._scripts.calls.ask_or_skip(STORE, asked, []))

    async def renew(self, owner: str, refs: Sequence[Ref], until_ms: int) -> list[Ref]:
        return [ref_of(bytes(ref)) for ref in await self._scripts.run("renew", owner, until_ms, *map(ref_bytes, refs))]

    async def put_back(self, owner: str, claim: Claim) -> bool:
        tenant, tries = claim.lane.partition(":")[0], f"{claim.attempts} {claim.deaths}"
        args = (owner, ref_bytes(claim.ref), claim.lane, claim.place, tenant, claim.model, tries)
        return bool(await self._scripts.run("put_back", *args))

    async def complete(self, claim: Claim, result: Result, usage: Usage) -> int | None:
        tokens = (getattr(usage, name) for name in TOKENS)
        args = (ref_bytes(claim.ref), claim.lane, claim.place, *claim.ref, _result(result), result.kind, *tokens)
        done = int(await self._scripts.run("complete", *args))
        return None if done < 0 else done

    async def lanes(self, job: str) -> list[str]:
        asked: Any = self._scripts.redis.smembers(f"{PREFIX}lanes:{job}")
        return sorted(_texts(await self._scripts.calls.ask_or_skip(STORE, asked, [])))

    async def drop(self, job: str, total: int, kind: Kind, lane: str, after: bytes, most: int) -> bytes:
        args = (job, bytes.fromhex(job), total, kind, lane, after, most)
        return bytes(await self._scripts.run("drop", *args))

    async def progress(self, job: str) -> Progress:
        asked: Any = self._scripts.redis.hgetall(f"{PREFIX}counts:{job}")
        found = await self._scripts.calls.ask_or_skip(STORE, asked, {})
        count = {name: _number(found.get(name.encode())) for name in ("planned", "queued", *KINDS, *TOKENS)}
        counts = Counts(**{name: count[name] for name in KINDS})
        prompt, completion, cached, cache_write = (count[name] for name in TOKENS)
        return Progress(count["planned"], count["queued"], counts, Usage(prompt, completion, cached, cache_write))

    async def results(self, job: str, start: int, count: int) -> list[Result | None]:
        lines = [str(line) for line in range(start, start + count)]
        if not lines:
            return []
        asked: Any = self._scripts.redis.hmget(f"{PREFIX}results:{job}", lines)
        found = await self._scripts.calls.ask_or_skip(STORE, asked, [b""] * len(lines))
        return [
            None if written is None else read_or_skip(STORE, partial(_result_of, written)) or Result("failed")
            for written in found
        ]

    async def forget(self, job: str) -> None:
        names = [f"{PREFIX}{name}:{job}" for name in ("staged", "lanes", "results", "counts")]
        await self._scripts.ask(self._scripts.redis.unlink(*names))


def _plan(plan: LinePlan) -> bytes:
    model, tokens = plan.model[:MODEL_CHARS].encode(), min(plan.tokens, MAX_TOKENS)
    return struct.pack(">H", len(model)) + model + struct.pack(">I", tokens) + path_of(plan.digests)


def _claims(flat: Sequence[Any]) -> list[Claim]:
    each = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    claims = [read_or_skip(STORE, partial(_claim, *one)) for one in each]
    return [claim for claim in claims if claim is not None]


def _claim(lane: bytes, place: bytes, tries: bytes) -> Claim:
    attempts, deaths = map(int, tries.split()) if tries else (0, 0)
    return Claim(ref_at(bytes(place)), lane.decode(), bytes(place), attempts, deaths)


def _texts(found: Iterable[bytes]) -> list[str]:
    texts = (read_or_skip(STORE, written.decode) for written in found)
    return [text for text in texts if text is not None]


def _number(written: bytes | None) -> int:
    """What was counted; 0 for what is no count."""

    def read() -> int:
        if not 0 <= (number := int(written or 0)) < 1 << 53:
            raise ValueError("no count")
        return number

    return read_or_skip(STORE, read) or 0


def _result(result: Result) -> str:
    return f"{result.kind} {result.spool} {result.offset} {result.num_bytes}" if result.spool else result.kind


def _result_of(written: bytes) -> Result:
    """Raises ValueError for what `_result` has not written."""
    kind, *where = written.decode().split(" ")
    if kind not in KINDS:
        raise ValueError("no result")
    if not where:
        return Result(kind)
    spool, offset, num_bytes = where
    if not spool.isalnum():
        raise ValueError("no result")
    return Result(kind, spool, int(offset), int(num_bytes))
