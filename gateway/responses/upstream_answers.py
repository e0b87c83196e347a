"""Stands between the passthrough and the upstreams: answers of hosted APIs that are given again, byte for byte where
the client asks in the form that they came in, and through their API's converter where it does not.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from gateway.config import ResponseCacheSettings
from gateway.errors import KvasirError, NotCachedError
from gateway.responses.base import Figures
from gateway.responses.eligibility import Mode
from gateway.responses.entries import Entry
from gateway.responses.exact import ExactCache
from gateway.responses.flights import Flight, Flights
from gateway.responses.key import entry_id
from gateway.responses.repeat import EntryRepeat
from gateway.responses.upstream_key import find_upstream_bypass, include_usage, route_of, streams, upstream_key
from gateway.responses.upstream_recording import Form, Kept, find_kept, write
from gateway.types import Hit, Lookup, UpstreamAnswer, UpstreamRequest

Ending = Literal["stop", "tool_calls", "length"]


class Upstreams(Protocol):
    """Who answers, as the passthrough knows them."""

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool: ...

    def models(self, dialect: str, tenant: str) -> Mapping[str, int]: ...

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]: ...

    def whose(self, model: str, tenant: str) -> str:
        """Which upstreams and models answer; another text when the operator changes it."""
        ...


class Replay(Protocol):
    """How one route writes an answer in its two forms. Pure; None for what cannot be told."""

    def fold(self, stream: bytes) -> dict[str, Any] | None:
        """The whole answer that a complete stream tells."""
        ...

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A stream that tells a whole answer, in pieces."""
        ...

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """A stream in its own pieces, with or without the usage that was asked for."""
        ...

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """How it ended; None for an answer that is not complete, or not one."""
        ...


@dataclass(frozen=True, slots=True)
class _Head:
    """What comes before the pieces of an answer."""

    upstream: str
    status: int
    headers: tuple[tuple[str, str], ...]
    label: str


_Item = _Head | bytes


