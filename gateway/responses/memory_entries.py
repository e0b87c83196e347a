"""Answers in the memory of this gateway: the first place that is looked at, and the only one without a Redis."""

from __future__ import annotations

from collections.abc import Callable

from gateway.responses.entries import About, Entry
from gateway.storage.byte_store import Quota
from gateway.storage.memory_bytes import Memory


class MemoryEntries(Memory[Entry]):
    """See Entries. A time to live counts from when the answer was made, and no use makes it longer."""

    up = True

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        """`now` is the clock of entries, in seconds since 1970."""
        super().__init__(Quota(total_bytes=max_bytes, by_use=True), now)

    @property
    def evicted(self) -> int:
        """See Entries."""
        return self.figures.evicted

    def set(self, entry: Entry) -> bool:
        """In place of the one with this id. False if it is larger than all may be together."""
        return self.store(entry.owner, entry.id, entry, entry.num_bytes, entry.expires_s) == "stored"

    async def find(self, owner: str, name: str) -> Entry | None:
        """See Entries."""
        return self.get(owner, name)

    async def put(self, entry: Entry) -> bool:
        """See Entries."""
        return self.set(entry)

    async def remove(self, owner: str, name: str) -> bool:
        """See Entries."""
        return self.delete(owner, name)

    async def owners(self) -> list[str]:
        """See Entries."""
        return sorted(self._owners)

    async def all_of(self, owner: str) -> list[About]:
        """See Entries."""
        return [About.of(held.value) for held in self.of(owner).values()]
