"""Bytes, or other values, in the memory of this gateway: they end with it, and other gateways do not have them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from gateway.storage.byte_store import Put, Quota

V = TypeVar("V")


@dataclass(slots=True)
class MemoryFigures:
    """Since the start, but for the first two."""

    entries: int = 0
    bytes: int = 0
    evicted: int = 0  # past the quota
    expired: int = 0
    removed: int = 0  # by operators
    emptied: int = 0  # times that everything was given up, because it was not known what operators had removed


class Held(NamedTuple, Generic[V]):
    value: V
    about: bytes
    num_bytes: int
    set_s: float
    expires_s: float


@dataclass(slots=True)
class _Owned(Generic[V]):
    """held  by key, in the order of eviction"""

    held: OrderedDict[str, Held[V]] = field(default_factory=OrderedDict)
    bytes: int = 0


class Memory(Generic[V]):
    """Values by owner and key within a quota. Nothing waits."""

    def __init__(self, quota: Quota, now: Callable[[], float]) -> None:
        """`now` is in seconds."""
        self._quota = quota
        self._now = now
        self._owners: dict[str, _Owned[V]] = {}  # none of them is empty
        self.figures = MemoryFigures()

    def get(self, owner: str, key: str, *, within_s: float = math.inf) -> V | None:
        """Counts as a use. None also for what was set longer ago than `within_s`."""
        owned = self._owners.get(owner)
        held = None if owned is None else owned.held.get(key)
        if owned is None or held is None:
            return None
        now = self._now()
        if held.expires_s <= now:
            self._drop(owner, key)
            self.figures.expired += 1
            return None
        if self._quota.by_use:
            owned.held.move_to_end(key)
        return held.value if now - held.set_s <= within_s else None

    def store(
        self,
        owner: str,
        key: str,
        value: V,
        num_bytes: int,
        expires_s: float,
        *,
        about: bytes = b"",
        refuse: bool = False,
    ) -> Put:
        """See ByteStore.put."""
        quota = self._quota
        if num_bytes > quota.largest:
            return "bytes"
        if refuse and (refused := self._find_refusal(owner, key, num_bytes)) is not None:
            return refused
        self.delete(owner, key)
        self._make_room(owner, num_bytes)
        owned = self._owners.setdefault(owner, _Owned())
        owned.held[key] = Held(value, about, num_bytes, self._now(), expires_s)
        owned.bytes += num_bytes
        self.figures.entries += 1
        self.figures.bytes += num_bytes
        return "stored"

    def delete(self, owner: str, key: str) -> bool:
        """Whether it was there, before its end."""
        owned = self._owners.get(owner)
        if owned is None or key not in owned.held:
            return False
        return self._drop(owner, key).expires_s > self._now()

    def clear(self) -> None:
        """Removes everything."""
        self._owners.clear()
        self.figures.entries = self.figures.bytes = 0

    def of(self, owner: str) -> Mapping[str, Held[V]]:
        """Everything of this owner that has not ended, by key."""
        owned, now = self._owners.get(owner), self._now()
        return {} if owned is None else {key: held for key, held in owned.held.items() if held.expires_s > now}

    def __iter__(self) -> Iterator[V]:
        """All values; some may be past their end."""
        return iter([held.value for owned in self._owners.values() for held in owned.held.values()])

    def _find_refusal(self, owner: str, key: str, num_bytes: int) -> Put | None:
        """Why the quota of an owner has no room for so many bytes more. Drops what has expired, of all owners."""
        now = self._now()
        for name in list(self._owners):
            for over in [one for one, held in self._owners[name].held.items() if held.expires_s <= now]:
                self._drop(name, over)
        others = [held.num_bytes for name, held in self.of(owner).items() if name != key]
        if len(others) >= self._quota.entries:
            return "entries"
        return "bytes" if sum(others) + num_bytes > self._quota.bytes else None

    def _make_room(self, owner: str, num_bytes: int) -> None:
        """Evicts from an owner past its own quota, then from the owner with most past the common one, so that a burst
        evicts nothing of owners with less."""
        quota = self._quota
        while (owned := self._owners.get(owner)) is not None:
            over = next(iter(owned.held.values())).expires_s <= self._now()
            if not over and len(owned.held) < quota.entries and owned.bytes + num_bytes <= quota.bytes:
                break
            self._evict(owner)
        while self.figures.bytes + num_bytes > quota.total_bytes:
            coming = {owner: num_bytes}
            self._evict(max(self._owners, key=lambda name: self._owners[name].bytes + coming.get(name, 0)))

    def _evict(self, owner: str) -> None:
        """Drops the first entry of an owner."""
        held = self._drop(owner, next(iter(self._owners[owner].held)))
        if held.expires_s <= self._now():
            self.figures.expired += 1
        else:
            self.figures.evicted += 1

    def _drop(self, owner: str, key: str) -> Held[V]:
        owned = self._owners[owner]
        held = owned.held.pop(key)
        owned.bytes -= held.num_bytes
        if not owned.held:
            del self._owners[owner]
        self.figures.entries -= 1
        self.figures.bytes -= held.num_bytes
        return held


class MemoryBytes(Memory[bytes]):
    """See ByteStore. Never down."""

    async def put(
        self,
        owner: str,
        key: str,
        body: bytes,
        ttl_s: float | None = None,
        *,
        about: bytes = b"",
        num_bytes: int | None = None,
        expected: bytes | None = None,
        refuse: bool = False,
    ) -> Put:
        if expected is not None and self.get(owner, key) != expected:
            return "changed"
        size = len(body) if num_bytes is None else num_bytes
        expires_s = self._now() + (self._quota.ttl_s if ttl_s is None else ttl_s)
        return self.store(owner, key, body, size, expires_s, about=about, refuse=refuse)

    async def find(self, owner: str, key: str) -> bytes | None:
        return self.get(owner, key)

    async def look(self, owner: str, key: str) -> bytes | None:
        held = self.of(owner).get(key)
        return None if held is None else held.about

    async def all_of(self, owner: str) -> Mapping[str, bytes]:
        return {key: held.about for key, held in self.of(owner).items()}

    async def extend(self, owner: str, key: str, ttl_s: float, about: bytes) -> bool:
        if (held := self.of(owner).get(key)) is None:
            return False
        self._owners[owner].held[key] = held._replace(expires_s=self._now() + ttl_s, about=about)
        return True

    async def remove(self, owner: str, key: str) -> bool:
        return self.delete(owner, key)
