"""Which answers were removed, in Redis: what gateways tell each other, so that none gives them from its memory.

    kvasir:{removals}.head   hash: log, a random name; number, of its last removal
    kvasir:{removals}.last   list: JSON of a choice and its second, the last one first

What is in there is small and bounded. A log that Redis loses, with everything else, comes back under another name.
"""

from __future__ import annotations

import secrets
from dataclasses import astuple
from typing import Final

import orjson
from redis.asyncio import Redis

from gateway.errors import RedisDownError
from gateway.responses.listing import Chosen
from gateway.responses.removals import Place, Removal, Told
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.storage.scripts import script

MAX_REMOVALS: Final = 256
"""That are known; who missed more of them gives up what it has."""

MAX_BYTES: Final = 4096
"""Of one. A choice with longer names is told as one of everything, which gateways then ask Redis for again."""

_KEYS: Final = ["kvasir:{removals}.head", "kvasir:{removals}.last"]


class RedisRemovals:
    """See RemovalLog."""

    def __init__(self, redis: Redis, *, timeout_s: float, breaker: RedisBreaker | None = None) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call."""
        self._calls = RedisCalls(timeout_s, breaker)
        self._add = redis.register_script(script(__package__, "removals_add.lua"))
        self._read = redis.register_script(script(__package__, "removals_read.lua"))

    async def add(self, removal: Removal) -> None:
        """See RemovalLog."""
        written = _written(removal)
        if len(written) > MAX_BYTES:
            written = _written(Removal(Chosen(), removal.at_s))
        await self._calls.ask(self._add(keys=_KEYS, args=[written, MAX_REMOVALS, secrets.token_hex(8)]))

    async def read(self, since: Place | None) -> Told:
        """See RemovalLog."""
        log, number = since or ("", 0)
        asked = self._read(keys=_KEYS, args=[log, number, secrets.token_hex(8)])
        name, last, *written = await self._calls.ask(asked)
        place = read_or_skip("removals", lambda: (name.decode(), int(last)))
        if place is None:
            raise RedisDownError("what was removed cannot be read")
        removals = [removal for one in written if (removal := _read(one)) is not None]
        return Told(place, removals, whole=log == place[0] and number + len(removals) == place[1])


def _written(removal: Removal) -> bytes:
    return orjson.dumps([removal.at_s, *astuple(removal.chosen)])


def _read(written: bytes) -> Removal | None:
    """None for what a newer gateway may have written: then one has been missed."""
    try:
        at_s, *chosen = orjson.loads(written)
        return Removal(Chosen(*chosen), float(at_s))
    except (TypeError, ValueError):
        return None
