"""The lease on one replica's event stream: one gateway follows it and writes the index in Redis, the others read that.

As the lease of a batch job (queues/batch/scripts/lease.lua), but with the clock of Redis alone, because its end is only
seconds away. Beside the owner lies what it says of the stream, which the others answer with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import orjson
import xxhash

from gateway.errors import RedisDownError
from gateway.replicas.base import Trust
from gateway.storage.redis_calls import RedisCalls, read_or_skip

_STORE: Final = "states of KV event streams"


class StreamState(NamedTuple):
    """What the gateway that follows a stream says of it."""

    trust: Trust
    reason: str  # for the trust; empty for exact
    published: bool = False  # the index in Redis is what the events say


class StreamLease:
    """Asked for by one gateway. `fence` is not 0 while it is held, and larger for every later holder."""

    def __init__(
        self,
        calls: RedisCalls,
        model: str,
        incarnation: str,
        owner: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        tag = xxhash.xxh3_64_hexdigest(model.encode())  # in a cluster beside the blocks
        self._key = f"kvasir:{{{tag}}}:events:{incarnation}"
        self._calls = calls
        self._script = calls.script(__package__, "lease.lua")
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock
        self._end_s = 0.0  # of the lease, no later than Redis ends it
        self._down_s: float | None = None  # since when Redis does not answer
        self._fence = 0
        self.others: StreamState | None = None  # of the holder, when it is another one

    @property
    def fence(self) -> int:
        return self._fence if self._clock() < self._end_s else 0

    @property
    def lost_redis(self) -> bool:
        """Redis has not answered for as long as a lease lasts: nobody can hold this one."""
        return self._down_s is not None and self._clock() - self._down_s >= self._lease_s

    async def take(self, state: StreamState, *, wanted: bool = True) -> None:
        """Takes the lease if it is free, renews it if it is this gateway's, else reads the holder's state. Releases it
        where it is not `wanted`."""
        asked_s = self._clock()
        args = (self._owner, round(self._lease_s * 1e3) if wanted else 0, orjson.dumps(tuple(state)))
        try:
            answer: Any = await self._calls.ask(self._script(keys=[self._key], args=args))
        except RedisDownError:
            self._down_s = asked_s if self._down_s is None else self._down_s
            return
        self._down_s = None
        fence, text = answer
        self._fence = read_or_skip(_STORE, partial(int, fence)) or 0 if fence else 0
        self._end_s = asked_s + self._lease_s
        self.others = read_or_skip(_STORE, partial(_state, text)) if text else None

    async def release(self) -> None:
        """Nothing happens when it is another gateway's, or Redis does not answer."""
        self._fence = 0
        try:
            await self._calls.ask(self._script(keys=[self._key], args=[self._owner, 0, b""]))
        except RedisDownError:
            return


def _state(text: bytes) -> StreamState:
    """Raises ValueError and others for what no gateway wrote."""
    trust, reason, published = orjson.loads(text)
    if trust not in get_args(Trust):
        raise ValueError("no trust")
    return StreamState(trust, str(reason), bool(published))
