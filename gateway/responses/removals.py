"""What operators removed, at whichever gateway: it goes from this one's memory, too, soon and for certain.

A removal is a choice and its second, and no list of answers: a gateway has some that nobody else knows of. It is told
when Redis has the answers no more, so that what is read there afterwards may be kept in memory again. Each gateway
looks every `every_s`. Who missed one, or cannot know, gives up its memory.

    told here                 -> from this memory at once; others hear of it
    told elsewhere            -> heard at the next look
    Redis is away             -> nothing can be removed; memory is given as ever
    it is back                -> nothing is given from memory before the next look (`current`)
    the log was lost, or      -> memory is emptied
    there were too many
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.responses.entries import About, Entries, Entry
from gateway.responses.listing import Chosen
from gateway.responses.memory_entries import MemoryEntries

log = logging.getLogger(__name__)

Place = tuple[str, int]
"""In a log: its name, and the number of a removal."""

LOST: Final[Place] = ("", 0)
"""A place in no log: whatever is told next, something was missed."""

LATE_S: Final = 10.0
"""An answer that was made so shortly before it was removed may reach Redis after that, and is removed there again."""

LOOKED_AT: Final = 512
"""Answers between which others have their turn, of some microseconds each."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Of all answers that were chosen at that second, in seconds since 1970."""

    chosen: Chosen
    at_s: float

    def takes(self, entry: Entry) -> bool:
        return self.chosen.takes(About.of(entry), self.at_s)


@dataclass(frozen=True, slots=True)
class Told:
    """place     of the last removal
    removals  that are known, after the place that was asked for
    whole     whether these are all of them
    """

    place: Place
    removals: Sequence[Removal]
    whole: bool


class RemovalLog(Protocol):
    """What gateways tell each other. Methods raise RedisDownError."""

    async def add(self, removal: Removal) -> None: ...

    async def read(self, since: Place | None) -> Told:
        """None: from its beginning, and never whole."""
        ...


class Questions(Protocol):
    """Of the semantic cache."""

    def forget(self, removal: Removal) -> None:
        """Soon those whose answers are removed are gone, here and for other gateways."""
        ...


class Removals:
    """Without a log, those of this gateway alone.

    number   goes up when an answer may have been removed: what was asked of Redis before may be gone by now
    current  whether memory may be given while Redis answers
    """

    def __init__(
        self,
        memory: MemoryEntries,
        redis: Entries | None,
        told: RemovalLog | None,
        questions: Questions | None = None,
        *,
        every_s: float,
    ) -> None:
        self._memory = memory
        self._redis = redis
        self._log = told
        self._questions = questions
        self._every_s = every_s
        self._place: Place | None = None
        self._following: asyncio.Task[None] | None = None
        self.number = 0
        self.current = True

    def start(self) -> None:
        """Looks from now on, until `close`."""
        if self._log is not None:
            self._following = tasks.spawn(self._follow(), name="follow removals")

    async def close(self) -> None:
        await tasks.cancel(self._following)

    async def tell(self, removal: Removal) -> None:
        """Redis has its answers no more. Raises RedisDownError when other gateways do not hear of it."""
        await self._apply(removal)
        if self._log is not None:
            await self._log.add(removal)

    async def look(self) -> None:
        """What was told since the last look is gone from here when this returns. Never raises."""
        if self._log is None:
            return
        try:
            told = await self._log.read(self._place)
            if self._place is not None and not told.whole:
                self._empty()
            for removal in told.removals:
                await self._apply(removal)
        except RedisDownError:
            self.current = False
            self._place = self._place or LOST
            return
        self._place, self.current = told.place, True

    async def _follow(self) -> None:
        while not tasks.was_cancelled():
            await self.look()
            await asyncio.sleep(self._every_s)

    async def _apply(self, removal: Removal) -> None:
        self.number += 1
        if self._questions is not None:
            self._questions.forget(removal)
        late: list[Entry] = []
        for count, entry in enumerate(self._memory, start=1):
            if removal.takes(entry) and self._memory.get(entry.owner, entry.id) is entry:
                self._memory.figures.removed += self._memory.delete(entry.owner, entry.id)
                late += [entry] if entry.created_s > removal.at_s - LATE_S else []
            if count % LOOKED_AT == 0:
                await asyncio.sleep(0)
        if self._redis is not None:
            for entry in late:
                await self._redis.remove(entry.owner, entry.id)

    def _empty(self) -> None:
        self.number += 1
        self._memory.figures.emptied += 1
        log.warning("it is not known which answers were removed: this gateway's memory of answers is emptied")
        self._memory.clear()
