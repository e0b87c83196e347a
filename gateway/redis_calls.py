"""How stages ask Redis: so many calls at a time, each within its time limit, and one error for everything that fails.

A Redis is not away because a burst of requests keeps the loop busy, or makes calls wait for each other. So the time
limit of a call starts when its turn has come, and the loop has to come round several times before it is over
(tasks.patience). Who waits when a call is not answered waits no longer: a Redis that hangs costs everybody one time
limit. From then on one call at a time finds out whether it is back, and all others go on without it at once. A Redis
that answers, but not quickly enough for all who ask, is taken for away by those who wait TURNS time limits.

The index alone has one timer for both (index/redis_index.py): what it does not find costs little.

What is found there and was written by none of us (of another kind, cut short, no JSON, absurd) is passed over, counted
in `unreadable` and logged once for each store: `read_or_skip`, and the calls of RedisCalls that say so.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from gateway import tasks

log = logging.getLogger(__name__)

_T = TypeVar("_T")

unreadable: Final[Counter[str]] = Counter()
"""Entries of Redis that were passed over since the start, by the store that wanted them."""

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


async def warn_of_eviction(redis: Redis) -> None:
    """Says so when this Redis gives up keys without a time to live, which jobs, leases and the ledger have. Quiet where
    it cannot be asked: whoever needs it finds out."""
    try:
        memory: Any = await redis.info("memory")
        policy, most = str(memory.get("maxmemory_policy", "")), int(memory.get("maxmemory", 0))
    except (RedisError, OSError, TimeoutError, ValueError) as error:
        log.debug("what Redis evicts is not known: %s", error)
        return
    if most and policy.startswith("allkeys-"):
        log.warning(
            "Redis gives up batches and rows of the ledger when it is full: its maxmemory-policy is %s (maxmemory %d "
            "bytes); set maxmemory-policy to volatile-lru, which evicts only what has a time to live",
            policy,
            most,
        )


def read_or_skip(store: str, read: Callable[[], _T]) -> _T | None:
    """What `read` makes of something from Redis; None when that cannot be read."""
    try:
        return read()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        skipped(store, error)
        return None


def skipped(store: str, error: Exception) -> None:
    """Notes that something in Redis cannot be read. Never its content."""
    unreadable[store] += 1
    if unreadable[store] == 1:
        log.warning(
            "Redis holds %s that no gateway wrote, which are passed over (%s); kvasir_redis_unreadable_total counts "
            "them: look for others who write keys that begin with kvasir:",
            store,
            type(error).__name__,
        )


_STRANGE: Final = (
    *("WRONGTYPE", "not an integer", "not a float", "not a valid float"),  # what a command says of a key
    *("attempt to ", "bad argument", "too short", "Expected "),  # what a script stumbles over
)


def _is_strange(error: BaseException | None) -> bool:
    """Whether what a key holds is nothing that we write."""
    return isinstance(error, ResponseError) and any(words in str(error) for words in _STRANGE)


class RedisCalls:
    """Those of one stage."""

    def __init__(self, timeout_s: float, down: Callable[[str], Exception], *, all_ask: bool = False) -> None:
        """timeout_s  bounds every call, from its turn on
        down       makes the stage's own error of what went wrong
        all_ask    while Redis is silent, too: of callers who go on asking until it is back
        """
        self._timeout_s = timeout_s
        self._down = down
        self._all_ask = all_ask
        self._turns = asyncio.Semaphore(MAX_CALLS)
        self._unanswered = 0
        self._silent = False  # the last call was not answered
        self._probing = False  # a call is finding out whether that is still so

    async def ask(self, call: Awaitable[_T]) -> _T:
        """What the call returns. Raises what `down` makes; what was asked for may have been done all the same."""
        begun, unanswered = False, self._unanswered
        try:
            async with self._turn():
                if unanswered != self._unanswered or (self._silent and self._probing):
                    raise TimeoutError("a call before this one was not answered")
                begun = True
                return await self._ask(call)
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise self._down(str(error) or type(error).__name__) from error
        finally:
            if not begun and asyncio.iscoroutine(call):
                call.close()

    async def ask_or_skip(self, store: str, call: Awaitable[_T], instead: _T) -> _T:
        """As `ask`; `instead` for a key that holds what we do not write."""
        try:
            return await self.ask(call)
        except Exception as error:
            if not _is_strange(error.__cause__):
                raise
            skipped(store, error)
            return instead

    async def ask_each(self, store: str, pipe: Pipeline) -> list[Any]:
        """As `ask` for all commands of a pipeline; None for a key that holds what we do not write."""

        async def execute() -> list[Any]:
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            for error in answers:
                if isinstance(error, Exception) and not _is_strange(error):
                    raise error
            return answers

        answers = await self.ask(execute())
        for error in answers:
            if isinstance(error, Exception):
                skipped(store, error)
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    async def _ask(self, call: Awaitable[_T]) -> _T:
        probes = self._probing = self._silent and not self._all_ask
        try:
            async with tasks.patience(self._timeout_s):
                answer = await call
        except ResponseError:
            self._silent = False
            raise
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError):
            self._unanswered += 1
            self._silent = True
            raise
        finally:
            self._probing = self._probing and not probes
        self._silent = False
        return answer

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._turns.locked():
            async with tasks.patience(TURNS * self._timeout_s, looks=TURNS * tasks.LOOKS):
                await self._turns.acquire()
        else:
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()
