"""Keeps the spaces of several gateways together over Redis, off the path of requests. While Redis is unreachable each
gateway knows its own questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from gateway.errors import RedisDownError
from gateway.responses.semantic.background import Background
from gateway.responses.semantic.entry import Entry
from gateway.responses.semantic.redis_questions import READ_AT_A_TIME, RedisQuestions

if TYPE_CHECKING:
    from gateway.responses.semantic.space import Space

SAVE_S: Final = 30.0
"""Seconds from one time that what was learned is saved to the next."""

APPLIED_AT_A_TIME: Final = 8
"""Changes from Redis, of a tenth to half a millisecond each, between which others have their turn."""

LOOKED_AT: Final = 64
"""Questions between which others have their turn when some are forgotten, of some microseconds each, and as many as
above when they are."""

MAX_WRITES: Final = 256
"""Writes that wait for Redis; beyond, others do not hear of a question."""


@dataclass(slots=True)
class _Known:
    """Of one space.

    since    number of the last change that was read
    next_s   when to look again, next_save_s when to save again
    saved    requests that the budget had counted when it was saved
    """

    since: int = 0
    next_s: float = 0.0
    next_save_s: float = 0.0
    saved: int = 0
    loaded: bool = False
    reading: bool = False


class Sync:
    """No method waits or raises."""

    def __init__(
        self,
        redis: RedisQuestions | None,
        background: Background,
        *,
        sync_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`background` is the caller's, who closes it."""
        self._redis = redis
        self._background = background
        self._sync_s = sync_s
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._writing = 0
        self.failures = self.unread = self.removed = 0

    def catch_up(self, name: str, space: Space) -> None:
        """Soon the space knows what others put, if it was a while ago that this was asked."""
        now, known = self._clock(), self._known.setdefault(name, _Known())
        if self._redis is None or known.reading or now < known.next_s:
            return
        known.reading = True
        self._background.start(self._read(self._redis, name, known, space), "read questions")

    def forget(self, name: str) -> None:
        """Nobody has its space any more; the next one begins to read at the beginning."""
        self._known.pop(name, None)

    def put(self, name: str, entry: Entry) -> None:
        """Others will know this one."""
        self._write(name, entry.key, entry.to_bytes())

    def drop(self, name: str, key: bytes) -> None:
        """Others will give it no more."""
        self._write(name, key, b"")

    def remove(self, name: str, space: Space, takes: Callable[[Entry], bool]) -> None:
        """Soon these are gone from the space, and others give them no more. Redis may be away for the second half."""
        self._background.start(self._remove(name, space, takes), "remove questions")

    def _write(self, name: str, key: bytes, body: bytes) -> None:
        redis = self._redis
        if redis is None or (body and self._writing >= MAX_WRITES):
            return
        self._writing += 1
        self._background.start(self._written(redis.put(name, key, body)), "write a question")

    async def _remove(self, name: str, space: Space, takes: Callable[[Entry], bool]) -> None:
        gone: list[bytes] = []
        for number, entry in enumerate(space, 1):
            if takes(entry) and space.find(entry.key) == entry:
                space.remove(entry.key)
                gone.append(entry.key)
            if number % LOOKED_AT == 0:
                await asyncio.sleep(0)
        self.removed += len(gone)
        if (redis := self._redis) is None:
            return
        try:
            for key in gone:
                await redis.put(name, key, b"")
        except RedisDownError as error:
            self.failures += error.asked

    async def _written(self, call: Awaitable[None]) -> None:
        try:
            await call
        except RedisDownError as error:
            self.failures += error.asked
        finally:
            self._writing -= 1

    async def _read(self, redis: RedisQuestions, name: str, known: _Known, space: Space) -> None:
        try:
            if not known.loaded:
                self._restore(space, await redis.load_budget(name))
                known.loaded = True
            while True:
                known.since, changes = await redis.changes(name, known.since)
                for number, (key, body) in enumerate(changes, 1):
                    self._apply(space, key, body)
                    if number % APPLIED_AT_A_TIME == 0:
                        await asyncio.sleep(0)
                if len(changes) < READ_AT_A_TIME:
                    break
            await self._save(redis, name, known, space)
        except RedisDownError as error:
            self.failures += error.asked
        finally:
            known.reading = False
            known.next_s = self._clock() + self._sync_s

    async def _save(self, redis: RedisQuestions, name: str, known: _Known, space: Space) -> None:
        figures = space.budget.figures()
        requests = figures.requests
        # Without a label there is nothing to go on with, and models that clients made up would fill Redis.
        if not figures.labels or self._clock() < known.next_save_s or requests == known.saved:
            return
        known.next_save_s, known.saved = self._clock() + SAVE_S, requests
        await redis.save_budget(name, orjson.dumps(space.budget.to_state()))

    def _apply(self, space: Space, key: bytes, body: bytes) -> None:
        if not body:
            space.remove(key)
            return
        try:
            entry = Entry.from_bytes(body)
        except ValueError:
            self.unread += 1
            return
        if space.find(key) != entry and not space.remember(entry):
            self.unread += 1

    def _restore(self, space: Space, state: bytes | None) -> None:
        if state is None or space.budget.figures().labels:
            return
        try:
            space.budget.restore(orjson.loads(state))
        except ValueError:
            self.unread += 1
