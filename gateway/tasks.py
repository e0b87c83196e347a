"""Background tasks that cannot get lost: kept, named, and logged when they fail. And waiting with patience."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

log = logging.getLogger(__name__)

LOOKS: Final = 8
"""So often the loop has to come round before somebody who does not answer is given up."""

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Starts `work` and keeps it referenced until it ends. A failure is logged; cancelling is not a failure."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_done)
    return task


async def cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits for its end. Quiet when it had ended, or failed (which was logged then)."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait([task])


def was_cancelled() -> bool:
    """Whether the running task has been told to end, even if it never saw a CancelledError.

    Loops that call foreign code ask this at each turn: before Python 3.12 asyncio.wait_for, which redis-py waits with,
    drops a cancellation that arrives together with its result, and `cancel` would wait for ever.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@asynccontextmanager
async def patience(timeout_s: float, *, looks: int = LOOKS) -> AsyncIterator[None]:
    """As asyncio.timeout, for answers that a busy loop may not have got round to reading: in a burst of requests one
    turn of it takes longer than a whole time limit, and with one timer everybody who is asked would seem to be away.
    The task is cancelled at each later look, too, until it leaves: foreign code may drop it (see was_cancelled)."""
    loop, task, seen, cancels = asyncio.get_running_loop(), asyncio.current_task(), 0, 0
    timer: asyncio.TimerHandle
    assert task is not None

    def look() -> None:
        nonlocal seen, cancels, timer
        timer = loop.call_later(timeout_s / looks, look)
        seen += 1
        if seen >= looks:
            cancels += 1
            task.cancel()

    before = task.cancelling()
    timer = loop.call_later(timeout_s / looks, look)
    try:
        yield
    except asyncio.CancelledError as error:
        if cancels and task.cancelling() - cancels <= before:
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
        for _ in range(cancels):
            task.uncancel()


def _done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s failed", task.get_name(), exc_info=error)
