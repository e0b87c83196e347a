"""An answer that was given, for who asks for the very same again: whether the cache would give it once more.

Knows no request and no bytes of an answer. stage.py and upstream_answers.py hand it out with what they found; whoever
still has what was made of it asks here before giving it again.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.responses.base import Figures
from gateway.responses.entries import Entry
from gateway.responses.exact import ExactCache
from gateway.types import Lookup, Reuse


class EntryRepeat:
    """See types.Repeat: one entry, given to one request."""

    __slots__ = ("_entry", "_exact", "_figures", "_given", "_max_age_s", "_now")

    def __init__(
        self,
        exact: ExactCache,
        entry: Entry,
        reuse: Reuse,
        now: Callable[[], float],
        figures: Figures,
        given: Callable[[], None] | None = None,
    ) -> None:
        """`reuse` is what the request said; `now` the clock of entries; `given` is called each time that it is."""
        self._given = given
        self._exact = exact
        self._entry = entry
        self._max_age_s = reuse.max_age_s
        self._now = now
        self._figures = figures

    @property
    def num_bytes(self) -> int:
        """That it keeps in memory."""
        return self._entry.num_bytes

    def again(self) -> Lookup | None:
        """Counted as any other hit, and as one of these."""
        age_s = self._now() - self._entry.created_s
        if (self._max_age_s is not None and age_s > self._max_age_s) or not self._exact.has(self._entry):
            return None
        self._figures.outcomes["exact"] += 1
        self._figures.resent += 1
        if self._given is not None:
            self._given()
        return Lookup("exact", entry=self._entry.id, age_s=max(age_s, 0.0))
