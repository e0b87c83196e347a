"""Stands between the passthrough and the upstreams: answers of hosted APIs that are given again, byte for byte where
the client asks in the form that they came in, and through their API's converter where it does not.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from gateway.config import ResponseCacheSettings
from gateway.errors import KvasirError, NotCachedError, OverloadedError
from gateway.responses.eligibility import Mode
from gateway.responses.entries import Entry
from gateway.responses.flights import Flight, Flights
from gateway.responses.key import entry_id
from gateway.responses.lookups import Lookups
from gateway.responses.upstream_again import Again, Head, content_type, find_again, find_text, is_odd
from gateway.responses.upstream_asked import UpstreamAsked
from gateway.responses.upstream_forms import MEDIA, read, streams_for, told
from gateway.responses.upstream_key import find_upstream_bypass, route_of
from gateway.responses.upstream_recording import Form, Kept, write
from gateway.responses.upstream_traces import account_given_up, account_hit, account_shared, took_ms
from gateway.tasks import off_loop
from gateway.types import Hit, Lookup, Replay, Trace, UpstreamAnswer, UpstreamRequest

ONCE: Final = frozenset(("idempotency-key", "x-client-request-id"))
"""Headers of one request, which another one of ours must not be taken for."""


class Upstreams(Protocol):
    """Who answers, as the passthrough knows them."""

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool: ...

    def models(self, dialect: str, tenant: str) -> Mapping[str, int]: ...

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]: ...

    def whose(self, model: str, tenant: str) -> str:
        """Which upstreams and models answer; another text when the operator changes it."""
        ...


_Item = Head | bytes


class RememberedUpstreams:
    """In the place of the upstreams. What fails in here makes a cache cold, and no request fail."""

    def __init__(
        self,
        upstreams: Upstreams,
        replays: Mapping[str, Replay],
        settings: ResponseCacheSettings,
        modes: Mapping[str, Mode],
        lookups: Lookups,
    ) -> None:
        """`replays` by route, as upstream_key.route_of calls it. `lookups` are those of the whole response cache."""
        self._upstreams = upstreams
        self._replays = replays
        self._settings = settings
        self._modes = modes
        self._lookups = lookups
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
        find = partial(find_upstream_bypass, request, self._settings, mode, known=replay is not None)
        reason = await off_loop(request.work, find)
        if reason is not None or replay is None:
            self._note(request, Lookup("bypass", reason or "route"))
            if request.reuse.only_kept:
                raise NotCachedError(f"The request wants an answer from the cache or none (only-if-cached): {reason}.")
            async with self._upstreams.answer(request) as answer:
                yield answer
            return
        whose = self._upstreams.whose(request.model, request.tenant.name)
        asked = await off_loop(request.work, lambda: UpstreamAsked.of(request, replay, whose))
        async with aclosing(self._answer(asked)) as answers:
            async for answer in answers:
                yield answer

    async def _answer(self, asked: UpstreamAsked) -> AsyncGenerator[UpstreamAnswer, None]:
        """One answer, and then the end."""
        request, reuse = asked.request, asked.request.reuse
        entry = await self._lookups.find(asked)
        again = None if entry is None else find_again(entry, asked)
        if entry is not None and again is not None:
            lookup, request.trace.repeat = self._lookups.given(asked, entry)
            yield self._given(request, again, lookup)
            return
        with_others = reuse.write and not reuse.only_kept
        async with aclosing(self._together(asked) if with_others else self._alone(asked)) as answers:
            async for answer in answers:
                yield answer

    async def _alone(self, asked: UpstreamAsked) -> AsyncGenerator[UpstreamAnswer, None]:
        """What means the same, or an answer for nobody else, or none at all."""
        request = asked.request
        if (alike := await self._find_alike(asked)) is not None:
            yield self._given(request, *alike)
            return
        self._note(request, Lookup("miss", entry=entry_id(asked.key)))
        if request.reuse.only_kept:
            raise NotCachedError("There is no answer in the cache that will do (only-if-cached).")
        async with self._upstreams.answer(request) as answer:
            yield answer

    async def _together(self, asked: UpstreamAsked) -> AsyncGenerator[UpstreamAnswer, None]:
        """With all others who ask the same, as far as one answer does for both."""
        request = asked.request
        if (answer := await self._from_stream(asked)) is not None:
            yield answer
            return
        while True:
            shared = _shared(asked, asked.form)
            flight = self._flights.find(shared)
            leads = flight is None
            shares = False
            if flight is None:
                flight = self._flights.launch(shared, request)
                flight.start(lambda flight: self._work(asked, flight), "upstream flight")
            try:
                async with aclosing(flight.read()) as items:
                    head = await anext(items)
                    assert isinstance(head, Head)
                    shares = not leads and head.status < 400  # an error saves nothing
                    self._begin(asked, flight, shares=shares)
                    pieces = _pieces(items)
                    async with aclosing(pieces):
                        yield UpstreamAnswer(
                            head.upstream, head.status, head.headers, pieces, head.label, head.retry_after_s
                        )
                if shares and flight.lookup is None and flight.hit is not None:  # known once it was read to its end
                    account_shared(request, flight, flight.hit)
                return
            except KvasirError as error:
                if flight.fails(request, error):
                    raise
            finally:
                if leads and flight.hit is None:
                    flight.unpaid = request.trace
                if await flight.given_up() and shares:
                    account_given_up(request, flight)

    async def _from_stream(self, asked: UpstreamAsked) -> UpstreamAnswer | None:
        """The whole answer, made of a stream of the same when that is complete. None where nobody has asked for one, or
        where nothing can be made of it."""
        for form in streams_for(asked.form, asked.replay):
            if (flight := self._flights.find(_shared(asked, form))) is not None:
                return await self._folded(asked, flight, form)
        return None

    async def _folded(self, asked: UpstreamAsked, flight: Flight[_Item], form: Form) -> UpstreamAnswer | None:
        """What the flight brings in this form, at its end, in the form that was asked for."""
        try:
            async with aclosing(flight.read()) as items:
                head, *rest = await _all(items, self._settings.max_flight_bytes)
        except KvasirError as error:
            if not flight.begun and flight.fails(asked.request, error):
                raise
            return None  # nothing of the stream was passed on: the request may still be sent by itself
        finally:
            if await flight.given_up():
                account_given_up(asked.request, flight)
        assert isinstance(head, Head)
        pieces, headers, good = [item for item in rest if isinstance(item, bytes)], head.headers, head.status < 400
        if good:
            whole = told(pieces, form, asked.form, asked.replay)
            if whole is None:
                return None
            pieces, headers = [*whole], (("Content-Type", MEDIA[asked.form.stream]),)
        self._begin(asked, flight, shares=good)
        if good and flight.lookup is None and flight.hit is not None:
            account_shared(asked.request, flight, flight.hit)
        return UpstreamAnswer(head.upstream, head.status, headers, _each(pieces), head.label, head.retry_after_s)

    def _begin(self, asked: UpstreamAsked, flight: Flight[_Item], *, shares: bool) -> None:
        """What a reader is told of an answer whose head is there."""
        request, lookup, hit = asked.request, flight.lookup, flight.hit
        if lookup is not None and hit is not None:
            self._note(request, lookup)
            account_hit(request, hit)
            return
        self._note(request, Lookup("shared" if shares else "miss", entry=entry_id(asked.key)))
        if shares:
            account_hit(request, Hit("exact", 0, 0, 0.0))

    async def _work(self, asked: UpstreamAsked, flight: Flight[_Item]) -> AsyncGenerator[_Item, None]:
        """What means the same, or an answer of the upstreams."""
        alike = await self._find_alike(asked)
        if alike is not None:
            again, flight.lookup = alike
            flight.hit = again.hit(flight.lookup)
            yield again.head
            for piece in again.pieces:
                yield piece
            return
        request, entry = asked.request, None
        async with self._upstreams.answer(request) as answer:
            yield Head(answer.upstream, answer.status, answer.headers, answer.label, answer.retry_after_s)
            async with aclosing(answer.pieces) as pieces:
                async for piece in pieces:
                    yield piece
            trace = request.trace
            flight.hit = Hit("exact", trace.prompt_tokens, trace.completion_tokens, took_ms(request))
            if answer.status == 200 and (full := flight.full) is not None:
                entry = self._keep(asked, answer, [item for item in full if isinstance(item, bytes)])
        flight.land()
        if entry is not None:
            await self._lookups.share(entry)

    async def _find_alike(self, asked: UpstreamAsked) -> tuple[Again, Lookup] | None:
        """The answer to another request that means the same."""

        async def anew() -> str | None:
            return await self._say_anew(asked)

        return await self._lookups.find_alike(
            asked, lambda entry: find_again(entry, asked), lambda again: find_text(again.pieces, asked), anew
        )

    async def _say_anew(self, asked: UpstreamAsked) -> str | None:
        """The text of an answer that nobody waits for."""
        request, model = _off_the_path(asked.request), asked.model
        try:
            async with self._upstreams.answer(request) as answer:
                model = answer.label
                if answer.status != 200 or is_odd(answer, asked):
                    return None
                pieces, size = [], 0
                async for piece in answer.pieces:
                    pieces.append(piece)
                    size += len(piece)
                    if size > self._settings.max_entry_bytes:
                        return None
        finally:
            self._lookups.audited(asked, model, request.trace, request.received_s)
        return find_text(pieces, asked)

    def _keep(self, asked: UpstreamAsked, answer: UpstreamAnswer, pieces: Sequence[bytes]) -> Entry | None:
        if is_odd(answer, asked):
            return None
        said = read(b"".join(pieces), asked.form, asked.replay)
        tools = self._settings.tool_calls or bool(asked.reuse.asked)  # an upstream may have some of its own
        allowed = {"stop": True, "tool_calls": tools, "length": self._settings.truncated}
        if said is None or not allowed[said.ending]:
            self._lookups.figures.not_kept["truncated"] += said is not None and said.ending == "length"
            return None
        trace = asked.request.trace
        tokens = trace.prompt_tokens, trace.completion_tokens
        body = write(Kept(asked.form, content_type(answer), answer.label, tokens, took_ms(asked.request), pieces))
        return self._lookups.keep(asked, answer.label, body, said.text)

    def _given(self, request: UpstreamRequest, again: Again, lookup: Lookup) -> UpstreamAnswer:
        self._note(request, lookup)
        account_hit(request, again.hit(lookup))
        head = again.head
        return UpstreamAnswer(head.upstream, head.status, head.headers, _each(again.pieces), head.label)

    def _note(self, request: UpstreamRequest, lookup: Lookup) -> None:
        self._lookups.note(request.trace, lookup)


def _shared(asked: UpstreamAsked, form: Form) -> Hashable | None:
    """What requests have in common that share an answer in this form; None for those that share none. Nobody of the
    online lane waits for what has to wait in the other, and nobody for what its upstream was told to let wait."""
    request = asked.request
    return (asked.key, form, asked.reuse, request.lane, asked.tiers) if asked.reuse.read else None


def _off_the_path(request: UpstreamRequest) -> UpstreamRequest:
    """The same for nobody who waits: in what the online lane leaves."""
    now = time.monotonic()
    deadline_s = now + request.deadline_s - request.received_s
    headers = tuple(item for item in request.headers if item[0] not in ONCE)
    return replace(request, received_s=now, deadline_s=deadline_s, headers=headers, lane="batch", trace=Trace())


def _size(item: _Item) -> int:
    return 64 + len(item) if isinstance(item, bytes) else 1024


async def _all(items: AsyncGenerator[_Item, None], max_bytes: int) -> list[_Item]:
    """Raises OverloadedError for more than can be held for one request."""
    every, num_bytes = list[_Item](), 0
    async for item in items:
        every.append(item)
        if (num_bytes := num_bytes + _size(item)) > max_bytes:
            raise OverloadedError("The answer is too long to be made of a stream.")
    return every


async def _pieces(items: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    async for item in items:
        if isinstance(item, bytes):
            yield item


async def _each(pieces: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece
