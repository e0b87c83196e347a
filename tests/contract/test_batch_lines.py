"""The promises of queues/batch/lines.py over both stores, side by side and at random."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.protocol import DIGEST_BYTES
from gateway.errors import OverloadedError
from gateway.queues.batch.base import Counts, LinePlan
from gateway.queues.batch.lines import QUANTUM_TOKENS, Claim, MemoryLines, Progress, Result
from gateway.queues.batch.paths import Ref
from gateway.queues.batch.redis_jobs import PREFIX, RedisScripts
from gateway.queues.batch.redis_lines import RedisLines
from gateway.types import Usage
from tests.fakes.redis_fleet import keys_of, opened
from tests.fakes.redis_process import RedisProcess

Lines = MemoryLines | RedisLines
LIMIT_S = 30.0
J1, J2 = "01" * 16, "02" * 16
NONE = Usage(0, 0)
DONE = Result("succeeded", "s", 5, 6)


@pytest.fixture(params=["memory", "redis"])
async def lines(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Lines]:
    if request.param == "memory":
        yield MemoryLines()
        return
    async with opened(redis_url) as redis:
        yield RedisLines(RedisScripts(redis, timeout_s=LIMIT_S))


def plans(*firsts: int, model: str = "m", tokens: int = 0) -> list[LinePlan]:
    """Prompts of one block each, whose order is that of `firsts`."""
    return [LinePlan(model, bytes([first]) * DIGEST_BYTES, tokens) for first in firsts]


async def put(lines: Lines, job: str, made: list[LinePlan], tenant: str = "a") -> None:
    await lines.stage(job, 0, made)
    assert await lines.queue(job, tenant, len(made)) == 0


def numbers(claims: list[Claim]) -> list[int]:
    return [claim.ref.line for claim in claims]


async def test_lines_are_claimed_along_their_prefixes_across_jobs_and_once(lines: Lines) -> None:
    await put(lines, J1, plans(3, 1, 2))
    await put(lines, J2, plans(2, 9, 1))
    claims = await lines.claim("x", "m", 4, 10)
    assert [(claim.ref.job, claim.ref.line) for claim in claims] == [(J1, 1), (J2, 2), (J1, 2), (J2, 0)]
    assert numbers(await lines.claim("y", "m", 9, 10)) == [0, 1]
    assert await lines.claim("y", "m", 9, 10) == []
    assert await lines.models(64) == []


async def test_the_next_claim_goes_on_where_the_last_one_was_and_begins_again_at_the_end(lines: Lines) -> None:
    await put(lines, J1, plans(5, 6, 7))
    assert numbers(await lines.claim("x", "m", 2, 10)) == [0, 1]
    await put(lines, J2, plans(1, 8))
    assert [claim.ref for claim in await lines.claim("x", "m", 3, 10)] == [(J1, 2), (J2, 1), (J2, 0)]


async def test_lines_wait_only_when_they_are_queued(lines: Lines) -> None:
    assert await lines.stage(J1, 0, plans(1, 2)) == 2
    assert await lines.stage(J1, 0, plans(1, 2)) == 2, "who comes again changes nothing"
    assert await lines.stage(J1, 2, plans(3)) == 3
    assert await lines.models(64) == []
    assert await lines.progress(J1) == Progress(3, 0)
    assert await lines.queue(J1, "a", 2) == 1
    assert await lines.models(64) == ["m"]
    assert await lines.queue(J1, "a", 2) == 0
    assert await lines.progress(J1) == Progress(3, 3)
    assert await lines.lanes(J1) == ["a:m"]


async def test_models_have_lines_of_their_own_whatever_their_names(lines: Lines) -> None:
    names = ["m", "a:b", "é\n ", "x" * 300, ""]
    await put(lines, J1, [LinePlan(name) for name in names])
    found = await lines.models(64)
    assert sorted(found) == sorted(name[:200] for name in names)
    assert [numbers(await lines.claim("x", name[:200], 9, 10)) for name in names] == [[0], [1], [2], [3], [4]]
    assert await lines.models(64) == []


async def test_a_lease_that_is_over_goes_to_the_next_and_the_first_result_counts(lines: Lines) -> None:
    await put(lines, J1, plans(1))
    (claim,) = await lines.claim("x", "m", 1, 10)
    assert await lines.renew("x", [claim.ref, Ref(J1, 7)], 20) == [claim.ref]
    assert await lines.take_over("y", 9, 19, 30, 1) == []
    assert await lines.take_over("y", 9, 20, 30, 1) == [claim._replace(attempts=1)]
    assert await lines.renew("x", [claim.ref], 99) == []
    assert await lines.complete(claim, DONE, NONE) == 1
    assert await lines.complete(claim, Result("failed", "other", 0, 1), NONE) is None
    assert await lines.results(J1, 0, 2) == [DONE, None]
    assert await lines.take_over("x", 9, 1000, 2000, 1) == []


async def test_a_lease_that_ends_counts_as_an_attempt_and_who_has_some_is_taken_over_one_by_one(lines: Lines) -> None:
    await put(lines, J1, plans(1, 2, 3))
    await lines.claim("x", "m", 3, 10)
    assert [claim.attempts for claim in await lines.take_over("y", 2, 10, 20, 0)] == [1, 1]
    assert [(claim.ref.line, claim.attempts) for claim in await lines.take_over("z", 9, 20, 30, 1)] == [(2, 1), (0, 2)]
    assert [(claim.ref.line, claim.attempts) for claim in await lines.take_over("z", 9, 20, 30, 0)] == []
    (again,) = await lines.take_over("z", 9, 20, 30, 9)
    assert (again.ref.line, again.attempts) == (1, 2)


async def test_what_is_put_back_waits_at_its_place_with_its_counts(lines: Lines) -> None:
    await put(lines, J1, plans(1, 2))
    (first, second) = await lines.claim("x", "m", 2, 10)
    assert not await lines.put_back("y", first)
    for tries in ((1, 0), (1, 1)):
        first = first._replace(attempts=tries[0], deaths=tries[1])
        assert await lines.put_back("x", first)
        assert await lines.models(64) == ["m"]
        assert await lines.claim("x", "m", 5, 10) == [first]
    assert await lines.complete(first, Result("failed", "s", 0, 1), NONE) == 1
    assert not await lines.put_back("x", first)
    assert await lines.put_back("x", second)


async def test_a_result_of_who_lost_the_lease_takes_a_line_that_waits_again(lines: Lines) -> None:
    await put(lines, J1, plans(1))
    (claim,) = await lines.claim("slow", "m", 1, 10)
    await lines.take_over("y", 1, 10, 20, 1)
    assert await lines.put_back("y", claim)
    assert await lines.complete(claim, DONE, NONE) == 1
    assert await lines.claim("y", "m", 1, 30) == []


async def test_tenants_take_turns_by_the_tokens_of_their_lines(lines: Lines) -> None:
    half = QUANTUM_TOKENS // 2
    await put(lines, J1, plans(*range(8), tokens=half), "a")
    await put(lines, J2, plans(*range(8), tokens=half // 2), "b")
    order = []
    for _ in range(12):
        (claim,) = await lines.claim("x", "m", 1, 10)
        order.append(claim.lane[0])
    assert "".join(order) == "aabbbbbbbbaa", "a turn is a quantum, beyond what the other one had"


async def test_counts_and_tokens_add_up(lines: Lines) -> None:
    await put(lines, J1, plans(1, 2, 3))
    claims = await lines.claim("x", "m", 9, 10)
    await lines.complete(claims[0], DONE, Usage(10, 2, 3, 4))
    await lines.complete(claims[1], Result("failed", "s", 0, 2), NONE)
    await lines.complete(claims[2], DONE, Usage(1, 1))
    assert await lines.progress(J1) == Progress(3, 3, Counts(0, succeeded=2, failed=1), Usage(11, 3, 3, 4))
    await lines.forget(J1)
    assert await lines.progress(J1) == Progress()


async def test_dropping_is_for_lines_that_have_not_begun_and_for_one_job(lines: Lines) -> None:
    await lines.stage(J1, 0, plans(1, 2, 3))
    await lines.queue(J1, "a", 3)
    await lines.stage(J1, 3, plans(4, 5))
    await put(lines, J2, plans(1, 2, 3))
    (runs, _) = await lines.claim("x", "m", 2, 10)
    assert await lines.drop(J1, 7, "cancelled", "", b"", 3) == b""
    assert await lines.stage(J1, 5, plans(6)) == 7, "nothing is added any more"
    assert await lines.queue(J1, "a", 9) == 0
    after, looks = b"", 0
    while True:
        after = await lines.drop(J1, 7, "expired", "a:m", after, 2)
        looks += 1
        if not after:
            break
    assert looks == 3
    assert await lines.complete(runs, DONE, NONE) == 7
    assert await lines.results(J1, 0, 7) == [DONE, *[None] * 6]
    assert (await lines.progress(J1)).counts == Counts(0, succeeded=1, expired=2, cancelled=4)
    assert [claim.ref for claim in await lines.claim("x", "m", 9, 10)] == [(J2, 1), (J2, 2)]


PLANS = st.lists(
    st.builds(
        LinePlan,
        st.sampled_from(["m", "n"]),
        st.integers(1, 3).map(lambda first: bytes([first]) * DIGEST_BYTES),
        st.sampled_from([0, QUANTUM_TOKENS // 3]),
    ),
    max_size=3,
)
JOBS = st.sampled_from([(J1, "a"), (J2, "b"), ("03" * 16, "a")])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), JOBS, PLANS),
        st.tuples(st.just("queue"), JOBS, st.integers(1, 4)),
        st.tuples(st.just("claim"), st.sampled_from("xy"), st.sampled_from("mn"), st.integers(1, 3)),
        st.tuples(st.just("take_over"), st.sampled_from("xy"), st.integers(1, 3), st.integers(0, 2)),
        st.tuples(st.just("renew"), st.sampled_from("xy")),
        st.tuples(st.just("put_back"), st.sampled_from("xy"), st.integers(0, 9)),
        st.tuples(st.just("complete"), st.integers(0, 9), st.sampled_from(["succeeded", "failed"])),
        st.tuples(st.just("drop"), JOBS, st.integers(1, 3)),
        st.tuples(st.just("wait"), st.integers(1, 15)),
    ),
    max_size=40,
)


class History:
    """Does the same to both stores, and holds them to what is promised."""

    def __init__(self, stores: list[Lines]) -> None:
        self.stores = stores
        self.now_ms = 0
        self.planned: dict[str, int] = {}
        self.queued: dict[str, int] = {}
        self.claims: list[Claim] = []
        self.seen: dict[tuple[str, int], Result] = {}
        self.dropped: set[str] = set()

    async def both(self, method: str, *args: Any) -> Any:
        one, other = [await getattr(store, method)(*args) for store in self.stores]
        assert one == other, method
        return one

    async def do(self, what: str, *args: Any) -> None:
        if what == "wait":
            self.now_ms += args[0]
        elif what == "stage":
            (job, _), made = args
            if made:
                self.planned[job] = await self.both("stage", job, self.planned.get(job, 0), made)
        elif what == "queue":
            (job, tenant), most = args
            left = await self.both("queue", job, tenant, most)
            self.queued[job] = self.planned.get(job, 0) - left
        elif what == "claim":
            found = await self.both("claim", *args, self.now_ms + 10)
            assert not {claim.ref for claim in found} & set(self.seen), "what is done does not run again"
            self.claims += found
        elif what == "take_over":
            owner, most, tried = args
            self.claims += await self.both("take_over", owner, most, self.now_ms, self.now_ms + 10, tried)
        elif what == "renew":
            await self.both("renew", args[0], [claim.ref for claim in self.claims], self.now_ms + 10)
        elif what == "drop":
            (job, _), most = args
            self.dropped.add(job)
            self.queued[job] = self.planned.setdefault(job, 0)
            for lane in ("", *await self.both("lanes", job)):
                after = b""
                while after := await self.both("drop", job, self.planned[job], "cancelled", lane, after, most):
                    pass
        elif self.claims:
            await self.of_a_claim(what, *args)

    async def of_a_claim(self, what: str, *args: Any) -> None:
        if what == "put_back":
            owner, index = args
            await self.both("put_back", owner, self.claims[index % len(self.claims)])
        else:
            claim = self.claims[args[0] % len(self.claims)]
            result = Result(args[1], "s", len(self.seen), 1)
            done = await self.both("complete", claim, result, Usage(1, 2))
            assert (done is None) <= (tuple(claim.ref) in self.seen or claim.ref.job in self.dropped), "one result"
            assert done is None or tuple(claim.ref) not in self.seen

    async def check(self) -> None:
        for job in self.planned:
            found = await self.both("results", job, 0, self.planned[job])
            results = {(job, line): result for line, result in enumerate(found) if result is not None}
            before = {ref: result for ref, result in self.seen.items() if ref[0] == job}
            assert before.items() <= results.items(), "a result never changes"
            self.seen |= results
            progress = await self.both("progress", job)
            assert progress[:2] == (self.planned[job], self.queued.get(job, 0))
            assert progress.done == len(results) + progress.counts.cancelled

    async def finish(self) -> None:
        """Whoever comes last finds every line that was queued."""
        for model in "mn":
            self.claims += await self.both("claim", "z", model, 1000, self.now_ms)
        self.claims += await self.both("take_over", "z", 1000, self.now_ms + 1000, self.now_ms + 2000, 1000)
        for claim in self.claims:
            await self.both("complete", claim, DONE, Usage(0, 0))
        for job, queued in self.queued.items():
            assert (await self.both("progress", job)).done == queued, "no line is lost"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_both_stores_do_the_same_and_every_line_has_one_result_in_the_end(
    redis_url: str, operations: list[Any]
) -> None:
    async def run() -> None:
        async with opened(redis_url) as redis:
            await redis.flushall()
            history = History([MemoryLines(), RedisLines(RedisScripts(redis, timeout_s=LIMIT_S))])
            for operation in operations:
                await history.do(*operation)
                await history.check()
            await history.finish()

    asyncio.run(run())


async def test_lines_survive_a_redis_that_is_killed(tmp_path: Any) -> None:
    # While the disk is busy, `everysec` answers before it has written.
    with RedisProcess(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as process:
        async with opened(process.url) as redis:
            store = RedisLines(RedisScripts(redis, timeout_s=LIMIT_S))
            await put(store, J1, plans(*[line % 256 for line in range(2500)]))
            claims = await store.claim("x", "m", 10, 10)
            await store.complete(claims[0], DONE, NONE)
            before = await store.progress(J1)
            process.kill()
            with pytest.raises(OverloadedError):
                await store.progress(J1)
            process.start()
            assert await store.progress(J1) == before == Progress(2500, 2500, Counts(0, 1))
            assert await store.complete(claims[1], DONE, NONE) == 2
            assert len(await store.claim("x", "m", 3000, 10)) == 2490


async def test_nothing_is_left_in_redis_of_lines_that_are_done_and_forgotten(redis_url: str) -> None:
    async with opened(redis_url) as redis:
        store = RedisLines(RedisScripts(redis, timeout_s=LIMIT_S))
        await put(store, J1, plans(1, 2, 3))
        (claim, *_) = await store.claim("x", "m", 1, 10)
        await store.put_back("x", claim._replace(attempts=1, deaths=1))
        for each in await store.claim("x", "m", 9, 10):
            await store.complete(each, DONE, NONE)
        await store.claim("x", "m", 9, 10)
        await store.forget(J1)
        assert await keys_of(redis, f"{PREFIX}*") == []


async def test_a_redis_that_is_full_takes_results_and_nothing_new(own_redis: RedisProcess) -> None:
    async with opened(own_redis.url) as redis:
        store = RedisLines(RedisScripts(redis, timeout_s=LIMIT_S))
        await put(store, J1, plans(1, 2, 3))
        (claim,) = await store.claim("x", "m", 1, 10)
        await redis.config_set("maxmemory", 1)
        with pytest.raises(OverloadedError):
            await store.stage(J2, 0, plans(1))
        assert await store.complete(claim, DONE, NONE) == 1
        (later,) = await store.claim("x", "m", 1, 10)
        assert await store.complete(later, DONE, NONE) == 2
        assert not await store.drop(J1, 3, "cancelled", "a:m", b"", 9)
        assert await store.progress(J1) == Progress(3, 3, Counts(0, succeeded=2, cancelled=1))
