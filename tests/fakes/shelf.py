"""Answers that gateways share, for tests of what happens when they cannot be reached."""

from __future__ import annotations

import asyncio

from gateway.errors import RedisDownError
from gateway.responses.entries import About, Entry


class Shelf:
    """See RedisEntries. While it is `down` every call fails; where `go` is set, `find` and `put` wait for it, and
    `find` returns what was there when it was called."""

    evicted = 0

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.looked_up: list[tuple[str, str]] = []
        self.down = False
        self.go: asyncio.Event | None = None
        self.asked = 0

    async def find(self, owner: str, name: str) -> Entry | None:
        self.looked_up.append((owner, name))
        found = self.entries.get((owner, name))
        await self._answer()
        return found

    async def put(self, entry: Entry) -> bool:
        await self._answer()
        self.entries[entry.owner, entry.id] = entry
        return True

    async def remove(self, owner: str, name: str) -> bool:
        self._check()
        return self.entries.pop((owner, name), None) is not None

    async def owners(self) -> list[str]:
        self._check()
        return [owner for owner, _ in self.entries]

    async def all_of(self, owner: str) -> list[About]:
        self._check()
        return []

    @property
    def up(self) -> bool:
        return not self.down

    async def _answer(self) -> None:
        if self.go is not None:
            await self.go.wait()
        self._check()

    def _check(self) -> None:
        self.asked += 1
        if self.down:
            raise RedisDownError("away")
