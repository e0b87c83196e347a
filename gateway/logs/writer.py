"""Writes the lines of the log: they wait a moment in memory, and a thread writes them, several in one write.

Logging never waits for the reader. A pipe that is not read fills the memory that is set aside for it; further lines are
dropped and counted, and the log says how many are missing. Does not know what lines say.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.config import LogSettings
from gateway.logs.lines import Fields, JsonLines, Lines

WINDOW_S: Final = 60.0
MAX_KINDS: Final = 1000
"""Kinds of warnings counted by themselves in a minute; foreign code may put data into what should be the kind."""

CHUNK_BYTES: Final = select.PIPE_BUF
"""Of one write, which a pipe keeps together though other processes write into it as well (pipe(7))."""

MAX_BYTES: Final = 16 << 20
"""Of lines that wait for a slow reader: some seconds of a busy gateway. Further ones are dropped and counted."""

MAX_ALIKE: Final = 60
"""Warnings and errors of one kind that are written in a minute; further ones are counted."""

DELAY_S: Final = 0.1
"""That a line waits for others, so that one write has many; warnings and errors do not wait."""

CLOSE_S: Final = 1.0
"""That a process waits in its end for a reader of its last lines."""

LATER_BYTES: Final = 1024
"""Counted for a line whose text is not made yet."""

_FOR_ALL: Final = 0.9  # of the memory; the rest is for warnings and errors


class Later(NamedTuple):
    """A line whose text is made when it is written."""

    created: float  # seconds since 1970
    level: int
    name: str  # of the logger
    message: Callable[[], str | Fields]


_Line = bytes | Later | threading.Event
"""A line that waits; an event is set once all lines before it are written."""


class Floods:
    """Counts warnings and errors by kind: the first of each minute are written. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether it is written. Call `summary` first."""
        kind = (record.name, str(record.msg))
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = ("", "others")
        self._counts[kind] += 1
        return self._counts[kind] <= MAX_ALIKE

    def summary(self) -> list[str]:
        """Once a minute is over, a line for each kind that was not written in full."""
        if self._clock() - self._begun_s < WINDOW_S:
            return []
        counts, self._counts, self._begun_s = self._counts, Counter(), self._clock()
        return [
            f"{count - MAX_ALIKE} more lines of {name} in a minute like: {kind}"
            for (name, kind), count in counts.items()
            if count > MAX_ALIKE
        ]


class Writer(logging.Handler):
    """Writes to an open file. A thread of its own does so until `close`."""

    def __init__(self, file_no: int, settings: LogSettings) -> None:
        super().__init__()
        self._file_no = file_no
        self._floods = Floods()
        self._lines = JsonLines() if settings.format == "json" else Lines()
        self.setFormatter(self._lines)
        self._mutex = threading.RLock()  # not the handler's, which logging.shutdown holds while it flushes
        self._waiting: deque[_Line] = deque()
        self._num_bytes = 0
        self._filled, self._soon = threading.Event(), threading.Event()
        self.lost = 0
        """Lines that were never written, since the start."""
        self._unreported, self._why = 0, ""  # of these, since the log last said so
        self._ends = self._is_stuck = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues it; a warning, or worse, is written at once. Never waits for the reader, and never raises."""
        urgent = record.levelno >= logging.WARNING
        with self._mutex:
            for message in self._floods.summary():
                self._put(self._own(message), urgent=True)
            if urgent and not self._floods.admits(record):
                return
        self._put(_encoded(lambda: self.format(record), record.name), urgent=urgent)
        if urgent:
            self._soon.set()
        if self._ends and not self._is_stuck:  # after `close`, when the interpreter ends
            self._write_all()

    def later(self, name: str, level: int, message: Callable[[], str | Fields]) -> None:
        """As a record of INFO or below, in a tenth of the time. For a process that runs."""
        self._put(Later(time.time(), level, name, message))

    def flush(self) -> None:
        """Returns when what was logged before is written, or after CLOSE_S."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return
        written = threading.Event()
        self._put(written)
        self._soon.set()
        self._is_stuck = not written.wait(0.0 if self._is_stuck else CLOSE_S)

    def close(self) -> None:
        """Flushes, and ends the thread. Waits for CLOSE_S at most."""
        self.flush()
        self._ends = True
        self._filled.set()
        self._soon.set()
        if not self._is_stuck:
            self._thread.join(CLOSE_S)
            self._is_stuck = self._thread.is_alive()
        super().close()

    def _put(self, line: _Line, *, urgent: bool = False) -> None:
        with self._mutex:
            size = _size(line)
            if size and self._num_bytes + size > MAX_BYTES * (1.0 if urgent else _FOR_ALL):
                self._lose(line, "the log is read too slowly")
                return
            self._waiting.append(line)
            self._num_bytes += size
        if not self._filled.is_set():
            self._filled.set()

    def _lose(self, line: _Line, why: str) -> None:
        count = line.count(b"\n") if isinstance(line, bytes) else 1
        with self._mutex:
            self.lost += count
            self._unreported += count
            self._why = why

    def _own(self, message: str) -> bytes:
        return self._lines.line(time.time(), "WARNING", __name__, message).encode() + b"\n"

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ends:
            self._filled.wait()
            self._soon.wait(DELAY_S)
            self._filled.clear()
            self._soon.clear()
            self._write_all()

    def _write_all(self) -> None:
        """Until nothing waits; then reports how many lines are missing."""
        chunk = b""
        while (line := self._take()) is not None:
            if isinstance(line, threading.Event):
                self._write(chunk)
                chunk = b""
                line.set()
            elif len(chunk) + len(line) > CHUNK_BYTES:
                self._write(chunk)
                chunk = line
            else:
                chunk += line
        self._write(chunk)
        if count := self._unreported:
            self._unreported -= count
            self._write(self._own(f"{count} lines are missing here: {self._why}"), reports=count)

    def _take(self) -> bytes | threading.Event | None:
        """The next one, encoded; None when none waits."""
        with self._mutex:
            if not self._waiting:
                return None
            line = self._waiting.popleft()
            self._num_bytes -= _size(line)
        if isinstance(line, Later):
            created, level, name, message = line
            return _encoded(lambda: self._lines.line(created, logging.getLevelName(level), name, message()), name)
        return line

    def _write(self, lines: bytes, *, reports: int = 0) -> None:
        """What cannot be written is lost. `reports`: how many lost lines this is the report of."""
        left = memoryview(lines)
        while left:
            try:
                left = left[os.write(self._file_no, left) :]
                self._is_stuck = False
            except BlockingIOError:  # another process has made the pipe one that does not wait
                select.select((), (self._file_no,), ())
            except OSError as error:  # the reader has gone; no room on the disk
                if reports:
                    self._unreported += reports
                else:
                    self._lose(bytes(left), error.strerror or type(error).__name__)
                return


def _size(line: _Line) -> int:
    """Bytes that it is counted with."""
    return len(line) if isinstance(line, bytes) else LATER_BYTES if isinstance(line, Later) else 0


def _encoded(make: Callable[[], str], name: str) -> bytes:
    """A line that cannot be made is no reason to fail, and only the kind of error is told: its text may quote data."""
    try:
        line = make()
    except Exception as error:
        line = f"{name}: a line that cannot be written: {type(error).__name__}"
    return (line + "\n").encode("utf-8", "backslashreplace")
