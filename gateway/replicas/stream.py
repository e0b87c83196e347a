"""The KV events of one data-parallel rank of a server, in order and without a gap that nobody is told of.

    SUB     [topic, sequence (8 bytes, big-endian), payload], from when the subscription has reached the server
    DEALER  asks for a replay with ["", sequence], and gets ["", topic, sequence, payload] for each batch that the
            server still has from there on, then ["", "", ff * 8, ""]; older servers leave the topic out. Frames are
            read from the end, so that both forms are one.

A server numbers batches from 0 in every lifetime, and says neither how far back its buffer reaches nor that it
restarted. So every replay begins with the last batch that is here: another payload under its number, or none, shows a
server that began anew, even when its numbers have overtaken the old ones. The same question, every `beat_s`, shows lost
batches behind which nothing came. A number that goes backwards needs no question.

While a replay is read nothing is taken out of the subscription: ZeroMQ holds up to MAX_HELD messages, none larger than
MAX_MESSAGE_BYTES. What it drops is a gap like any other. A server drops silently, too, in the middle of a replay and at
its end; then the rest is asked for, by a new socket, so that late answers go nowhere.

Knows nothing of what is in a payload. Its neighbour is follower.py, which does.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from typing import Any, Final, Literal, Protocol

import xxhash
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.protocol.frozen import dataclass
from gateway import tasks
from gateway.replicas.base import EventSource

log = logging.getLogger(__name__)

MAX_HELD: Final = 4096
"""Messages that ZeroMQ holds for one socket, of a few KB each as a rule: 75 KB for a step of 16,000 new tokens."""

MAX_MESSAGE_BYTES: Final = 32 << 20
"""A server that sends a larger one is disconnected by ZeroMQ."""

TRIES: Final = 3
"""Questions in a row that bring nothing until a server counts as silent."""

PAUSE_BEATS: Final = 5
"""For so many `beat_s` gaps are not asked for where such a question was not answered."""

AT_ONCE_S: Final = 0.005
"""Payloads are passed on for so long before others on the event loop have a turn."""

RECONNECT_MS: Final = (100, 1000)  # first and longest pause
PING_MS: Final = (2000, 6000)  # of TCP connections: how often, and when one without an answer is cut
COUNTERS: Final = (
    *("connections", "disconnections", "batches", "gaps", "lost", "replays", "replay_failures", "restarts"),
    "malformed",
)
END: Final = b"\xff" * 8


class Sink(Protocol):
    """What becomes of a stream. All calls come from one task, and must not block."""

    def begin(self, missing: str) -> None:
        """All that was passed on before is void. `missing` says why older batches are unknown; empty: there are none,
        the next batch is the server's first."""

    def payload(self, payload: bytes) -> None:
        """The next batch."""

    def answering(self, problem: str) -> None:
        """Whether the batches passed on are all there are, as far as is known: `problem` says why that is not known,
        and is empty when it is. Called at least every few `beat_s`."""


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """beat_s    from one question whether the last batch is still the last one to the next
    answer_s  after which a server that is asked, or stops in the middle of a replay, does not answer

    A loss or a restart is known after beat_s, silence after beat_s + TRIES * answer_s: within 5 s."""

    beat_s: float = 2.0
    answer_s: float = 1.0


Answer = Literal["whole", "cut", "restarted"]


