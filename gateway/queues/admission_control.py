"""Admission control under KV-cache thrashing: when sessions push one another out of the caches (`Overload`), and which
engines then accept prompts without a cached prefix (`AdmissionControl`). Pure: no I/O, no clock.

A session asks again when it has read its answer, and needs what was computed for it then. While the caches hold the
sessions that take turns, hardly anything is computed twice. When they do not, each prompt that gets in evicts what
another session will need, and the engines recompute what they had; all the more the more requests wait.

    share    what went into recomputing, of the seconds that engines gave us and those in which no request waited
    holds    from `overload_share` on, until the share is less than half of that

New prompts, however many and however long, are nothing of this kind: nothing that is known of them was lost. Seconds in
which no request waits count as well, because a session that comes back rarely may be recomputed at leisure.

A prompt without a cached prefix costs its own prefill, and that of every session whose blocks it evicts. So while the
cache thrashes, an engine accepts one only into blocks that no session needs soon (sessions.py). A prompt of which some
engine holds half goes wherever the router sends it. One engine in eight, at least one, stays open to all: sessions that
fit nowhere take turns there, at each other's cost. Sessions that have blocks keep them until they end or stay away.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from gateway.queues.router import EngineSlots
from gateway.queues.sessions import Sessions
from gateway.types import Ask

MEMORY_S: Final = 60.0
"""What was seconds ago counts for exp(-seconds / MEMORY_S)."""

LEAST_S: Final = 15.0
"""Of engines' time, before a share of it means anything."""

CLOSED_FOR_ONE: Final = 7
"""Engines that may refuse prompts without a cached prefix, for each one that is open to all."""

LITTLE: Final = 0.01
"""Of an engine's cache: so much is let in everywhere."""


class Overload:
    """Recognises thrashing in one queue. Times are those of any clock that does not go back."""

    def __init__(self, begins: float) -> None:
        """`begins` is the share from which on it holds."""
        self.holds = False
        self._begins = begins
        self._now_s = 0.0
        self._again_s = 0.0
        self._total_s = 0.0

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self._again_s / max(self._total_s, LEAST_S)

    def computed(self, seconds: float, again_s: float) -> None:
        """So much time an engine will need for a request, `again_s` of it for what had been computed before."""
        self._total_s += seconds
        self._again_s += again_s

    def look(self, now_s: float, idle_engines: int, *, goes_on: bool = False) -> bool:
        """Whether it holds now. `idle_engines` are those that no request waited for since the last look. What
        `goes_on` does not end, however little is recomputed: that is so because requests are held back."""
        passed_s = max(0.0, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        kept = math.exp(-passed_s / MEMORY_S)
        self._again_s *= kept
        self._total_s = self._total_s * kept + MEMORY_S * (1 - kept) * idle_engines
        self.holds = (self.holds and goes_on) or self.share >= self._begins / (2 if self.holds else 1)
        return self.holds


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
        self, engine_slots: Collection[EngineSlots[Any]], sessions: Sessions, open_to_all: set[str], now_s: float
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


def choose_open(
    engine_slots: Collection[EngineSlots[Any]], before: set[str], sessions: Sessions, now_s: float
) -> set[str]:
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
