"""Chooses an engine for a prompt: where will the first token come soonest? Pure: no I/O, no clock, no memory.

    score = expected wait + prefill_weight * own prefill         seconds, the least wins

The weight above 1 makes an engine that holds the prefix attractive beyond this one request, because prefilling
elsewhere takes time from everybody and evicts somebody's blocks; on real traces 4 was the best (docs/decisions.md). The
registry says which engines there are; the street asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from engine.protocol import Hello, Load
from gateway.config import RoutingSettings

ASSUMED_COMPLETION_TOKENS: Final = 128
"""Tokens that a running sequence is taken to have left, when all places of an engine are taken."""

ASSUMED_DECODE_TOKENS_PER_S: Final = 100.0
"""Of all sequences of an engine together, before it has measured its own."""


class _Engine(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...


E = TypeVar("E", bound=_Engine)


class Router:
    """street.Router."""

    def __init__(self, settings: RoutingSettings, queued: Callable[[str], int] | None = None) -> None:
        """`queued` says how many requests wait in this gateway for a place at the engine of an incarnation."""
        self._settings = settings
        self._queued = queued

    def choose(self, engines: Sequence[E], prompt_tokens: int, cached_tokens: Mapping[str, int]) -> E:
        """The engine with the least score; with equal scores the one with fewer sequences, then the first by name.

        cached_tokens  leading tokens of the prompt that each incarnation holds; one that is missing holds none
        engines        at least one
        """
        if len(engines) == 1:
            return engines[0]

        # An engine that has measured nothing yet is taken to be as quick as the others, or nobody would ever ask it.
        assumed = max(engine.load.prefill_tokens_per_s for engine in engines) or self._settings.prefill_tokens_per_s

        def rank(engine: E) -> tuple[float, int, str, str]:
            hello, load = engine.hello, engine.load
            queued = self._queued(hello.incarnation) if self._queued else 0
            own = max(0, prompt_tokens - cached_tokens.get(hello.incarnation, 0))
            busy = load.running + load.waiting + queued
            prefill_tokens_per_s = load.prefill_tokens_per_s or assumed
            score_s = self.score_s(load, own, hello.max_sequences, queued, prefill_tokens_per_s)
            return score_s, busy, engine.name, hello.incarnation

        return min(engines, key=rank)

    def score_s(
        self, load: Load, own_tokens: int, max_sequences: int, queued: int, prefill_tokens_per_s: float
    ) -> float:
        """Seconds until the first token, with the own prefill weighted.

        own_tokens            tokens of the prompt that the engine would have to prefill
        max_sequences         sequences that the engine runs at a time
        queued                requests in front of this one that the engine does not know yet
        prefill_tokens_per_s  how quick the engine is at it
        """
        wait_s = expected_wait_s(load, max_sequences, queued, prefill_tokens_per_s)
        return wait_s + self._settings.prefill_weight * own_tokens / prefill_tokens_per_s


def expected_wait_s(load: Load, max_sequences: int, queued: int, prefill_tokens_per_s: float) -> float:
    """Seconds until the running step and the prefills in front are done, and a place is free when all are taken."""
    decode_tokens_per_s = load.decode_tokens_per_s or ASSUMED_DECODE_TOKENS_PER_S
    step_s = load.running / decode_tokens_per_s
    prefill_s = load.prefill_backlog / prefill_tokens_per_s
    excess = max(0, load.running + load.waiting + queued + 1 - max_sequences)
    # max_sequences answers of that length end in length * max_sequences / rate seconds: one every length / rate.
    return step_s + prefill_s + excess * ASSUMED_COMPLETION_TOKENS / decode_tokens_per_s
