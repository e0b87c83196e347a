"""Many requests in a row against a naive twin: a set of prefixes, and the rules as the documentation tells them.

One block is one token here. The twin keeps prefixes of blocks; ours gets what an engine says: the lengths of all kept
prefixes that the prompt begins with.
"""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.protocol import Breakpoint
from gateway.api.anthropic.caching import account, read_caching
from gateway.api.anthropic.messages import converse, read_turns

LOOKBACK = 20

Prompt = list[tuple[int, str | None]]
"""Blocks: what is in them, and the time to live of a marker."""


class Twin:
    """Entries are whole prefixes."""

    def __init__(self) -> None:
        self.entries: set[tuple[int, ...]] = set()

    def ask(self, prompt: Prompt) -> tuple[int, int, int]:
        """Read, written for five minutes, and for an hour."""
        contents = tuple(content for content, _ in prompt)
        marks = [(end, ttl) for end, (_, ttl) in enumerate(prompt, start=1) if ttl is not None]
        read = 0
        for end, _ in reversed(marks):
            for place in range(end, max(0, end - LOOKBACK), -1):
                if contents[:place] in self.entries:
                    read = max(read, place)
                    break
        # Positions as billing has them: A, B, C.
        highest_1h = max((end for end, ttl in marks if ttl == "1h" and end > read), default=read)
        last = max((end for end, _ in marks), default=0)
        self.entries |= {contents[:end] for end, _ in marks}
        return read, max(0, last - highest_1h) if last > read else 0, highest_1h - read


class Ours:
    """As the dialect does it, over an engine that keeps everything."""

    def __init__(self) -> None:
        self.leases: set[tuple[int, ...]] = set()

    def ask(self, prompt: Prompt) -> tuple[int, int, int]:
        contents = tuple(content for content, _ in prompt)
        blocks: list[Any] = []
        for content, ttl in prompt:
            block: dict[str, Any] = {"type": "text", "text": chr(97 + content)}
            blocks.append(block | ({"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}))
        turns = read_turns([{"role": "user", "content": blocks}], "messages")
        caching = read_caching(converse((), turns).blocks, None, LOOKBACK, ("5m", "1h"))
        points = [Breakpoint(marker.chars, marker.ttl_s) for marker in caching.markers]
        reads = sorted((len(lease) for lease in self.leases if contents[: len(lease)] == lease), reverse=True)
        entries = {point.tokens for point in points} | {place.chars for place in caching.places}
        cached = account(reads if points else (), entries, points, points[-1].tokens if points else 0)
        self.leases |= {contents[: point.tokens] for point in points}
        return cached.read, cached.written_5m, cached.written_1h


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Beginnings are alike, lengths go past the look back, hours come before minutes."""
    length = draw(st.integers(1, 50))
    changed = draw(st.none() | st.integers(0, length - 1))
    contents = [1 if index == changed else 0 for index in range(length)]
    marked = sorted(draw(st.sets(st.integers(0, length - 1), max_size=4)))
    hours = draw(st.integers(0, len(marked)))
    ttls = {index: "1h" if number < hours else "5m" for number, index in enumerate(marked)}
    return [(content, ttls.get(index)) for index, content in enumerate(contents)]


FAR: Prompt = [(0, "5m" if index == 29 else None) for index in range(30)]
NEAR: Prompt = [(0, "5m" if index == 9 else None) for index in range(30)]
NEARER: Prompt = [(0, "5m" if index == 10 else None) for index in range(30)]


@settings(max_examples=300, deadline=None)
@example(asked=[NEAR, FAR])
@example(asked=[NEARER, FAR])
@given(asked=st.lists(prompts(), min_size=1, max_size=6))
def test_every_request_of_a_row_is_accounted_for_as_the_twin_does(asked: list[Prompt]) -> None:
    twin, ours = Twin(), Ours()
    for prompt in asked:
        assert ours.ask(prompt) == twin.ask(prompt)
