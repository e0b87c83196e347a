from __future__ import annotations

import asyncio
import contextlib
import logging

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


async def test_a_loop_ends_although_its_library_drops_the_cancellation() -> None:
    turns: list[bool] = []

    async def work() -> None:
        while not tasks.was_cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            turns.append(tasks.was_cancelled())

    task = tasks.spawn(work(), name="deaf")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.cancel(task), 5)
    assert turns == [True]
