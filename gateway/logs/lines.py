"""How a line of the log is written; its traceback is tracebacks.py's.

A record is one line: a line feed, an escape sequence or a mark that reorders text in what it quotes is escaped, so that
no request can forge a line, or hide one from an operator with a terminal. Lines say neither thread, process nor line of
code; looking them up is a third of what a line costs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gateway.logs.tracebacks import escaped, told

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


class Later(NamedTuple):
    """A line whose text is asked for when it is written, of something that changes no more."""

    created: float  # seconds since 1970
    level: int
    name: str  # of the logger
    said: Callable[[], str]


class Lines(logging.Formatter):
    """With the time of the day made once a second."""

    def __init__(self) -> None:
        super().__init__(FORMAT)
        self._made = (-1, "")  # together, as several threads read it

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """As the module's own, to the millisecond."""
        return f"{self._second(record.created)},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Without its traceback."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Without what an error may quote of a request."""
        return "" if ei[1] is None else told(ei[1])

    def later(self, line: Later) -> str:
        """As `format` has a record's."""
        created, level, name, said = line
        milliseconds = int((created - int(created)) * 1000)
        return escaped(f"{self._second(created)},{milliseconds:03d} {logging.getLevelName(level)} {name} {said()}")

    def _second(self, created: float) -> str:
        second, written = self._made
        if second != int(created):
            second = int(created)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._made = (second, written)
        return written
