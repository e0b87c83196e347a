"""The engines' own counters, fetched for /metrics and /admin/stats, at most once every KEEP_S. An engine that is
unreachable or does not answer in time has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway import tasks
from gateway.engines.bundled import BundledEngine

KEEP_S: Final = 1.0
"""Seconds for which figures are new enough: two scrapes at a time cost an engine one answer."""

NOTHING: Final[Mapping[str, Any]] = {}


class EngineFigures:
    """Belongs to one event loop."""

    def __init__(
        self, clients: Callable[[], Sequence[BundledEngine]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clients = clients
        self._clock = clock
        self._figures: dict[str, Mapping[str, Any]] = {}  # by URL
        self._asked_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Returns when every engine has answered or had its time, at once if they did a moment ago."""
        if self._asked_s is not None and self._clock() - self._asked_s < KEEP_S:
            return
        if self._asking is None:
            self._asking = tasks.spawn(self._ask(), name="engine figures")
        await asyncio.shield(self._asking)  # others may wait for the same answers

    def of(self, url: str) -> Mapping[str, Any]:
        """What the engine last said, empty when it said nothing. Must not be changed."""
        return self._figures.get(url, NOTHING)

    async def close(self) -> None:
        """Ends what is being asked."""
        await tasks.cancel(self._asking)

    async def _ask(self) -> None:
        try:
            clients = list(self._clients())
            answers = await asyncio.gather(*(client.fetch_stats() for client in clients))
            self._figures = {client.url: stats for client, stats in zip(clients, answers, strict=True) if stats}
            self._asked_s = self._clock()
        finally:
            self._asking = None
