"""How stages ask Redis: so many calls at a time, each within its time limit, and one error for everything that fails.

A Redis is not away because a burst of requests keeps the loop busy, or makes calls wait for each other. So the time
limit of a call starts when its turn has come, and the loop has to come round several times before it is over
(tasks.patience). Who waits when a call is not answered waits no longer: a Redis that hangs costs everybody one time
limit. A Redis that answers, but not quickly enough for all who ask, is taken for away by those who wait TURNS of them.

The index alone has one timer for both (index/redis_index.py): what it does not find costs little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from gateway import tasks

_T = TypeVar("_T")

MAX_CALLS: Final = 32
"""Of one stage, at the same time, so that a burst waits for a connection instead of running out of them."""

MAX_CONNECTIONS: Final = 16 * MAX_CALLS
"""Of one client: more than all stages together may ask at a time."""

TURNS: Final = 16
"""Time limits that a call waits for its turn, at most."""

SOCKET_TIMEOUTS: Final = 4
"""Time limits that a socket waits, which has no patience for a busy loop. Callers bound their calls themselves."""


def connect(url: str, timeout_s: float) -> Redis:
    """A client for calls that take no longer than `timeout_s`, in which nothing takes longer than SOCKET_TIMEOUTS of
    it, and which tries again only once: a connection may have been closed while it was idle. Its owner closes it."""
    most_s = SOCKET_TIMEOUTS * timeout_s
    return Redis.from_url(
        url,
        socket_connect_timeout=most_s,
        socket_timeout=most_s,
        retry=Retry(NoBackoff(), 1),
        max_connections=MAX_CONNECTIONS,
    )


class RedisCalls:
    """Those of one stage."""

    def __init__(self, timeout_s: float, down: Callable[[str], Exception]) -> None:
        """`timeout_s` bounds every call, from its turn on. `down` makes the stage's own error of what went wrong."""
        self._timeout_s = timeout_s
        self._down = down
        self._turns = asyncio.Semaphore(MAX_CALLS)
        self._unanswered = 0

    async def ask(self, call: Awaitable[_T]) -> _T:
        """What the call returns. Raises what `down` makes; what was asked for may have been done all the same."""
        begun, unanswered = False, self._unanswered
        try:
            await self._take_turn()
            try:
                if unanswered != self._unanswered:
                    raise TimeoutError("a call before this one was not answered")
                begun = True
                async with tasks.patience(self._timeout_s):
                    return await call
            finally:
                self._turns.release()
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._unanswered += begun and not isinstance(error, ResponseError)
            raise self._down(str(error) or type(error).__name__) from error
        finally:
            if not begun and asyncio.iscoroutine(call):
                call.close()

    async def _take_turn(self) -> None:
        if not self._turns.locked():
            await self._turns.acquire()
            return
        async with tasks.patience(TURNS * self._timeout_s, looks=TURNS * tasks.LOOKS):
            await self._turns.acquire()
