"""Steps 1 and 7 of the street: was it answered before, is it being answered, and may the answer be remembered?

    memory -> flight { Redis -> semantic -> generate -> remember }

Requests that are the same share a flight, which also looks into Redis once for all of them. What fails in here makes a
cache cold and no request fail.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from engine.protocol import Hello
from gateway.config import ResponseCacheSettings
from gateway.errors import BadRequestError, KvasirError, NotCachedError
from gateway.responses.base import Asked, Figures, Generate, Match, Semantic
from gateway.responses.eligibility import Mode, find_bypass, may_keep
from gateway.responses.entries import Entry
from gateway.responses.exact import ExactCache
from gateway.responses.flights import Flight, Flights
from gateway.responses.key import entry_id, request_key
from gateway.responses.recording import Recording, decode, encode, record
from gateway.responses.repeat import EntryRepeat
from gateway.responses.upstream_answers import RememberedUpstreams, Replay, Upstreams
from gateway.types import (
    CallDelta,
    ChatPrompt,
    Event,
    Finished,
    Hit,
    Lookup,
    Request,
    Scope,
    Started,
    TextDelta,
    TextPrompt,
    Trace,
    Usage,
)


class ResponseCache:
    """See the street's Protocol."""

    def __init__(
        self,
        settings: ResponseCacheSettings,
        modes: Mapping[str, Mode],
        exact: ExactCache,
        semantic: Semantic | None,
        now: Callable[[], float],
    ) -> None:
        """`modes` are those of tenants that have one of their own. `now` is the clock of entries, since 1970."""
        self._settings = settings
        self._modes = modes
        self._exact = exact
        self._semantic = semantic
        self._now = now
        self._flights: Flights[Event] = Flights(settings.max_flight_bytes, _size)
        self._before: list[RememberedUpstreams] = []
        self.figures = Figures()

    @property
    def in_flight(self) -> int:
        """Generations that may be joined, those of upstreams among them."""
        return len(self._flights) + sum(made.in_flight for made in self._before)

    def before(self, upstreams: Upstreams, replays: Mapping[str, Replay]) -> RememberedUpstreams:
        """The same for upstreams, whose answers are bytes; they are kept, and counted, with all others."""
        made = RememberedUpstreams(
            upstreams, replays, self._settings, self._modes, self._exact, self._now, self.figures
        )
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
            "semantic": self._semantic.stats() if self._semantic is not None else {},
            "events": {
                **asdict(exact),
                "evicted": memory.evicted,
                "expired": memory.expired,
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
            scope = request.scope or Scope(tenant=request.tenant.name)
            asked = Asked(request, model, request_key(request, model), owner_of(scope))
            return self._answer(asked, generate)
        self.figures.bypassed[reason] += 1
        self._note(request, Lookup("bypass", reason))
        if request.reuse.only_kept:
            raise _not_cached(reason)
        return generate(request)

    async def _answer(self, asked: Asked, generate: Generate) -> AsyncGenerator[Event, None]:
        request, reuse = asked.request, asked.request.reuse
        entry = self._exact.peek(asked.owner, asked.key) if reuse.read else None
        if entry is not None and self._fresh(entry, request):
            self._repeated(asked)
            given = partial(self._repeated, _without_text(asked))
            request.trace.repeat = EntryRepeat(self._exact, entry, reuse, self._now, self.figures, given)
            for event in self._replay(request, entry, self._found(entry)):
                yield event
            return
        # What is not to be kept is not shared, either.
        with_others = reuse.write and not reuse.only_kept
        answer = self._together(asked, generate) if with_others else self._alone(asked, generate)
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    async def _alone(self, asked: Asked, generate: Generate) -> AsyncGenerator[Event, None]:
        """From the cache, or generated for nobody else, or not at all."""
        request = asked.request
        if (found := await self._find(asked, generate)) is not None:
            for event in self._replay(request, *found):
                yield event
            return
        self._note(request, Lookup("miss", entry=entry_id(asked.key)))
        if request.reuse.only_kept:
            raise _not_cached("there is no answer that will do")
        async with aclosing(generate(request)) as events:
            async for event in events:
                yield event

    async def _together(self, asked: Asked, generate: Generate) -> AsyncGenerator[Event, None]:
        """With all others who ask the same, as long as one of them is there."""
        request = asked.request
        while True:
            key = (asked.key, request.lane, request.tier, request.reuse) if request.reuse.read else None
            flight = self._flights.find(key)
            leads = flight is None
            if flight is None:
                flight = self._flights.launch(key)
                flight.start(lambda flight: self._work(asked, generate, flight), "response flight")
            try:
                async with aclosing(flight.read()) as events:
                    async for event in events:
                        yield self._told(event, asked, flight, leads=leads)
                return
            except KvasirError as error:
                # What was wrong with the first request is wrong with this one; what failed it may not fail this one.
                if leads or flight.begun or isinstance(error, BadRequestError):
                    raise

    async def _work(self, asked: Asked, generate: Generate, flight: Flight[Event]) -> AsyncGenerator[Event, None]:
        """An answer from the cache, or a new one, which is remembered before anybody sees its end."""
        found = await self._find(asked, generate) if asked.request.reuse.read else None
        if found is not None:
            entry, flight.lookup = found
            recording = decode(entry.body, joined=False)
            flight.hit = _hit(flight.lookup, recording)
            for event in recording.events():
                yield event
            return
        kept: Entry | None = None
        async with aclosing(generate(asked.request)) as events:
            async for event in events:
                if type(event) is Finished:
                    kept = self._keep(asked, flight.full, event)
                    flight.land()
                yield event
        if kept is not None:
            await self._exact.share(kept)

    async def _find(self, asked: Asked, generate: Generate) -> tuple[Entry, Lookup] | None:
        """The answer to this request, or to one that means the same."""
        request = asked.request
        if not request.reuse.read:
            return None
        entry = await self._exact.find(asked.owner, asked.key)
        if entry is not None and self._fresh(entry, request):
            self._repeated(asked)
            return entry, self._found(entry)
        if self._semantic is None or (match := await self._semantic.find(asked)) is None:
            return None
        entry = await self._exact.find(asked.owner, match.key)
        if entry is None or not self._fresh(entry, request):
            self._semantic.gone(asked, match)
            return None
        self._compare(asked, match, entry, generate)
        return entry, self._found(entry)._replace(outcome="semantic", similarity=match.similarity)

    def _repeated(self, asked: Asked) -> None:
        if self._semantic is not None:
            self._semantic.repeated(asked)

    def _compare(self, asked: Asked, match: Match, entry: Entry, generate: Generate) -> None:
        assert self._semantic is not None

        def anew() -> AsyncGenerator[Event, None]:
            request, now = asked.request, time.monotonic()
            deadline_s = now + request.deadline_s - request.received_s
            later = replace(request, received_s=now, deadline_s=deadline_s, group=None, lane="batch", trace=Trace())
            return generate(later)

        self._semantic.hit(asked, match, list(decode(entry.body, joined=True).events()), anew)

    def _keep(self, asked: Asked, events: Sequence[Event] | None, finished: Finished) -> Entry | None:
        """What other gateways may have, too."""
        recording = None if events is None else record([*events, finished], _since_ms(asked.request))
        if recording is None:
            self.figures.not_kept["too_large"] += 1
            return None
        if not may_keep(recording, self._settings):
            self.figures.not_kept["truncated"] += 1
            return None
        body = encode(recording)
        if len(body) > self._settings.max_entry_bytes:
            self.figures.not_kept["too_large"] += 1
            return None
        now, settings, asked_s = self._now(), self._settings, asked.request.reuse.ttl_s
        ttl_s = settings.ttl_s if asked_s is None else min(asked_s, settings.max_ttl_s)
        entry = Entry(asked.key, entry_id(asked.key), asked.owner, asked.request.model, now, now + ttl_s, body)
        self._exact.keep(entry)
        if self._semantic is not None:
            self._semantic.remember(asked, [*(events or ()), finished])
        return entry

    def _replay(self, request: Request, entry: Entry, lookup: Lookup) -> Sequence[Event]:
        """All at once: in the pieces that it came in, for who wants pieces."""
        self._note(request, lookup)
        recording, trace = decode(entry.body, joined=not request.stream), request.trace
        trace.first_token_ms = trace.overhead_ms = _since_ms(request)
        trace.prompt_tokens = trace.cached_tokens = trace.told_cached_tokens = recording.prompt_tokens
        trace.completion_tokens, trace.finish = recording.completion_tokens, recording.reason
        trace.hit = _hit(lookup, recording)
        return list(recording.events())

    def _told(self, event: Event, asked: Asked, flight: Flight[Event], *, leads: bool) -> Event:
        """As the request of this reader is to have it. What was generated is accounted for with the one that led."""
        trace, lookup = asked.request.trace, flight.lookup
        if type(event) is Started:
            entry = entry_id(asked.key)
            self._note(asked.request, lookup or Lookup("miss" if leads else "shared", entry=entry))
        if leads and lookup is None:
            return event
        if type(event) is Started:
            tokens = event.usage.prompt_tokens
            trace.first_token_ms = trace.overhead_ms = _since_ms(asked.request)
            trace.prompt_tokens = trace.cached_tokens = trace.told_cached_tokens = tokens
            trace.hit = flight.hit or Hit("exact", tokens, 0, 0.0)
            return replace(event, usage=Usage(tokens, 0, cached_tokens=tokens))
        if type(event) is Finished:
            usage = event.usage
            trace.completion_tokens, trace.finish = usage.completion_tokens, event.reason
            took_ms = (time.monotonic() - flight.begun_s) * 1e3
            trace.hit = flight.hit or Hit("exact", usage.prompt_tokens, usage.completion_tokens, took_ms)
            reused = Usage(usage.prompt_tokens, usage.completion_tokens, cached_tokens=usage.prompt_tokens)
            return replace(event, usage=reused)
        return event

    def _found(self, entry: Entry) -> Lookup:
        return Lookup("exact", entry=entry.id, age_s=max(self._now() - entry.created_s, 0.0))

    def _fresh(self, entry: Entry, request: Request) -> bool:
        most = request.reuse.max_age_s
        return most is None or self._now() - entry.created_s <= most

    def _note(self, request: Request, lookup: Lookup) -> None:
        request.trace.lookup = lookup
        self.figures.outcomes[lookup.outcome] += 1


def owner_of(scope: Scope) -> str:
    """Whose answers those of a scope are, as stores and operators know it. What clients separate theirs with is in the
    key alone."""
    return f"namespace:{scope.namespace}" if scope.namespace else f"tenant:{scope.tenant}"


def _without_text(asked: Asked) -> Asked:
    """For what is kept of it as long as its answer may come again: its text would be as much as the request."""
    prompt = asked.request.prompt
    short = replace(prompt, messages=[]) if isinstance(prompt, ChatPrompt) else TextPrompt("")
    return replace(asked, request=replace(asked.request, prompt=short, trace=Trace()))


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
