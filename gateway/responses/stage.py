"""Steps 1 and 7 of the pipeline: was it answered before, is it being answered, and may the answer be remembered?

    memory -> flight { Redis -> semantic -> generate -> remember }

Requests that are the same share a flight, which also looks into Redis once for all of them. What fails in here makes a
cache cold and no request fail.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, Literal

from engine.protocol import Hello
from gateway.config import ResponseCacheSettings
from gateway.errors import KvasirError, NotCachedError
from gateway.responses.asked import EngineAsked
from gateway.responses.base import Audited, Generate, Semantic
from gateway.responses.eligibility import Mode, find_bypass, may_keep
from gateway.responses.entries import Entry
from gateway.responses.exact import ExactCache
from gateway.responses.flights import Flight, Flights
from gateway.responses.key import entry_id
from gateway.responses.lookups import Lookups
from gateway.responses.recording import Recording, decode, encode, record, text_of
from gateway.responses.upstream_answers import RememberedUpstreams, Upstreams
from gateway.tasks import off_loop
from gateway.types import CallDelta, Event, Finished, Hit, Lookup, Replay, Request, Started, TextDelta, Trace, Usage


class ResponseCache:
    """See the pipeline's Protocol."""

    def __init__(
        self,
        settings: ResponseCacheSettings,
        modes: Mapping[str, Mode],
        exact: ExactCache,
        semantic: Semantic | None,
        now: Callable[[], float],
        audited: Audited | None = None,
    ) -> None:
        """`modes` are those of tenants that have one of their own. `now` is the clock of entries, since 1970."""
        self._settings = settings
        self._modes = modes
        self._exact = exact
        self._lookups = Lookups(settings, exact, semantic, now, audited)
        self._flights: Flights[Event] = Flights(settings.max_flight_bytes, _size)
        self._before: list[RememberedUpstreams] = []
        self.figures = self._lookups.figures

    @property
    def in_flight(self) -> int:
        """Generations that may be joined, those of upstreams among them."""
        return len(self._flights) + sum(made.in_flight for made in self._before)

    def before(self, upstreams: Upstreams, replays: Mapping[str, Replay]) -> RememberedUpstreams:
        """The same for upstreams, whose answers are bytes; they are kept, and counted, with all others."""
        made = RememberedUpstreams(upstreams, replays, self._settings, self._modes, self._lookups)
        self._before.append(made)
        return made

    def stats(self) -> dict[str, Any]:
        """For operators: what is there now, and what happened since the start."""
        exact, memory = self._exact.figures, self._exact.memory_figures
        return {
            "entries": memory.entries,
            "bytes": memory.bytes,
            "in_flight": self.in_flight,
            "waiting": self._flights.readers + sum(made.waiting for made in self._before),
            "outcomes": dict(self.figures.outcomes),
            "bypassed": dict(self.figures.bypassed),
            "semantic": self._lookups.stats(),
            "events": {
                **asdict(exact),
                "evicted": memory.evicted,
                "expired": memory.expired,
                "removed": memory.removed,
                "emptied": memory.emptied,
                "redis_evicted": self._exact.redis_evicted,
                "resent": self.figures.resent,
                **self.figures.not_kept,
            },
        }

    def answer(self, request: Request, model: Hello, generate: Generate) -> AsyncGenerator[Event, None]:
        """The events of its answer, and in its trace what the cache had for it. Raises NotCachedError, and what
        `generate` raises."""
        settings = self._settings
        reason = find_bypass(request, settings, self._modes.get(request.tenant.name, settings.mode))
        if reason is None:
            return self._answer(request, model, generate)
        self._lookups.note(request.trace, Lookup("bypass", reason))
        if request.reuse.only_kept:
            raise _not_cached(reason)
        return generate(request)

    async def _answer(self, request: Request, model: Hello, generate: Generate) -> AsyncGenerator[Event, None]:
        asked, reuse = await off_loop(request.work, lambda: EngineAsked.of(request, model)), request.reuse
        entry = self._lookups.peek(asked)
        if entry is not None:
            lookup, request.trace.repeat = self._lookups.given(asked, entry)
            for event in self._replay(request, entry, lookup):
                yield event
            return
        # What is not to be kept is not shared, either.
        with_others = reuse.write and not reuse.only_kept
        answer = self._together(asked, generate) if with_others else self._alone(asked, generate)
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    async def _alone(self, asked: EngineAsked, generate: Generate) -> AsyncGenerator[Event, None]:
        """From the cache, or generated for nobody else, or not at all."""
        request = asked.request
        if (found := await self._find(asked, generate)) is not None:
            for event in self._replay(request, *found):
                yield event
            return
        self._lookups.note(request.trace, Lookup("miss", entry=entry_id(asked.key)))
        if request.reuse.only_kept:
            raise _not_cached("there is no answer that will do")
        async with aclosing(generate(request)) as events:
            async for event in events:
                yield event

    async def _together(self, asked: EngineAsked, generate: Generate) -> AsyncGenerator[Event, None]:
        """With all others who ask the same, as long as one of them is there."""
        request = asked.request
        while True:
            key = (
                (asked.key, request.lane, request.tier, request.priority, request.reuse) if request.reuse.read else None
            )
            flight = self._flights.find(key)
            if flight is None:
                flight = self._flights.launch(key, request)
                flight.start(lambda flight: self._work(asked, generate, flight), "response flight")
            flight.bill.join(request.trace)
            try:
                async with aclosing(flight.read()) as events:
                    async for event in events:
                        yield self._told(event, asked, flight)
                return
            except KvasirError as error:
                if flight.fails(request, error):
                    raise
            finally:
                if flight.lookup is None:
                    flight.bill.leave(request.trace)

    async def _work(self, asked: EngineAsked, generate: Generate, flight: Flight[Event]) -> AsyncGenerator[Event, None]:
        """An answer from the cache, or a new one, which is remembered before anybody sees its end."""
        found = await self._find(asked, generate)
        if found is not None:
            entry, flight.lookup = found
            recording = decode(entry.body, joined=False)
            flight.hit = _hit(flight.lookup, recording)
            for event in recording.events():
                yield event
            return
        kept: Entry | None = None
        async with aclosing(generate(replace(asked.request, trace=flight.bill.work))) as events:
            async for event in events:
                if type(event) is Finished:
                    kept = self._keep(asked, flight.full, event)
                    flight.land()
                yield event
        if kept is not None:
            await self._lookups.share(kept)

    async def _find(self, asked: EngineAsked, generate: Generate) -> tuple[Entry, Lookup] | None:
        """The answer to this request, or to one that means the same."""
        entry = await self._lookups.find(asked)
        if entry is not None:
            return entry, self._lookups.given(asked, entry)[0]

        async def anew() -> str | None:
            request = _off_the_path(asked.request)
            try:
                async with aclosing(generate(request)) as events:
                    return text_of([event async for event in events])
            finally:
                self._lookups.audited(asked, request.model, request.trace, request.received_s)

        return await self._lookups.find_alike(asked, lambda entry: entry, _text_in, anew)

    def _keep(self, asked: EngineAsked, events: Sequence[Event] | None, finished: Finished) -> Entry | None:
        """What other gateways may have, too."""
        recording = None if events is None else record([*events, finished], _since_ms(asked.request))
        if recording is None:
            self.figures.not_kept["too_large"] += 1
            return None
        if not may_keep(recording, self._settings):
            self.figures.not_kept["truncated"] += 1
            return None
        text = text_of([*(events or ()), finished])
        return self._lookups.keep(asked, asked.model, encode(recording), text)

    def _replay(self, request: Request, entry: Entry, lookup: Lookup) -> Sequence[Event]:
        """All at once: in the pieces that it came in, for who wants pieces."""
        self._lookups.note(request.trace, lookup)
        recording, trace = decode(entry.body, joined=not request.stream), request.trace
        trace.first_token_ms = trace.overhead_ms = _since_ms(request)
        trace.prompt_tokens = trace.cached_tokens = trace.told_cached_tokens = recording.prompt_tokens
        trace.completion_tokens, trace.finish = recording.completion_tokens, recording.reason
        trace.hit = _hit(lookup, recording)
        return list(recording.events())

    def _told(self, event: Event, asked: EngineAsked, flight: Flight[Event]) -> Event:
        """As the request of this reader is to have it. What was generated is accounted for with the one that leads."""
        trace, lookup, bill = asked.request.trace, flight.lookup, flight.bill
        if type(event) is Started:
            leads = lookup is None and bill.leads(trace)
            outcome: Literal["miss", "shared"] = "miss" if leads else "shared"
            self._lookups.note(trace, lookup or Lookup(outcome, entry=entry_id(asked.key)))
            if leads:
                bill.show(trace)
                return event
            tokens = event.usage.prompt_tokens
            trace.first_token_ms = trace.overhead_ms = _since_ms(asked.request)
            trace.prompt_tokens = trace.cached_tokens = trace.told_cached_tokens = tokens
            trace.hit = flight.hit or Hit("exact", tokens, 0, 0.0)
            return replace(event, usage=Usage(tokens, 0, cached_tokens=tokens))
        if type(event) is Finished:
            leads = lookup is None and bill.leads(trace)
            if lookup is None:
                bill.leave(trace)
            if leads:
                return event
            usage = event.usage
            trace.completion_tokens, trace.finish = usage.completion_tokens, event.reason
            saved, took_ms = usage.completion_tokens - trace.paid_tokens, (time.monotonic() - flight.begun_s) * 1e3
            trace.hit = flight.hit or Hit("exact", usage.prompt_tokens, saved, took_ms)
            reused = Usage(usage.prompt_tokens, usage.completion_tokens, cached_tokens=usage.prompt_tokens)
            return replace(event, usage=reused)
        return event


