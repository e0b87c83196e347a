"""Background tasks that cannot get lost: referenced, named, and logged when they fail. Timeouts on a busy loop, and
work that is too long for the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

log = logging.getLogger(__name__)

AT_ONCE: Final = 64 << 10
"""Work on a request that does not leave the event loop, at most: ten milliseconds at worst (see `work_of`)."""

CONTAINER_WORK: Final = 128
VALUE_WORK: Final = 8
TEXT_WORK: Final = 8

LARGE: Final = 1 << 17
"""Work from which on no single call of a C library may do all of it: the text of a megabyte."""

SWITCH_S: Final = 0.001
"""After which a thread that runs Python gives way to one that waits, the event loop's above all. Python's own is 5 ms,
which a small request would wait several times over."""

_thread: Final = ThreadPoolExecutor(1, thread_name_prefix="large")
"""For large requests. One, because what is done there needs the interpreter all the time: a second one would only stand
in the event loop's way for as long again."""

MAX_REST_S: Final = 0.05
_rested_s = 0.0
"""Monotonic time at which that thread has rested; written by itself alone."""

LOOKS: Final = 8
"""Turns of the loop within a time limit before it is over."""

_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Starts `work` and keeps it referenced until it ends. A failure is logged; cancelling is not a failure."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_done)
    return task


def share_interpreter() -> None:
    """Makes threads that run Python give way sooner (SWITCH_S). Called once, at start."""
    sys.setswitchinterval(SWITCH_S)


def work_of(num_chars: int, containers: int = 0, values: int = 0) -> int:
    """How much work it is to parse, check, render or hash a text, or one with so many messages, parts or other objects,
    each of which costs as much as a thousand characters, and so many values, each of which, with its name, costs as
    much as 64."""
    return num_chars // TEXT_WORK + CONTAINER_WORK * containers + VALUE_WORK * values


async def off_loop(amount: int, work: Callable[[], _T]) -> _T:
    """What `work` returns or raises. Where the amount of it (`work_of`) is beyond AT_ONCE it runs in a thread, and must
    touch nothing that others change."""
    if amount <= AT_ONCE:
        return work()
    in_context = partial(copy_context().run, work)
    return await asyncio.get_running_loop().run_in_executor(_thread, partial(_paced, in_context))


def _paced(work: Callable[[], _T]) -> _T:
    """Has the thread rest before what comes behind long work, for about as long, so that a row of large requests leaves
    the event loop half of the interpreter, and a small one waits for one long call at most."""
    global _rested_s
    time.sleep(max(0.0, _rested_s - time.monotonic()))
    begun_s = time.monotonic()
    try:
        return work()
    finally:
        ended_s = time.monotonic()
        _rested_s = ended_s + (min(ended_s - begun_s, MAX_REST_S) if ended_s - begun_s > SWITCH_S else 0.0)


async def cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits for its end. Quiet when it had ended, or failed (which was logged then)."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait([task])


async def end(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Asks a process to end (SIGTERM), and kills it when it does not in time: False then."""
    if process.returncode is not None:
        return True
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
        return True
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return False


def was_cancelled() -> bool:
    """Whether the running task was cancelled, even if it never saw a CancelledError.

    Loops that call foreign code ask this at each turn: before Python 3.12 asyncio.wait_for, which redis-py waits with,
    drops a cancellation that arrives together with its result, and `cancel` would wait for ever.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@asynccontextmanager
async def patience(timeout_s: float, *, looks: int = LOOKS) -> AsyncIterator[None]:
    """As asyncio.timeout, for answers that a busy loop may not have got round to reading: in a burst of requests one
    turn of it takes longer than a whole time limit, and with one timer every server would seem to be unreachable.
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
