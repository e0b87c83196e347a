"""Answers of upstreams, below HTTP on our side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from engine.protocol import Lane
from gateway.config import QueueSettings, UpstreamSettings
from gateway.errors import DeadlineError, KvasirError, QueueFullError, UpstreamLostError, UpstreamsAwayError
from gateway.types import Tenant, Trace, UpstreamRequest
from gateway.upstreams.stage import BUSY_S, Upstreams
from gateway.upstreams.upstream import NO_ROOM_S, Upstream
from tests.fakes.upstream import CHAT, Told, error, nowhere, upstream
from tests.fakes.waiting import until

VALUES: dict[str, Any] = {"model": "up-1", "messages": []}


async def test_an_answer_that_nobody_begins_to_read_gives_its_connection_back() -> None:
    async with upstream() as stub:
        upstreams, now = Upstreams([stub.settings()], {}), time.monotonic()
        path = "/v1/chat/completions"
        body = orjson.dumps(VALUES)
        request = UpstreamRequest("r", Tenant("a"), "openai", "up-1", path, "", (), body, VALUES, now, now + 10)
        async with upstreams.answer(request) as answer:
            assert answer.status == 200
            assert upstreams.figures()["up"]["in_flight"] == 1
        assert upstreams.figures()["up"]["in_flight"] == 0
        await upstreams.close()


async def test_an_upstream_that_stays_away_is_in_the_log_once_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    settings = nowhere(breaker_failures=2, breaker_open_s=10.0)
    one = Upstream(settings, None, queue=QueueSettings(), clock=lambda: now[0])
    for _ in range(5):
        one.failed("connect")
        one.failed("connect")
        now[0] += 11.0
        assert one.breaker.admit()
    assert caplog.text.count("circuit breaker open") == 1
    one.breaker.succeeded()
    one.failed("connect")
    one.failed("connect")
    assert caplog.text.count("circuit breaker open") == 2


# -- the batch lane ---------------------------------------------------------------------------------------------------


def asking(lane: Lane = "batch", model: str = "up-1") -> UpstreamRequest:
    now, values = time.monotonic(), VALUES | {"model": model}
    body = orjson.dumps(values)
    path = "/v1/chat/completions"
    return UpstreamRequest("r", Tenant("a"), "openai", model, path, "", (), body, values, now, now + 10, lane=lane)


@asynccontextmanager
async def asked_of(
    *settings: UpstreamSettings, clock: Callable[[], float] = time.monotonic, **limits: Any
) -> AsyncIterator[Upstreams]:
    upstreams = Upstreams(settings, {}, queue=QueueSettings(**limits), clock=clock, backoff_s=0.0)
    yield upstreams
    await upstreams.close()


async def whole(upstreams: Upstreams, request: UpstreamRequest) -> int:
    async with upstreams.answer(request) as answer:
        async for _ in answer.chunks:
            pass
        return answer.status


async def test_a_line_waits_while_online_requests_take_all_places_and_they_never_wait() -> None:
    async with upstream() as stub, asked_of(stub.settings(batch_slots=1)) as upstreams:
        online = asking("online")
        async with upstreams.answer(online), upstreams.answer(asking("online")):
            line = asyncio.ensure_future(whole(upstreams, asking()))
            await until(lambda: upstreams.figures()["up"]["batch_waiting"] == 1)
            assert len(stub.got) == 2
        assert await line == 200
        figures = upstreams.figures()["up"]
        assert (figures["in_flight"], figures["batch_in_flight"], figures["batch_waiting"]) == (0, 0, 0)


async def test_lines_take_no_connection_from_online_requests() -> None:
    settings = {"batch_slots": 2, "max_connections": 1, "max_waiting": 0, "connect_timeout_s": 0.5, "retries": 0}
    stalls = [Told(then="stall")] * 2
    async with upstream(*stalls, CHAT) as stub, asked_of(stub.settings(**settings)) as upstreams:
        lines = [asyncio.ensure_future(whole(upstreams, asking())) for _ in stalls]
        await until(lambda: len(stub.got) == len(lines))
        assert await whole(upstreams, asking("online")) == 200
        assert upstreams.figures()["up"]["in_flight"] == len(lines)
        for line in lines:
            line.cancel()
        await asyncio.wait(lines)
        assert upstreams.figures()["up"]["in_flight"] == 0


async def test_a_line_keeps_its_place_until_its_answer_is_read_to_the_end() -> None:
    async with upstream() as stub, asked_of(stub.settings(batch_slots=1)) as upstreams:
        first = asking()
        async with upstreams.answer(first):
            second = asking()
            line = asyncio.ensure_future(whole(upstreams, second))
            await until(lambda: upstreams.figures()["up"]["batch_waiting"] == 1)
        assert await line == 200
        assert (first.trace.queue_ms < second.trace.queue_ms, len(stub.got)) == (True, 2)


async def test_the_time_that_a_line_waited_for_its_place_is_not_time_at_its_upstream() -> None:
    long_ago = replace(asking(), received_s=time.monotonic() - 1000.0)
    async with upstream() as stub, asked_of(stub.settings(timeout_s=10.0)) as upstreams:
        assert await whole(upstreams, long_ago) == 200


@pytest.mark.parametrize("lane", ["online", "batch"])
async def test_an_upstream_that_has_no_room_for_anybody_gets_no_more_lines_for_a_while(lane: Lane) -> None:
    busy = error(429, retry_after="0")
    async with upstream(busy, CHAT) as stub, asked_of(stub.settings(retries=0)) as upstreams:
        assert await whole(upstreams, asking(lane)) == 429
        assert await whole(upstreams, asking()) == 200
    stands = time.monotonic()
    for told, waits_s in (({"retry_after": "60"}, 60.0), ({}, NO_ROOM_S)):
        async with (
            upstream(error(429, **told), CHAT) as stub,
            asked_of(stub.settings(retries=0), clock=lambda: stands) as upstreams,
        ):
            assert await whole(upstreams, asking(lane)) == 429
            with pytest.raises(UpstreamsAwayError) as caught:
                await whole(upstreams, asking())
            assert caught.value.retry_after_s == pytest.approx(waits_s)
            assert await whole(upstreams, asking("online")) == 200


async def test_an_upstream_that_answers_lines_gets_more_of_them_again() -> None:
    settings = {"batch_slots": 2, "retries": 0}
    async with upstream(error(429, retry_after="0"), CHAT) as stub, asked_of(stub.settings(**settings)) as upstreams:
        assert await whole(upstreams, asking()) == 429  # one at a time from now on
        async with upstreams.answer(asking()), upstreams.answer(asking()):
            assert upstreams.figures()["up"]["batch_in_flight"] == 2


async def test_online_requests_are_not_told_how_long_lines_are_held_off() -> None:
    settings = {"max_connections": 1, "max_waiting": 0, "retries": 0}
    async with upstream(error(429, retry_after="60"), CHAT) as stub, asked_of(stub.settings(**settings)) as upstreams:
        assert await whole(upstreams, asking("online")) == 429
        async with upstreams.answer(asking("online")):
            with pytest.raises(UpstreamsAwayError) as caught:
                await whole(upstreams, asking("online"))
        assert caught.value.retry_after_s == BUSY_S


async def test_a_line_is_not_tried_again_at_once_where_there_is_no_room() -> None:
    async with upstream(error(429, retry_after="5")) as stub, asked_of(stub.settings(retries=3)) as upstreams:
        async with upstreams.answer(asking()) as answer:
            assert (answer.status, answer.retry_after_s) == (429, 5.0)
        assert len(stub.got) == 1


async def test_a_line_goes_to_the_next_upstream_as_online_requests_do_and_holds_one_place_at_a_time() -> None:
    async with upstream(error(500)) as first, upstream() as second:
        named = first.settings(name="first", retries=1), second.settings(name="second")
        async with asked_of(*named) as upstreams:
            async with upstreams.answer(asking()) as answer:
                taken = {name: figures["batch_in_flight"] for name, figures in upstreams.figures().items()}
                assert (answer.upstream, taken) == ("second", {"first": 0, "second": 1})
            assert (len(first.got), len(second.got)) == (2, 1)


async def test_lines_that_fail_each_time_do_not_take_the_upstream_from_the_online_lane() -> None:
    settings = {"retries": 0, "breaker_failures": 2}
    async with upstream(error(500)) as stub, asked_of(stub.settings(**settings)) as upstreams:
        assert [await whole(upstreams, asking()) for _ in range(4)] == [500] * 4
        assert (upstreams.figures()["up"]["breaker"], upstreams.figures()["up"]["errors"]) == ("closed", {"500": 4})
        assert [await whole(upstreams, asking("online")) for _ in range(2)] == [500] * 2
        assert upstreams.figures()["up"]["breaker"] == "open"


async def test_a_line_that_tries_whether_an_upstream_is_back_says_that_it_is_not() -> None:
    now = [100.0]
    settings = {"retries": 0, "breaker_failures": 1, "breaker_open_s": 10.0}
    async with upstream(error(500)) as stub, asked_of(stub.settings(**settings), clock=lambda: now[0]) as upstreams:
        assert await whole(upstreams, asking("online")) == 500
        now[0] += 10.0
        assert upstreams.figures()["up"]["breaker"] == "half-open"
        assert await whole(upstreams, asking()) == 500
        assert upstreams.figures()["up"]["breaker"] == "open"


async def test_a_line_waits_for_no_place_at_an_upstream_that_is_left_alone() -> None:
    settings = nowhere(breaker_failures=1, retries=0, batch_slots=1)
    async with asked_of(settings) as upstreams:
        with pytest.raises(UpstreamLostError) as caught:
            await whole(upstreams, asking())
        assert not caught.value.begun
        with pytest.raises(UpstreamsAwayError):
            await whole(upstreams, asking())
        assert upstreams.figures()["nowhere"]["batch_in_flight"] == 0


# -- places for online requests ---------------------------------------------------------------------------------------


async def test_the_time_that_an_online_request_waited_is_not_time_at_its_upstream() -> None:
    long_ago = replace(asking("online"), received_s=time.monotonic() - 1000.0)
    async with upstream() as stub, asked_of(stub.settings(timeout_s=10.0, max_in_flight=1)) as upstreams:
        assert await whole(upstreams, long_ago) == 200


async def test_what_is_waited_in_front_of_several_upstreams_is_one_limit() -> None:
    async with (
        upstream(Told([b"x"], then="stall")) as stub,
        asked_of(stub.settings(max_in_flight=1), max_wait_s=60.0) as upstreams,
        upstreams.answer(asking("online")),
    ):
        waited = replace(asking("online"), trace=Trace(queue_ms=60_000.0))  # in front of another one
        with pytest.raises(DeadlineError):
            async with asyncio.timeout(5.0):  # its own time is ten seconds
                await whole(upstreams, waited)


async def test_a_request_waits_less_where_it_may_overflow_to_another_upstream() -> None:
    stall = Told([b"x"], then="stall")
    async with upstream(stall) as first, upstream(stall, CHAT) as second:
        named = (
            stub.settings(name=name, max_in_flight=1, overflow_s=0.0)
            for stub, name in ((first, "first"), (second, "second"))
        )
        async with asked_of(*named) as upstreams, upstreams.answer(asking("online")):
            async with upstreams.answer(asking("online")) as answer:
                assert answer.upstream == "second"
                waits = asyncio.ensure_future(whole(upstreams, asking("online")))  # at the last one it does wait
                await until(lambda: upstreams.figures()["second"]["waiting"] == 1)
            assert await waits == 200
            assert [upstreams.figures()[name]["errors"] for name in ("first", "second")] == [{"late": 2}, {}]


async def test_a_request_whose_own_time_is_over_goes_to_no_other_upstream() -> None:
    async with upstream(Told([b"x"], then="stall")) as first, upstream() as second:
        named = first.settings(name="first", max_in_flight=1), second.settings(name="second")
        async with asked_of(*named) as upstreams, upstreams.answer(asking("online")):
            with pytest.raises(DeadlineError):
                await whole(upstreams, replace(asking("online"), deadline_s=time.monotonic() + 0.05))
        assert not second.got


@pytest.mark.parametrize(
    ("failures", "told"), [(5, UpstreamLostError), (1, QueueFullError)], ids=["fails", "is left alone"]
)
async def test_a_full_upstream_is_what_is_told_where_the_others_are_left_alone(
    failures: int, told: type[KvasirError]
) -> None:
    other = nowhere(breaker_failures=failures, retries=0)
    async with (
        upstream(Told([b"x"], then="stall")) as stub,
        asked_of(stub.settings(max_in_flight=1), other, max_waiting=0) as upstreams,
        upstreams.answer(asking("online")),
    ):
        with pytest.raises(UpstreamLostError):
            await whole(upstreams, asking("online"))
        with pytest.raises(told):
            await whole(upstreams, asking("online"))


async def test_those_who_wait_are_told_as_soon_as_their_upstream_is_left_alone() -> None:
    settings = {"max_in_flight": 1, "breaker_failures": 1}
    async with upstream(Told([b"x"], then="stall")) as stub, asked_of(stub.settings(**settings)) as upstreams:
        async with upstreams.answer(asking("online")):
            waiting = [asyncio.ensure_future(whole(upstreams, asking("online"))) for _ in range(10)]
            await until(lambda: upstreams.figures()["up"]["waiting"] == len(waiting))
            upstreams._now.by_name["up"].failed("lost")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [UpstreamsAwayError] * 10
        assert (len(stub.got), upstreams.figures()["up"]["waiting"]) == (1, 0)


async def test_an_error_that_is_there_as_a_whole_holds_no_place() -> None:
    settings = {"max_in_flight": 1, "retries": 1}
    async with upstream(error(500), error(500), CHAT) as stub, asked_of(stub.settings(**settings)) as upstreams:
        async with upstreams.answer(asking("online")) as answer:
            assert answer.status == 500
            assert await whole(upstreams, asking("online")) == 200
        assert len(stub.got) == 3
