"""Pings in front of a stream that is late: headers and something that every client skips, so that no proxy takes the
connection for idle. Knows no dialect and no pipeline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from aiohttp import web

from gateway import tasks

PING_S: Final = 10.0
"""From one ping to the next: proxies cut what is idle for 30 or 60 seconds."""

LOOK_S: Final = 0.5
"""From one look whether the response may begin to the next."""


class Pings:
    """Of one response. Costs a timer, and a task once it is late."""

    def __init__(self, begin: Callable[[], Awaitable[web.StreamResponse]], ping: Callable[[], bytes]) -> None:
        """`begin` sends headers, or has sent them."""
        self._begin = begin
        self._ping = ping
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start_at(self, start_s: float, may_begin: Callable[[], bool]) -> None:
        """Pings from `start_s` (monotonic clock) on, as soon as `may_begin`. Call `stop` in any case."""

        def begin() -> None:
            self._task = tasks.spawn(self._run(may_begin), name="ping")

        delay_s = max(0.0, start_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, begin)

    def stop(self) -> None:
        """No ping begins after this; one that is being written is written to its end."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _run(self, may_begin: Callable[[], bool]) -> None:
        with suppress(ConnectionResetError):
            while not may_begin():  # noqa: ASYNC110 - nothing tells when a request gets its slot
                await asyncio.sleep(LOOK_S)
            response = await self._begin()
            while not self._stopped:
                await response.write(self._ping())
                await asyncio.sleep(PING_S)
