"""Work that no request waits for, and that is over when its owner is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.tasks import cancel, spawn


class Background:
    """Tasks of one owner. What starts them bounds how many there are."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """As tasks.spawn does."""
        task = spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels what runs, and waits for its end."""
        while self._tasks:
            await cancel(next(iter(self._tasks)))
