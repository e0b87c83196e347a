"""Identical requests in flight share one generation.

A flight is what one task produces and any number of readers read, each from the beginning. It goes on while somebody
reads, and is aborted when nobody does. Readers share one list of what came. Of several, who is too far behind is given
up; one alone is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Final, Generic, TypeVar

from gateway import tasks
from gateway.errors import BadRequestError, KvasirError, OverloadedError, QueueFullError
from gateway.native import no_panic
from gateway.responses.bill import Bill
from gateway.types import Hit, Lookup, Request, Trace, UpstreamRequest

_T = TypeVar("_T")

END_S: Final = 1.0
"""That work which was told to end is waited for."""


class Flight(Generic[_T]):
    """One generation.

    bill         who pays for what an own engine computes
    unpaid       of a request that launched it and left before its end: what it takes is another reader's to account for
    lookup, hit  what the cache had for it, said by its work before the first item; None: it had nothing
    leader       the request that launched it
    begun_s      monotonic clock
    """

    leader: Request | UpstreamRequest | None = None
    lookup: Lookup | None = None
    hit: Hit | None = None
    unpaid: Trace | None = None

    def __init__(self, max_bytes: int, size: Callable[[_T], int], close: Callable[[], None]) -> None:
        """`close` is called once, when nobody may join any more."""
        self.begun_s = time.monotonic()
        self.bill = Bill()
        self._max_bytes = max_bytes
        self._size = size
        self._close = close
        self._items: deque[_T] = deque()
        self._dropped = 0  # items that came before the first of these
        self._bytes = 0
        self._places: dict[object, int] = {}  # reader -> number of the next item for it
        self._changed = asyncio.Event()
        self._was_read = asyncio.Event()
        self._open = True
        self._landed = False
        self._given_up = False
        self._ended = False
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether anything came."""
        return bool(self._items) or self._dropped > 0

    @property
    def readers(self) -> int:
        return len(self._places)

    @property
    def full(self) -> Sequence[_T] | None:
        """What came, from the first on, unless that was too much."""
        return None if self._dropped or self._bytes > self._max_bytes else list(self._items)

    def fails(self, request: Request | UpstreamRequest, error: KvasirError) -> bool:
        """Whether the error that ended the flight is this reader's as well. Otherwise the reader may try again: nothing
        was sent to it, and the error belongs to the leader alone (its deadline, its tenant's share of a queue)."""
        leader, now = self.leader, time.monotonic()
        if leader is None or leader is request or self.begun or isinstance(error, BadRequestError):
            return True
        if isinstance(error, QueueFullError):
            return leader.tenant.name == request.tenant.name
        return now < leader.deadline_s or now >= request.deadline_s

    def start(self, work: Callable[[Flight[_T]], AsyncGenerator[_T, None]], name: str) -> None:
        """Runs until `work` has no more to give."""
        self._task = tasks.spawn(self._run(work), name)

    def land(self) -> None:
        """Said by the work: what is still to do is not for the readers, and goes on without them."""
        self._end_joining()
        self._landed = True

    async def given_up(self) -> bool:
        """Whether all left before its end. Then its work has ended when this returns, within reason, and what it used
        is known."""
        if self._given_up and self._task is not None:
            await asyncio.wait([self._task], timeout=END_S)
        return self._given_up

    async def read(self) -> AsyncGenerator[_T, None]:
        """Everything, as it comes. Raises what ended the flight, and OverloadedError for who is too slow."""
        reader = object()
        self._places[reader] = 0
        try:
            while True:
                while (place := self._places.get(reader)) is not None and place < self._dropped + len(self._items):
                    self._places[reader] = place + 1
                    self._was_read.set()
                    yield self._items[place - self._dropped]
                if place is None:
                    raise OverloadedError("The answer was not read for too long.")
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return
                await self._changed.wait()
        finally:
            self._places.pop(reader, None)
            self._was_read.set()  # who waits for it to read waits for nobody any more
            if not self._places and not self._landed and self._task is not None:
                self._end_joining()
                self._given_up = self._task.cancel()

    async def _run(self, work: Callable[[Flight[_T]], AsyncGenerator[_T, None]]) -> None:
        try:
            with no_panic():
                async with aclosing(work(self)) as items:
                    async for item in items:
                        self._add(item)
                        if self._bytes > self._max_bytes:
                            await self._make_room()
        except asyncio.CancelledError:
            self._error = KvasirError("The answer was given up.")
            raise
        except Exception as error:
            self._error = error
        finally:
            self._end_joining()
            self._ended = True
            self._changed.set()

    def _add(self, item: _T) -> None:
        self._items.append(item)
        self._bytes += self._size(item)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _make_room(self) -> None:
        """Nobody can join, so that what all have read can go; then who is behind the others. One alone holds up nobody,
        and is waited for."""
        await asyncio.sleep(0)  # who is only not at its turn yet is not slow
        self._end_joining()
        self._drop_read()
        while self._bytes > self._max_bytes and self._places:
            if len(self._places) == 1:
                self._was_read.clear()
                await self._was_read.wait()
            else:
                slowest = min(self._places, key=lambda reader: self._places[reader])
                del self._places[slowest]
            self._drop_read()

    def _drop_read(self) -> None:
        needed = min(self._places.values(), default=self._dropped + len(self._items))
        while self._dropped < needed and self._items:
            self._bytes -= self._size(self._items.popleft())
            self._dropped += 1

    def _end_joining(self) -> None:
        if self._open:
            self._open = False
            self._close()


class Flights(Generic[_T]):
    """What is in the air, by what it is an answer to."""

    def __init__(self, max_bytes: int, size: Callable[[_T], int]) -> None:
        """`max_bytes` of one flight that wait for its slowest reader, as `size` counts them."""
        self._max_bytes = max_bytes
        self._size = size
        self._flying: dict[Hashable, Flight[_T]] = {}

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def readers(self) -> int:
        """Of those that may be joined."""
        return sum(flight.readers for flight in self._flying.values())

    def find(self, key: Hashable) -> Flight[_T] | None:
        """One that may still be joined: who reads it gets everything."""
        return self._flying.get(key)

    def launch(self, key: Hashable | None, leader: Request | UpstreamRequest | None = None) -> Flight[_T]:
        """A new one, in place of one that could be joined. With None, nobody else can find it."""
        flight: Flight[_T]

        def close() -> None:
            if self._flying.get(key) is flight:
                del self._flying[key]

        flight = Flight(self._max_bytes, self._size, close)
        flight.leader = leader
        if key is not None:
            self._flying[key] = flight
        return flight
