"""Which lines run together. One whose engine died at work on it runs by itself the next time, among those of its model
on this gateway: if it was the cause, it takes no other line with it. Pure but for waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Apart:
    """One gateway's."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._alone: set[str] = set()  # models of which a line runs by itself
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, model: str, *, alone: bool) -> AsyncIterator[None]:
        """Entered when the line may run. `alone`: no other line of the model runs until it is left."""
        while model in self._alone or (alone and self._running[model]):
            await self._changed.wait()
        self._running[model] += 1
        if alone:
            self._alone.add(model)
        try:
            yield
        finally:
            self._running[model] -= 1
            if not self._running[model]:
                del self._running[model]
            if alone:
                self._alone.discard(model)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
