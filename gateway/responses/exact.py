"""Answers to the very same request: first in memory, then in Redis. A Redis that is down is a cache that is cold.

An answer is found by its id and given only when its whole key is the request's, and its owner.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gateway.errors import RedisDownError
from gateway.responses.entries import Entry, entry_id
from gateway.responses.entry_stores import MemoryEntries, RedisEntries
from gateway.storage.memory_bytes import MemoryFigures

if TYPE_CHECKING:
    from gateway.responses.stored_answers import StoredAnswers

_T = TypeVar("_T")


@dataclass(slots=True)
class ExactFigures:
    """Since the start."""

    memory_hits: int = 0
    redis_hits: int = 0
    kept: int = 0
    redis_failures: int = 0


class ExactCache:
    """No method raises."""

    def __init__(
        self,
        memory: MemoryEntries,
        redis: RedisEntries | None,
        *,
        memory_s: float = math.inf,
        removals: StoredAnswers | None = None,
    ) -> None:
        """What has been in memory for `memory_s` is asked for in Redis again, and everything while Redis answers and it
        is not known what was removed."""
        self._removals = removals
        self._memory_s = math.inf if redis is None else memory_s
        self._memory = memory
        self._redis = redis
        self.figures = ExactFigures()

    @property
    def memory_figures(self) -> MemoryFigures:
        """Of this gateway's memory."""
        return self._memory.figures

    @property
    def redis_evicted(self) -> int:
        """Answers that this gateway removed from Redis to make room."""
        return 0 if self._redis is None else self._redis.evicted

    def peek(self, owner: str, key: bytes) -> Entry | None:
        """From memory alone, unless Redis is to be asked whether it is still there."""
        entry = self._memory.get(owner, entry_id(key), within_s=self._memory_s)
        if entry is None or entry.key != key or not self._memory_is_current:
            return None
        self.figures.memory_hits += 1
        return entry

    def has(self, entry: Entry) -> bool:
        """Whether `peek` finds this very entry, and no later one in its place. Counts as finding it."""
        held = self._memory.get(entry.owner, entry.id, within_s=self._memory_s)
        if held is not entry or not self._memory_is_current:
            return False
        self.figures.memory_hits += 1
        return True

    async def find(self, owner: str, key: bytes) -> Entry | None:
        """From memory or Redis, within the time that Redis has to answer."""
        if (entry := self.peek(owner, key)) is not None:
            return entry
        redis = self._redis
        if redis is None:
            return None
        name, removals = entry_id(key), self._num_removals
        here = self._memory.get(owner, name)
        entry = await self._ask(redis.find(owner, name), here)
        if entry is None:
            self._memory.delete(owner, name)
        if entry is None or entry.key != key:
            return None
        if entry is not here:
            self.figures.redis_hits += 1
            if removals == self._num_removals:
                self._memory.set(entry)
        return entry

    def keep(self, entry: Entry) -> None:
        """In memory, from now on."""
        self.figures.kept += 1
        self._memory.set(entry)

    async def share(self, entry: Entry) -> None:
        """With other gateways, over Redis."""
        redis, removals = self._redis, self._num_removals
        if redis is None:
            return
        await self._ask(redis.put(entry), False)
        if removals != self._num_removals and self._memory.get(entry.owner, entry.id) is not entry:
            await self._ask(redis.remove(entry.owner, entry.id), False)  # it came behind its own removal

    @property
    def _num_removals(self) -> int:
        """Invalidation epoch: a look into Redis that began in an earlier one must not fill memory."""
        return 0 if self._removals is None else self._removals.number

    @property
    def _memory_is_current(self) -> bool:
        """Or that cannot be known, because Redis is away."""
        return self._removals is None or self._removals.current or self._redis is None or not self._redis.up

    async def _ask(self, call: Awaitable[_T], otherwise: _T) -> _T:
        try:
            return await call
        except RedisDownError as error:
            self.figures.redis_failures += error.asked
            return otherwise
