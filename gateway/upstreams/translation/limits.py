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

MAX_DIGITS: Final = 12

_SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_DURATION: Final = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,7})m(?!s))?(?:(\d{1,9}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?",
    re.ASCII,
)
_UNITS_S: Final = (86400.0, 3600.0, 60.0, 1.0, 1e-3)
_WHAT: Final = ("limit", "remaining", "reset")
_OPENAI: Final = [(kind, [f"x-ratelimit-{what}-{kind}" for what in _WHAT]) for kind in ("requests", "tokens")]
_ANTHROPIC: Final = [
    (kind, [f"anthropic-ratelimit-{kind.replace('_', '-')}-{what}" for what in _WHAT]) for kind in Allowance._fields
]


def limits_of(headers: Iterable[tuple[str, str]], now_s: float) -> Allowance | None:
    """None where they say nothing. `tokens` is the limit of prompts where there is none of both together. `now_s` is in
    seconds since 1970."""
    told = {name.lower(): value for name, value in headers if name[:1] in "xXaA"}
    rooms: dict[str, Room] = {}
    for kind, names in _OPENAI if _OPENAI[0][1][0] in told or _OPENAI[1][1][0] in told else _ANTHROPIC:
        limit, remaining, reset = map(told.get, names)
        if limit and remaining and _is_count(limit) and _is_count(remaining):
            reset_s = _reset_s(reset or "", now_s)
            rooms[kind] = Room(int(limit), int(remaining), reset_s if 0 <= reset_s <= LONGEST_S else 0.0)
    if not rooms:
        return None
    if "tokens" not in rooms and "input_tokens" in rooms:
        rooms["tokens"] = rooms["input_tokens"]
    return Allowance(**rooms)


def id_of(headers: Iterable[tuple[str, str]]) -> str:
    """The upstream's id of the request; empty without one."""
    ids = (value for name, value in headers if name.lower() in ("request-id", "x-request-id"))
    return next((one for one in ids if _SANE_ID.fullmatch(one)), "")


def _is_count(written: str) -> bool:
    return written.isdigit() and written.isascii() and len(written) <= MAX_DIGITS


def _reset_s(written: str, now_s: float) -> float:
    """0 for what is neither."""
    if found := _DURATION.fullmatch(written):
        return sum(float(number) * unit_s for number, unit_s in zip(found.groups(), _UNITS_S, strict=True) if number)
    try:
        time = datetime.fromisoformat(written)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() - now_s
    except (ValueError, OverflowError):
        return 0.0
