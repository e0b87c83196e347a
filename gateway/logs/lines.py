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
from collections.abc import Iterator
from typing import Any, Final

import orjson

from gateway.errors import KvasirError

QUOTE_DATA: Final = (ValueError, LookupError, KvasirError)
TEMPLATES: Final = "jinja2"  # whose errors say what a template made of a message; not imported for it
LEFT_OUT: Final = "(its text is left out: it may quote a request)"

_PLAIN: Final = re.compile(r"[^\s\"=]+")


def traceback_of(error: BaseException) -> str:
    """Its traceback and those of its causes, the causes first. Without a line end."""
    return "".join(_tracebacks(error, set())).rstrip("\n")


def escaped(text: str) -> str:
    """On one line: characters that are not printed (str.isprintable) are written as Python escapes them."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def _tracebacks(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _tracebacks(before, seen)
        yield "\nThen there was another one:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from traceback.format_tb(error.__traceback__)
    yield f"{_name(type(error))}: {_error_text(error)}\n"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            if id(one) not in seen:
                yield "\nIn this group:\n\n"
                yield from _tracebacks(one, seen)


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


class Lines(logging.Formatter):
    """Lines of text, as `2026-11-22 10:00:00,123 INFO gateway.app message`, with the traceback below."""

    def __init__(self) -> None:
        super().__init__()
        self._last_second = (-1, "")  # and how it is written; one value, as several threads read it

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        message = record.args if isinstance(record.args, Fields) else record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        return self.line(record.created, record.levelname, record.name, message, error)

    def line(
        self, created: float, level: str, name: str, message: str | Fields, error: BaseException | None = None
    ) -> str:
        """`created` in seconds since 1970, `name` of the logger."""
        second, written = self._last_second
        if second != int(created):
            second = int(created)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._last_second = (second, written)
        text = escaped(f"{written},{int((created - second) * 1000):03d} {level} {name} {message}")
        return text if error is None else f"{text}\n{traceback_of(error)}"


class JsonLines(Lines):
    """One JSON object per line: `time` (RFC 3339, UTC), `level`, `logger`, then `message`, or the fields of the line,
    and `traceback`."""

    def line(
        self, created: float, level: str, name: str, message: str | Fields, error: BaseException | None = None
    ) -> str:
        """See Lines."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
        line: dict[str, Any] = {"time": f"{second}.{int((created % 1) * 1000):03d}Z", "level": level, "logger": name}
        line |= message if isinstance(message, Fields) else {"message": message}
        if error is not None:
            line["traceback"] = traceback_of(error)
        written = orjson.dumps(line, default=str).decode()
        return written if written.isprintable() else "".join(map(_json_escaped, written))


def _json_escaped(char: str) -> str:
    """What no terminal may act upon, as JSON escapes it: in UTF-16 units."""
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _text(value: Any) -> Any:
    """Of a field: quoted where a space in it could be taken for the beginning of another field."""
    return value if not isinstance(value, str) or _PLAIN.fullmatch(value) else orjson.dumps(value).decode()
