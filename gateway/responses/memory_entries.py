"""Answers in the memory of this gateway: the first place that is looked at, and the only one without a Redis."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gateway.responses.entries import About, Entry


@dataclass(slots=True)
class MemoryFigures:
    """Since the start, but for the first two."""

    entries: int = 0
    bytes: int = 0
    evicted: int = 0  # to make room
    expired: int = 0
    removed: int = 0  # because operators removed them
    emptied: int = 0  # times that everything was given up, because it was not known what they had removed


class _Held(NamedTuple):
    entry: Entry
    set_s: float


class MemoryEntries:
    """LRU by bytes. A time to live counts from when the answer was made, and no use makes it longer."""

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        """`now` is the clock of entries, in seconds since 1970."""
        self._max_bytes = max_bytes
        self._now = now
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # used last at the end
        self.figures = MemoryFigures()

    @property
    def evicted(self) -> int:
        """See Entries."""
        return self.figures.evicted

    def get(self, owner: str, name: str, *, within_s: float = math.inf) -> Entry | None:
        """Counts as a use. None for what is over its time, too, and for what was set longer ago than `within_s`."""
        held = self._held.get((owner, name))
        if held is None:
            return None
        now = self._now()
        if held.entry.expires_s <= now:
            self._drop(held.entry)
            self.figures.expired += 1
            return None
        self._held.move_to_end((owner, name))
        return held.entry if now - held.set_s <= within_s else None

    def set(self, entry: Entry) -> bool:
        """In place of the one with this id. False if it is larger than all may be together."""
        self.delete(entry.owner, entry.id)
        if entry.num_bytes > self._max_bytes:
            return False
        while self.figures.bytes + entry.num_bytes > self._max_bytes:
            self._drop(next(iter(self._held.values())).entry)
            self.figures.evicted += 1
        self._held[entry.owner, entry.id] = _Held(entry, self._now())
        self.figures.entries += 1
        self.figures.bytes += entry.num_bytes
        return True

    def delete(self, owner: str, name: str) -> bool:
        """Whether it was there, in its time."""
        held = self._held.get((owner, name))
        if held is None:
            return False
        self._drop(held.entry)
        return held.entry.expires_s > self._now()

    def clear(self) -> None:
        """Gives up everything."""
        self._held.clear()
        self.figures.entries = self.figures.bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        """What is held, in the order of use; what is over its time may be among it."""
        return iter([held.entry for held in self._held.values()])

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
        return sorted({entry.owner for entry in self})

    async def all_of(self, owner: str) -> list[About]:
        """See Entries."""
        return [
            About(owner, entry.id, entry.model, entry.created_s, entry.expires_s, entry.num_bytes)
            for entry in self
            if entry.owner == owner and entry.expires_s > self._now()
        ]

    def _drop(self, entry: Entry) -> None:
        del self._held[entry.owner, entry.id]
        self.figures.entries -= 1
        self.figures.bytes -= entry.num_bytes