class EventStream:
    """Passes the batches of one server on, from `start` to `stop`. Belongs to one event loop. Never raises."""

    def __init__(self, source: EventSource, sink: Sink, times: StreamTimes = StreamTimes()) -> None:  # noqa: B008
        self._source = source
        self._sink = sink
        self._times = times
        self._sub: Any = None
        self._dealer: Any = None
        self._task: asyncio.Task[None] | None = None
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._reset()

    def start(self) -> None:
        """Begins to connect, and goes on trying. Also after `stop`: then nothing is known of before."""
        self._reset()
        self._task = tasks.spawn(self._run(), name=f"kv events {self._source.events}")

    async def stop(self) -> None:
        """Disconnects. The sink is not called any more."""
        await tasks.cancel(self._task)

    def figures(self) -> dict[str, float]:
        """Counters since the start. connected: whether it is; last_sequence, -1 before the first batch; lag_s, for how
        long it has not been known that all batches are here, 0 before it ever was."""
        lag_s = 0.0 if self._known_s is None else time.monotonic() - self._known_s
        return {**self._counts, "connected": self._connected, "last_sequence": self._last, "lag_s": lag_s}

    def _reset(self) -> None:
        self._connected = False
        self._last = -1  # number of the last batch passed on
        self._print = b""  # of its payload
        self._live = -1  # number of the last batch that the subscription brought
        self._begun = False  # the sink was told of this lifetime of the server
        self._problem: str | None = None  # as the sink was told
        self._began_later = False  # the last replay began later than it was asked to
        self._read_again = False  # from the first batch on, because some were lost while nothing answered
        self._suspect = False  # the connection broke: what comes next may be of another lifetime
        self._due_s = 0.0  # monotonic time of the next question
        self._pause_end_s = 0.0  # before this monotonic time no gap is asked for
        self._turn_s = 0.0  # since when the event loop's others wait
        self._known_s: float | None = None  # monotonic time at which all batches were known last

    # -- the subscription ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        context = zmq.asyncio.Context.instance()
        self._sub = _socket(context, zmq.SUB)
        monitor = self._sub.get_monitor_socket()
        watching = tasks.spawn(self._watch(monitor), name="kv event connection")
        try:
            self._sub.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            self._sub.connect(self._source.events)
            await self._read()
        except zmq.ZMQError as error:  # an endpoint that is none
            log.warning("KV events of %s cannot be followed: %s", self._source.events, error)
            self._tell(f"{self._source.events} cannot be followed: {error}")
        finally:
            self._sub.disable_monitor()  # while its other end is open: ZeroMQ blocks otherwise
            await tasks.cancel(watching)
            monitor.close()
            self._sub.close()
            self._hang_up()

    async def _read(self) -> None:
        await self._check()
        while not tasks.was_cancelled():
            left_s = self._due_s - time.monotonic()
            if left_s <= 0:
                await self._check(
                    1 if self._problem else TRIES
                )  # a silent one is not waited for as long again and again
                continue
            try:
                async with asyncio.timeout(left_s):
                    frames = await self._sub.recv_multipart()
            except TimeoutError:
                continue
            if len(frames) == 3 and len(frames[1]) == 8:
                await self._arrived(struct.unpack(">Q", frames[1])[0], frames[2])
            else:
                self._counts["malformed"] += 1
            await self._give_way()

    async def _arrived(self, sequence: int, payload: bytes) -> None:
        """A batch that the subscription brings."""
        backwards, self._live = sequence <= self._live, sequence
        gap = sequence > self._last + 1 and self._last >= 0
        self._counts["gaps"] += gap and not backwards
        complete = False
        if backwards:
            self._forget()
            complete = await self._check()
        elif (gap or self._suspect or not self._begun) and time.monotonic() >= self._pause_end_s:
            complete = await self._check()
            if not complete:  # batches go on without replay, and must not wait for it each time
                self._pause_end_s = time.monotonic() + PAUSE_BEATS * self._times.beat_s
        # A replay has brought it, or it is what an earlier lifetime of the server sent last.
        if not complete and sequence > self._last:
            self._take(sequence, payload)
            if self._source.replay is None:
                self._suspect = False
                self._tell("")

    async def _watch(self, monitor: Any) -> None:
        while not tasks.was_cancelled():
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._counts["connections"] += 1
                self._connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._counts["disconnections"] += 1
                self._connected = False
                self._suspect = True

    # -- what is known -------------------------------------------------------------------------------------------------

    def _take(self, sequence: int, payload: bytes) -> None:
        """Passes a batch on. What is between it and the last one is lost."""
        if sequence != self._last + 1:
            first = self._last + 1
            self._counts["lost"] += sequence - first
            self._read_again = bool(self._problem) and self._source.replay is not None
            why = self._problem or "the server does not have them any more"
            self._begin(f"KV events {first} to {sequence - 1} are lost: {why}")
        elif not self._begun:
            self._begin("")
        self._last, self._print = sequence, _print(payload)
        self._counts["batches"] += 1
        self._sink.payload(payload)

    def _begin(self, missing: str) -> None:
        self._begun = True
        self._sink.begin(missing)

    def _forget(self) -> None:
        """The server restarted."""
        log.info("KV events of %s begin anew: the server restarted", self._source.events)
        self._counts["restarts"] += 1
        self._begin("the server restarted, and has not sent its first KV events again")
        self._last, self._begun = -1, False

    def _tell(self, problem: str) -> None:
        if not problem:
            self._known_s = time.monotonic()
        self._problem = problem
        self._sink.answering(problem)

    # -- replay --------------------------------------------------------------------------------------------------------

    async def _check(self, tries: int = TRIES) -> bool:
        """Asks for the last batch and all behind it, until there are no more (True) or nothing comes."""
        self._due_s = time.monotonic() + self._times.beat_s
        if self._source.replay is None:
            if self._suspect or not self._begun:
                self._tell(f"{self._source.events} has sent nothing since it was connected, and has no replay endpoint")
            return False
        failed = restarts = 0
        while failed < tries and restarts < TRIES:
            before = self._last
            answer = await self._ask(self._source.replay)
            self._due_s = time.monotonic() + self._times.beat_s
            if answer == "whole":
                self._suspect = self._began_later = False
                self._pause_end_s = 0.0
                if self._read_again:
                    self._last, self._begun, self._read_again = -1, False, False
                    continue
                if not self._begun:
                    self._begin("")  # nothing has happened there yet
                self._tell("")
                return True
            self._hang_up()
            if answer == "restarted":
                self._forget()
                self._live = -1
                failed, restarts = 0, restarts + 1
            else:
                failed = 0 if self._last > before else failed + 1
        self._counts["replay_failures"] += 1
        self._tell(f"{self._source.replay} does not answer")
        return False

    async def _ask(self, endpoint: str) -> Answer:
        """One replay from the last batch on, which is passed on as it comes.

        "whole": it came to its end. "cut": it did not, or batches are missing in the middle. "restarted": the last
        batch is not what it was."""
        if self._dealer is None:
            self._dealer = _socket(zmq.asyncio.Context.instance(), zmq.DEALER)
            self._dealer.connect(endpoint)
        self._counts["replays"] += 1
        asked = self._last
        checked, first = asked < 0, True  # is the server's lifetime known to be the same; is nothing here yet
        try:
            async with asyncio.timeout(self._times.answer_s):
                await self._dealer.send_multipart([b"", struct.pack(">Q", max(asked, 0))])
            while True:
                async with asyncio.timeout(self._times.answer_s):
                    frames = await self._dealer.recv_multipart()
                if len(frames) < 3 or len(frames[-2]) != 8:
                    self._counts["malformed"] += 1
                    return "cut"
                if frames[-2] == END:
                    return "whole" if checked else "restarted"
                (sequence,) = struct.unpack(">Q", frames[-2])
                if not checked and sequence == asked:
                    if _print(frames[-1]) != self._print:
                        return "restarted"
                elif sequence != self._last + 1 and not (first and self._is_lost(sequence)):
                    return "cut"
                else:
                    self._take(sequence, frames[-1])
                checked, first = True, False
                await self._give_way()
        except TimeoutError:
            return "cut"

    def _is_lost(self, sequence: int) -> bool:
        """Whether a replay that begins with this number shows that older ones are gone: if the last one did, too."""
        later = sequence > self._last + 1
        self._began_later, before = later, self._began_later
        return later and before

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    async def _give_way(self) -> None:
        """A socket that has a message is read without a turn of the event loop in between."""
        if time.monotonic() - self._turn_s > AT_ONCE_S:
            await asyncio.sleep(0)
            self._turn_s = time.monotonic()


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    options = (
        *((zmq.LINGER, 0), (zmq.RCVHWM, MAX_HELD), (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES), (zmq.IPV6, 1)),
        *((zmq.RECONNECT_IVL, RECONNECT_MS[0]), (zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])),
        *((zmq.HEARTBEAT_IVL, PING_MS[0]), (zmq.HEARTBEAT_TIMEOUT, PING_MS[1])),
    )
    for option, value in options:
        socket.setsockopt(option, value)
    return socket


def _print(payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(payload)
