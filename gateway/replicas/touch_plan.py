"""When the prefixes that leases keep are to be touched in the cache of one replica: after a third of what is neither
live nor leased was stored, counted in tokens, not by the clock. touching.py touches them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

TOUCH_SHARE: Final = 1 / 3
"""Of the tokens that are neither live nor leased, which may be stored from one touch to the next."""

LEAST_SHARE: Final = 1 / 32
"""Of the whole cache: what is stored from one touch to the next at least, however much of it is live."""


class TouchPlan:
    """When prefixes are to be touched. Pure; all counts are tokens.

    own     that this gateway's requests store, in whole pages
    full    of these, those that KV events tell of
    stored  that KV events told of
    base    what `stored` is ahead of `full`, as far as it is counted in `others`
    """

    def __init__(self, capacity_tokens: int, page_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._page = page_tokens
        self._own = self._full = self._others = self._base = self._unseen = 0
        self._ahead: int | None = None  # of the base, at most, since the last mark
        self._marks: dict[bytes, tuple[float, float]] = {}  # prefix -> `pushed` at its last touch, and how much is left

    @property
    def pushed(self) -> float:
        """Tokens that were stored, by this gateway and by others, since the start."""
        return self._own + self._others

    @property
    def own(self) -> int:
        """Of these, by this gateway."""
        return self._own

    def sent(self, new_tokens: int) -> int:
        """So many tokens will be stored. Returns what is counted: a page that stays incomplete takes its place, without
        an event."""
        full = new_tokens // self._page * self._page
        self._own += full + self._page
        self._full += full
        return full + self._page

    def store(self, tokens: int) -> None:
        """So many were stored since the start of the follower, as its events say."""
        ahead = tokens - self._full - self._base
        self._ahead = max(ahead, ahead if self._ahead is None else self._ahead)
        if ahead > 0:
            self._others += ahead
            self._base += ahead

    def store_unseen(self, tokens: int) -> None:
        """Others stored so many since the start, which no event tells of."""
        self._others += tokens - self._unseen
        self._unseen = tokens

    def mark(self, name: bytes, used: float, taken: int) -> None:
        """A prefix was used when `pushed` was `used`. `taken` tokens are live, will soon be, or are leased."""
        before, _ = self._marks.get(name, (-math.inf, 0))
        if used >= before:
            left = max(self._capacity * LEAST_SHARE, (self._capacity - taken) * TOUCH_SHARE)
            self._marks[name] = used, left
        # What was counted all the time and never told of, as by requests that failed, hides no others from now on.
        self._base += min(0, self._ahead or 0)
        self._ahead = None

    def keep(self, names: Iterable[bytes]) -> None:
        """Forgets all other prefixes."""
        self._marks = {name: mark for name in names if (mark := self._marks.get(name)) is not None}

    def forget(self) -> None:
        """The cache begins empty."""
        self._marks.clear()
        self._base, self._ahead = -self._full, None

    def is_known(self, name: bytes) -> bool:
        return name in self._marks

    def is_due(self, name: bytes) -> bool:
        used, left = self._marks.get(name, (-math.inf, 0))
        return self.pushed - used >= left
