"""The gateways connected to this engine, and what each is still to be sent. No sockets here.

Everything runs on the event loop: block events and step frames arrive in the order in which the loop's thread made
them, so a snapshot taken while a gateway is attached loses no event and doubles none. engine/server.py owns the
sockets, and calls this.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from engine.protocol import BlockEvents, Hello, Load, StepFrame, encode
from engine.publish import ResidencyTable

log = logging.getLogger(__name__)

SNAPSHOT_PART_BYTES: Final = 1 << 20
LOAD_INTERVAL_S: Final = 0.1
"""Gateways that a step did nothing for are told the load this often at most."""


class Gateway:
    """One connection. `owner` names it to the loop, and is never used twice."""

    def __init__(self, owner: str, limit_bytes: int, hang_up: Callable[[], None]) -> None:
        self.owner = owner
        self._limit_bytes = limit_bytes
        self._hang_up = hang_up
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._work = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._gone = False

    def send(self, data: bytes, *, beyond_limit: bool = False) -> None:
        """Queues a message. A gateway that lets more than the limit pile up is hung up on.

        beyond_limit  raises the limit by the message's size: what is sent first may be larger than any change
        """
        if self._gone:
            return
        if beyond_limit:
            self._limit_bytes += len(data)
        if self._unsent_bytes + len(data) > self._limit_bytes:
            log.warning("gateway %s does not read what it is sent; hanging up", self.owner)
            self.forget()
            self._hang_up()
            return
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        self._all_sent.clear()
        self._work.set()

    def forget(self) -> None:
        """Nothing more is sent."""
        self._gone = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._all_sent.set()

    async def sent(self) -> None:
        """Returns when everything queued is handed to the socket. Waits for as long as the gateway does not read."""
        await self._all_sent.wait()

    async def write(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends what is queued, in order, until it is cancelled or `send` fails."""
        while True:
            await self._work.wait()
            while self._unsent:
                data = self._unsent.popleft()
                await send(data)
                self._unsent_bytes = max(0, self._unsent_bytes - len(data))
            self._work.clear()
            self._all_sent.set()


class Gateways:
    """All connections, and the table of blocks that a new one is told first."""

    def __init__(self, hello: Hello, *, buffer_bytes: int) -> None:
        self.table = ResidencyTable()
        self.load = Load(free_blocks=hello.num_blocks)
        self._hello = hello
        self._buffer_bytes = buffer_bytes
        self._connected: dict[str, Gateway] = {}
        self._numbers = itertools.count(1)
        self._told_s = 0.0  # loop time at which idle gateways were told the load
        self._telling: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connected)

    def attach(self, hang_up: Callable[[], None]) -> Gateway:
        """A new connection, with hello, the snapshot of all blocks and the load queued. `hang_up` ends its socket."""
        gateway = Gateway(f"gateway-{next(self._numbers)}", self._buffer_bytes, hang_up)
        gateway.send(encode(self._hello), beyond_limit=True)
        for events in self.table.snapshot(SNAPSHOT_PART_BYTES):
            gateway.send(encode(events), beyond_limit=True)
        gateway.send(encode(StepFrame([], self.load)), beyond_limit=True)
        self._connected[gateway.owner] = gateway
        return gateway

    def detach(self, gateway: Gateway) -> None:
        gateway.forget()
        self._connected.pop(gateway.owner, None)

    def blocks_changed(self, events: BlockEvents) -> None:
        """Applies events to the table and passes them on."""
        self.table.apply(events)
        data = encode(events)
        for gateway in list(self._connected.values()):
            gateway.send(data)

    def stepped(self, frames: Mapping[str, StepFrame]) -> None:
        """Passes a step's frames on, by owner. The others hear of the load, at most every LOAD_INTERVAL_S."""
        for owner, frame in frames.items():
            self.load = frame.load
            if (gateway := self._connected.get(owner)) is not None:
                gateway.send(encode(frame))
        if self._telling is None and any(owner not in frames for owner in self._connected):
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(max(loop.time(), self._told_s + LOAD_INTERVAL_S), self.tell_load)

    def tell_load(self) -> None:
        """Tells every gateway the load, now."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._told_s = asyncio.get_running_loop().time()
        data = encode(StepFrame([], self.load))
        for gateway in list(self._connected.values()):
            gateway.send(data)
