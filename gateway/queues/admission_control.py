"""Admission control under KV-cache thrashing: which engines accept prompts without a cached prefix.

Pure: no I/O, no clock.

A prompt without a cached prefix costs its own prefill, and that of every session whose blocks it evicts. So while the
cache thrashes, an engine accepts one only into blocks that no session needs soon (sessions.py). A prompt of which some
engine holds half goes wherever the router sends it. One engine in eight, at least one, stays open to all: sessions that
fit nowhere take turns there, at each other's cost. Sessions that have blocks keep them until they end or stay away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.queues.sessions import Sessions
from gateway.types import Ask

CLOSED_FOR_ONE: Final = 7
"""Engines that may refuse prompts without a cached prefix, for each one that is open to all."""

LITTLE: Final = 0.01
"""Of an engine's cache: so much is let in everywhere."""


class EngineSlots(Protocol):
    """See lane.EngineSlots."""

    @property
    def engine(self) -> Any: ...

    @property
    def incarnation(self) -> str: ...


@dataclass(slots=True)
class _Cache:
    """An engine's cache: blocks that no session needs soon, all blocks, and tokens per block."""

    room: int
    num_blocks: int
    block_tokens: int

    def blocks(self, ask: Ask, incarnation: str) -> int:
        """Blocks that a prompt needs besides its cached ones; the whole cache for a prompt longer than that."""
        tokens = max(0, ask.prompt_tokens - ask.cached_tokens.get(incarnation, 0))
        return min(-(-tokens // self.block_tokens), self.num_blocks)


class AdmissionControl:
    """The state of the caches now; `add` records each prompt that is sent meanwhile."""

    def __init__(
        self, engine_slots: Iterable[EngineSlots], sessions: Sessions, open_to_all: set[str], now_s: float
    ) -> None:
        self._caches: dict[str, _Cache] = {}  # of those that are not open to all
        for slots in engine_slots:
            if slots.incarnation not in open_to_all:
                hello = slots.engine.hello
                room = sessions.room(slots.incarnation, hello.num_blocks, now_s)
                self._caches[slots.incarnation] = _Cache(room, hello.num_blocks, hello.namespace.block_size)

    def closed(self, ask: Ask) -> frozenset[str]:
        """Engines that do not accept the request: none for one with a cached prefix, for one that has to go to the
        engine of its group, and for tier `priority`."""
        if ask.only is not None or ask.tier == "priority" or _has_prefix(ask):
            return frozenset()
        return frozenset(
            incarnation
            for incarnation, cache in self._caches.items()
            if cache.blocks(ask, incarnation) > max(cache.room, LITTLE * cache.num_blocks)
        )

    def add(self, incarnation: str, ask: Ask) -> None:
        """Records that the request is sent to this engine."""
        if (cache := self._caches.get(incarnation)) is not None:
            cache.room -= cache.blocks(ask, incarnation)


def choose_open(engine_slots: Iterable[EngineSlots], before: set[str], sessions: Sessions, now_s: float) -> set[str]:
    """The engines that are open to all: those that were, as far as they are there, then those with the least room."""
    room = {
        slots.incarnation: sessions.room(slots.incarnation, slots.engine.hello.num_blocks, now_s)
        for slots in engine_slots
    }
    count = -(-len(room) // (CLOSED_FOR_ONE + 1))
    ranked = sorted(room, key=lambda incarnation: (incarnation not in before, room[incarnation], incarnation))
    return set(ranked[:count])


def _has_prefix(ask: Ask) -> bool:
    """Whether some engine holds at least half of the prompt."""
    return 2 * max(ask.cached_tokens.values(), default=0) >= ask.prompt_tokens
