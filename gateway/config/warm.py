"""Prompts that are computed before a request asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from engine.config import Section
from gateway.config.tenants import ALL_TENANTS
from gateway.config.units import Duration, Name

MAX_ENTRIES: Final = 256
"""[[warm]] of one gateway."""

HOSTED_TTLS: Final = ("5m", "1h")
"""Times to live of the caches of hosted APIs."""


class WarmSettings(Section):
    """[[warm]]: the beginning of prompts that engines compute when they come up, in idle time, and keep."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """The model that computes it, or an alias."""
    text: str = ""
    """A system prompt; this or `file`."""
    file: Path | None = None
    """A text file with a system prompt, or a `.json` file with `messages` and `tools` of a chat completion."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_TENANTS,)
    """Names of the tenants that it is for, or `*` for every tenant."""
    namespace: Name | None = None
    """Namespace of its blocks; as for requests that ask for none when not set."""
    ttl: Duration = "1h"
    """How long each renewal keeps it; the next one comes before its end."""
    hosted: bool = False
    """Whether an upstream is asked to cache it, too, by requests for one token, which cost money."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if bool(self.text.strip()) == (self.file is not None):
            raise ValueError("has either text or file")
        if self.hosted and self.ttl not in HOSTED_TTLS:
            raise ValueError(f"ttl: caches of hosted APIs keep a prefix for {' or '.join(HOSTED_TTLS)}, not {self.ttl}")
        return self
