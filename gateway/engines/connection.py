"""The sequences of one connection to an engine, and what is still to be written to it. No sockets here.

bundled.py reads and writes the socket; this sorts. On the hot path: one dictionary look-up, one append and one future
for each update of a sequence, and no task.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from engine.protocol import (
    Abort,
    EngineMessage,
    GatewayMessage,
    Group,
    Hello,
    Lane,
    Load,
    Sampling,
    SequenceUpdate,
    StepFrame,
    Submit,
    encode,
)
from gateway.errors import EngineFailedError, EngineLostError, KvasirError
from gateway.types import EncodedPrompt, Request

MAX_UNSENT_BYTES: Final = 256 << 20
"""Bytes of submits that wait while the engine does not read; more than every place's worth of the longest prompts."""


BUFFER_UPDATES: Final = 65_536
"""Updates of one sequence that wait for a slow client before its stream fails: more than any answer has tokens."""


class Stream:
    """One sequence's updates on their way from the reader of the socket to its one consumer."""

    __slots__ = ("_failure", "_limit", "_updates", "_waiter", "seq")

    def __init__(self, seq: int, limit: int) -> None:
        self.seq = seq
        self._limit = limit
        self._updates: deque[SequenceUpdate] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: KvasirError | None = None

    def push(self, update: SequenceUpdate) -> None:
        """Fails the stream when more updates wait than its limit."""
        if len(self._updates) >= self._limit:
            self._updates.clear()
            self.fail(EngineFailedError("The answer was read too slowly."))
            return
        self._updates.append(update)
        self._wake()

    def fail(self, error: KvasirError) -> None:
        """Updates that came before are still taken; then `error` is raised. The first failure counts."""
        self._failure = self._failure or error
        self._wake()

    async def take(self) -> SequenceUpdate:
        """The next update, or several that waited, merged into one. Raises what `fail` was given."""
        while not self._updates:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        update = self._updates.popleft()
        while self._updates and self._updates[0].finish != "error":
            _merge(update, self._updates.popleft())
        return update

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection:
    """What one connection carries, from hello to its end."""

    def __init__(self, name: str, hello: Hello, buffer_updates: int = BUFFER_UPDATES) -> None:
        self.name = name
        self.hello = hello
        self.load = Load()
        self.streams: dict[int, Stream] = {}
        self.unseen: dict[int, tuple[int, int, Lane]] = {}  # seq -> (frames then, tokens to prefill, lane)
        # Online sequences that have no token yet: seq -> (tenant, tokens to prefill).
        self.unstarted: dict[int, tuple[str, int]] = {}
        self._frames = 0
        self._seqs = itertools.count(1)
        self._buffer_updates = buffer_updates
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._work = asyncio.Event()
        self._failed: KvasirError | None = None

    def open(self, prompt: EncodedPrompt, sampling: Sampling, request: Request, cost: int) -> Stream:
        """Sends a new sequence, without waiting. `cost` is how many tokens it will probably have to prefill."""
        if self._failed is not None:
            raise EngineLostError(self._failed.message)
        stream = Stream(next(self._seqs), self._buffer_updates)
        self._send(
            Submit(
                seq=stream.seq,
                tokens=prompt.tokens,
                digests=prompt.digests,
                sampling=sampling,
                salt=request.salt,
                tenant=request.tenant.name,
                lane=request.lane,
                request_id=request.request_id,
                breakpoints=prompt.breakpoints,
                use_cache=request.use_cache,
                grammar=request.constraint.grammar if request.constraint else None,
                group=Group(request.group.number, request.group.size) if request.group else None,
                adapter=self.hello.named(request.model).namespace.adapter,
            )
        )
        self.streams[stream.seq] = stream
        self.unseen[stream.seq] = (self._frames, cost, request.lane)
        if request.lane == "online":
            self.unstarted[stream.seq] = (request.tenant.name, cost)
        return stream

    def ended(self, stream: Stream) -> bool:
        """The engine has finished the sequence: there is nothing left to abort. False when it had ended."""
        self.unseen.pop(stream.seq, None)
        self.unstarted.pop(stream.seq, None)
        return self.streams.pop(stream.seq, None) is not None

    def abort(self, stream: Stream) -> None:
        """Aborts the sequence at the engine, unless it has ended."""
        if self.ended(stream) and self._failed is None:
            self._send(Abort(stream.seq))

    def dispatch(self, message: EngineMessage | GatewayMessage) -> bool:
        """Hands a step's updates to their sequences; late ones for aborted sequences are dropped. False if no step."""
        if not isinstance(message, StepFrame):
            return False
        self.load = message.load
        self._frames += 1
        for update in message.updates:
            if (stream := self.streams.get(update.seq)) is not None:
                stream.push(update)
            self.unseen.pop(update.seq, None)
            self.unstarted.pop(update.seq, None)
        # The frame after next was made by a step that began when the engine had the sequence: its load includes it.
        for seq in [seq for seq, (sent, *_) in self.unseen.items() if sent < self._frames - 1]:
            del self.unseen[seq]
        return True

    def fail(self, error: KvasirError) -> None:
        """The end: every sequence raises `error`, and new ones are refused with it."""
        self._failed = error
        for stream in self.streams.values():
            stream.fail(error)
        self.streams.clear()
        self.unseen.clear()
        self.unstarted.clear()
        self._unsent.clear()

    async def write(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends what `open` and `abort` left to be sent, in order. Ends only by failing."""
        while True:
            await self._work.wait()
            while self._unsent:
                data = self._unsent.popleft()
                self._unsent_bytes -= len(data)
                await send(data)
            self._work.clear()

    def _send(self, message: GatewayMessage) -> None:
        data = encode(message)
        if isinstance(message, Submit) and self._unsent_bytes + len(data) > MAX_UNSENT_BYTES:
            raise EngineLostError(f"Engine {self.name} does not read.")
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        self._work.set()


def _merge(update: SequenceUpdate, later: SequenceUpdate) -> None:
    """Appends `later` to `update`."""
    update.tokens += later.tokens
    update.prompt_logprobs = update.prompt_logprobs or later.prompt_logprobs
    if later.logprobs is not None:
        update.logprobs = [*(update.logprobs or ()), *later.logprobs]
    if update.cached_tokens is None:
        update.cached_tokens, update.queue_ms, update.prefill_ms = later.cached_tokens, later.queue_ms, later.prefill_ms
    if update.leases_degraded is None:
        update.lease_read_tokens, update.lease_write_tokens = later.lease_read_tokens, later.lease_write_tokens
        update.lease_reads = later.lease_reads
        update.leases_degraded = later.leases_degraded
    update.finish, update.stop_id, update.error = later.finish, later.stop_id, later.error
