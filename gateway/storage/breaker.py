"""Whether Redis is reachable: one circuit breaker for all parts of a gateway that ask the same client.

    closed     every call goes to Redis
    open       no call does until `retry_s` seconds after the failure
    half-open  one call at a time is the probe: its success closes the breaker, its failure opens it again

A call fails when its connection breaks or its time limit ends. A failure opens the breaker only if no other call was
answered since the failed one began: otherwise that call was slow, and Redis is there. An error that Redis itself sends
(out of memory, a key of another type) is an answer. The breaker logs one line when it opens and one when it closes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from redis.exceptions import RedisError, ResponseError

from gateway.breaker import Breaker

log = logging.getLogger(__name__)

UNREACHABLE: Final = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError)
"""What a call of redis-py raises, but for our own mistakes."""

REFUSALS_S: Final = 60.0
"""Seconds from one log line about commands that Redis refuses to the next."""


class RedisBreaker(Breaker):
    """outages   times that it opened
    failures  calls that showed Redis to be unreachable
    """

    def __init__(self, *, retry_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """With retry_s 0 the breaker is half-open as soon as it has opened."""
        super().__init__(1, retry_s, clock)
        self.retry_s = retry_s
        self.outages = 0
        self.failures = 0
        self._answers = 0
        self._down_s = 0.0  # since when
        self._next_refusal_s = 0.0

    @property
    def up(self) -> bool:
        """False from the failure that opens the breaker to the answer that closes it."""
        return self.state == "closed"

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call. Raises ConnectionError where the call must not be made."""
        probes = not self.up
        if probes and not self.admit():
            raise ConnectionError("Redis was unreachable a moment ago")
        answers = self._answers
        try:
            yield
        except ResponseError:
            self._answered(probes)
            raise
        except UNREACHABLE as error:
            if probes or answers == self._answers:
                self._lost(error, probes)
            raise
        except BaseException:
            if probes:
                self.abandoned()
            raise
        self._answered(probes)

    def refused(self, error: ResponseError) -> None:
        """Logs that Redis refuses commands, at most once in REFUSALS_S."""
        if (now_s := self._clock()) >= self._next_refusal_s:
            self._next_refusal_s = now_s + REFUSALS_S
            log.warning("Redis refuses commands, and this gateway goes on without what they are for: %s", error)

    def _answered(self, probes: bool) -> None:
        """Only a probe closes the breaker: other calls began before the failure."""
        self._answers += 1
        if probes and not self.up:
            self.succeeded()
            log.info("Redis is reachable again after %.1f s", self._clock() - self._down_s)

    def _lost(self, error: BaseException, probes: bool) -> None:
        self.failures += 1
        if self.up:
            self.outages += 1
            self._down_s = self._clock()
            log.warning(
                "Redis is unreachable, and this gateway goes on with its own memory: %s. The next try is in %g s",
                str(error) or type(error).__name__,
                self.retry_s,
            )
        elif not probes:
            return
        self.failed()
