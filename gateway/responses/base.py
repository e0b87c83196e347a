"""The promises between the parts of the response cache.

exact      the answer to this very request, in memory or in Redis
flights    the same, while it is generated for somebody else
semantic   the answer to a request that means the same
generate   none of these; what comes is then remembered by all of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gateway.types import Event, Request, Reuse, Trace

Generate = Callable[[Request], AsyncGenerator[Event, None]]
"""Steps 2 to 6 of the pipeline."""

Audited = Callable[[str, str, Trace, float], None]
"""Told what it took to generate an answer that was only compared: the tenant who had the hit, the model as figures name
it, the trace, and milliseconds. Never raises."""

Said = Callable[[], str | None]
"""The text of an answer; None for one that is more than a text, or is not complete."""

Anew = Callable[[], Awaitable[str | None]]
"""The same of an answer that is generated for the asking. Raises what generating raises."""


class Situation(NamedTuple):
    """A chat without what its user said last.

    digest  of everything else; who compares texts compares those of one situation
    text    what the user said last
    """

    digest: bytes
    text: str


class Asked(Protocol):
    """A request that may be answered from the cache, whoever would generate its answer. Itself and no other, however
    alike: what was found for it is forgotten with it."""

    @property
    def key(self) -> bytes:
        """Under which its answer will be kept."""
        ...

    @property
    def owner(self) -> str:
        """Whose it will be."""
        ...

    @property
    def tenant(self) -> str: ...

    @property
    def model(self) -> str:
        """As clients name it."""
        ...

    @property
    def reuse(self) -> Reuse: ...

    @property
    def work(self) -> int:
        """That it is to hash it (tasks.work_of)."""
        ...

    def find_unfit(self, max_temperature: float) -> str | None:
        """Why no other request's answer will do, as far as that can be told without its text; None where one may.

        tools     its answer may call some
        form      its answer has to be more than a text, or another form of text
        sampling  its temperature is higher
        """
        ...

    def find_situation(self) -> Situation | None:
        """None for what is no chat that ends with a text of its user. Hashes all of it: work for a thread, where
        there is much."""
        ...


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

    def repeats(self, asked: Asked) -> Callable[[], None]:
        """What is called each time that the exact cache has the answer: nothing is to be found, one request more is to
        be counted. Holds nothing of the request's text."""
        ...

    def hit(self, asked: Asked, match: Match, given: Said, anew: Anew) -> None:
        """It was there, and is given. `anew` generates an answer of its own, for who wants to compare."""
        ...

    def gone(self, asked: Asked, match: Match) -> None:
        """It was not there any more."""
        ...

    def remember(self, asked: Asked, answer: str | None) -> None:
        """The text of what was generated, and is kept under the key; None for what no other request may get."""
        ...

    def stats(self) -> dict[str, Any]:
        """For operators."""
        ...