class RememberedUpstreams:
    """In the place of the upstreams. What fails in here makes a cache cold, and no request fail."""

    def __init__(
        self,
        upstreams: Upstreams,
        replays: Mapping[str, Replay],
        settings: ResponseCacheSettings,
        modes: Mapping[str, Mode],
        exact: ExactCache,
        now: Callable[[], float],
        figures: Figures,
    ) -> None:
        """`replays` by route, as upstream_key.route_of calls it. `figures` are those of the whole response cache."""
        self._upstreams = upstreams
        self._replays = replays
        self._settings = settings
        self._modes = modes
        self._exact = exact
        self._now = now
        self._figures = figures
        self._flights: Flights[_Item] = Flights(settings.max_flight_bytes, _size)

    @property
    def in_flight(self) -> int:
        """Answers that are on their way and may be joined."""
        return len(self._flights)

    @property
    def waiting(self) -> int:
        """Requests that are answered by these."""
        return self._flights.readers

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        """See Upstreams."""
        return self._upstreams.serves(model, tenant, ours=ours)

    def models(self, dialect: str, tenant: str) -> Mapping[str, int]:
        """See Upstreams."""
        return self._upstreams.models(dialect, tenant)

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """See Upstreams. Raises NotCachedError, too."""
        mode = self._modes.get(request.tenant.name, self._settings.mode)
        replay = self._replays.get(route_of(request))
        reason = find_upstream_bypass(request, self._settings, mode, known=replay is not None)
        if reason is not None or replay is None:
            self._figures.bypassed[reason or "route"] += 1
            self._note(request, Lookup("bypass", reason or "route"))
            if request.reuse.only_kept:
                raise NotCachedError(f"The request wants an answer from the cache or none (only-if-cached): {reason}.")
            async with self._upstreams.answer(request) as answer:
                yield answer
            return
        async with aclosing(self._answer(request, replay)) as answers:
            async for answer in answers:
                yield answer

    async def _answer(self, request: UpstreamRequest, replay: Replay) -> AsyncGenerator[UpstreamAnswer, None]:
        """One answer, and then the end."""
        owner, key = f"tenant:{request.tenant.name}", upstream_key(request, self._whose(request))
        reuse, form = request.reuse, Form(streams(request), streams(request) and include_usage(request))
        entry = await self._exact.find(owner, key) if reuse.read else None
        if entry is not None and self._fresh(entry, reuse.max_age_s):
            kept = find_kept(entry.body)
            pieces = None if kept is None else _told(kept, form, replay)
            if kept is not None and pieces is not None:
                yield self._again(request, entry, kept, form, pieces)
                return
        if reuse.only_kept:
            self._note(request, Lookup("miss", entry=entry_id(key)))
            raise NotCachedError("There is no answer in the cache that will do (only-if-cached).")
        if not reuse.write:
            self._note(request, Lookup("miss", entry=entry_id(key)))
            async with self._upstreams.answer(request) as answer:
                yield answer
            return
        async with aclosing(self._together(request, replay, owner, key, form)) as answers:
            async for answer in answers:
                yield answer

    async def _together(
        self, request: UpstreamRequest, replay: Replay, owner: str, key: bytes, form: Form
    ) -> AsyncGenerator[UpstreamAnswer, None]:
        """With all others who ask the same in the same form."""
        while True:
            shared = (key, form, request.reuse) if request.reuse.read else None
            flight = self._flights.find(shared)
            leads = flight is None
            if flight is None:
                flight = self._flights.launch(shared)
                flight.start(lambda flight: self._work(request, replay, owner, key, form, flight), "upstream flight")
            try:
                async with aclosing(flight.read()) as items:
                    head = await anext(items)
                    assert isinstance(head, _Head)
                    shares = not leads and head.status < 400  # an error saves nothing
                    self._note(request, Lookup("shared" if shares else "miss", entry=entry_id(key)))
                    if shares:
                        _account(request, Hit("exact", 0, 0, 0.0))
                    pieces = _pieces(items)
                    async with aclosing(pieces):
                        yield UpstreamAnswer(head.upstream, head.status, head.headers, pieces, head.label)
                if shares and flight.hit is not None:  # known once the answer was read to its end
                    _share(request, flight, flight.hit)
                return
            except KvasirError:
                if leads or flight.begun:
                    raise
            finally:
                if leads and flight.hit is None:
                    flight.unpaid = request.trace

    async def _work(
        self,
        request: UpstreamRequest,
        replay: Replay,
        owner: str,
        key: bytes,
        form: Form,
        flight: Flight[_Item],
    ) -> AsyncGenerator[_Item, None]:
        entry: Entry | None = None
        async with self._upstreams.answer(request) as answer:
            yield _Head(answer.upstream, answer.status, answer.headers, answer.label)
            async with aclosing(answer.pieces) as pieces:
                async for piece in pieces:
                    yield piece
            trace = request.trace
            flight.hit = Hit("exact", trace.prompt_tokens, trace.completion_tokens, _ms(request))
            if answer.status == 200 and (full := flight.full) is not None:
                entry = self._keep(request, answer, full, replay, owner, key, form)
        flight.land()
        if entry is not None:
            await self._exact.share(entry)

    def _keep(
        self,
        request: UpstreamRequest,
        answer: UpstreamAnswer,
        full: Sequence[_Item],
        replay: Replay,
        owner: str,
        key: bytes,
        form: Form,
    ) -> Entry | None:
        pieces = [item for item in full if isinstance(item, bytes)]
        kind = next((value for name, value in answer.headers if name.lower() == "content-type"), "")
        if ("text/event-stream" in kind) != form.stream or any(
            name.lower() == "content-encoding" for name, _ in answer.headers
        ):
            return None
        ending = _ending(b"".join(pieces), form, replay)
        tools = self._settings.tool_calls or bool(request.reuse.asked)  # an upstream may have some of its own
        allowed = {"stop": True, "tool_calls": tools, "length": self._settings.truncated}
        if ending is None or not allowed[ending]:
            self._figures.not_kept["truncated"] += ending == "length"
            return None
        trace, settings = request.trace, self._settings
        tokens = trace.prompt_tokens, trace.completion_tokens
        body = write(Kept(form, kind, answer.label, tokens, _ms(request), pieces))
        if len(body) > settings.max_entry_bytes:
            self._figures.not_kept["too_large"] += 1
            return None
        now, asked_s = self._now(), request.reuse.ttl_s
        ttl_s = settings.ttl_s if asked_s is None else min(asked_s, settings.max_ttl_s)
        entry = Entry(key, entry_id(key), owner, answer.label, now, now + ttl_s, body)
        self._exact.keep(entry)
        return entry

    def _again(
        self, request: UpstreamRequest, entry: Entry, kept: Kept, form: Form, pieces: Sequence[bytes]
    ) -> UpstreamAnswer:
        self._note(request, Lookup("exact", entry=entry.id, age_s=max(self._now() - entry.created_s, 0.0)))
        _account(request, Hit("exact", *kept.tokens, kept.ms))
        request.trace.repeat = EntryRepeat(self._exact, entry, request.reuse, self._now, self._figures)
        kind = kept.type if form.stream == kept.form.stream else _TYPES[form.stream]
        return UpstreamAnswer("", 200, (("Content-Type", kind),), _pieces(_each(pieces)), kept.label)

    def _whose(self, request: UpstreamRequest) -> str:
        return self._upstreams.whose(request.model, request.tenant.name)

    def _fresh(self, entry: Entry, max_age_s: float | None) -> bool:
        return max_age_s is None or self._now() - entry.created_s <= max_age_s

    def _note(self, request: UpstreamRequest, lookup: Lookup) -> None:
        request.trace.lookup = lookup
        self._figures.outcomes[lookup.outcome] += 1


