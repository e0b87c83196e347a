"""Keeps the index of one replica equal to what its cache holds, and says how far that can be trusted.

    exact     every KV event since the server's start is here
    degraded  older events are lost, so the index began empty at some point: it holds a part. Or the stream is silent
    fallback  no events: none are published, they cannot be read, or nothing has come for `lost_s`; the index is what
              this gateway sent there (history.py)

A loss empties the index: a block that is missing costs a prefill that was not needed, but one that is long gone would
stand there for ever. It is exact again when the server says that it holds nothing, when it restarts, or when as many
blocks were stored since as its cache has and none of the known ones hangs behind an unknown one: then what was stored
before was pushed out, or is not used.

With Redis one gateway has the lease on a stream (lease.py). It follows the events, into its own memory and, by
engine/publish.py, into Redis; the others read Redis. A holder that has heard nothing for `lost_s` releases the lease,
and takes it again once it hears something, if no other one has it by then. Where Redis has not answered for as long as
a lease lasts, every gateway follows by itself, and stops when another one has published again. Without Redis each
always does.

Its neighbours are stream.py, residency.py, which makes digests of events, and replica.py, which owns it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from engine.protocol import DIGEST_BYTES, BlockEvents, Hello
from engine.protocol.frozen import dataclass
from engine.publish import Publisher, ResidencyTable
from gateway import tasks
from gateway.replicas.base import EventSource, OnBlocks, Trust
from gateway.replicas.events import Cleared, EventError, decode
from gateway.replicas.history import TTL_S, History
from gateway.replicas.lease import StreamLease, StreamState
from gateway.replicas.residency import Residency
from gateway.replicas.stream import EventStream, StreamTimes
from gateway.storage.redis_calls import RedisCalls

log = logging.getLogger(__name__)

MAX_BLOCKS: Final = 1 << 20
"""Of one replica's index, in all tiers: 16 million tokens in blocks of 16, 400 MB of memory."""

HISTORY_BLOCKS: Final = 1 << 16
"""Of a replica that does not say how many its cache has."""

COUNTERS: Final = ("events", "stored_blocks", "removed_blocks", "unreadable", "truncations", "takeovers", "resyncs")
SNAPSHOT_BYTES: Final = 1 << 20

REREAD_S: Final = 60.0
"""From one reading of all events anew, because the index was wrong, to the next: what is read may be what is wrong."""

Content = Literal["nothing", "events", "history"]
"""What this gateway's memory index has of the replica. nothing: Redis has it."""


@dataclass(frozen=True, slots=True)
class FollowerTimes:
    """
    stream         see StreamTimes
    lease_s        after which another gateway takes a stream over whose holder died
    renew_s        from one look at the lease to the next
    index_ttl_s    after which the blocks in Redis are gone if no gateway renews them
    lost_s         of silence, until the events are given up
    history_ttl_s  see history.py
    """

    stream: StreamTimes = StreamTimes()
    lease_s: float = 3.0
    renew_s: float = 1.0
    index_ttl_s: float = 15.0
    lost_s: float = 30.0
    history_ttl_s: float = TTL_S


