"""Service tiers: what requests call them, and which of them a request is served in.

A tier decides who goes first where requests of the online lane wait (queues/lane.py). What a dialect tells of it is
what was served, not what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.api.record import Record
from gateway.types import Tier

OPENAI_TIERS: Final[Mapping[str, Tier]] = {
    "auto": "default",
    "default": "default",
    "scale": "default",
    "flex": "flex",
    "priority": "priority",
    "fast": "priority",
    "ultrafast": "priority",
}
"""By the value of `service_tier`."""

ANTHROPIC_TIERS: Final[Mapping[str, Tier]] = {"auto": "priority", "standard_only": "default"}
"""The same; `auto` is priority for those who have it."""


def grant(asked: Tier, record: Record) -> Tier:
    """The tier that the record's requests are served in, which it notes."""
    allowed = asked != "priority" or record.may_have_priority
    record.tier = asked if allowed and record.lane == "online" else "default"
    return record.tier
