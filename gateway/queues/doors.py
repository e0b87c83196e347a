"""Which engines take whom while sessions push one another out of the caches. Pure: no I/O, no clock.

A prompt without its prefix costs its own prefill, and the next one of everybody whom it pushes out. So an engine takes
it only in room that nobody needs soon (sessions.py). Who finds half of its prompt somewhere goes there, or where it is
served sooner all the same, as ever. One engine in eight, at least one, is open to all: sessions that fit nowhere take
turns there at each other's cost, instead of everywhere at everybody's. Sessions that have room keep it until they end
or stay away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.queues.sessions import Sessions
from gateway.types import Ask

CLOSED_FOR_ONE: Final = 7
"""Engines that may close their doors for each one that is open to all."""

LITTLE: Final = 0.01
"""Of an engine's cache: so much is let in everywhere."""


class Seat(Protocol):
    """See lane.Seat."""

    @property
    def engine(self) -> Any: ...

    @property
    def incarnation(self) -> str: ...


@dataclass(slots=True)
class _Cache:
    """Of an engine: blocks that nobody needs soon, and all of them, of so many tokens each."""

    room: int
    num_blocks: int
    block_tokens: int

    def blocks(self, ask: Ask, incarnation: str) -> int:
        """That a prompt needs besides those that are there; all of them for one that is longer than the cache."""
        tokens = max(0, ask.prompt_tokens - ask.cached_tokens.get(incarnation, 0))
        return min(-(-tokens // self.block_tokens), self.num_blocks)


class Doors:
    """At one moment. `add` what is sent meanwhile."""

    def __init__(self, seats: Iterable[Seat], sessions: Sessions, open_to_all: set[str], now_s: float) -> None:
        self._caches: dict[str, _Cache] = {}  # of those that are not open to all
        for seat in seats:
            if seat.incarnation not in open_to_all:
                hello = seat.engine.hello
                room = sessions.room(seat.incarnation, hello.num_blocks, now_s)
                self._caches[seat.incarnation] = _Cache(room, hello.num_blocks, hello.namespace.block_size)

    def closed(self, ask: Ask) -> frozenset[str]:
        """Engines that do not take it. Who has a prefix somewhere is for the router to place, who belongs to a group
        goes where that is, and `priority` goes anywhere."""
        if ask.only is not None or ask.tier == "priority" or _has_prefix(ask):
            return frozenset()
        return frozenset(
            incarnation
            for incarnation, cache in self._caches.items()
            if cache.blocks(ask, incarnation) > max(cache.room, LITTLE * cache.num_blocks)
        )

    def add(self, incarnation: str, ask: Ask) -> None:
        """It is sent there."""
        if (cache := self._caches.get(incarnation)) is not None:
            cache.room -= cache.blocks(ask, incarnation)


def choose_open(seats: Iterable[Seat], before: set[str], sessions: Sessions, now_s: float) -> set[str]:
    """The engines that are open to all: those that were, as far as they are there, then those with the least room."""
    room = {seat.incarnation: sessions.room(seat.incarnation, seat.engine.hello.num_blocks, now_s) for seat in seats}
    count = -(-len(room) // (CLOSED_FOR_ONE + 1))
    ranked = sorted(room, key=lambda incarnation: (incarnation not in before, room[incarnation], incarnation))
    return set(ranked[:count])


def _has_prefix(ask: Ask) -> bool:
    """Of which some engine holds half at least."""
    return 2 * max(ask.cached_tokens.values(), default=0) >= ask.prompt_tokens
