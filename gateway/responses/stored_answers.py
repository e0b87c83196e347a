"""Remembered answers as operators see them: in the memory of this gateway, and in Redis, which all share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from gateway.responses.base import Stored
from gateway.responses.entries import About, Chosen, Content, Entries
from gateway.responses.entry_stores import MemoryEntries
from gateway.responses.recording import UpstreamRecording, decode, decode_upstream
from gateway.responses.removals import Removal, Removals
from gateway.types import CallDelta, Event, TextDelta

AT_ONCE: Final = 16
"""Answers that are removed at the same time: half the calls that Redis gets from here, so that requests get some."""


class StoredAnswers:
    """See Answers in entries.py."""

    def __init__(self, memory: MemoryEntries, redis: Entries | None, removals: Removals | None = None) -> None:
        """`removals` tells other gateways what is removed here."""
        self._removals = removals
        self._stores: tuple[Entries, ...] = (memory,) if redis is None else (memory, redis)

    async def scan(self, chosen: Chosen, at_s: float) -> AsyncIterator[About]:
        owners = {owner for store in self._stores for owner in await store.owners()}
        for owner in sorted(owners if chosen.owner is None else owners & {chosen.owner}):
            kept = {one.id: one for store in self._stores for one in await store.all_of(owner)}
            for one in kept.values():
                if chosen.takes(one, at_s):
                    yield one

    async def find(self, kept: About) -> Content | None:
        for store in self._stores:
            if (entry := await store.find(kept.owner, kept.id)) is not None:
                return _content(entry.body)
        return None

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        found = [about async for about in self.scan(chosen, at_s)]
        removed = 0
        for start in range(0, len(found), AT_ONCE):
            removed += sum(await asyncio.gather(*map(self._remove, found[start : start + AT_ONCE])))
        if self._removals is not None:  # after Redis has them no more, from which others would have them again
            await self._removals.tell(Removal(chosen, at_s))
        return removed

    async def _remove(self, kept: About) -> bool:
        """From Redis first: what is in memory alone is not shared again."""
        there = [await store.remove(kept.owner, kept.id) for store in reversed(self._stores)]
        return any(there)


def _content(body: bytes) -> Content | None:
    """None for what cannot be read, which no request gets, either."""
    if (kept := decode_upstream(body)) is not None:
        return _of_upstream(kept)
    stored = decode(body, joined=True)
    return None if stored is None else _of_engine(stored)


def _of_upstream(kept: UpstreamRecording) -> Content:
    """As it wrote it. Only complete answers are kept, and how they ended is in there, in the words of its API."""
    return Content(*kept.tokens, None, b"".join(kept.chunks).decode(errors="replace"))


def _of_engine(stored: Stored[Event]) -> Content:
    """Its chunks put together."""
    text = "".join(event.text for event in stored.items if isinstance(event, TextDelta))
    calls: dict[int, tuple[str, str]] = {}
    for event in stored.items:
        if isinstance(event, CallDelta):
            name, arguments = calls.get(event.call, ("", ""))
            calls[event.call] = (name + event.name, arguments + event.arguments)
    return Content(stored.prompt_tokens, stored.completion_tokens, stored.finish, text, tuple(calls.values()))
