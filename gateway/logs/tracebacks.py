"""Tracebacks for the log: where an error happened and what it was, without what it may quote of a request.

The texts of some errors are made of data: a key that is missing, a number that is none, a template that refuses a
message. There may be a prompt in it, or a key. Others speak of code and machines, and are what an operator needs.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Final

from gateway.errors import KvasirError

QUOTE_DATA: Final = (ValueError, LookupError, KvasirError)
TEMPLATES: Final = "jinja2"  # whose errors say what a template made of a message; not imported for it
LEFT_OUT: Final = "(its text is left out: it may quote a request)"


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
    yield f"{_name(type(error))}: {_text(error)}\n"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            if id(one) not in seen:
                yield "\nIn this group:\n\n"
                yield from _told(one, seen)


def _text(error: BaseException) -> str:
    if isinstance(error, QUOTE_DATA) or type(error).__module__.partition(".")[0] == TEMPLATES:
        return LEFT_OUT
    try:
        return escaped(str(error))
    except Exception:
        return "(its text cannot be made)"


def _name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
