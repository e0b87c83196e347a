"""Remembered answers as operators see them, in memory and in Redis; what they remove, at whichever gateway, leaves the
memory of all of them. One epoch in Redis counts removals:

    removed here              from this memory at once, and the epoch goes up
    the epoch went up by one  the last removal is applied to this memory
    it went up by more, or    memory is emptied: it is not known what was removed
    Redis lost it
    Redis is unreachable      nothing can be removed; memory is used
    it is back                memory is used again after the next look (`current`)

A removal is a choice and its second, not a list of answers: a gateway has some that no other knows of. The epoch goes
up when Redis has the answers no more, so that what is read there afterwards may be put into memory again. Each gateway
looks every `every_s`.

    kvasir:removals   hash: epoch; last, JSON of a choice and its second
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Final, Protocol

import orjson

from gateway import tasks
from gateway.errors import RedisDownError
from gateway.responses.base import Stored
from gateway.responses.entries import About, Chosen, Content, Entry
from gateway.responses.entry_stores import MemoryEntries, RedisEntries
from gateway.responses.recording import decode, decode_upstream
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.types import CallDelta, Event, TextDelta

log = logging.getLogger(__name__)

KEY: Final = "kvasir:removals"

UNKNOWN: Final = 0
"""No epoch: whichever comes next, removals may have been missed."""

MAX_BYTES: Final = 4096
"""Of a removal in Redis. One with longer names is not written: other gateways empty their memory."""

LATE_S: Final = 10.0
"""An answer that was made so shortly before it was removed may reach Redis after that, and is removed there again."""

LOOKED_AT: Final = 512
"""Answers between which other tasks have their turn, of some microseconds each."""

AT_ONCE: Final = 16
"""Answers that are removed from Redis at the same time: half the calls that it gets from here, so that requests get
some."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Of all answers that were chosen at that second, in seconds since 1970."""

    chosen: Chosen
    at_s: float

    def takes(self, kept: About | Entry) -> bool:
        return self.chosen.takes(kept, self.at_s)


class RemovalEpoch:
    """The epoch in Redis. Methods raise RedisDownError."""

    def __init__(self, calls: RedisCalls) -> None:
        self._redis = calls.redis
        self._calls = calls

    async def advance(self, removal: Removal) -> int:
        """The epoch that begins with this removal."""
        written = orjson.dumps([removal.at_s, *astuple(removal.chosen)])
        pipe = self._redis.pipeline(transaction=True)
        pipe.hsetnx(KEY, "epoch", _new_epoch())
        pipe.hincrby(KEY, "epoch", 1)
        pipe.hset(KEY, "last", written if len(written) <= MAX_BYTES else b"null")
        _, epoch, _ = await self._calls.ask(pipe.execute())
        return int(epoch)

    async def read(self) -> tuple[int, Removal | None]:
        """The epoch, and the removal that it began with; None where that is not known."""
        epoch, last = await self._calls.ask(self._read())
        if epoch is None:
            pipe = self._redis.pipeline(transaction=True)
            pipe.hsetnx(KEY, "epoch", _new_epoch())
            pipe.hget(KEY, "epoch")
            _, epoch = await self._calls.ask(pipe.execute())
        number = read_or_skip("removals", partial(int, epoch))
        if number is None:
            raise RedisDownError("what was removed cannot be read")
        return number, None if last is None else read_or_skip("removals", partial(_removal, last))

    def _read(self) -> Awaitable[Any]:
        return self._redis.hmget(KEY, ["epoch", "last"])


class Questions(Protocol):
    """Of the semantic cache."""

    def forget(self, removal: Removal) -> None:
        """Soon those whose answers are removed are gone, here and for other gateways."""
        ...


class StoredAnswers:
    """See Answers in entries.py. Without an epoch in Redis, removals are of this gateway alone.

    number   goes up when an answer may have been removed: what was read in Redis before may be gone by now
    current  whether memory may be used while Redis answers
    """

    def __init__(
        self,
        memory: MemoryEntries,
        redis: RedisEntries | None,
        epoch: RemovalEpoch | None = None,
        questions: Questions | None = None,
        *,
        every_s: float = 1.0,
    ) -> None:
        self._memory = memory
        self._redis = redis
        self._epoch = epoch
        self._questions = questions
        self._every_s = every_s
        self._seen: int | None = None  # epoch, up to which this memory has nothing that was removed
        self._following: asyncio.Task[None] | None = None
        self.number = 0
        self.current = True

    def start(self) -> None:
        """Looks for removals from now on, until `close`."""
        if self._epoch is not None:
            self._following = tasks.spawn(self._follow(), name="follow removals")

    async def close(self) -> None:
        await tasks.cancel(self._following)

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
                for kept in await self._redis.all_of(owner):
                    if chosen.takes(kept, at_s) and (owner, kept.id) not in here:
                        yield kept

    async def find(self, kept: About) -> Content | None:
        entry = self._memory.get(kept.owner, kept.id)
        if entry is None and self._redis is not None:
            entry = await self._redis.find(kept.owner, kept.id)
        return None if entry is None else _content(entry.body)

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        found = [kept async for kept in self.scan(chosen, at_s)]
        if self._redis is not None:  # first: what is in memory alone is not shared again
            for start in range(0, len(found), AT_ONCE):
                part = found[start : start + AT_ONCE]
                await asyncio.gather(*(self._redis.remove(kept.owner, kept.id) for kept in part))
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
            self.current = False
            self._seen = self._seen or UNKNOWN
            return
        self._seen, self.current = epoch, True

    async def _follow(self) -> None:
        while not tasks.was_cancelled():
            await self.look()
            await asyncio.sleep(self._every_s)

    async def _remembered(self) -> AsyncIterator[Entry]:
        """Everything in memory; some may be past its time."""
        for count, entry in enumerate(self._memory, start=1):
            yield entry
            if count % LOOKED_AT == 0:
                await asyncio.sleep(0)

    async def _apply(self, removal: Removal) -> None:
        """To the memory of this gateway."""
        self.number += 1
        if self._questions is not None:
            self._questions.forget(removal)
        late: list[Entry] = []
        async for entry in self._remembered():
            if removal.takes(entry) and self._memory.get(entry.owner, entry.id) is entry:
                self._memory.figures.removed += self._memory.delete(entry.owner, entry.id)
                late += [entry] if entry.created_s > removal.at_s - LATE_S else []
        if self._redis is not None:
            for entry in late:
                await self._redis.remove(entry.owner, entry.id)

    def _empty(self) -> None:
        self.number += 1
        self._memory.figures.emptied += 1
        log.info("answers were removed, and it is not known which: this gateway's memory of answers is emptied")
        self._memory.clear()


def _new_epoch() -> int:
    """Where counting begins: later than any epoch that a Redis which lost everything has had."""
    return time.time_ns() // 1000


def _removal(written: bytes) -> Removal | None:
    """Raises ValueError and others for what a newer gateway may have written."""
    if (read := orjson.loads(written)) is None:
        return None
    at_s, *chosen = read
    return Removal(Chosen(*chosen), float(at_s))


def _content(body: bytes) -> Content | None:
    """None for what cannot be read, which no request gets, either."""
    if (kept := decode_upstream(body)) is not None:
        # Only complete answers are kept, and how they ended is in there, in the words of the API.
        return Content(*kept.tokens, None, b"".join(kept.chunks).decode(errors="replace"))
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
