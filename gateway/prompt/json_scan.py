"""JSON that is read one character after the other, and given up at the first that does not fit.

A scan is a generator: it is sent characters, raises NoMatchError at the first that it does not take, and ends with the
last that it does. So it needs no text to go back in, and may stop anywhere between two pieces. Used by tool_calls.py.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Final

MAX_BLANKS: Final = 64
"""Characters of white space in a row."""
MAX_STRING: Final = 1_024
"""Characters of a string."""

BLANKS: Final = " \t\r\n"

Scan = Generator[None, str, str]
"""What it returns is the last character that it took, where nothing else is said."""


class NoMatchError(Exception):
    """The character that was sent last does not fit."""


class Braces:
    """Finds the brace that closes an object, behind the one that opens it."""

    def __init__(self) -> None:
        self._open = 1
        self._in_string = self._escaped = False

    def closed_by(self, char: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        else:
            self._open += (char == "{") - (char == "}")
        return not self._open


def expect(char: str, expected: str) -> None:
    if char != expected:
        raise NoMatchError


def skip_blanks(char: str) -> Scan:
    """The first character that is none, `char` or a later one."""
    count = 0
    while char in BLANKS:
        count += 1
        if count > MAX_BLANKS:
            raise NoMatchError
        char = yield
    return char


def read_string(char: str) -> Scan:
    """The string that begins with `char`, quotes included."""
    expect(char, '"')
    chars, escaped = ['"'], False
    while True:
        char = yield
        chars.append(char)
        if char == '"' and not escaped:
            return "".join(chars)
        escaped = char == "\\" and not escaped
        if len(chars) > MAX_STRING:
            raise NoMatchError


def unquote(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        raise NoMatchError from None
