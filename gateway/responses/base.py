"""The promises between the parts of the response cache.

exact      the answer to this very request, in memory or in Redis
flights    the same, while it is generated for somebody else
semantic   the answer to a request that means the same
generate   none of these; what comes is then remembered by all of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import Hello
from gateway.types import Event, Request

Generate = Callable[[Request], AsyncGenerator[Event, None]]
"""Steps 2 to 6 of the street."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that may be answered from the cache.

    key    under which its answer will be kept
    owner  whose it will be
    """

    request: Request
    model: Hello
    key: bytes
    owner: str


@dataclass(frozen=True, slots=True)
class Match:
    """The answer of another request, whose key this is, will do."""

    key: bytes
    similarity: float


@dataclass(slots=True)
class Figures:
    """Since the start."""

    outcomes: Counter[str] = field(default_factory=Counter)  # requests, by Lookup.outcome
    bypassed: Counter[str] = field(default_factory=Counter)  # requests, by reason
    resent: int = 0  # of the exact ones, to requests that were not read: the bytes were known
    not_kept: Counter[str] = field(default_factory=lambda: Counter(too_large=0, truncated=0))  # answers, by reason


class Semantic(Protocol):
    """Answers to requests that mean the same. No method raises, and none is called for requests that the exact cache
    is not for."""

    async def find(self, asked: Asked) -> Match | None:
        """The answer to give, which the cache then looks up by its key."""
        ...

    def repeated(self, asked: Asked) -> None:
        """The exact cache has the answer: nothing is to be found, one request more is to be counted."""
        ...

    def hit(
        self, asked: Asked, match: Match, answer: Sequence[Event], anew: Callable[[], AsyncGenerator[Event, None]]
    ) -> None:
        """It was there, and is given. `anew` generates an answer of its own, for who wants to compare."""
        ...

    def gone(self, asked: Asked, match: Match) -> None:
        """It was not there any more."""
        ...

    def remember(self, asked: Asked, answer: Sequence[Event]) -> None:
        """It was generated, and is kept under the key."""
        ...

    def stats(self) -> dict[str, Any]:
        """For operators."""
        ...
