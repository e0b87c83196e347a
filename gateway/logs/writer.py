"""Lines of the log on their way out: they wait a moment in memory, and a thread writes them, several in one write.

Whoever logs never waits for who reads. A pipe that nobody empties fills the memory that is set aside for it; then lines
are dropped and counted, and the log says how many where they are missing. Does not know what lines say.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from gateway.config import LogSettings
from gateway.logs.lines import Fields, JsonLines, Later, Lines

WINDOW_S: Final = 60.0
MAX_KINDS: Final = 1000
"""Told apart in a minute; foreign code may put data into what should be the kind."""

CHUNK_BYTES: Final = select.PIPE_BUF
"""Of one write, which a pipe keeps together though other processes write into it as well (pipe(7))."""

MAX_LINES: Final = 20_000
MAX_BYTES: Final = 16 << 20
"""Of lines that wait for a slow reader: some seconds of a busy gateway. Further ones are dropped and counted."""

MAX_ALIKE: Final = 60
"""Warnings and errors of one kind that are written in a minute; further ones are counted."""

DELAY_S: Final = 0.1
"""That a line waits for others, so that one write has many; warnings and errors wait for none."""

CLOSE_S: Final = 1.0
"""That a process waits in its end for a reader of its last lines."""

LATER_BYTES: Final = 2048
"""What a line takes whose text is not made yet, with what it is made of."""

_SPARED: Final = 0.9  # of the room: the rest is for warnings and errors
_GOES_ON: Final = 0.5  # of the room, below which lines are taken again that had none
_SLOW: Final = "what reads it is too slow"

_GAP: Final = b""
"""Among the lines: here some are missing."""

_Said = TypeVar("_Said", logging.LogRecord, Later)
_Line = bytes | Later | threading.Event


class Floods:
    """Warnings and errors of one kind that come again and again: some of a minute are written, the rest is counted. Not
    for several threads at once."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` of each kind are admitted in a minute."""
        self._most = most
        self._clock = clock
        self._begun_s = clock()
        self._seen: Counter[tuple[str, str]] = Counter()

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether it is written. Ask `over` first."""
        kind = (record.name, str(record.msg))
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            kind = ("", "others")
        self._seen[kind] += 1
        return self._seen[kind] <= self._most

    def over(self) -> Sequence[str]:
        """Once a minute is over, what to say of those that were not admitted in it; mostly nothing."""
        if (now_s := self._clock()) - self._begun_s < WINDOW_S:
            return ()
        left_out = [
            (name, kind, count - self._most) for (name, kind), count in self._seen.items() if count > self._most
        ]
        self._begun_s = now_s
        self._seen.clear()
        return [f"{count} more lines of {name} in a minute like: {kind}" for name, kind, count in left_out]


class Writer(logging.Handler):
    """Writes to an open file. A thread of its own does so until `close`."""

    def __init__(
        self,
        file_no: int,
        settings: LogSettings,
        *,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
        max_alike: int = MAX_ALIKE,
        delay_s: float = DELAY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        super().__init__()
        self._file_no = file_no
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._delay_s, self._close_s = delay_s, close_s
        self._few_lines, self._few_bytes = int(_SPARED * max_lines), int(_SPARED * max_bytes)
        self._floods = Floods(max_alike)
        self._lines = JsonLines() if settings.format == "json" else Lines()
        self.setFormatter(self._lines)
        self._mutex = threading.RLock()  # not the handler's, which logging.shutdown holds while it flushes
        self._waiting: deque[tuple[int, _Line]] = deque()  # bytes that each takes; who is told is an Event
        self._num_bytes = 0
        self._filled, self._soon = threading.Event(), threading.Event()
        self.lost = 0
        """Lines that were never written, since the start."""
        self._missing, self._why = 0, ""  # of these, since the log last said so
        self._drops = False
        self._ends = self._is_stuck = self._is_torn = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Puts it behind the others; a warning, or worse, is written at once. Waits for nobody, and never raises."""
        urgent = record.levelno >= logging.WARNING
        with self._mutex:
            for said in self._floods.over():
                line = self._bytes_of(self._lines.later, Later(time.time(), logging.WARNING, __name__, said.__str__))
                self._add(len(line), line, urgent=True)
            if urgent and not self._floods.admits(record):
                return
        line = self._bytes_of(self.format, record)
        self._add(len(line), line, urgent=urgent)
        if urgent:
            self._soon.set()
        if self._ends and not self._is_stuck:  # after `close`, when the interpreter ends
            self._write_all()

    def later(self, name: str, level: int, said: Callable[[], str | Fields]) -> None:
        """As a record of INFO or below, in a tenth of the time. For a process that runs."""
        self._add(LATER_BYTES, Later(time.time(), level, name, said))

    def flush(self) -> None:
        """Returns when what was logged before is written, or after CLOSE_S."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return
        written = threading.Event()
        with self._mutex:
            self._put(0, written)
        self._soon.set()
        self._is_stuck = not written.wait(0.0 if self._is_stuck else self._close_s)

    def close(self) -> None:
        """Flushes, and ends the thread. Waits for CLOSE_S at most."""
        self.flush()
        self._ends = True
        self._filled.set()
        self._soon.set()
        if not self._is_stuck:
            self._thread.join(self._close_s)
            self._is_stuck = self._thread.is_alive()
        super().close()

    def _add(self, num_bytes: int, line: bytes | Later, *, urgent: bool = False) -> None:
        with self._mutex:
            is_full = len(self._waiting) >= self._few_lines or self._num_bytes + num_bytes > self._few_bytes
            if (is_full or self._drops) and not self._admits(num_bytes, line, urgent=urgent):
                return
            self._put(num_bytes, line)

    def _admits(self, num_bytes: int, line: bytes | Later, *, urgent: bool) -> bool:
        """Whether it is let in, now that there is little room, or was none."""
        share = 1.0 if urgent else _GOES_ON if self._drops else _SPARED
        if len(self._waiting) >= share * self._max_lines or self._num_bytes + num_bytes > share * self._max_bytes:
            self._drops = True
            self._lose(line.count(b"\n") if isinstance(line, bytes) else 1, _SLOW)
            return False
        if self._drops and not urgent:
            self._drops = False
            self._put(0, _GAP)
        return True

    def _put(self, num_bytes: int, line: _Line) -> None:
        self._waiting.append((num_bytes, line))
        self._num_bytes += num_bytes
        if len(self._waiting) == 1:
            self._filled.set()

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self._missing += count
        self._why = why

    def _bytes_of(self, make: Callable[[_Said], str], line: _Said) -> bytes:
        """What cannot be written is no reason to fail, and only its kind is told: its text may have anything in it."""
        try:
            said = make(line)
        except Exception as error:
            said = f"{line.name}: a line that cannot be written: {type(error).__name__}"
        return (said + "\n").encode("utf-8", "backslashreplace")

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ends:
            self._filled.wait()
            self._soon.wait(self._delay_s)
            self._filled.clear()
            self._soon.clear()
            self._write_all()

    def _write_all(self) -> None:
        """Until nothing waits."""
        if not self._drops:
            self._tell_missing()  # what could not be written the last time
        piece: list[bytes] = []
        num_bytes = 0
        while (line := self._take()) is not None:
            size = CHUNK_BYTES if isinstance(line, threading.Event) or line == _GAP else len(line)
            if piece and num_bytes + size > CHUNK_BYTES:
                self._write(piece)
                piece, num_bytes = [], 0
            if isinstance(line, threading.Event):
                line.set()
            elif line == _GAP:
                self._tell_missing()
            else:
                piece.append(line)
                num_bytes += size
        if piece:
            self._write(piece)
        self._tell_missing()

    def _take(self) -> bytes | threading.Event | None:
        """The next one, with its text; None when none waits."""
        with self._mutex:
            if not self._waiting:
                self._drops = False
                return None
            num_bytes, line = self._waiting.popleft()
            self._num_bytes -= num_bytes
        return self._bytes_of(self._lines.later, line) if isinstance(line, Later) else line

    def _tell_missing(self) -> None:
        if not (count := self._missing):
            return
        said = f"{count} lines are missing here: {self._why}"
        line = self._lines.later(Later(time.time(), logging.WARNING, __name__, lambda: said))
        if self._write([line.encode() + b"\n"], counted=False):
            with self._mutex:
                self._missing -= count

    def _write(self, lines: Sequence[bytes], *, counted: bool = True) -> bool:
        """Whether all of it is written. What is not is missing, if it is to be counted."""
        whole = b"\n" * self._is_torn + b"".join(lines)
        left = memoryview(whole)
        while left:
            try:
                left = left[os.write(self._file_no, left) :]
                self._is_stuck = False
            except BlockingIOError:  # somebody else has opened the pipe as one that does not wait
                select.select((), (self._file_no,), ())
            except OSError as error:  # nobody reads it any more; no room on the disk
                self._is_torn |= len(left) < len(whole)
                count = min(bytes(left).count(b"\n"), sum(line.count(b"\n") for line in lines))
                with self._mutex:
                    self._lose(count if counted else 0, error.strerror or type(error).__name__)
                return False
        self._is_torn = False
        return True
