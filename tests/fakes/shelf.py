"""Answers that are kept in common, for tests of what happens when they cannot be reached."""

from __future__ import annotations

from gateway.errors import RedisDownError
from gateway.responses.entries import About, Entry


class Shelf:
    """A Redis that can be away."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.down = False
        self.asked = 0

    async def find(self, owner: str, name: str) -> Entry | None:
        self._check()
        return self.entries.get((owner, name))

    async def put(self, entry: Entry) -> bool:
        self._check()
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

    @property
    def evicted(self) -> int:
        return 0

    def _check(self) -> None:
        self.asked += 1
        if self.down:
            raise RedisDownError("away")
