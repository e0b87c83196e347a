"""Lines in Redis, shared by all gateways. The scripts say what they do; see lines.py for what is promised.

kvasir:{batches}:staged:JOB      list: plans of lines that are not queued yet, in their order
kvasir:{batches}:waiting:LANE    sorted set of places, all with the same score, so in byte order
kvasir:{batches}:models          set: models that lines may wait for
kvasir:{batches}:turns:MODEL     sorted set: tenants with lines, by the tokens that they had
kvasir:{batches}:clock, last     hashes: model -> tokens at which the last turn began, and whose it was
kvasir:{batches}:cursors         hash: lane -> place of the last line that was claimed
kvasir:{batches}:claims          sorted set: lines that run, by the millisecond at which their lease ends
kvasir:{batches}:claimed         hash: line -> owner, lane and place
kvasir:{batches}:attempts        hash: line -> how often it was tried in vain
kvasir:{batches}:deaths          hash: line -> how many engines died at work on it
kvasir:{batches}:lanes:JOB       set: lanes in which the job had lines
kvasir:{batches}:results:JOB     hash: number of a line -> its result
kvasir:{batches}:counts:JOB      hash: planned, queued, results by kind, tokens
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, cast, get_args

from gateway.queues.batch.base import Counts, LinePlan
from gateway.queues.batch.job import Progress
from gateway.queues.batch.lines import QUANTUM_TOKENS, Back, Claim, Kind, Result, lane_of
from gateway.queues.batch.paths import MAX_TOKENS, Ref, path_of, ref_at, ref_bytes, ref_of
from gateway.queues.batch.redis_jobs import PREFIX, STORE, RedisScripts
from gateway.storage.redis_calls import read_or_skip
from gateway.types import Usage

COUNTED: Final = (
    *("succeeded", "failed", "cancelled", "expired"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "cache_write_tokens"),
)
STAGE_AT_ONCE: Final = 1000
"""Lua takes some thousands of arguments."""

LOOK_AT: Final = 1000
"""Lines whose lease is over that are looked at to find those which may be taken over."""


class RedisLines:
    """See Lines."""

    def __init__(self, scripts: RedisScripts) -> None:
        self._scripts = scripts

    async def stage(self, job: str, start: int, plans: Sequence[LinePlan]) -> int:
        planned = start
        for first in range(0, len(plans), STAGE_AT_ONCE):
            some = [_plan(plan) for plan in plans[first : first + STAGE_AT_ONCE]]
            planned = int(await self._scripts.run("stage", job, start + first, *some))
            if planned != start + first + len(some):
                break
        return planned

    async def queue(self, job: str, tenant: str, most: int) -> int:
        return int(await self._scripts.run("queue", job, bytes.fromhex(job), tenant, most))

    async def models(self, most: int) -> list[str]:
        asked: Any = self._scripts.redis.srandmember(f"{PREFIX}models", most)
        models = _texts(await self._scripts.calls.ask_or_skip(STORE, asked, []))
        random.shuffle(models)  # Redis chooses by chance, and tells them in the order of its table
        return models

    async def claim(self, owner: str, model: str, most: int, until_ms: int) -> list[Claim]:
        asked = self._scripts.call("claim", owner, _bytes(model), most, until_ms, QUANTUM_TOKENS)
        return _claims(await self._scripts.calls.ask_or_skip(STORE, asked, []))

    async def take_over(self, owner: str, most: int, now_ms: int, until_ms: int, tried: int) -> list[Claim]:
        asked = self._scripts.call("take_over", owner, most, now_ms, until_ms, tried, LOOK_AT)
        return _claims(await self._scripts.calls.ask_or_skip(STORE, asked, []))

    async def renew(self, owner: str, refs: Sequence[Ref], until_ms: int) -> list[Ref]:
        return [ref_of(bytes(ref)) for ref in await self._scripts.run("renew", owner, until_ms, *map(ref_bytes, refs))]

    async def put_back(self, owner: str, claim: Claim, most_attempts: int, *, died: bool = False) -> Back:
        tenant, _, model = claim.lane.partition(":")
        ref, lane = ref_bytes(claim.ref), _bytes(claim.lane)
        counted = "deaths" if died else "attempts"
        args = (owner, ref, lane, claim.place, tenant, _bytes(model), most_attempts, counted)
        return cast("Back", _text(await self._scripts.run("put_back", *args)))

    async def complete(self, claim: Claim, result: Result, usage: Usage) -> int | None:
        (job, line), lane = claim.ref, _bytes(claim.lane)
        tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.cache_write_tokens)
        args = (ref_bytes(claim.ref), lane, claim.place, job, line, _result(result), result.kind, *tokens)
        done = int(await self._scripts.run("complete", *args))
        return None if done < 0 else done

    async def drop_staged(self, job: str, total: int, kind: Kind, most: int) -> bool:
        return int(await self._scripts.run("drop_staged", job, total, kind, most)) > 0

    async def lanes(self, job: str) -> list[str]:
        asked: Any = self._scripts.redis.smembers(f"{PREFIX}lanes:{job}")
        return sorted(_texts(await self._scripts.calls.ask_or_skip(STORE, asked, [])))

    async def drop_waiting(self, job: str, lane: str, after: bytes, kind: Kind, most: int) -> bytes:
        args = (job, bytes.fromhex(job), _bytes(lane), after, kind, most)
        return bytes(await self._scripts.run("drop_waiting", *args))

    async def progress(self, job: str) -> Progress:
        asked = self._scripts.redis.pipeline(transaction=False)  # a Redis that is full refuses any transaction
        asked.hmget(f"{PREFIX}counts:{job}", ["planned", "queued"])
        asked.hlen(f"{PREFIX}results:{job}")
        counted, done = await self._scripts.calls.ask_each(STORE, asked)
        planned, queued = (_number(count) for count in counted or (None, None))
        return Progress(planned, queued, done or 0)

    async def tally(self, job: str) -> tuple[Counts, Usage]:
        asked: Any = self._scripts.redis.hgetall(f"{PREFIX}counts:{job}")
        found = await self._scripts.calls.ask_or_skip(STORE, asked, {})
        counts = {name: _number(found.get(name.encode())) for name in COUNTED}
        kinds = {kind: counts.get(kind, 0) for kind in ("succeeded", "failed", "cancelled", "expired")}
        prompt, completion = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
        cached, cache_write = counts.get("cached_tokens", 0), counts.get("cache_write_tokens", 0)
        return Counts(**kinds), Usage(prompt, completion, cached, cache_write)

    async def results(self, job: str, start: int, count: int) -> list[Result | None]:
        lines = [str(line) for line in range(start, start + count)]
        if not lines:
            return []
        asked: Any = self._scripts.redis.hmget(f"{PREFIX}results:{job}", lines)
        found = await self._scripts.calls.ask_or_skip(STORE, asked, [None] * len(lines))
        return [
            None if written is None else read_or_skip(STORE, partial(_result_of, written)) or Result("failed")
            for written in found
        ]

    async def forget(self, job: str) -> None:
        names = [f"{PREFIX}{name}:{job}" for name in ("staged", "lanes", "results", "counts")]
        await self._scripts.ask(self._scripts.redis.unlink(*names))


def _plan(plan: LinePlan) -> bytes:
    model, tokens = _bytes(lane_of("", plan.model)[1:]), min(plan.tokens, MAX_TOKENS)
    return struct.pack(">H", len(model)) + model + struct.pack(">I", tokens) + path_of(plan.digests)


def _claims(flat: Sequence[Any]) -> list[Claim]:
    each = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    claims = [read_or_skip(STORE, partial(_claim, *one)) for one in each]
    return [claim for claim in claims if claim is not None]


def _claim(lane: bytes, place: bytes, attempts: Any, deaths: Any) -> Claim:
    return Claim(ref_at(bytes(place)), _text(lane), bytes(place), int(attempts), int(deaths))


def _texts(found: Iterable[bytes]) -> list[str]:
    texts = (read_or_skip(STORE, partial(_text, written)) for written in found)
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
    kind, *where = _text(written).split(" ")
    if kind not in get_args(Kind):
        raise ValueError("no result")
    if not where:
        return Result(cast("Kind", kind))
    result = Result(cast("Kind", kind), where[0], int(where[1]), int(where[2]))
    if not result.spool.isalnum() or not (0 <= result.offset < 1 << 53 and 0 <= result.num_bytes < 1 << 31):
        raise ValueError("no result")
    return result


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(written: bytes | str) -> str:
    return written if isinstance(written, str) else bytes(written).decode("utf-8", "surrogatepass")
