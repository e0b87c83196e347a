"""Answers in the memory of this gateway: the first place that is looked at, and the only one without a Redis."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.responses.entries import Entry


@dataclass(slots=True)
class MemoryFigures:
    """Since the start, but for the first two."""

    entries: int = 0
    bytes: int = 0
    evicted: int = 0  # to make room
    expired: int = 0


class MemoryEntries:
    """LRU by bytes. A time to live counts from when the answer was made, and no use makes it longer."""

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        """`now` is the clock of entries, in seconds since 1970."""
        self._max_bytes = max_bytes
        self._now = now
        self._held: OrderedDict[tuple[str, str], Entry] = OrderedDict()  # used last at the end
        self.figures = MemoryFigures()

    def get(self, owner: str, name: str) -> Entry | None:
        """Counts as a use. None for what is over its time, too."""
        entry = self._held.get((owner, name))
        if entry is None:
            return None
        if entry.expires_s <= self._now():
            self._drop(entry)
            self.figures.expired += 1
            return None
        self._held.move_to_end((owner, name))
        return entry

    def set(self, entry: Entry) -> bool:
        """In place of the one with this id. False if it is larger than all may be together."""
        self.delete(entry.owner, entry.id)
        if entry.num_bytes > self._max_bytes:
            return False
        while self.figures.bytes + entry.num_bytes > self._max_bytes:
            self._drop(next(iter(self._held.values())))
            self.figures.evicted += 1
        self._held[entry.owner, entry.id] = entry
        self.figures.entries += 1
        self.figures.bytes += entry.num_bytes
        return True

    def delete(self, owner: str, name: str) -> bool:
        """Whether it was there, in its time."""
        entry = self._held.get((owner, name))
        if entry is None:
            return False
        self._drop(entry)
        return entry.expires_s > self._now()

    def __iter__(self) -> Iterator[Entry]:
        """What is held, in the order of use; what is over its time may be among it."""
        return iter(list(self._held.values()))

    async def find(self, owner: str, name: str) -> Entry | None:
        """See Entries."""
        return self.get(owner, name)

    async def put(self, entry: Entry) -> bool:
        """See Entries."""
        return self.set(entry)

    async def remove(self, owner: str, name: str) -> bool:
        """See Entries."""
        return self.delete(owner, name)

    def _drop(self, entry: Entry) -> None:
        del self._held[entry.owner, entry.id]
        self.figures.entries -= 1
        self.figures.bytes -= entry.num_bytes
