"""What operators choose and see of remembered answers, and the promises of who shows them. Values only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from gateway.responses.entries import About


@dataclass(frozen=True, slots=True)
class Told:
    """What a remembered answer says: its text, and the names and arguments of its tool calls. Of an upstream's the text
    is all that it wrote, calls included, and `finish` is not told."""

    prompt_tokens: int
    completion_tokens: int
    finish: str | None
    text: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some of the remembered answers. What is not given takes all.

    id  its beginning
    """

    owner: str | None = None
    model: str | None = None
    id: str = ""
    older_than_s: float = 0.0
    younger_than_s: float | None = None

    @property
    def everything(self) -> bool:
        return self == Chosen()

    def takes(self, kept: About, at_s: float) -> bool:
        """Whether it is one of them, by its age at that second; what was made later is not."""
        age_s = at_s - kept.created_s
        return (
            self.owner in (None, kept.owner)
            and self.model in (None, kept.model)
            and kept.id.startswith(self.id)
            and age_s >= self.older_than_s
            and (self.younger_than_s is None or age_s <= self.younger_than_s)
            and kept.expires_s > at_s
        )


class Answers(Protocol):
    """All answers that are remembered, of this gateway and in what it shares with others. Methods raise
    RedisDownError: who asks here wants to know, and not to be served."""

    def scan(self, chosen: Chosen, at_s: float) -> AsyncIterator[About]:
        """Those that were chosen at that second, each once, in no order; what comes or goes meanwhile may be
        missing."""
        ...

    async def find(self, kept: About) -> Told | None: ...

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        """Those that were chosen at that second, from here and from what is shared. How many there were. Other gateways
        hear of it soon."""
        ...
