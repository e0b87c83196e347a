"""Times as Google's APIs write them in JSON: google.protobuf.Duration and Timestamp. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from gateway.api.fields import Check, made, text
from gateway.errors import BadRequestError

_DURATION: Final = re.compile(r"(-?[0-9]{1,12})(?:\.([0-9]{1,9}))?s")
_TIMESTAMP: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[-+][0-9]{2}:[0-9]{2})"
)


def _duration_s(written: str, path: str) -> float:
    if not _DURATION.fullmatch(written):
        raise BadRequestError(
            f"Illegal duration format in '{path}'; a duration is seconds that end with 's', as in '3.5s'.", param=path
        )
    return float(written[:-1])


def _timestamp_s(written: str, path: str) -> float:
    try:
        if not _TIMESTAMP.fullmatch(written):
            raise ValueError
        return datetime.fromisoformat(written.upper()).timestamp()
    except (ValueError, OverflowError):
        raise BadRequestError(
            f"Illegal timestamp in '{path}'; one is written as in '2026-11-21T10:00:00.5Z' (RFC 3339).", param=path
        ) from None


duration_s: Final[Check[float]] = made(text(), _duration_s)
"""Seconds, possibly negative."""

timestamp_s: Final[Check[float]] = made(text(), _timestamp_s)
"""Seconds since 1970."""


def duration(seconds: float) -> str:
    """`2s`, `0.5s`."""
    written = f"{seconds:.9f}".rstrip("0").rstrip(".")
    return f"{written}s"


def timestamp(seconds: float) -> str:
    """In UTC, to the microsecond: `2026-11-21T10:00:00.500000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
