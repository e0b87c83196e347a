"""What the headers of an upstream's answer say of its limits and of the request's id, in no dialect: the client's own
writes them again (api/*/wire.py). Pure.

    OpenAI     x-ratelimit-{limit,remaining,reset}-{requests,tokens}; resets are durations, `6m0s`
    Anthropic  anthropic-ratelimit-{requests,tokens,input-tokens,output-tokens}-{limit,remaining,reset}; resets are
               times (RFC 3339)
    Gemini     none
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from gateway.types import Allowance, Room

LONGEST_S: Final = 1e7
"""Resets that are later are none."""

_SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_NUMBER: Final = re.compile(r"\d{1,12}")
_DURATION: Final = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,7})m(?!s))?(?:(\d{1,9}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?"
)
_UNITS_S: Final = (86400.0, 3600.0, 60.0, 1.0, 1e-3)


def limits_of(headers: Iterable[tuple[str, str]], now: datetime) -> Allowance | None:
    """None where they say nothing. `tokens` is the limit of prompts where there is none of both together."""
    told = {name.lower(): value.strip() for name, value in headers if "ratelimit-" in name.lower()}
    rooms = {kind: _room(told, kind.replace("_", "-"), now) for kind in Allowance._fields} if told else {}
    if not any(rooms.values()):
        return None
    rooms["tokens"] = rooms["tokens"] or rooms["input_tokens"]
    return Allowance(**rooms)


def id_of(headers: Iterable[tuple[str, str]]) -> str:
    """The upstream's id of the request; empty without one."""
    ids = (value for name, value in headers if name.lower() in ("request-id", "x-request-id"))
    return next((one for one in ids if _SANE_ID.fullmatch(one)), "")


def _room(told: dict[str, str], kind: str, now: datetime) -> Room | None:
    def find(what: str) -> str:
        ours = told.get(f"x-ratelimit-{what}-{kind}", "")
        return ours or told.get(f"anthropic-ratelimit-{kind}-{what}", "")

    limit, remaining = find("limit"), find("remaining")
    if not (_NUMBER.fullmatch(limit) and _NUMBER.fullmatch(remaining)):
        return None
    reset_s = _reset_s(find("reset"), now)
    return Room(int(limit), int(remaining), reset_s if 0 <= reset_s <= LONGEST_S else 0.0)


def _reset_s(written: str, now: datetime) -> float:
    """0 for what is neither."""
    if found := _DURATION.fullmatch(written):
        return sum(float(number or 0) * unit_s for number, unit_s in zip(found.groups(), _UNITS_S, strict=True))
    try:
        time = datetime.fromisoformat(written)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    except (ValueError, OverflowError):
        return 0.0
