"""How long the event loop stands still, measured by itself: what every request of this gateway waits besides its own
work. Two histograms of how late a timer was:

    lag      as clients notice it
    own lag  the part of it in which this process ran: work on the loop, or a thread that kept the interpreter. The
             rest is a machine that had no processor for it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from gateway.admin.tallies import Durations

EVERY_S: Final = 0.02
"""From one look to the next. A stop is found but for so much of it."""

BOUNDS_S: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Of one application's event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "kvasir_event_loop_{}_seconds".format
        lag = Durations(name("lag"), "Seconds. How late the event loop came to a timer.", (), BOUNDS_S)
        own = Durations(name("own_lag"), "Seconds. The part of the lag in which the gateway itself ran.", (), BOUNDS_S)
        registry.register(lag)
        registry.register(own)
        self._lag, self._own_lag = lag.of(), own.of()
        self._timer: asyncio.TimerHandle | None = None

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """While the application runs."""
        self._look_again(asyncio.get_running_loop())
        yield
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(EVERY_S, self._look, loop, time.monotonic() + EVERY_S, time.process_time())

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float, ran_before_s: float) -> None:
        late_s = max(0.0, time.monotonic() - due_s)
        self._lag.add(late_s)
        self._own_lag.add(min(late_s, time.process_time() - ran_before_s))
        self._look_again(loop)
