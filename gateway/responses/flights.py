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
"""Of a request itself, whichever request its answer was generated for."""

_COMPUTED: Final = tuple(one.name for one in fields(Trace) if one.name not in _OWN)


class Bill:
    """Which request pays for a generation that several share: the oldest reader until it leaves, then the next. So
    everything computed is accounted for once, with a request that was reading at the time.

    work   the trace that is filled in on its way
    ended  no more is computed
    """

    def __init__(self, *, metered_at_end: bool = False) -> None:
        """`metered_at_end`: tokens are known only then, not from the first one on."""
        self.work = Trace()
        self.ended = False
        self._metered_at_end = metered_at_end
        self._readers: list[Trace] = []  # in order of arrival
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

    bill     which request pays for what is computed
    found    the cached answer, set by its work before the first item; None: the answer is generated
    begun_s  monotonic clock
    """

    def __init__(
        self,
        flights: dict[Hashable, Flight[_T]],
        key: Hashable | None,
        leader: _Leader,
        *,
        max_bytes: int,
        size: Callable[[_T], int],
        metered_at_end: bool = False,
    ) -> None:
        """`leader` launches it. Until it ends, `flights` has it under its key for others to join; None: none can.
        `max_bytes`, as `size` counts them, wait for the slowest reader."""
        self.bill = Bill(metered_at_end=metered_at_end)
        self.found: tuple[Stored[_T], Lookup] | None = None
        self.begun_s = time.monotonic()
        self._flights = flights
        self._key = key
        self._leader = leader
        self._max_bytes = max_bytes
        self._size = size
        self._items: deque[_T] = deque()
        self._dropped = 0  # items before the first of these
        self._bytes = 0
        self._next: dict[object, int] = {}  # reader -> number of the next item for it
        self._changed = asyncio.Event()
        self._was_read = asyncio.Event()
        self._landed = False
        self._abandoned = False
        self._ended = False
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        if key is not None:
            flights[key] = self

    @property
    def shared(self) -> bool:
        """Whether other requests can join."""
        return self._key is not None

    @property
    def begun(self) -> bool:
        """Whether there is an item."""
        return bool(self._items) or self._dropped > 0

    @property
    def readers(self) -> int:
        return len(self._next)

    @property
    def full(self) -> Sequence[_T] | None:
        """All items so far; None if they were too large to hold."""
        return None if self._dropped or self._bytes > self._max_bytes else list(self._items)

    def fails(self, request: _Leader, error: KvasirError) -> bool:
        """Whether the error that ended the flight is this reader's as well. Otherwise the reader may try again: nothing
        was sent to it, and the error belongs to the leader alone (its deadline, its tenant's share of a queue)."""
        leader, now = self._leader, time.monotonic()
        if leader is request or self.begun or isinstance(error, BadRequestError):
            return True
        if isinstance(error, QueueFullError):
            return leader.tenant.name == request.tenant.name
        return now < leader.deadline_s or now >= request.deadline_s

    def start(self, work: Callable[[Flight[_T]], Awaitable[None]]) -> None:
        """Runs `work`, which adds the items, to its end."""
        self._task = tasks.spawn(self._run(work), "response flight")

    def land(self) -> None:
        """Called by the work: what is left to do is not for the readers, and goes on without them."""
        self._end_joining()
        self._landed = self.bill.ended = True

    async def leave(self, trace: Trace) -> None:
        """The request reads no more. If it was the last one, before the end, the cancelled work is waited for, END_S at
        most: then it is known what it used."""
        try:
            if self._abandoned and self._task is not None:
                await self._end_of(self._task)
        finally:
            if self.found is None:
                self.bill.leave(trace)

    @staticmethod
    async def _end_of(task: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait([task], timeout=END_S)
        except asyncio.CancelledError:  # the client's connection is gone as well: what it used is still to be known
            await asyncio.wait([task], timeout=END_S)
            raise

    async def read(self) -> AsyncGenerator[_T, None]:
        """Everything, as it comes. Raises what ended the flight, and OverloadedError for a reader that is too slow."""
        reader = object()
        self._next[reader] = 0
        try:
            while True:
                while (item := self._next.get(reader)) is not None and item < self._dropped + len(self._items):
                    self._next[reader] = item + 1
                    self._was_read.set()
                    yield self._items[item - self._dropped]
                if item is None:
                    raise OverloadedError("The answer was not read for too long.")
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return
                await self._changed.wait()
        finally:
            self._next.pop(reader, None)
            self._was_read.set()  # nothing waits any more for this one to read
            if not self._next and not self._landed and self._task is not None:
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
        self._changed.set()  # for those that wait now
        self._changed.clear()
        if self._bytes > self._max_bytes:
            await self._make_room()

    async def _make_room(self) -> None:
        """No request can join any more, so that what all have read is dropped; then the slowest readers are. A single
        one holds up no other, and is waited for."""
        await asyncio.sleep(0)  # a reader that only had no turn yet is not slow
        self._end_joining()
        self._drop_read()
        while self._bytes > self._max_bytes and self._next:
            if len(self._next) == 1:
                self._was_read.clear()
                await self._was_read.wait()
            else:
                slowest = min(self._next, key=lambda reader: self._next[reader])
                del self._next[slowest]
            self._drop_read()

    def _drop_read(self) -> None:
        needed = min(self._next.values(), default=self._dropped + len(self._items))
        while self._dropped < needed and self._items:
            self._bytes -= self._size(self._items.popleft())
            self._dropped += 1

    def _end_joining(self) -> None:
        if self._flights.get(self._key) is self:
            del self._flights[self._key]
