"""What settings are written in: durations, names, lists in one text."""

from __future__ import annotations

import re
import shlex
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from engine.config import ENVIRONMENT_PREFIX

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


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


WORDS = BeforeValidator(_words)
"""A list that came as one text, from a flag or a variable, is cut as a shell does."""

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Share = Annotated[float, Field(ge=0, le=1)]


def http_url(url: str, whose: str, key_field: str) -> str:
    """The URL without slashes at its end. Raises ValueError, without the URL, in which there may be a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{whose}'s URL begins with http:// or https:// and a host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{whose}'s URL has no user, query or fragment; its key belongs into key or {key_field}")
    _ = parts.port  # raises ValueError for what is no port
    return url.rstrip("/")


def check_key(key: SecretStr | None, variable: str | None, key_field: str) -> None:
    """A key, or the name of an environment variable that has it (`key_field`), or neither. Raises ValueError."""
    if key is not None and variable is not None:
        raise ValueError(f"has both a key and {key_field}; one of them is enough")
    if variable is not None and variable.startswith(ENVIRONMENT_PREFIX):
        raise ValueError(f"{key_field}: variables that begin with {ENVIRONMENT_PREFIX} are settings of Kvasir's own")
    if key is not None and not key.get_secret_value().isprintable():
        raise ValueError("the key has characters that no header has")
