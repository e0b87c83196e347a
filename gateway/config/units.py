"""What settings are written in: durations, and lists in one text."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

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


def split(data: object, name: str) -> object:
    """A list that came as one text, from a flag or a variable: cut at commas."""
    if isinstance(data, dict) and isinstance(data.get(name), str):
        return {**data, name: tuple(item for item in data[name].split(",") if item)}
    return data
