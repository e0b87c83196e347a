"""Misses that one change would have saved: of each tenant, by cause, from what is kept of the latest requests. Pure.

Each request is compared with a few earlier ones that are found by what they share with it, so that the time is
proportional to the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, Final

from gateway.explain.causes import (
    SLACK_BLOCKS,
    Cause,
    View,
    computed_again,
    equal_by_parts,
    explain,
    likeness,
    view_of,
)

CAUSES: Final[frozenset[Cause]] = frozenset(
    (
        *("volatile", "tools_order", "tools_changed", "moved", "marked_changes"),
        *("other_scope", "other_engine", "evicted"),
    )
)
"""For which there is one thing to do. Text that was edited, and what is new, are no mistakes."""

LONG_PARTS: Final = 8
"""The longest, by which a part is found that stands elsewhere."""

_Key = tuple[object, ...]


@dataclass(slots=True)
class Misses:
    """Of one tenant and cause. `example` are the ids of two requests, the earlier one first: those that cost most."""

    cause: Cause
    requests: int = 0
    tokens: dict[str, int] = field(default_factory=dict)  # that were computed again, by model
    example: tuple[str, str] = ("", "")
    text: str = ""
    advice: str | None = None
    most: int = 0  # tokens, of the example


def find_misses(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Misses]]:
    """By tenant, those that cost most first. `rows` are those of requests (admin/requests.py), the newest first."""
    seen = dict[_Key, int]()  # the latest request that has it
    views = list[View]()
    found = dict[str, dict[Cause, Misses]]()
    for number, row in enumerate(rows := rows[::-1]):
        now = view_of(row)
        views.append(now)
        if now.uncached:
            continue
        keys = [*_keys(now)]
        if now.cached_tokens is not None and (near := _nearest(seen, keys, views, now)) is not None:
            _compare(found, rows[near], views[near], row, now)
        seen.update(dict.fromkeys(keys, number))
    return {
        tenant: sorted(causes.values(), key=lambda one: -sum(one.tokens.values()))
        for tenant, causes in sorted(found.items())
    }


def _compare(
    found: dict[str, dict[Cause, Misses]], earlier: Mapping[str, Any], before: View, row: Mapping[str, Any], now: View
) -> None:
    """Adds what it missed, if it is more than the end of a prompt that is never cached."""
    equal = max(equal_by_parts(before, now), now.cached_tokens or 0)
    verdict = explain(before, now, equal)
    again = computed_again(verdict.cause, before, now, equal) or 0
    if verdict.cause not in CAUSES or again <= SLACK_BLOCKS * now.block_size:
        return
    one = found.setdefault(now.tenant, {}).setdefault(verdict.cause, Misses(verdict.cause))
    one.requests += 1
    one.tokens[now.model] = one.tokens.get(now.model, 0) + again
    if again > one.most:
        one.most, one.example = again, (str(earlier.get("id")), str(row.get("id")))
        one.text, one.advice = verdict.text, verdict.advice


def _nearest(seen: Mapping[_Key, int], keys: Iterable[_Key], views: Sequence[View], now: View) -> int | None:
    """The earlier request that is most like it, of the latest that share something: the newest of several."""
    near = dict[object, int]()  # of each kind of key the first that is there, which says most
    for key in keys:
        if key[0] not in near and (number := seen.get(key)) is not None:
            near[key[0]] = number
    return max(near.values(), key=lambda number: (likeness(views[number], now), number), default=None)


def _keys(now: View) -> Iterator[_Key]:
    """What it may share with another of its tenant and model, by kind; of a kind those first that say most."""
    whose = (now.tenant, now.model)
    digests, shapes = list[_Key](), list[_Key]()
    digest, shape = 0, 0
    for part in now.parts:
        digest, shape = hash((digest, part.role, part.digest)), hash((shape, part.role, part.shape))
        digests.append(("equal", *whose, now.scope, digest))
        shapes.append(("alike", *whose, shape))
    yield from reversed(digests)
    yield from reversed(shapes)
    yield from (("alike and close", *key[1:], now.scope) for key in reversed(shapes))
    tools = sorted(part.digest for part in now.parts if part.section == "tools")
    rest = next((part.shape for part in now.parts if part.section != "tools"), "")
    if tools:
        yield "tools", *whose, now.scope, *tools
        yield "behind tools", *whose, now.scope, rest
    for part in nlargest(LONG_PARTS, now.parts, key=lambda part: part.chars):
        yield "part", *whose, now.scope, part.digest
