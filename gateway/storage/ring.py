"""The latest N entries of all gateways, newest first: a list in Redis, or the memory of one.

Memory has this gateway's own in any case, and what was read last: that is what is shown while Redis is away.

    kvasir:{NAME}.ring      list of entries, the newest first; no time to live
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import orjson

from gateway.errors import RedisDownError
from gateway.storage.redis_calls import RedisCalls

PUSHED_AT_ONCE: Final = 200
"""By one command."""


class Read(NamedTuple):
    """`stale`: Redis is away, and these are what was last known."""

    entries: Sequence[bytes]
    stale: bool = False


class Ring:
    """Each entry has to be different from all others: one that was pushed twice is read once."""

    def __init__(self, name: str, most: int, calls: RedisCalls | None) -> None:
        """`most` entries are kept."""
        self._key = f"kvasir:{{{name}}}.ring"
        self._most = most
        self._calls = calls
        self._own: deque[bytes] = deque(maxlen=most)  # newest first
        self._waiting: deque[bytes] = deque(maxlen=most)  # for Redis, oldest first
        self._known: Sequence[bytes] = ()  # as last read from Redis
        self._pushing = asyncio.Lock()

    async def push(self, entries: Sequence[bytes]) -> None:
        """Oldest first. Never raises: what Redis does not take is tried again with the next."""
        self._own.extendleft(entries)
        if self._calls is None:
            return
        self._waiting.extend(entries)
        async with self._pushing:
            with suppress(RedisDownError):
                while self._waiting:
                    some = [self._waiting.popleft() for _ in range(min(len(self._waiting), PUSHED_AT_ONCE))]
                    await self._push(self._calls, some)

    async def _push(self, calls: RedisCalls, some: Sequence[bytes]) -> None:
        pipe = calls.redis.pipeline(transaction=False)  # for a moment it may be longer
        pipe.lpush(self._key, *some)
        pipe.ltrim(self._key, 0, self._most - 1)
        try:
            await calls.ask_each(self._key, pipe)
        except BaseException:
            room = self._most - len(self._waiting)  # what came meanwhile is newer
            self._waiting.extendleft(reversed(some[max(0, len(some) - room) :]))
            raise

    async def read(self, most: int | None = None) -> Read:
        """The newest `most`, or all. Never raises."""
        most = self._most if most is None else most
        if self._calls is None:
            return Read([*self._own][:most])
        try:
            await self.push(())
            found: Any = await self._calls.ask_or_skip(self._key, self._calls.redis.lrange(self._key, 0, most - 1), [])
        except RedisDownError:
            return Read([*dict.fromkeys(chain(self._own, self._known))][:most], stale=True)
        entries = [*dict.fromkeys(found)]
        if most == self._most:
            self._known = entries
        return Read(entries)


def read_objects(entries: Iterable[bytes], name: str) -> list[dict[str, Any]]:
    """Entries that are JSON objects with a field of this name; what no gateway wrote is passed over."""
    found = list[dict[str, Any]]()
    for entry in entries:
        with suppress(ValueError):
            one = orjson.loads(entry)
            if isinstance(one, dict) and name in one:
                found.append(one)
    return found