class Follower:
    """Of one data-parallel rank in one lifetime of its server. Belongs to one event loop.

    trust, reason  how far the index can be trusted, and why not farther
    """

    def __init__(
        self,
        hello: Hello,
        source: EventSource | None,
        on_blocks: OnBlocks,
        calls: RedisCalls | None = None,
        *,
        name: str = "",
        times: FollowerTimes = FollowerTimes(),  # noqa: B008
        max_blocks: int = MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        hello      incarnation, model, namespace (its salt is left out) and num_blocks, 0 if it is not known
        source     None: the server publishes no events
        on_blocks  called with the incarnation and changes of this gateway's memory index, or with None when another
                   gateway follows
        calls      None: there is no Redis
        name       of the replica, for the log
        """
        self._hello = hello
        self._on_blocks = on_blocks
        self._calls = calls
        self._name = name or hello.incarnation
        self._times = times
        self._clock = clock
        self._stream = None if source is None else EventStream(source, self, times.stream)
        self._lease: StreamLease | None = None
        if calls is not None and source is not None:
            self._lease = StreamLease(
                calls, hello.model, hello.incarnation, uuid.uuid4().hex, times.lease_s, clock=clock
            )
        self._residency = Residency(replace(hello.namespace, salt=""), max_blocks)
        self._table = ResidencyTable()
        self._history = History(times.history_ttl_s, hello.num_blocks or HISTORY_BLOCKS)
        self._publisher: Publisher | None = None
        self._published_fence = 0
        self._content: Content = "nothing"
        self._task: asyncio.Task[None] | None = None
        self._following = False
        self._began_s = 0.0  # when it began to follow
        self._followed = False  # the stream was read to its end since then
        self._reading = False  # a replay from the first event on has not come to its end
        self._problem = ""  # why it is not known whether all events are here
        self._heard_s = 0.0  # of the last event, or word that there are no more
        self._missing = ""  # why events are
        self._unread = ""  # why the last payload could not be read
        self._stored = 0  # blocks since events were missing
        self._reread = False  # the events are to be read from the first one on
        self._reread_s = 0.0  # when that may be next
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._shared = StreamState("fallback", "the KV events have not been read yet")
        self.trust: Trust = "fallback"
        self.reason = self._shared.reason if source is not None else "the server publishes no KV events"

    def start(self) -> None:
        """Begins to follow, or to wait for the lease."""
        self._task = tasks.spawn(self._run(), name=f"follow {self._name}")

    async def stop(self) -> None:
        """Another gateway may follow from now on; until one does the blocks stay in Redis for index_ttl_s."""
        await tasks.cancel(self._task)
        if self._following and self._stream is not None:
            await self._stream.stop()
        if self._publisher is not None:
            await self._publisher.stop()
            self._publisher = None
        if self._lease is not None:
            await self._lease.release()

    @property
    def leads(self) -> bool:
        """Whether this gateway looks after the replica's leases: it follows the events, or there are none."""
        return self._lease is None or self._following

    def sent(self, digests: bytes) -> None:
        """This gateway sent a prompt whose full blocks have these digests. Does nothing while there are events."""
        if self._content == "history":
            self._on_blocks(self._hello.incarnation, self._history.sent(digests, self._clock()))

    def resync(self) -> None:
        """The index said more than the cache holds (gateway/receipts.py): it is empty from now on, and the events are
        read again from the first one. Soon after the last time they are not, and what comes from now on is in it."""
        self._counts["resyncs"] += 1
        if self._content == "history":
            self._history.clear()
            self._on_blocks(self._hello.incarnation, BlockEvents(reset=True))
        elif self._following:
            self._reread = self._clock() >= self._reread_s
            self._restart("the index predicted blocks that the cache did not hold")
            self._judge()

    def figures(self) -> dict[str, Any]:
        """trust, reason, `following` (this gateway reads the stream) and `holder` (for all gateways), blocks of the
        index and orphans, if this gateway follows, and counters since the start: see also EventStream.figures."""
        blocks = len(self._history) if self._content == "history" else self._residency.blocks
        return {
            "trust": self.trust,
            "reason": self.reason,
            "following": self._following,
            "holder": self._lease is not None and self._lease.fence > 0,
            "blocks": blocks,
            "orphans": self._residency.orphans,
            "unaligned": self._residency.unaligned,
            **self._counts,
            **({} if self._stream is None else self._stream.figures()),
        }

    # -- stream.Sink ---------------------------------------------------------------------------------------------------

    def begin(self, missing: str) -> None:
        self._counts["truncations"] += bool(missing)
        self._reading, self._unread = True, ""
        self._restart(missing)
        self._judge()

    def payload(self, payload: bytes) -> None:
        self._heard_s = self._clock()
        try:
            batch = decode(payload)
        except EventError as error:
            self._counts["unreadable"] += 1
            self._unread = str(error)
            self._restart(f"KV events could not be read: {error}")
            self._judge()
            return
        self._unread = ""
        self._counts["events"] += len(batch.events)
        for events in self._residency.apply(batch):
            self._apply(events)
        if self._missing and (self._is_renewed() or any(type(event) is Cleared for event in batch.events)):
            self._missing = ""
            self._judge()

    def answering(self, problem: str) -> None:
        self._problem, self._reading = problem, False
        if not problem:
            self._heard_s = self._clock()
        self._followed = self._followed or not problem or self._heard_s > self._began_s
        self._judge()

    def _restart(self, missing: str) -> None:
        """The index is empty, and what comes from now on is in it."""
        self._missing, self._stored = missing, 0
        self._apply(self._residency.clear())

    def _is_renewed(self) -> bool:
        """Whether everything that the cache held when events were lost is known again, or gone from it."""
        return 0 < self._hello.num_blocks <= self._stored and not self._residency.orphans

    def _apply(self, events: BlockEvents) -> None:
        self._stored += len(events.stored) // DIGEST_BYTES
        self._counts["stored_blocks"] += len(events.stored) // DIGEST_BYTES
        self._counts["removed_blocks"] += len(events.removed) // DIGEST_BYTES
        self._table.apply(events)
        if self._content == "events":
            self._on_blocks(self._hello.incarnation, events)
        if self._publisher is not None:
            self._publisher.publish(events)

    # -- trust ---------------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[Trust, str]:
        if self._stream is None:
            return "fallback", "the server publishes no KV events"
        if not self._following:
            return self._shared[:2]
        if not self._followed:
            if self._clock() < self._began_s + self._times.lease_s:
                return self._shared[:2]  # of the gateway that followed before
            return "fallback", self._problem or "the KV events have not been read yet"
        if self._unread:
            return "fallback", self._unread
        if self._problem:
            return "fallback" if self._is_silent() else "degraded", self._problem
        if self._missing or self._reading:
            return "degraded", self._missing or "the KV events are being read from the first one on"
        return "exact", ""

    def _is_silent(self) -> bool:
        return bool(self._problem) and self._clock() >= self._heard_s + self._times.lost_s

    def _judge(self) -> None:
        """Settles the trust, logs when it is another one, and has the index hold what goes with it."""
        trust, reason = self._state()
        if trust != self.trust:
            level = logging.INFO if trust == "exact" else logging.WARNING
            log.log(level, "the index of replica %s is %s now%s", self._name, trust, reason and f": {reason}")
        self.trust, self.reason = trust, reason
        content: Content = "history" if trust == "fallback" else "events" if self._following else "nothing"
        if content == self._content:
            return
        self._content = content
        self._history.clear()
        parts: Sequence[BlockEvents | None] = [None] if content == "nothing" else [BlockEvents(reset=True)]
        for events in self._table.snapshot(SNAPSHOT_BYTES) if content == "events" else parts:
            self._on_blocks(self._hello.incarnation, events)

    # -- who follows ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not tasks.was_cancelled():
            await self._look()
            await asyncio.sleep(self._times.renew_s)

    async def _look(self) -> None:
        """The lease, the stream, the publisher and the history, one after the other."""
        lease = self._lease
        if lease is not None:
            published = self._publisher is not None and self._publisher.up
            deaf = self._following and self.trust == "fallback" and self._is_silent()
            await lease.take(StreamState(self.trust, self.reason, published), wanted=not deaf)
            if lease.others is not None and not self._following:
                self._shared = lease.others
        if self._stream is not None:
            await self._follow(self._stream, lease)
        self._judge()
        await self._publish(0 if lease is None else lease.fence)
        if self._content == "history":
            self._on_blocks(self._hello.incarnation, self._history.expired(self._clock()))

    async def _follow(self, stream: EventStream, lease: StreamLease | None) -> None:
        if lease is None or lease.fence or lease.lost_redis:
            wanted = True
        else:
            wanted = self._following and not (lease.others and lease.others.published)
        if wanted and not self._following:
            self._counts["takeovers"] += 1
            self._following, self._followed, self._began_s = True, False, self._clock()
            self._heard_s, self._problem, self._reading = self._began_s, "", False
            stream.start()
        elif wanted and self._reread:
            self._reread, self._reread_s = False, self._clock() + REREAD_S
            await stream.stop()
            stream.start()
        elif self._following and not wanted:
            await stream.stop()
            self._following = False
            self._shared = (lease and lease.others) or self._shared
            self._restart("")

    async def _publish(self, fence: int) -> None:
        """Publishes what the events say, under the present lease and no other one."""
        wanted = fence if self._followed and self._content == "events" else 0
        if self._publisher is not None and wanted != self._published_fence:
            publisher, self._publisher = self._publisher, None
            await (publisher.close() if fence and not wanted else publisher.stop())
        if wanted and self._publisher is None and self._calls is not None:
            self._published_fence = wanted
            beat_s, ttl_s = self._times.renew_s, self._times.index_ttl_s
            self._publisher = Publisher(
                self._calls.redis, self._table, self._hello, None, heartbeat_s=beat_s, lease_s=ttl_s, fence=wanted
            )
            self._publisher.start()
