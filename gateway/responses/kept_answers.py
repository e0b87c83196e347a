"""What is remembered, as operators see it: in the memory of this gateway, and in Redis, which all share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from gateway.responses.base import Stored
from gateway.responses.entries import About, Entries
from gateway.responses.listing import Chosen, Told
from gateway.responses.memory_entries import MemoryEntries
from gateway.responses.recording import UpstreamRecording, decode, decode_upstream
from gateway.responses.removals import Removal, Removals
from gateway.types import CallDelta, Event, TextDelta

AT_ONCE: Final = 16
"""Answers that are removed at the same time: half the calls that Redis gets from here, so that requests get some."""


class KeptAnswers:
    """See Answers in listing.py."""

    def __init__(self, memory: MemoryEntries, redis: Entries | None, removals: Removals | None = None) -> None:
        """`removals` tells other gateways what is removed here."""
        self._removals = removals
        self._places: tuple[Entries, ...] = (memory,) if redis is None else (memory, redis)

    async def scan(self, chosen: Chosen, at_s: float) -> AsyncIterator[About]:
        owners = {owner for place in self._places for owner in await place.owners()}
        for owner in sorted(owners if chosen.owner is None else owners & {chosen.owner}):
            kept = {one.id: one for place in self._places for one in await place.all_of(owner)}
            for one in kept.values():
                if chosen.takes(one, at_s):
                    yield one

    async def find(self, kept: About) -> Told | None:
        for place in self._places:
            if (entry := await place.find(kept.owner, kept.id)) is not None:
                return _told(entry.body)
        return None

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        found = [kept async for kept in self.scan(chosen, at_s)]
        removed = 0
        for start in range(0, len(found), AT_ONCE):
            removed += sum(await asyncio.gather(*map(self._remove, found[start : start + AT_ONCE])))
        if self._removals is not None:  # after Redis has them no more, from which others would have them again
            await self._removals.tell(Removal(chosen, at_s))
        return removed

    async def _remove(self, kept: About) -> bool:
        """From Redis first: what is in memory alone is not shared again."""
        there = [await place.remove(kept.owner, kept.id) for place in reversed(self._places)]
        return any(there)


def _told(body: bytes) -> Told | None:
    """None for what cannot be read, which no request gets, either."""
    if (kept := decode_upstream(body)) is not None:
        return _told_by_upstream(kept)
    stored = decode(body, joined=True)
    return None if stored is None else _told_by_engine(stored)


def _told_by_upstream(kept: UpstreamRecording) -> Told:
    """As it wrote it. Only complete answers are kept, and how they ended is in there, in the words of its API."""
    return Told(*kept.tokens, None, b"".join(kept.chunks).decode(errors="replace"))


def _told_by_engine(stored: Stored[Event]) -> Told:
    """Its chunks put together."""
    text = "".join(event.text for event in stored.items if isinstance(event, TextDelta))
    calls: dict[int, tuple[str, str]] = {}
    for event in stored.items:
        if isinstance(event, CallDelta):
            name, arguments = calls.get(event.call, ("", ""))
            calls[event.call] = (name + event.name, arguments + event.arguments)
    return Told(stored.prompt_tokens, stored.completion_tokens, stored.finish, text, tuple(calls.values()))
