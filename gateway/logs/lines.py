"""How a line of the log is written, as text or as JSON, and its traceback.

A record is one line: a line feed, an escape sequence or a mark that reorders text in what it quotes is escaped, so that
no request can forge a line, or hide one from an operator with a terminal. Lines say neither thread, process nor line of
code; looking them up is a third of what a line costs. A traceback leaves out the texts of errors that may quote a
request: a key that is missing, a number that is none, a template that refuses a message.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import orjson

from gateway.errors import KvasirError

QUOTE_DATA: Final = (ValueError, LookupError, KvasirError)
TEMPLATES: Final = "jinja2"  # whose errors say what a template made of a message; not imported for it
LEFT_OUT: Final = "(its text is left out: it may quote a request)"

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


_PLAIN: Final = re.compile(r"[^\s\"=]+")


def told(error: BaseException) -> str:
    """All of it, the causes first. Without a line end."""
    return "".join(_told(error, set())).rstrip("\n")


def escaped(text: str) -> str:
    """On one line: characters that are not printed (str.isprintable) are written as Python escapes them."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def _told(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _told(before, seen)
        yield "\nThen there was another one:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from traceback.format_tb(error.__traceback__)
    yield f"{_name(type(error))}: {_error_text(error)}\n"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            if id(one) not in seen:
                yield "\nIn this group:\n\n"
                yield from _told(one, seen)


def _error_text(error: BaseException) -> str:
    if isinstance(error, QUOTE_DATA) or type(error).__module__.partition(".")[0] == TEMPLATES:
        return LEFT_OUT
    try:
        return escaped(str(error))
    except Exception:
        return "(its text cannot be made)"


def _name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Fields(dict[str, Any]):
    """The fields of a line, as an argument of the logging module. Text leaves out the empty ones; JSON has all."""

    def __str__(self) -> str:
        return " ".join([f"{name}={_text(value)}" for name, value in self.items() if value])


class Later(NamedTuple):
    """A line whose text is asked for when it is written, of something that changes no more."""

    created: float  # seconds since 1970
    level: int
    name: str  # of the logger
    said: Callable[[], str | Fields]


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


class JsonLines(Lines):
    """One JSON object per line: `time` (RFC 3339, UTC), `level`, `logger`, then `message`, or the fields of the line,
    and `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        said = record.args if isinstance(record.args, Fields) else record.getMessage()
        line = self._object(record.created, record.levelname, record.name, said)
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = told(record.exc_info[1])
        return _json(line)

    def later(self, line: Later) -> str:
        """As `format` has a record's."""
        return _json(self._object(line.created, logging.getLevelName(line.level), line.name, line.said()))

    def _object(self, created: float, level: str, name: str, said: str | Fields) -> dict[str, Any]:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
        milliseconds = int((created - int(created)) * 1000)
        line = {"time": f"{second}.{milliseconds:03d}Z", "level": level, "logger": name}
        return {**line, **said} if isinstance(said, Fields) else {**line, "message": said}


def _json(line: dict[str, Any]) -> str:
    """On one line: what no terminal may act upon is escaped, as in text."""
    written = orjson.dumps(line, default=str).decode()
    return (
        written if written.isprintable() else "".join([one if one.isprintable() else _escape(one) for one in written])
    )


def _escape(one: str) -> str:
    """As JSON writes it: UTF-16 units."""
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _text(value: Any) -> Any:
    """Of a field: quoted where a space in it could be taken for the beginning of another field."""
    return value if not isinstance(value, str) or _PLAIN.fullmatch(value) else orjson.dumps(value).decode()
