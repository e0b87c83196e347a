"""An answer whose bytes are all known, written to its connection at once.

aiohttp prepares an answer in a dozen steps, because it may still become another one: compressed, in pieces, without a
body. An answer that was written before is none of these. What is written here is what aiohttp would write.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11


class Sent(web.StreamResponse):
    """What aiohttp is given for an answer that has left: there is nothing that it has to do for it, and the same one
    stands for all of them."""

    def __init__(self, *, keep_alive: bool) -> None:
        """Whether the connection goes on."""
        super().__init__()
        self._goes_on = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._goes_on

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """It is written."""


_GOES_ON: Final = Sent(keep_alive=True)
_ENDS: Final = Sent(keep_alive=False)
_OWN: Final = frozenset(("connection", "content-length", "date", "server", "transfer-encoding"))
_SERVER: Final = f"\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"


async def send(http: web.Request, headers: bytes, more: Mapping[str, str], body: bytes) -> Sent:
    """Answers 200, and returns when the client has room for more.

    headers  as `header_lines` has them, with the type of the content
    more     other ones

    Raises ConnectionResetError when the client is gone.
    """
    goes_on = bool(http.keep_alive)
    if http.version == HttpVersion11:
        begin = b"HTTP/1.1 200 OK\r\n" if goes_on else b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    else:
        begin = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" if goes_on else b"HTTP/1.0 200 OK\r\n"
    lines = [f"{name}: {value}\r\n" for name, value in more.items()]
    lines.append(f"Content-Length: {len(body)}\r\nDate: {_date(int(time.time()))}{_SERVER}")
    writer = http.writer
    await writer.write(b"".join((begin, headers, "".join(lines).encode(), body)))
    await writer.drain()
    return _GOES_ON if goes_on else _ENDS


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Ready to be sent, without those that `send` writes. Names and values have no line end in them."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if name.lower() not in _OWN]
    return "".join(lines).encode("utf-8", "surrogateescape")


@lru_cache(maxsize=2)
def _date(now_s: int) -> str:
    """Of a second since 1970, as HTTP writes it."""
    return formatdate(now_s, usegmt=True)
