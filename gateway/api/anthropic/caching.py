"""Prompt caching as the Anthropic API has it: `cache_control` into markers, and what leases did into the three figures
of input tokens. Pure.

    explicit    on up to 4 blocks of tools, system and messages; a 1h one not behind a 5m one
    automatic   one at the top of the request marks the last block that can be cached

A read counts where the request has a breakpoint, or at most 20 blocks before one, as upstream: an entry that lies
elsewhere may have been reused all the same, and is not reported. Runs of tool calls and of tool results are one block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from engine.protocol import Breakpoint
from engine.protocol.frozen import dataclass
from gateway.api.anthropic.messages import Block
from gateway.api.fields import invalid, unsupported
from gateway.config import duration_s
from gateway.errors import BadRequestError
from gateway.types import MAX_BREAKPOINTS, MAX_MARKERS, Marker

DEFAULT_TTL: Final = "5m"
HOUR_S: Final = 3600.0
_RUNS: Final = ("tool_use", "tool_result")


@dataclass(frozen=True, slots=True)
class Caching:
    """The breakpoints of a request.

    markers  its breakpoints
    places   where else an entry counts: at blocks before them, the last one first
    """

    markers: tuple[Marker, ...] = ()
    places: tuple[Marker, ...] = ()


@dataclass(frozen=True, slots=True)
class Cached:
    """Tokens of a prompt that were read, and written for five minutes and for an hour. They do not overlap."""

    read: int = 0
    written_5m: int = 0
    written_1h: int = 0

    @property
    def written(self) -> int:
        return self.written_5m + self.written_1h


def read_caching(
    blocks: Sequence[Block], automatic: Mapping[str, str] | None, lookback: int, ttls: Sequence[str]
) -> Caching:
    """`blocks` in the order of the prompt: tools, system, messages. `lookback` counts the marked block itself. `ttls`
    are those that the operator allows.

    Raises BadRequestError for more than 4 markers, for a 1h one behind a 5m one, and for a time that is not allowed.
    """
    marked = {number: _ttl(block.control) for number, block in enumerate(blocks) if block.control is not None}
    if automatic is not None:
        _add_automatic(marked, blocks, _ttl(automatic))
    if not marked:
        return Caching()
    _check(marked, blocks, ttls)
    markers = tuple(_marker(blocks[number], duration_s(ttl)) for number, ttl in sorted(marked.items()))
    places: list[Marker] = []
    for number in sorted(set(_before(blocks, marked, lookback)), reverse=True):
        block = blocks[number]
        places += [_marker(block._replace(settled=place), 0.0) for place in {block.settled, block.place}]
    own = {replace(marker, ttl_s=0.0) for marker in markers}
    return Caching(markers, tuple(place for place in places if place not in own)[:MAX_MARKERS])


def account(reads: Sequence[int], entries: Collection[int], points: Sequence[Breakpoint], kept_tokens: int) -> Cached:
    """The figures of one prompt.

    reads        tokens of the leases that it begins with
    entries      tokens at which a read counts
    points       its breakpoints, shortest first
    kept_tokens  up to the last of them that is kept
    """
    read = max((tokens for tokens in reads if tokens in entries), default=0)
    written = {DEFAULT_TTL: 0, "1h": 0}
    done = read
    for point in points:
        if done < point.tokens <= kept_tokens:
            written["1h" if point.ttl_s >= HOUR_S else DEFAULT_TTL] += point.tokens - done
            done = point.tokens
    return Cached(read, written[DEFAULT_TTL], written["1h"])


def _ttl(control: Mapping[str, str]) -> str:
    return control.get("ttl", DEFAULT_TTL)


def _add_automatic(marked: dict[int, str], blocks: Sequence[Block], ttl: str) -> None:
    """On the last block that can be cached; where there is none, nothing is."""
    last = next((number for number in reversed(range(len(blocks))) if blocks[number].kind != "thinking"), None)
    if last is not None and marked.setdefault(last, ttl) != ttl:
        why = f"the last block has a cache_control of its own, with ttl='{marked[last]}'"
        raise invalid("cache_control.ttl", why)


def _check(marked: Mapping[int, str], blocks: Sequence[Block], ttls: Sequence[str]) -> None:
    if len(marked) > MAX_BREAKPOINTS:
        raise BadRequestError(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found {len(marked)}.",
            code="array_above_max_length",
        )
    allowed = {duration_s(ttl) for ttl in ttls}
    shorter = False
    for number, ttl in sorted(marked.items()):
        path = f"{blocks[number].path}.cache_control.ttl"
        if ttl == "1h" and shorter:
            raise invalid(
                path,
                "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that blocks "
                "are processed in the following order: `tools`, `system`, `messages`",
            )
        shorter = shorter or ttl != "1h"
        if duration_s(ttl) not in allowed:
            raise unsupported(path, f"this server keeps nothing for {ttl} (leases.ttls: {', '.join(ttls)})")


def _before(blocks: Sequence[Block], marked: Collection[int], lookback: int) -> Iterator[int]:
    """Numbers of the blocks that are at most so many positions before a marked one, and can be cached."""
    for start in marked:
        left, number = lookback, start
        while number >= 0 and left > 0:
            kind = blocks[number].kind
            if kind != "thinking":
                yield number
            number -= 1
            in_run = kind in _RUNS and number >= 0 and blocks[number].kind == kind
            left -= kind != "thinking" and not in_run


def _marker(block: Block, ttl_s: float) -> Marker:
    match block.kind:
        case "tool":
            return Marker(0, 0, ttl_s, tool=block.settled)
        case "tool_use":
            return Marker(block.message, 0, ttl_s, call=block.settled)
        case _:
            return Marker(block.message, block.settled, ttl_s, media=block.media)