def _off_the_path(request: Request) -> Request:
    """The same for nobody who waits: in what the online lane leaves."""
    now = time.monotonic()
    deadline_s = now + request.deadline_s - request.received_s
    return replace(request, received_s=now, deadline_s=deadline_s, group=None, lane="batch", trace=Trace())


def _text_in(entry: Entry) -> str | None:
    return text_of(list(decode(entry.body, joined=True).events()))


def _hit(lookup: Lookup, recording: Recording) -> Hit:
    kind: Literal["exact", "semantic"] = "semantic" if lookup.outcome == "semantic" else "exact"
    return Hit(kind, recording.prompt_tokens, recording.completion_tokens, recording.generation_ms)


def _since_ms(request: Request) -> float:
    return (time.monotonic() - request.received_s) * 1e3


def _not_cached(why: str) -> NotCachedError:
    return NotCachedError(f"The request wants an answer from the cache or none (only-if-cached): {why}.")


def _size(event: Event) -> int:
    """About what an event takes in memory."""
    if type(event) is TextDelta:
        return 160 + 4 * len(event.text) + sum(400 * (1 + len(token.top)) for token in event.scored)
    if type(event) is CallDelta:
        return 200 + 4 * len(event.arguments)
    if type(event) is Started:
        return 400 + sum(400 * (1 + len(token.top)) for token in event.scored)
    return 200
