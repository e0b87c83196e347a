"""What becomes of a request before anybody generates, and of its answer behind that: an answer to the very same, an
answer to one that means the same, a new one to keep. Counts each.

The stages in front of our own engines and of upstreams both ask here; what an answer is made of is theirs. No method
raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from gateway.config import ResponseCacheSettings
from gateway.responses.base import Anew, Asked, Audited, Figures, Semantic
from gateway.responses.entries import Entry
from gateway.responses.exact import ExactCache
from gateway.responses.key import entry_id
from gateway.responses.repeat import EntryRepeat
from gateway.types import Lookup, Reuse, Trace

_T = TypeVar("_T")


class Lookups:
    """Over the caches of one gateway."""

    def __init__(
        self,
        settings: ResponseCacheSettings,
        exact: ExactCache,
        semantic: Semantic | None,
        now: Callable[[], float],
        audited: Audited | None = None,
    ) -> None:
        """`now` is the clock of entries, since 1970."""
        self._settings = settings
        self._exact = exact
        self._semantic = semantic
        self._now = now
        self._audited = audited
        self.figures = Figures()

    def audited(self, asked: Asked, model: str, trace: Trace, began_s: float) -> None:
        """What was generated for nobody, to compare it with what was given; it has no record that would account for
        it. `began_s` is on the monotonic clock."""
        if self._audited is not None:
            self._audited(asked.tenant, model, trace, (time.monotonic() - began_s) * 1e3)

    def peek(self, asked: Asked) -> Entry | None:
        """Its answer, from this gateway's memory."""
        if not asked.reuse.read:
            return None
        return self._fresh(self._exact.peek(asked.owner, asked.key), asked.reuse)

    async def find(self, asked: Asked) -> Entry | None:
        """Its answer, from memory or Redis."""
        if not asked.reuse.read:
            return None
        return self._fresh(await self._exact.find(asked.owner, asked.key), asked.reuse)

    def given(self, asked: Asked, entry: Entry) -> tuple[Lookup, EntryRepeat]:
        """What is said of an answer that was found, and what gives it again to who asks for the very same."""
        count = None if self._semantic is None else self._semantic.repeats(asked)
        if count is not None:
            count()
        repeat = EntryRepeat(self._exact, entry, asked.reuse, self._now, self.figures, count)
        return self._lookup(entry), repeat

    async def find_alike(
        self, asked: Asked, read: Callable[[Entry], _T | None], say: Callable[[_T], str | None], anew: Anew
    ) -> tuple[_T, Lookup] | None:
        """The answer of a request that means the same.

        read  the answer in the form that is wanted; None where it cannot have that
        say   its text
        """
        semantic = self._semantic
        if semantic is None or not asked.reuse.read or (match := await semantic.find(asked)) is None:
            return None
        entry = await self._exact.find(asked.owner, match.key)
        if entry is None:
            semantic.gone(asked, match)
        answer = None if (entry := self._fresh(entry, asked.reuse)) is None else read(entry)
        if entry is None or answer is None:
            return None
        semantic.hit(asked, match, partial(say, answer), anew)
        return answer, self._lookup(entry)._replace(outcome="semantic", similarity=match.similarity)

    def keep(self, asked: Asked, model: str, body: bytes, text: str | None) -> Entry | None:
        """What other gateways may have, too. `text` is what it says to who only means the same, None for what others
        may not have."""
        settings, reuse = self._settings, asked.reuse
        if len(body) > settings.max_entry_bytes:
            self.figures.not_kept["too_large"] += 1
            return None
        now = self._now()
        ttl_s = settings.ttl_s if reuse.ttl_s is None else min(reuse.ttl_s, settings.max_ttl_s)
        entry = Entry(asked.key, entry_id(asked.key), asked.owner, model, now, now + ttl_s, body)
        self._exact.keep(entry)
        if self._semantic is not None:
            self._semantic.remember(asked, text)
        return entry

    async def share(self, entry: Entry) -> None:
        """With other gateways."""
        await self._exact.share(entry)

    def note(self, trace: Trace, lookup: Lookup) -> None:
        """What the request is told."""
        trace.lookup = lookup
        self.figures.outcomes[lookup.outcome] += 1
        if lookup.outcome == "bypass":
            self.figures.bypassed[lookup.reason] += 1

    def stats(self) -> dict[str, Any]:
        """Of the semantic cache; empty without one."""
        return {} if self._semantic is None else self._semantic.stats()

    def _lookup(self, entry: Entry) -> Lookup:
        return Lookup("exact", entry=entry.id, age_s=max(self._now() - entry.created_s, 0.0))

    def _fresh(self, entry: Entry | None, reuse: Reuse) -> Entry | None:
        """None for one that is older than the request wants."""
        if entry is None or reuse.max_age_s is None:
            return entry
        return entry if self._now() - entry.created_s <= reuse.max_age_s else None
