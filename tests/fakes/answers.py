"""Remembered answers that a test wrote, for the operator's pages alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from gateway.errors import RedisDownError
from gateway.responses.entries import About, Chosen, Content


@dataclass
class FakeAnswers:
    """See Answers."""

    kept: dict[About, Content] = field(default_factory=dict)
    down: bool = False

    async def scan(self, chosen: Chosen, at_s: float) -> AsyncIterator[About]:
        self._check()
        for kept in list(self.kept):
            if chosen.takes(kept, at_s):
                yield kept

    async def content(self, kept: About) -> Content | None:
        self._check()
        return self.kept.get(kept)

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        found = [kept async for kept in self.scan(chosen, at_s)]
        for kept in found:
            del self.kept[kept]
        return len(found)

    def _check(self) -> None:
        if self.down:
            raise RedisDownError("away")
