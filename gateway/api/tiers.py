"""Service tiers: what requests call them, and which of them a request is served in.

A tier decides who goes first where requests of the online lane wait (gateway/gate.py). What
a dialect tells of it is what was served, not what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.record import Record
from gateway.types import Tenant, Tier

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
"""The same; `auto` is priority for tenants that have it."""


def grant(requested: Tier, record: Record) -> Tier:
    """The tier that the record's requests are served in, which it notes."""
    allowed = requested != "priority" or record.may_have_priority
    record.tier = requested if allowed and record.lane == "online" else "default"
    return record.tier


def find_tier(dialect: str, values: Mapping[str, Any], tenant: Tenant) -> Tier:
    """The tier of a request for an upstream. Its body was not checked: an unknown tier is the default one."""
    tiers = ANTHROPIC_TIERS if dialect == "anthropic" else OPENAI_TIERS
    named = values.get("service_tier", "auto")
    requested: Tier = tiers.get(named, "default") if isinstance(named, str) else "default"
    return requested if requested != "priority" or tenant.priority else "default"