_ODD = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What a converter may raise for an answer that is none of its API's."""

_TYPES = {False: "application/json", True: "text/event-stream; charset=utf-8"}


def _ending(joined: bytes, form: Form, replay: Replay) -> Ending | None:
    """None for what is not complete, or cannot be read."""
    try:
        whole = replay.fold(joined) if form.stream else _object(joined)
        return None if whole is None else replay.ending(whole)
    except _ODD:
        return None


def _told(kept: Kept, form: Form, replay: Replay) -> Sequence[bytes] | None:
    """In the form that is wanted; None where it cannot be."""
    if kept.form == form:
        return kept.pieces
    try:
        return _converted(b"".join(kept.pieces), kept, form, replay)
    except _ODD:
        return None


def _converted(joined: bytes, kept: Kept, form: Form, replay: Replay) -> Sequence[bytes] | None:
    if kept.form.stream and form.stream:
        return replay.restream(joined, usage=form.usage)
    if form.stream:
        whole = _object(joined)
        return None if whole is None else replay.unfold(whole, usage=form.usage)
    folded = replay.fold(joined)
    return None if folded is None else [orjson.dumps(folded)]


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None


def _account(request: UpstreamRequest, hit: Hit) -> None:
    """Nothing was asked of an upstream for it."""
    request.trace.first_token_ms = request.trace.overhead_ms = _ms(request)
    _count(request, hit)


def _count(request: UpstreamRequest, hit: Hit) -> None:
    trace = request.trace
    trace.hit = hit
    trace.prompt_tokens = trace.cached_tokens = trace.told_cached_tokens = hit.prompt_tokens
    trace.completion_tokens = hit.completion_tokens


def _share(request: UpstreamRequest, flight: Flight[_Item], hit: Hit) -> None:
    """The first to read to the end accounts for what was used, where the request that it was asked for has left."""
    paid, flight.unpaid = flight.unpaid, None
    if paid is None:
        _count(request, hit)
        return
    trace = request.trace
    trace.hit, trace.engine, trace.by_upstream = None, paid.engine, paid.by_upstream
    trace.prompt_tokens, trace.completion_tokens = paid.prompt_tokens, paid.completion_tokens
    trace.cached_tokens, trace.told_cached_tokens = paid.cached_tokens, paid.told_cached_tokens
    trace.cache_write_tokens, trace.lease_writes = paid.cache_write_tokens, paid.lease_writes


def _ms(request: UpstreamRequest) -> float:
    return (time.monotonic() - request.received_s) * 1e3


def _size(item: _Item) -> int:
    return 64 + len(item) if isinstance(item, bytes) else 1024


async def _pieces(items: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    async for item in items:
        if isinstance(item, bytes):
            yield item


async def _each(pieces: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece
