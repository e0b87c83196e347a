"""`kvasir top`: the overview of a gateway in a terminal, until q or Ctrl-C; once where there is none."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from gateway.client.client import BatchCommandError, Client
from gateway.client.screen import screen

EVERY_S: Final = 2.0
"""From one look to the next."""

_ENTER: Final = "\x1b[?1049h\x1b[?25l"  # another screen, and no cursor on it
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_QUITS: Final = frozenset(b"qQ\x03\x04")


async def top(client: Client, url: str, span: str, *, once: bool) -> int:
    """Returns the exit status. Raises BatchCommandError if there is no overview to begin with."""
    overview = await client.overview(span)
    if once or not sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        print("\n".join(screen(overview, url, width=width, styled=False)), flush=True)  # noqa: T201
        return 0
    quits, turned = asyncio.Event(), asyncio.Event()
    with _terminal(quits, turned):
        note = ""
        while not quits.is_set():
            _draw(overview, url, note)
            turned.clear()
            if await _first(quits, turned, EVERY_S):
                continue  # it has another size, or is to end
            try:
                overview, note = await client.overview(span), ""
            except BatchCommandError as error:
                note = f"{error}; asking again"
    return 0


def _draw(overview: dict[str, Any], url: str, note: str) -> None:
    size = shutil.get_terminal_size()
    lines = screen(overview, url, width=size.columns - 1, height=size.lines, note=note)
    sys.stdout.write(_HOME + f"{_REST_OF_LINE}\n".join(lines) + _REST_OF_LINE + _REST)
    sys.stdout.flush()


async def _first(quits: asyncio.Event, turned: asyncio.Event, timeout_s: float) -> bool:
    """Whether one of them is set in that time."""
    waiting = [asyncio.ensure_future(one.wait()) for one in (quits, turned)]
    done, rest = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for one in rest:
        one.cancel()
    return bool(done)


@contextmanager
def _terminal(quits: asyncio.Event, turned: asyncio.Event) -> Iterator[None]:
    """A screen of its own, which is left as it was found, also after a signal."""
    loop, keys = asyncio.get_running_loop(), sys.stdin.fileno() if sys.stdin.isatty() else None
    was = None if keys is None else termios.tcgetattr(keys)
    handled = {
        signal.SIGINT: quits.set,
        signal.SIGTERM: quits.set,
        signal.SIGHUP: quits.set,
        signal.SIGWINCH: turned.set,
    }
    for number, react in handled.items():
        loop.add_signal_handler(number, react)

    def typed() -> None:
        assert keys is not None
        if not (data := os.read(keys, 64)) or not _QUITS.isdisjoint(data):
            quits.set()

    try:
        if keys is not None:
            tty.setcbreak(keys)
            loop.add_reader(keys, typed)
        sys.stdout.write(_ENTER)
        yield
    finally:
        if keys is not None and was is not None:
            loop.remove_reader(keys)
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(keys, termios.TCSADRAIN, was)
        for number in handled:
            loop.remove_signal_handler(number)
        with suppress(OSError):
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
