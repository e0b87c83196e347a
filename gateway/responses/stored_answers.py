"""Remembered answers in memory and in Redis, for requests and for operators. What operators remove at one gateway
leaves the memory of all of them. One epoch in Redis counts removals:

    removed here              from this memory at once, and the epoch goes up
    the epoch went up by one  the last removal is applied to this memory
    it went up by more, or    memory is emptied: it is not known what was removed
    Redis lost it
    Redis is unreachable      nothing can be removed; memory is used
    it is back                memory is used again after the next look (`look`)

A removal is a choice and its second, not a list of answers: a gateway has some that no other knows of. The epoch goes
up when Redis has the answers no more, so that what is read there afterwards may be put into memory again. Each gateway
looks every `every_s`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Final, TypeVar

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.responses.base import Stored
from gateway.responses.entries import About, Chosen, Content, Entry, entry_id
from gateway.responses.entry_stores import MemoryEntries, RedisEntries, Removal, RemovalEpoch
from gateway.responses.recording import decode, decode_upstream
from gateway.types import CallDelta, Event, TextDelta

if TYPE_CHECKING:
    from gateway.responses.semantic.cache import SemanticCache

log = logging.getLogger(__name__)

_T = TypeVar("_T")

UNKNOWN: Final = 0
"""No epoch: whichever comes next, removals may have been missed."""

LATE_S: Final = 10.0
"""An answer that was made so shortly before it was removed may reach Redis after that, and is removed there again."""

LOOKED_AT: Final = 512
"""Answers between which other tasks have their turn, of some microseconds each."""

AT_ONCE: Final = 16
"""Answers that are removed from Redis at the same time: half the calls that it gets from here, so that requests get
some."""


class StoredAnswers:
    """Answers by owner and key, in memory first, then in Redis. Look-ups never raise: a Redis that is down is a cache
    that is cold. An answer is found by its id, and given only if its whole key is the request's, and its owner. For
    operators, see Answers in entries.py."""

    def __init__(
        self,
        memory: MemoryEntries,
        redis: RedisEntries | None,
        epoch: RemovalEpoch | None = None,
        semantic: SemanticCache | None = None,
        *,
        memory_s: float = math.inf,
        every_s: float = 1.0,
    ) -> None:
        """An answer that has been in memory for `memory_s` is looked up in Redis again. Without an epoch, removals are
        of this gateway alone. `semantic` hears of removals."""
        self.memory = memory
        self._redis = redis
        self._epoch = epoch
        self._semantic = semantic
        self._memory_s = math.inf if redis is None else memory_s
        self._every_s = every_s
        self._seen: int | None = None  # epoch, up to which this memory has nothing that was removed
        self._following: asyncio.Task[None] | None = None
        self._removals = 0  # invalidation epoch: a look into Redis that began in an earlier one must not fill memory
        self._current = True  # memory may be used while Redis answers
        self._counts = Counter(memory_hits=0, redis_hits=0, kept=0, redis_failures=0)

    def events(self) -> dict[str, int]:
        """Since the start, for operators."""
        memory, redis = self.memory.figures, self._redis
        return {
            **self._counts,
            "evicted": memory.evicted,
            "expired": memory.expired,
            "removed": memory.removed,
            "emptied": memory.emptied,
            "redis_evicted": 0 if redis is None else redis.evicted,
        }

    def start(self) -> None:
        """Looks for removals from now on, until `close`."""
        if self._epoch is not None:
            self._following = tasks.spawn(self._follow(), name="follow removals")

    async def close(self) -> None:
        await tasks.cancel(self._following)

    # -- for requests -------------------------------------------------------------------------------------------------

    def peek(self, owner: str, key: bytes) -> Entry | None:
        """From memory alone; None where Redis has to confirm that it is still there."""
        entry = self.memory.get(owner, entry_id(key), within_s=self._memory_s)
        return entry if entry is not None and entry.key == key and self._counts_as_hit() else None

    def has(self, entry: Entry) -> bool:
        """Whether `peek` finds this very entry, and no later one in its place. Counts as finding it."""
        held = self.memory.get(entry.owner, entry.id, within_s=self._memory_s)
        return held is entry and self._counts_as_hit()

    async def find(self, owner: str, key: bytes) -> Entry | None:
        """From memory or Redis, within the time that Redis has to answer."""
        redis = self._redis
        if (entry := self.peek(owner, key)) is not None or redis is None:
            return entry
        name, removals = entry_id(key), self._removals
        here = self.memory.get(owner, name)
        entry = await self._try(redis.find(owner, name), here)
        if entry is None:
            self.memory.delete(owner, name)
        if entry is None or entry.key != key:
            return None
        if entry is not here:
            self._counts["redis_hits"] += 1
            if removals == self._removals:
                self.memory.set(entry)
        return entry

    def keep(self, entry: Entry) -> None:
        """In memory, from now on."""
        self._counts["kept"] += 1
        self.memory.set(entry)

    async def share(self, entry: Entry) -> None:
        """With other gateways, over Redis."""
        redis, removals = self._redis, self._removals
        if redis is None:
            return
        await self._try(redis.put(entry), False)
        if removals != self._removals and self.memory.get(entry.owner, entry.id) is not entry:
            await self._try(redis.remove(entry.owner, entry.id), False)  # it was removed before it arrived

    def _counts_as_hit(self) -> bool:
        """Whether memory may be used: it is known what was removed, or cannot be, because Redis is unreachable."""
        usable = self._current or self._redis is None or not self._redis.up
        self._counts["memory_hits"] += usable
        return usable

    async def _try(self, call: Awaitable[_T], otherwise: _T) -> _T:
        try:
            return await call
        except RedisDownError as error:
            self._counts["redis_failures"] += error.asked
            return otherwise

    # -- for operators ------------------------------------------------------------------------------------------------

    async def scan(self, chosen: Chosen, at_s: float) -> AsyncIterator[About]:
        here = set[tuple[str, str]]()
        async for entry in self._remembered():
            if chosen.takes(entry, at_s):
                here.add((entry.owner, entry.id))
                yield About.of(entry)
        if self._redis is None:
            return
        for owner in await self._redis.owners():
            if chosen.owner in (None, owner):
                for about in await self._redis.all_of(owner):
                    if chosen.takes(about, at_s) and (owner, about.id) not in here:
                        yield about

    async def content(self, about: About) -> Content | None:
        entry = self.memory.get(about.owner, about.id)
        if entry is None and self._redis is not None:
            entry = await self._redis.find(about.owner, about.id)
        return None if entry is None else _content(entry.body)

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        found = [about async for about in self.scan(chosen, at_s)]
        if self._redis is not None:  # first: what is in memory alone is not shared again
            for start in range(0, len(found), AT_ONCE):
                part = found[start : start + AT_ONCE]
                await asyncio.gather(*(self._redis.remove(about.owner, about.id) for about in part))
        removal = Removal(chosen, at_s)
        await self._apply(removal)
        if self._epoch is not None:
            epoch = await self._epoch.advance(removal)
            if self._seen == epoch - 1:
                self._seen = epoch
        return len(found)

    async def look(self) -> None:
        """What was removed since the last look is gone from here when this returns. Never raises."""
        if self._epoch is None:
            return
        try:
            epoch, last = await self._epoch.read()
            if last is not None and self._seen in (None, epoch - 1):
                await self._apply(last)
            elif self._seen not in (None, epoch):
                self._empty()
        except RedisDownError:
            self._current = False
            self._seen = self._seen or UNKNOWN
            return
        self._seen, self._current = epoch, True

    async def _follow(self) -> None:
        while not tasks.was_cancelled():
            await self.look()
            await asyncio.sleep(self._every_s)

    async def _remembered(self) -> AsyncIterator[Entry]:
        """Everything in memory; some may be past its time."""
        for count, entry in enumerate(self.memory, start=1):
            yield entry
            if count % LOOKED_AT == 0:
                await asyncio.sleep(0)

    async def _apply(self, removal: Removal) -> None:
        """To the memory of this gateway."""
        self._removals += 1
        if self._semantic is not None:
            self._semantic.forget(removal)
        late: list[Entry] = []
        async for entry in self._remembered():
            if removal.takes(entry) and self.memory.get(entry.owner, entry.id) is entry:
                self.memory.figures.removed += self.memory.delete(entry.owner, entry.id)
                late += [entry] if entry.created_s > removal.at_s - LATE_S else []
        if self._redis is not None:
            for entry in late:
                await self._redis.remove(entry.owner, entry.id)

    def _empty(self) -> None:
        self._removals += 1
        self.memory.figures.emptied += 1
        log.info("answers were removed, and it is not known which: this gateway's memory of answers is emptied")
        self.memory.clear()


def _content(body: bytes) -> Content | None:
    """None for what cannot be read, which no request gets, either."""
    if (recording := decode_upstream(body)) is not None:
        # Only complete answers are stored, and their end is in there, in the words of the API.
        return Content(*recording.tokens, None, b"".join(recording.chunks).decode(errors="replace"))
    stored = decode(body, joined=True)
    return None if stored is None else _of_engine(stored)


def _of_engine(stored: Stored[Event]) -> Content:
    """Its chunks put together."""
    text = "".join(event.text for event in stored.items if isinstance(event, TextDelta))
    calls: dict[int, tuple[str, str]] = {}
    for event in stored.items:
        if isinstance(event, CallDelta):
            name, arguments = calls.get(event.call, ("", ""))
            calls[event.call] = (name + event.name, arguments + event.arguments)
    return Content(stored.prompt_tokens, stored.completion_tokens, stored.finish, text, tuple(calls.values()))
