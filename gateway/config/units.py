"""What settings are written in: durations, names, lists in one text."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def duration_s(written: str) -> float:
    """`90s`, `30m` or `12h` in seconds. Raises ValueError."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smh])", written, re.ASCII)
    if found is None:
        raise ValueError(f"{written!r} is no duration; one is written like 90s, 30m or 12h")
    return float(int(found[1]) * _SECONDS[found[2]])


def _duration(written: str) -> str:
    duration_s(written)
    return written


Duration = Annotated[str, AfterValidator(_duration)]


def _split(value: object) -> object:
    return tuple(item for item in value.split(",") if item) if isinstance(value, str) else value


COMMAS = BeforeValidator(_split)
"""A list that came as one text, from a flag or a variable, is cut at commas."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Share = Annotated[float, Field(ge=0, le=1)]
