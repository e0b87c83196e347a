"""The log of a process: lines on stderr, of a level and above. lines.py says how they are written, writer.py when.

Knows nothing of requests. Code logs with the logging module; a line for each request may be logged `later`.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Callable

from gateway.config import LogSettings
from gateway.logs.lines import Fields
from gateway.logs.writer import Writer

__all__ = ["Fields", "flush", "later", "lost_lines", "set_up"]

_writer: Writer | None = None  # of the process, as the logging module is


def set_up(level: str, settings: LogSettings) -> None:
    """For a process that begins. Does nothing where lines go somewhere already."""
    global _writer
    root = logging.getLogger()
    if root.handlers:
        return
    root.setLevel(level)
    if sys.stderr is None:  # closed by whoever started us; its number may be another file's by now
        root.addHandler(logging.NullHandler())
        return
    _writer = Writer(sys.stderr.fileno(), settings)
    root.addHandler(_writer)
    faulthandler.enable()  # a crash of native code says where
    # https://docs.python.org/3/howto/logging.html#optimization
    logging._srcfile = None  # noqa: SLF001
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def later(logger: logging.Logger, level: int, message: Callable[[], str | Fields]) -> None:
    """As `logger.log`, for a level that is logged and no warning. The text is asked for when the line is written, so it
    is of something that changes no more. Makes no LogRecord, which is most of what a line costs."""
    if _writer is None:
        logger.log(level, "%s", message())
    else:
        _writer.later(logger.name, level, message)


def flush() -> None:
    """Writes what was logged, unless stderr is not read. For code that writes to stderr itself."""
    if _writer is not None:
        _writer.flush()


def lost_lines() -> int:
    """Lines of this process that were never written."""
    return 0 if _writer is None else _writer.lost
