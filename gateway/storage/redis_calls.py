"""Calls of Redis: a bounded number at a time, each with a time limit, and one error for every failure.

A burst of requests keeps the event loop busy and makes calls wait for each other; Redis is not unreachable for that.
So the time limit of a call starts when its turn has come, and the loop has to come round several times before it ends
(tasks.patience). When a call is not answered, those that wait for a turn fail at once, and breaker.py decides when
Redis is called again: a Redis that hangs costs each request one time limit. A call that gets no turn within TURNS time
limits fails, too.

Entries in Redis that no gateway wrote (of another type, cut short, no JSON, absurd) are passed over, counted in
`unreadable` and logged once for each store: `read_or_skip`, `ask_or_skip` and `ask_each`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from engine import redis_client
from engine.redis_client import Script
from gateway import tasks
from gateway.errors import RedisDownError
from gateway.storage.breaker import UNREACHABLE, RedisBreaker

log = logging.getLogger(__name__)

_T = TypeVar("_T")

unreadable: Final[Counter[str]] = Counter()
"""Entries of Redis that were passed over since the start, by the store that wanted them."""

MAX_CALLS: Final = 32
"""Of one stage, at the same time, so that a burst waits for a connection instead of running out of them."""

MAX_CONNECTIONS: Final = 16 * MAX_CALLS
"""Of one client, in a cluster to each node: more than all stages together may ask at a time."""

TURNS: Final = 16
"""Time limits that a call waits for its turn, at most."""

SOCKET_TIMEOUTS: Final = 4
"""Time limits that a socket waits, which has no patience for a busy loop. Callers bound their calls themselves."""


def connect(url: str, timeout_s: float) -> Redis:
    """A client for calls that take no longer than `timeout_s`, in which nothing takes longer than SOCKET_TIMEOUTS of
    it. Its owner ends it with `close`."""
    return redis_client.connect(url, timeout_s=SOCKET_TIMEOUTS * timeout_s, max_connections=MAX_CONNECTIONS)


close = redis_client.close


async def warn_of_eviction(redis: Redis) -> None:
    """Warns when this Redis may evict keys without a time to live, which jobs, leases and the ledger have. Quiet when
    Redis does not answer."""
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
    """The result of `read` for a value from Redis; None when it cannot be read."""
    try:
        return read()
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        skipped(store, error)
        return None


def skipped(store: str, error: BaseException | None) -> None:
    """Counts an unreadable value, and logs the first one of a store, never its content."""
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
    """The calls of one store. Every failure is a RedisDownError with its cause."""

    def __init__(self, redis: Redis, timeout_s: float, breaker: RedisBreaker | None = None) -> None:
        """redis      the caller's: it is not closed here
        timeout_s  bounds every call, from its turn on
        breaker    of all calls of this gateway; None: a breaker for these calls alone
        """
        self.redis = redis
        self.breaker = breaker or RedisBreaker()
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(MAX_CALLS)

    def script(self, package: str | None, *names: str) -> Script:
        """The Lua source in these files of a package (`__package__` of its user), one behind the other."""
        assert package is not None
        source = "".join(files(package).joinpath(name).read_text(encoding="utf-8") for name in names)
        return Script(self.redis, source)

    async def ask(self, call: Awaitable[_T]) -> _T:
        """What the call returns. Raises RedisDownError; the command may have been executed all the same."""
        try:
            return await self._ask(call)
        except RedisDownError as error:
            self._note_refusal(error)
            raise

    async def ask_or_skip(self, store: str, call: Awaitable[_T], instead: _T) -> _T:
        """As `ask`; `instead` for a key that holds what we do not write."""
        try:
            return await self._ask(call)
        except RedisDownError as error:
            if not _is_strange(error.__cause__):
                self._note_refusal(error)
                raise
            skipped(store, error.__cause__)
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
        asked, failures = False, self.breaker.failures
        try:
            async with self._turn():
                if failures != self.breaker.failures:
                    raise TimeoutError("a call before this one was not answered")
                with self.breaker.call():
                    asked = True
                    async with tasks.patience(self._timeout_s):
                        return await call
        except UNREACHABLE as error:
            why = str(error) or type(error).__name__
            raise RedisDownError(why, asked=asked, retry_after_s=self.breaker.retry_s or 1.0) from error
        finally:
            if not asked and asyncio.iscoroutine(call):
                call.close()

    def _note_refusal(self, error: RedisDownError) -> None:
        if isinstance(error.__cause__, ResponseError):
            self.breaker.refused(error.__cause__)

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
