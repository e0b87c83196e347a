"""How many JSON values a body has, counted before it is parsed.

A parser written in C lets no other thread run until it is done, and makes objects of a hundred bytes out of two
characters. So what a body would become is counted first, slice by slice, and refused beyond limits that parse in a few
hundredths of a second. Pure, and safe in any thread.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.errors import BadRequestError
from gateway.tasks import work_of

MAX_CONTAINERS: Final = 50_000
"""Objects and arrays of one body: a conversation of 10,000 messages of several parts has fewer."""
MAX_NAMES: Final = 100_000
"""Names of fields, in all its objects together."""
MAX_VALUES: Final = 500_000
"""Values in all: 300,000 token ids, the most that one request may have embedded, fit."""

VALUE_BYTES: Final = 64
"""Memory of a small value, once it is parsed."""

_SLICE: Final = 64 << 10
"""Bytes that are looked at before another thread may have its turn: less than a millisecond."""

_LONG: Final = 512 << 10
"""The same where signs are only counted."""


class Structure(NamedTuple):
    """What a text has outside of its strings, or more."""

    containers: int
    names: int
    values: int

    def work(self, num_bytes: int) -> int:
        """Of a body of so many bytes (tasks.work_of). A name has a value."""
        return work_of(num_bytes, self.containers, max(self.names, self.values))

    def fits(self) -> bool:
        return self.containers <= MAX_CONTAINERS and self.names <= MAX_NAMES and self.values <= MAX_VALUES


def check_structure(body: bytes, what: str = "The JSON body of your request") -> Structure:
    """An upper bound of what is in it. Raises BadRequestError beyond the limits; it may be no JSON."""
    bound = _bound(body)
    if bound.fits():
        return bound
    exact = count_structure(body)
    if not exact.fits():
        raise BadRequestError(
            f"{what} has {exact.containers} objects and arrays, {exact.names} names and {exact.values} values; the "
            f"limits are {MAX_CONTAINERS}, {MAX_NAMES} and {MAX_VALUES}.",
            code="too_many_json_values",
        )
    return exact


def work_of_json(body: bytes) -> int:
    """At least the work that it makes (tasks.work_of)."""
    return _bound(body).work(len(body))


def count_structure(body: bytes) -> Structure:
    """Exact for JSON, except that an empty object or array counts as if it had a value."""
    found = Structure(0, 0, 1)
    in_string, held = False, b""
    for start in range(0, len(body), _SLICE):
        part = held + body[start : start + _SLICE]
        # A backslash at the end belongs to what follows it.
        held = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        part = part[: len(part) - len(held)]
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        between = part.split(b'"')
        found = _add(found, b"".join(between[in_string::2]))
        in_string ^= len(between) % 2 == 0
    return found


def _bound(body: bytes) -> Structure:
    found = Structure(0, 0, 1)
    for start in range(0, len(body), _LONG):
        found = _add(found, body[start : start + _LONG])
    return found


def _add(found: Structure, part: bytes) -> Structure:
    opened = _count(part, b"{") + _count(part, b"[")
    return Structure(
        found.containers + opened, found.names + _count(part, b":"), found.values + opened + _count(part, b",")
    )


def _count(part: bytes, one: bytes) -> int:
    """Where there are few, as in texts, to take them out takes a fifth of the time that counting takes."""
    few = len(part) >> 8
    if few < 16:
        return part.count(one)
    found = len(part) - len(part.replace(one, b"", few))
    return found if found < few else part.count(one)
