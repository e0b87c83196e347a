"""Identical requests in flight share one generation.

A flight is what one task produces and any number of readers read, each from the beginning. It goes on while it has
readers, and is aborted when it has none. Readers share one list of items. Of several readers the slowest is dropped
when it is too far behind; a single one is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from dataclasses import fields
from typing import Final, Generic, TypeVar

from gateway import tasks
from gateway.errors import BadRequestError, KvasirError, OverloadedError, QueueFullError
from gateway.native import no_panic
from gateway.responses.base import Stored
from gateway.types import Lookup, Request, Trace, UpstreamRequest

_T = TypeVar("_T")
_Leader = Request | UpstreamRequest

END_S: Final = 1.0
"""Cancelled work is waited for at most so long."""

_OWN: Final = frozenset(("fork", "hit", "lookup", "paid_tokens", "repeat", "shared"))
"""Of a request itself, whoever its answer was generated for."""

_COMPUTED: Final = tuple(one.name for one in fields(Trace) if one.name not in _OWN)


class Bill:
    """Which request pays for a generation that several share: the one that has been there for longest, until it leaves;
    then the next. So all that was computed is accounted for once, with a request that was there when it was.

    work   the trace that is filled in on its way
    ended  no more is computed
    """

    def __init__(self, *, metered_at_end: bool = False) -> None:
        """`metered_at_end`: tokens are known only then; else, from the first token on."""
        self.work = Trace()
        self.ended = False
        self._metered_at_end = metered_at_end
        self._readers: list[Trace] = []  # in the order in which they came
        self._begun = False  # the prompt is accounted for
        self._paid_tokens = 0  # of the completion, by those that have left

    def join(self, trace: Trace) -> None:
        """A request reads along."""
        self._readers.append(trace)
        trace.shared = self.work

    def leads(self, trace: Trace) -> bool:
        """Whether everything up to now was computed for this request: it is reported as if it were alone."""
        return not self._begun and bool(self._readers) and self._readers[0] is trace

    def show(self, trace: Trace) -> None:
        """What was computed up to now."""
        for name in _COMPUTED:
            setattr(trace, name, getattr(self.work, name))

    def leave(self, trace: Trace) -> None:
        """The request has read the end, or hung up. What was computed while it was the first goes into its trace; all
        of it is left to the next one while it is not known how much that is. Does nothing the second time."""
        if not any(one is trace for one in self._readers):
            return
        trace.shared = None
        first, leads = self._readers[0] is trace, self.leads(trace)
        self._readers = [one for one in self._readers if one is not trace]
        known = self.ended or (self.work.first_token_ms is not None and not self._metered_at_end)
        if not first or (self._readers and not known):
            return
        if leads:
            self.show(trace)
            trace.hit = None
        else:
            trace.paid_tokens = trace.completion_tokens = self.work.completion_tokens - self._paid_tokens
        self._begun, self._paid_tokens = True, self.work.completion_tokens


class Flight(Generic[_T]):
    """One generation.

    key      by which others find it; None: no other request does
    leader   the request that launched it
    bill     which request pays for what is computed
    found    what the cache had for it, set by its work before the first item; None: nothing
    begun_s  monotonic clock
    """

    def __init__(
        self, key: Hashable | None, leader: _Leader, bill: Bill, flying: dict[Hashable, Flight[_T]], max_bytes: int,
        size: Callable[[_T], int],
    ) -> None:  # fmt: skip
        """`flying` are those that may be joined."""
        self.key = key
        self.leader = leader
        self.bill = bill
        self.found: tuple[Stored[_T], Lookup] | None = None
        self.begun_s = time.monotonic()
        self._flying = flying
        self._max_bytes = max_bytes
        self._size = size
        self._items: deque[_T] = deque()
        self._dropped = 0  # items that came before the first of these
        self._bytes = 0
        self._places: dict[object, int] = {}  # reader -> number of the next item for it
        self._changed = asyncio.Event()
        self._was_read = asyncio.Event()
        self._landed = False
        self._abandoned = False
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

    def fails(self, request: _Leader, error: KvasirError) -> bool:
        """Whether the error that ended the flight is this reader's as well. Otherwise the reader may try again: nothing
        was sent to it, and the error belongs to the leader alone (its deadline, its tenant's share of a queue)."""
        leader, now = self.leader, time.monotonic()
        if leader is request or self.begun or isinstance(error, BadRequestError):
            return True
        if isinstance(error, QueueFullError):
            return leader.tenant.name == request.tenant.name
        return now < leader.deadline_s or now >= request.deadline_s

    def start(self, work: Callable[[Flight[_T]], Awaitable[None]], name: str) -> None:
        """Runs `work`, which adds the items, to its end."""
        self._task = tasks.spawn(self._run(work), name)

    def land(self) -> None:
        """Called by the work: what is still to do is not for the readers, and goes on without them."""
        self._end_joining()
        self._landed = self.bill.ended = True

    async def abandoned(self) -> None:
        """Where all left before its end, its work has ended when this returns, within END_S, and what it used is
        known."""
        if not self._abandoned or self._task is None:
            return
        try:
            await asyncio.wait([self._task], timeout=END_S)
        except asyncio.CancelledError:  # the client's connection is gone as well: what it used is still to be known
            await asyncio.wait([self._task], timeout=END_S)
            raise

    async def read(self) -> AsyncGenerator[_T, None]:
        """Everything, as it comes. Raises what ended the flight, and OverloadedError for a reader that is too slow."""
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
            self._was_read.set()  # nothing waits any more for this one to read
            if not self._places and not self._landed and self._task is not None:
                self._end_joining()
                self._abandoned = self._task.cancel()

    async def _run(self, work: Callable[[Flight[_T]], Awaitable[None]]) -> None:
        try:
            with no_panic():
                await work(self)
        except asyncio.CancelledError:
            self._error = KvasirError("The answer was aborted.")
            raise
        except Exception as error:
            self._error = error
        finally:
            self._end_joining()
            self._ended = self.bill.ended = True
            self._changed.set()

    async def add(self, item: _T) -> None:
        """For all readers. Waits while too much is unread."""
        self._items.append(item)
        self._bytes += self._size(item)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._bytes > self._max_bytes:
            await self._make_room()

    async def _make_room(self) -> None:
        """No request can join any more, so that what all have read is dropped; then the slowest readers are. A single
        one holds up no other, and is waited for."""
        await asyncio.sleep(0)  # a reader that only had no turn yet is not slow
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
        if self._flying.get(self.key) is self:
            del self._flying[self.key]


class Flights(Generic[_T]):
    """Those that may be joined, by what they are answers to."""

    def __init__(self, max_bytes: int, size: Callable[[_T], int]) -> None:
        """`max_bytes` of one flight wait for its slowest reader, as `size` counts them."""
        self._max_bytes = max_bytes
        self._size = size
        self._flying: dict[Hashable, Flight[_T]] = {}

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def readers(self) -> int:
        """Requests that read them."""
        return sum(flight.readers for flight in self._flying.values())

    def find(self, key: Hashable) -> Flight[_T] | None:
        """One that may still be joined: its readers get all of it."""
        return self._flying.get(key)

    def launch(self, key: Hashable | None, leader: _Leader, *, metered_at_end: bool = False) -> Flight[_T]:
        """A new one, in place of one that could be joined. With None, no other request can find it."""
        bill = Bill(metered_at_end=metered_at_end)
        flight = Flight(key, leader, bill, self._flying, self._max_bytes, self._size)
        if key is not None:
            self._flying[key] = flight
        return flight
