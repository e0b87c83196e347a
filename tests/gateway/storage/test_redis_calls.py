"""Many calls at once, by a clock that the loop's turns move: nobody is asked, the tests answer. What stages ask a real
Redis for is in tests/contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from gateway.errors import RedisDownError
from gateway.storage.redis_calls import MAX_CALLS, TURNS, RedisCalls

TIMEOUT_S = 0.25
BURST = 20 * MAX_CALLS


class Turns:
    """Moves the loop's clock on, at each of its turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spent_s = 0.0
        self._loop = loop
        self._step_s = 0.0
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self.spent_s)

    def take(self, step_s: float) -> None:
        """Each so many seconds long, from now on; 0 for those that take no time."""
        begun, self._step_s = self._step_s > 0, step_s
        if not begun:
            self._turn()

    def _turn(self) -> None:
        self.spent_s += self._step_s
        if self._step_s:
            self._loop.call_soon(self._turn)


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    made = Turns(asyncio.get_running_loop(), monkeypatch)
    yield made
    made.take(0.0)


@pytest.fixture
def calls() -> RedisCalls:
    return RedisCalls(Redis(), TIMEOUT_S)


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "here"


async def test_a_burst_that_keeps_the_loop_busy_is_no_outage(calls: RedisCalls, turns: Turns) -> None:
    """Each turn of the loop is longer than a call may take, and the burst much longer."""

    async def answer() -> str:
        await asyncio.sleep(0)
        return "here"

    turns.take(2 * TIMEOUT_S)
    answers = await asyncio.gather(*(calls.ask(answer()) for _ in range(BURST)))
    assert answers == ["here"] * BURST
    assert turns.spent_s > 20 * TIMEOUT_S


async def test_a_redis_that_is_slow_is_waited_for_in_turn(calls: RedisCalls, turns: Turns) -> None:
    turns.take(TIMEOUT_S / 50)
    answers = await asyncio.gather(*(calls.ask(after(TIMEOUT_S / 2)) for _ in range(TURNS * MAX_CALLS)))
    assert answers == ["here"] * TURNS * MAX_CALLS
    assert turns.spent_s > 4 * TIMEOUT_S


async def test_nobody_waits_for_a_turn_without_end(calls: RedisCalls, turns: Turns) -> None:
    turns.take(TIMEOUT_S / 50)
    asked = (calls.ask(after(TIMEOUT_S * 0.9)) for _ in range(2 * TURNS * MAX_CALLS))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(one) for one in answers} == {str, RedisDownError}
    assert TURNS / 2 < answers.count("here") / MAX_CALLS < 2 * TURNS
    assert turns.spent_s < (TURNS + 6) * TIMEOUT_S
    assert await calls.ask(after(0.0)) == "here"


async def test_a_redis_that_hangs_costs_everybody_one_time_limit(calls: RedisCalls, turns: Turns) -> None:
    """Of those who wait for their turn nobody asks after that. Warnings are errors, so no coroutine is left behind."""
    asked = 0

    async def hang() -> str:
        nonlocal asked
        asked += 1
        return await after(1e6)

    turns.take(TIMEOUT_S / 50)
    failed = await asyncio.gather(*(calls.ask(hang()) for _ in range(BURST)), return_exceptions=True)
    assert {type(one) for one in failed} == {RedisDownError}
    assert asked == MAX_CALLS
    assert turns.spent_s < 3 * TIMEOUT_S
    with pytest.raises(RedisDownError):
        await calls.ask(hang())
    assert asked == MAX_CALLS + 1  # the next one asks again


async def test_while_redis_is_silent_one_call_at_a_time_finds_out_whether_it_is_back(
    calls: RedisCalls, turns: Turns
) -> None:
    asked, back = 0, asyncio.Event()

    async def wait() -> str:
        nonlocal asked
        asked += 1
        await back.wait()
        return "here"

    turns.take(TIMEOUT_S / 50)
    with pytest.raises(RedisDownError):
        await calls.ask(wait())
    for number in (2, 3):
        begun_s = turns.spent_s
        probe = asyncio.create_task(calls.ask(wait()))
        await asyncio.sleep(0)
        others = await asyncio.gather(*(calls.ask(wait()) for _ in range(BURST)), return_exceptions=True)
        assert {one.asked for one in others if isinstance(one, RedisDownError)} == {False}
        assert turns.spent_s < begun_s + TIMEOUT_S
        with pytest.raises(RedisDownError):
            await probe
        assert asked == number
    back.set()
    assert await calls.ask(wait()) == "here"
    assert await asyncio.gather(*(calls.ask(wait()) for _ in range(BURST))) == ["here"] * BURST


async def test_who_leaves_while_finding_out_leaves_it_to_the_next(calls: RedisCalls) -> None:
    async def refuse() -> str:
        raise RedisConnectionError("refused")

    with pytest.raises(RedisDownError):
        await calls.ask(refuse())
    probe = asyncio.create_task(calls.ask(after(1e6)))
    await asyncio.sleep(0)
    with pytest.raises(RedisDownError):
        await calls.ask(after(0.0))
    probe.cancel()
    await asyncio.wait([probe])
    assert await calls.ask(after(0.0)) == "here"


async def test_where_redis_refuses_nobody_waits(calls: RedisCalls) -> None:
    asked = 0

    async def refuse() -> str:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        raise RedisConnectionError("refused")

    failed = await asyncio.gather(*(calls.ask(refuse()) for _ in range(BURST)), return_exceptions=True)
    assert [getattr(one, "why", None) for one in failed[:MAX_CALLS]] == ["refused"] * MAX_CALLS
    assert asked == MAX_CALLS


async def test_what_redis_says_no_to_is_nobody_elses_affair(calls: RedisCalls) -> None:
    async def answer(number: int) -> str:
        await asyncio.sleep(0)
        if number % 2:
            raise ResponseError("WRONGTYPE")
        return "here"

    answers = await asyncio.gather(*(calls.ask(answer(number)) for number in range(BURST)), return_exceptions=True)
    assert answers[::2] == ["here"] * (BURST // 2)
    assert {getattr(one, "why", None) for one in answers[1::2]} == {"WRONGTYPE"}


@pytest.mark.parametrize("place", [0, BURST - 1], ids=["asks", "waits"])
async def test_who_leaves_gives_the_turn_to_the_next(calls: RedisCalls, place: int) -> None:
    go = asyncio.Event()

    async def answer() -> str:
        await go.wait()
        return "here"

    asked = [asyncio.create_task(calls.ask(answer())) for _ in range(BURST)]
    await asyncio.sleep(0)
    asked[place].cancel()
    go.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers.pop(place), asyncio.CancelledError)
    assert set(answers) == {"here"}


async def test_the_error_says_why(calls: RedisCalls) -> None:
    async def fail(error: Exception) -> None:
        raise error

    for error, why in ((OSError("no route"), "no route"), (asyncio.IncompleteReadError(b"", 1), "0 bytes read")):
        with pytest.raises(RedisDownError) as down:
            await calls.ask(fail(error))
        assert down.value.why.startswith(why)
    with pytest.raises(KeyError):  # which is a mistake of ours
        await calls.ask(fail(KeyError("x")))
