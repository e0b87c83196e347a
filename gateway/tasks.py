"""Background tasks that cannot get lost: kept, named, and logged when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

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


def _done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s failed", task.get_name(), exc_info=error)
