"""Two processes that ask each other, over a socket between them: a gateway's first process and a worker of it.

Knows nothing of what they ask. A message is its length and a pickle of (number, what, value); the answer has the same
number. Only processes of our own, which inherited the socket, are at its ends.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gateway import tasks

MAX_ASKED: Final = 64
"""Questions without an answer yet; the next one fails."""

MAX_UNREAD_BYTES: Final = 4 << 20
"""That a peer has not read; the next question to it fails."""

_LENGTH_BYTES: Final = 4


class Peer:
    """One end. `answer` is called with each question of the other end, what and value, and returns the answer."""

    def __init__(self, answer: Callable[[str, Any], Awaitable[Any]]) -> None:
        self._answer = answer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, end: socket.socket) -> None:
        """Takes over the socket, and begins to answer."""
        end.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        self._reading = tasks.spawn(self._read(reader), name="read from a peer")

    async def close(self) -> None:
        """Questions that have no answer by now fail."""
        await tasks.cancel(self._reading)

    async def ask(self, what: str, value: Any = None, *, timeout_s: float) -> Any:
        """Raises ConnectionError and TimeoutError."""
        writer = self._writer
        if writer is None or writer.is_closing() or len(self._asked) >= MAX_ASKED:
            raise ConnectionError("the process cannot be asked")
        if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            raise ConnectionError("the process does not read what it is asked")
        self._numbers += 1
        number = self._numbers
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            _send(writer, number, what, value)
            return await asyncio.wait_for(future, timeout_s)
        finally:
            del self._asked[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._writer is not None
        try:
            while not tasks.was_cancelled():
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                number, what, value = pickle.loads(await reader.readexactly(length))  # noqa: S301 - our own process
                if what:
                    tasks.spawn(self._reply(self._writer, number, what, value), name=f"answer a peer: {what}")
                elif (future := self._asked.get(number)) is not None and not future.done():
                    future.set_result(value)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other process has ended
        finally:
            self._writer.close()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ConnectionError("the process ended"))

    async def _reply(self, writer: asyncio.StreamWriter, number: int, what: str, value: Any) -> None:
        answer = await self._answer(what, value)
        if not writer.is_closing():
            _send(writer, number, "", answer)


def _send(writer: asyncio.StreamWriter, number: int, what: str, value: Any) -> None:
    message = pickle.dumps((number, what, value))
    writer.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
