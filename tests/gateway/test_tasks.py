from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest

from gateway import tasks


async def test_a_failure_in_the_background_is_logged_with_the_task_name(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    task = tasks.spawn(fail(), name="the task")
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([task])
        await asyncio.sleep(0)  # the callback runs in the next turn of the loop
    assert "the task" in caplog.text


async def test_cancelling_waits_for_the_end_and_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = tasks.spawn(work(), name="endless")
    await asyncio.sleep(0)
    await tasks.cancel(task)
    await tasks.cancel(None)
    assert ended.is_set()
    assert not caplog.records


async def test_who_is_not_heard_because_the_loop_was_busy_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, spent_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + spent_s)
    answer = loop.create_future()
    async with tasks.patience(5.0):
        for _ in range(tasks.LOOKS - 1):
            spent_s += 60.0  # in which the loop did not come round
            await asyncio.sleep(0)
        loop.call_soon(answer.set_result, "here")
        assert await answer == "here"


async def test_who_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, spent_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + spent_s)

    def pass_time() -> None:
        nonlocal spent_s, turns
        spent_s += 1.0
        turns += 1
        if turns < 100:
            loop.call_soon(pass_time)

    turns = 0
    loop.call_soon(pass_time)
    with pytest.raises(TimeoutError):
        async with tasks.patience(8.0 * tasks.LOOKS):
            await asyncio.Event().wait()
    assert turns <= (8 + 2) * tasks.LOOKS
    with pytest.raises(asyncio.CancelledError):  # somebody else's cancelling stays what it is
        async with tasks.patience(1000.0):
            raise asyncio.CancelledError


async def test_who_drops_a_cancellation_is_cancelled_again() -> None:
    dropped = 0
    with pytest.raises(TimeoutError):
        async with tasks.patience(0.08):
            for _ in range(3):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                dropped += 1
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert dropped == 3
    assert task is not None
    assert task.cancelling() == 0


async def test_what_comes_although_a_cancellation_was_dropped_is_taken() -> None:
    async with tasks.patience(0.01):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    await asyncio.sleep(0)  # nothing of it is left


async def test_somebody_elses_cancelling_is_no_time_limit() -> None:
    begun = asyncio.Event()

    async def wait() -> None:
        async with tasks.patience(0.01):
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # as from outside, while it is being given up
                raise

    task = asyncio.create_task(wait())
    await begun.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_loop_ends_although_its_library_drops_the_cancellation() -> None:
    turns: list[bool] = []

    async def work() -> None:
        while not tasks.was_cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            turns.append(tasks.was_cancelled())

    task = tasks.spawn(work(), name="deaf")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.cancel(task), 30)
    assert turns == [True]


async def test_the_thread_for_large_requests_rests_between_two_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"s": 100.0}
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock["s"] += seconds

    def work() -> None:
        clock["s"] += 0.03

    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: clock["s"], sleep=sleep))
    monkeypatch.setattr(tasks, "_rested_s", 0.0)
    await asyncio.gather(*(tasks.off_loop(tasks.AT_ONCE + 1, work) for _ in range(3)))
    assert slept == pytest.approx([0.0, 0.03, 0.03])
    clock["s"] += 1.0
    await tasks.off_loop(tasks.AT_ONCE + 1, work)
    assert slept[3:] == [0.0], "it had rested"
