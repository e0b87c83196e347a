"""Which lines run together. One whose engine died at work on it runs by itself the next time, among those of its model
on this gateway: if it was the cause, it takes no other line with it. The rows of those that run are bounded in bytes.
Pure but for waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

ROW_BYTES: Final = 64 << 20
"""Rows of all lines that run on one gateway, beside server.max_bodies_bytes: a row of the largest size fits in any
case, and is parsed to a few times its bytes."""


class Apart:
    """One gateway's."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._alone: set[str] = set()  # models of which a line runs by itself
        self._changed = asyncio.Event()
        self.row_bytes = 0

    @asynccontextmanager
    async def turn(self, model: str, num_bytes: int, *, alone: bool) -> AsyncIterator[None]:
        """Entered when the line, with a row of so many bytes, may run. `alone`: no other line of the model runs until
        it is left."""
        while (
            model in self._alone
            or (alone and self._running[model])
            or (self.row_bytes and self.row_bytes + num_bytes > ROW_BYTES)
        ):
            await self._changed.wait()
        self._running[model] += 1
        self.row_bytes += num_bytes
        if alone:
            self._alone.add(model)
        try:
            yield
        finally:
            self.row_bytes -= num_bytes
            self._running[model] -= 1
            if not self._running[model]:
                del self._running[model]
            if alone:
                self._alone.discard(model)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
