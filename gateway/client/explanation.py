"""What POST /admin/explain answers, as lines of text: both requests side by side, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final

from gateway.client.screen import clean

COLUMN: Final = 36
MAX_ROWS: Final = 40
"""Parts that are shown; the others are counted."""


def lines(told: Mapping[str, Any]) -> list[str]:
    return [clean(line) for line in _lines(told)]


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    differs = told["differs"]
    at = None if differs is None else differs["segment"]
    yield f"   {'earlier':<{COLUMN}} later"
    rows = list(zip_longest(told["a"], told["b"]))
    for number, (one, other) in enumerate(rows[:MAX_ROWS]):
        same = one is not None and other is not None and one["hash"] == other["hash"]
        mark = ">" if number == at else "=" if same else " "
        yield f"{mark}  {_part(one):<{COLUMN}} {_part(other)}".rstrip()
    if len(rows) > MAX_ROWS:
        yield f"   ... and {len(rows) - MAX_ROWS} more"
    yield ""
    yield f"{told['verdict']}: {told['text']}"
    if differs is not None and differs["a"] is not None:
        yield f"they differ from character {differs['char']} on:"
        yield f"  - {differs['a']!r}"
        yield f"  + {differs['b']!r}"
    if told["equal_tokens"] is not None:
        yield f"tokens that are equal: {told['equal_tokens']:,}"
    if told["computed_again_tokens"]:
        day = told["per_day"]
        money = "".join(f", {amount} {currency}" for currency, amount in (day["money"] or {}).items())
        yield f"computed again: {told['computed_again_tokens']:,} tokens; a day at the present rate: " + (
            f"{day['requests']:,} requests, {day['tokens']:,} tokens{money}"
        )
    if told["advice"]:
        yield f"advice: {told['advice']}"


def _part(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return ""
    size = f"{part['chars']} chars" if part["tokens"] is None else f"{part['tokens']} tokens"
    number = "" if part["message"] is None else f" {part['message']}"
    name = f"tool {part['role']}" if part["part"] == "tools" else f"{part['role']}{number}"
    return f"{name[: COLUMN - len(size) - 6]}, {size}{' *' if part['marked'] else ''}"
