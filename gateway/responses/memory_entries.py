"""Answers in the memory of this gateway: the first place that is looked at, and the only one without a Redis."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Owned:
    """held  by id, used last at the end"""

    held: OrderedDict[str, _Held] = field(default_factory=OrderedDict)
    bytes: int = 0


class MemoryEntries:
    """LRU by bytes within each owner; room is made by the owner who has most, as in Redis, so that a burst pushes out
    nothing of those who have less. A time to live counts from when the answer was made, and no use makes it longer."""

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        """`now` is the clock of entries, in seconds since 1970."""
        self._max_bytes = max_bytes
        self._now = now
        self._owners: dict[str, _Owned] = {}  # none of them is empty
        self.up = True
        self.figures = MemoryFigures()

    @property
    def evicted(self) -> int:
        """See Entries."""
        return self.figures.evicted

    def get(self, owner: str, name: str, *, within_s: float = math.inf) -> Entry | None:
        """Counts as a use. None for what is over its time, too, and for what was set longer ago than `within_s`."""
        owned = self._owners.get(owner)
        held = None if owned is None else owned.held.get(name)
        if owned is None or held is None:
            return None
        now = self._now()
        if held.entry.expires_s <= now:
            self._drop(held.entry)
            self.figures.expired += 1
            return None
        owned.held.move_to_end(name)
        return held.entry if now - held.set_s <= within_s else None

    def set(self, entry: Entry) -> bool:
        """In place of the one with this id. False if it is larger than all may be together."""
        self.delete(entry.owner, entry.id)
        if entry.num_bytes > self._max_bytes:
            return False
        while self.figures.bytes + entry.num_bytes > self._max_bytes:
            self._drop(next(iter(self._largest(entry).held.values())).entry)
            self.figures.evicted += 1
        owned = self._owners.setdefault(entry.owner, _Owned())
        owned.held[entry.id] = _Held(entry, self._now())
        owned.bytes += entry.num_bytes
        self.figures.entries += 1
        self.figures.bytes += entry.num_bytes
        return True

    def delete(self, owner: str, name: str) -> bool:
        """Whether it was there, in its time."""
        owned = self._owners.get(owner)
        held = None if owned is None else owned.held.get(name)
        if held is None:
            return False
        self._drop(held.entry)
        return held.entry.expires_s > self._now()

    def clear(self) -> None:
        """Gives up everything."""
        self._owners.clear()
        self.figures.entries = self.figures.bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        """What is held; what is over its time may be among it."""
        return iter([held.entry for owned in self._owners.values() for held in owned.held.values()])

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
        owned, now = self._owners.get(owner, _Owned()), self._now()
        return [
            About(owner, entry.id, entry.model, entry.created_s, entry.expires_s, entry.num_bytes)
            for entry, _ in owned.held.values()
            if entry.expires_s > now
        ]

    def _largest(self, entry: Entry) -> _Owned:
        """Who has most, with an entry that is to come."""
        coming = {entry.owner: entry.num_bytes}
        owner = max(self._owners, key=lambda name: self._owners[name].bytes + coming.get(name, 0))
        return self._owners[owner]

    def _drop(self, entry: Entry) -> None:
        owned = self._owners[entry.owner]
        del owned.held[entry.id]
        owned.bytes -= entry.num_bytes
        if not owned.held:
            del self._owners[entry.owner]
        self.figures.entries -= 1
        self.figures.bytes -= entry.num_bytes
