"""Steps 1 and 7 of the pipeline: was the request answered before, is it being answered, may the answer be remembered?

    memory -> flight { Redis -> semantic -> generate -> remember }

For our own engines and for upstreams, whose answers are Queries (base.py). Requests that are the same share a flight,
which also looks into Redis once for all of them. What fails in here makes a cache cold and no request fail.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.protocol import Hello
from gateway.config import ResponseCacheSettings
from gateway.errors import KvasirError, NotCachedError
from gateway.responses.base import END, Audited, Item, Mode, Query, Recorded, Stored
from gateway.responses.engine_answers import EngineQuery, Generate, find_bypass
from gateway.responses.entries import Entry, entry_id
from gateway.responses.flights import Flight
from gateway.responses.stored_answers import StoredAnswers
from gateway.tasks import off_loop
from gateway.types import (
    CallDelta,
    Event,
    Finished,
    Hit,
    Lookup,
    Repeat,
    Request,
    Reuse,
    Started,
    TextDelta,
    ThinkingDelta,
    Trace,
    UpstreamAnswer,
)

if TYPE_CHECKING:
    from gateway.responses.semantic.cache import SemanticCache


@dataclass(slots=True)
class Figures:
    """Since the start."""

    outcomes: Counter[str] = field(default_factory=Counter)  # requests, by Lookup.outcome
    bypassed: Counter[str] = field(default_factory=Counter)  # requests, by reason
    resent: int = 0  # of the exact ones, to requests whose bytes were known, without parsing
    not_kept: Counter[str] = field(default_factory=lambda: Counter(too_large=0, truncated=0))  # answers, by reason


class ResponseCache:
    """See the pipeline's Protocol."""

    def __init__(
        self,
        settings: ResponseCacheSettings,
        modes: Mapping[str, Mode],
        answers: StoredAnswers,
        semantic: SemanticCache | None,
        now: Callable[[], float],
        audited: Audited | None = None,
    ) -> None:
        """`modes` are those of tenants that have one of their own. `now` is the clock of entries, since 1970."""
        self.settings = settings
        self.modes = modes
        self._answers = answers
        self._semantic = semantic
        self._now = now
        self._audited = audited
        self._flights: dict[Hashable, Flight[Any]] = {}  # that can be joined
        self.figures = Figures()

    def mode(self, tenant: str) -> Mode:
        return self.modes.get(tenant, self.settings.mode)

    def stats(self) -> dict[str, Any]:
        """For operators: what is there now, and what happened since the start. `in_flight` are generations that may be
        joined, `waiting` the requests that read them."""
        memory = self._answers.memory.figures
        return {
            "entries": memory.entries,
            "bytes": memory.bytes,
            "in_flight": len(self._flights),
            "waiting": sum(flight.readers for flight in self._flights.values()),
            "outcomes": dict(self.figures.outcomes),
            "bypassed": dict(self.figures.bypassed),
            "semantic": {} if self._semantic is None else self._semantic.stats(),
            "events": {**self._answers.events(), "resent": self.figures.resent, **self.figures.not_kept},
        }

    def answer(self, request: Request, model: Hello, generate: Generate) -> AsyncGenerator[Event, None]:
        """The events of its answer, and in its trace what the cache had for it. Raises NotCachedError, and what
        `generate` raises."""
        reason = find_bypass(request, self.settings, self.mode(request.tenant.name))
        if reason is None:
            return self.answer_query(request.work, lambda: EngineQuery.of(request, model, generate, self.settings))
        self.bypass(request.trace, request.reuse, reason)
        return generate(request)

    def bypass(self, trace: Trace, reuse: Reuse, reason: str) -> None:
        """The cache has no part in a request. Raises NotCachedError where that is all it wants."""
        unwanted = reuse.asked is False or not (reuse.read or reuse.write)
        self._note(trace, Lookup("bypass", reason, unwanted=unwanted))
        if reuse.only_cached:
            raise _not_cached(reason)

    async def answer_query(self, work: int, make: Callable[[], Query[Item]]) -> AsyncGenerator[Item, None]:
        """The items of the answer to a query, without END. To `make` the query is so much work."""
        query = await off_loop(work, make)
        request = query.request
        # 1. In memory.
        if (entry := self._peek(query)) is not None and (stored := query.read(entry.body, shared=False)) is not None:
            lookup, request.trace.repeat = self._found(query, entry)
            self._account(query, stored.hit(lookup), lookup, stored)
            for item in stored.items:
                yield item
            return
        # 2. With all others that sent the same, as long as one of them is there.
        while True:
            flight = self._join(query)
            first = True
            try:
                async with aclosing(flight.read()) as items:
                    async for item in items:
                        if first:
                            item, first = self._begin(query, flight, item), False
                        elif type(item) is Finished or item is END:
                            item = self._end(query, flight, item)
                        if item is not END:
                            yield item
                return
            except KvasirError as error:
                if flight.fails(request, error):
                    raise
            finally:
                await flight.leave(request.trace)

    def _join(self, query: Query[Item]) -> Flight[Item]:
        """The flight of a request like this one, or its own."""
        key = query.flight_key
        flight = self._flights.get(key)
        if flight is None:
            max_bytes, at_end = self.settings.max_flight_bytes, query.metered_at_end
            flight = Flight(self._flights, key, query.request, max_bytes=max_bytes, size=_size, metered_at_end=at_end)
            flight.start(lambda flight: self._work(query, flight))
        flight.bill.join(query.request.trace)
        return flight

    async def _work(self, query: Query[Item], flight: Flight[Item]) -> None:
        """An answer from the cache, or a new one, which is remembered before any request sees its end."""
        flight.found = await self._find(query, shared=flight.shared)
        if flight.found is not None:
            for item in flight.found[0].items:
                await flight.add(item)
            return
        if query.reuse.only_cached:
            self._note(query.request.trace, Lookup("miss", entry=entry_id(query.key)))
            raise _not_cached("there is no answer that will do")
        entry: Entry | None = None
        async with aclosing(query.generate(flight.bill.work)) as items:
            async for item in items:
                if type(item) is Finished or item is END:
                    entry = self._keep(query, flight.full, item, flight.bill.work) if query.reuse.write else None
                    flight.land()
                await flight.add(item)
        if entry is not None:
            await self._answers.share(entry)

    def _begin(self, query: Query[Item], flight: Flight[Item], item: Item) -> Item:
        """The first item, as the request of this reader gets it. What was generated is accounted for with the one that
        leads."""
        trace, bill = query.request.trace, flight.bill
        if flight.found is not None:
            stored, lookup = flight.found
            self._account(query, stored.hit(lookup), lookup, stored)
            return item
        leads = bill.leads(trace)
        shares = not leads and query.succeeded(item)  # an error saves nothing
        lookup = Lookup("shared" if shares else "miss", entry=entry_id(query.key))
        if not shares:
            self._note(trace, lookup)
            if leads:
                bill.show(trace)
            return item
        self._account(query, Hit("exact", bill.work.prompt_tokens, 0, 0.0), lookup)
        return query.reused(item)

    def _end(self, query: Query[Item], flight: Flight[Item], item: Item) -> Item:
        """The last item, as the request gets it. What was computed for another request is known now."""
        trace, bill = query.request.trace, flight.bill
        if flight.found is not None:
            return item
        bill.leave(trace)
        if trace.hit is None:  # all of it was computed for this one
            return item
        work = bill.work
        trace.prompt_tokens = trace.cached_tokens = trace.reported_cached_tokens = work.prompt_tokens
        trace.completion_tokens = work.completion_tokens
        trace.finish = item.reason if isinstance(item, Finished) else None
        saved, took_ms = work.completion_tokens - trace.paid_tokens, (time.monotonic() - flight.begun_s) * 1e3
        trace.hit = Hit("exact", work.prompt_tokens, saved, took_ms)
        return query.reused(item)

    # -- the answers that there are -----------------------------------------------------------------------------------

    def _peek(self, query: Query[Any]) -> Entry | None:
        """From this gateway's memory."""
        return self._fresh(self._answers.peek(query.owner, query.key), query.reuse) if query.reuse.read else None

    async def _find(self, query: Query[Item], *, shared: bool) -> tuple[Stored[Item], Lookup] | None:
        """The answer to this request, from memory or Redis, or to one that means the same."""
        if not query.reuse.read:
            return None
        entry = self._fresh(await self._answers.find(query.owner, query.key), query.reuse)
        if entry is not None and (stored := query.read(entry.body, shared=shared)) is not None:
            return stored, self._found(query, entry)[0]
        semantic = self._semantic
        if semantic is None or (match := await semantic.find(query)) is None:
            return None
        entry = await self._answers.find(query.owner, match.key)
        if entry is None:
            semantic.gone(query, match)
        stored = None if (entry := self._fresh(entry, query.reuse)) is None else query.read(entry.body, shared=shared)
        if entry is None or stored is None:
            return None
        semantic.hit(query, partial(self._regenerate, query))
        return stored, self._lookup(entry)._replace(outcome="semantic", similarity=match.similarity)

    async def _regenerate(self, query: Query[Item]) -> str | None:
        """The text of a new answer that no request waits for. It has no record that would account for it."""
        other, trace = query.off_path(), Trace()
        items, num_bytes = list[Item](), 0
        try:
            async with aclosing(other.generate(trace)) as generated:
                async for item in generated:
                    items.append(item)
                    num_bytes += len(item) if isinstance(item, bytes) else 0  # tokens of an engine have their limit
                    if num_bytes > self.settings.max_entry_bytes:
                        return None
            return other.text(items)
        finally:
            if self._audited is not None:
                self._audited(query.tenant, other.label(items), trace, other.age_ms)

    def _found(self, query: Query[Any], entry: Entry) -> tuple[Lookup, Repeat]:
        """What is reported of an answer that was found, and what gives it again to the very same request. The latter
        holds nothing of the request's text."""
        count = None if self._semantic is None else self._semantic.repeats(query)
        if count is not None:
            count()
        max_age_s = query.reuse.max_age_s

        def again() -> Lookup | None:
            lookup = self._lookup(entry)
            if (max_age_s is not None and lookup.age_s > max_age_s) or not self._answers.has(entry):
                return None
            self.figures.outcomes["exact"] += 1
            self.figures.resent += 1
            if count is not None:
                count()
            return lookup

        return self._lookup(entry), Repeat(entry.num_bytes, again)

    def _lookup(self, entry: Entry) -> Lookup:
        return Lookup("exact", entry=entry.id, age_s=max(self._now() - entry.created_s, 0.0))

    def _fresh(self, entry: Entry | None, reuse: Reuse) -> Entry | None:
        """None for one that is older than the request wants."""
        if entry is None or reuse.max_age_s is None:
            return entry
        return entry if self._now() - entry.created_s <= reuse.max_age_s else None

    def _keep(self, query: Query[Item], items: Sequence[Item] | None, last: Item, trace: Trace) -> Entry | None:
        """In memory; what is returned other gateways may have, too."""
        settings, reuse = self.settings, query.reuse
        recorded = "too_large" if items is None else query.record([*items, last], trace)
        if isinstance(recorded, Recorded) and len(recorded.body) > settings.max_entry_bytes:
            recorded = "too_large"
        if not isinstance(recorded, Recorded):
            if recorded != "other":
                self.figures.not_kept[recorded] += 1
            return None
        now = self._now()
        ttl_s = settings.ttl_s if reuse.ttl_s is None else min(reuse.ttl_s, settings.max_ttl_s)
        name = entry_id(query.key)
        entry = Entry(query.key, name, query.owner, recorded.model, now, now + ttl_s, recorded.body)
        self._answers.keep(entry)
        if self._semantic is not None:
            self._semantic.remember(query, recorded.text)
        return entry

    def _account(self, query: Query[Any], hit: Hit, lookup: Lookup, stored: Stored[Any] | None = None) -> None:
        """Nothing was computed for the request."""
        trace = query.request.trace
        self._note(trace, lookup)
        trace.hit = hit
        trace.first_token_ms = trace.overhead_ms = query.age_ms
        trace.prompt_tokens = trace.cached_tokens = trace.reported_cached_tokens = hit.prompt_tokens
        trace.completion_tokens = hit.completion_tokens
        trace.finish = None if stored is None else stored.finish

    def _note(self, trace: Trace, lookup: Lookup) -> None:
        trace.lookup = lookup
        self.figures.outcomes[lookup.outcome] += 1
        if lookup.outcome == "bypass":
            self.figures.bypassed[lookup.reason] += 1


def _not_cached(why: str) -> NotCachedError:
    return NotCachedError(f"The request wants an answer from the cache or none (only-if-cached): {why}.")


def _size(item: object) -> int:
    """About what an item takes in memory."""
    if type(item) is TextDelta:
        return 160 + 4 * len(item.text) + sum(400 * (1 + len(token.top)) for token in item.scored)
    if type(item) is bytes:
        return 64 + len(item)
    if type(item) is CallDelta:
        return 200 + 4 * len(item.arguments)
    if type(item) is ThinkingDelta:
        return 200 + 4 * len(item.text) + len(item.signature)
    if type(item) is Started:
        return 400 + sum(400 * (1 + len(token.top)) for token in item.scored)
    return 1024 if isinstance(item, UpstreamAnswer) else 200
