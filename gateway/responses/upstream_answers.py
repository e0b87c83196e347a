"""Upstreams as a backend of the response cache: answers of hosted APIs that are given again, byte for byte where the
client wants the form that they came in, and through their API's converter where it does not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import orjson

from gateway.config import ResponseCacheSettings
from gateway.responses.base import END, Query, Recorded, Refused, Situation, Stored, owner_of
from gateway.responses.recording import Form, UpstreamRecording, decode_upstream, encode_upstream
from gateway.responses.upstream_key import (
    TIERS,
    find_unfit,
    find_upstream_bypass,
    find_upstream_refusal,
    find_upstream_situation,
    include_usage,
    route_of,
    streams,
    upstream_key,
)
from gateway.tasks import off_loop
from gateway.types import Ending, Replay, Trace, UpstreamAnswer, UpstreamRequest

if TYPE_CHECKING:
    from gateway.responses.stage import ResponseCache

ONCE: Final = frozenset(("idempotency-key", "x-client-request-id"))
"""Headers of one request, which another one of ours must not be taken for."""

MEDIA: Final = {False: "application/json", True: "text/event-stream; charset=utf-8"}
"""Content-Type of what was converted, by whether it streams."""

_ODD = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What a converter may raise for an answer that is none of its API's."""


class Upstreams(Protocol):
    """Sends requests to upstreams; see the passthrough's Protocol."""

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool: ...

    def speaks(self, model: str, tenant: str, dialect: str, path: str) -> bool: ...

    def models(self, tenant: str) -> Mapping[str, int]: ...

    def reachable(self, model: str, tenant: str) -> Mapping[str, bool]: ...

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]: ...

    def route_text(self, model: str, tenant: str) -> str:
        """Upstreams and models that answer; another text when the operator changes them."""
        ...


_Item = UpstreamAnswer | bytes
"""The head of an answer, without what it has to read, or bytes."""


@dataclass(slots=True, eq=False)
class UpstreamQuery(Query[_Item]):
    """See Query.

    replay      converts answers of its route
    route_text  which upstreams and models answer it
    """

    request: UpstreamRequest
    upstreams: Upstreams
    replay: Replay
    settings: ResponseCacheSettings
    route_text: str

    metered_at_end = True

    @classmethod
    def of(
        cls,
        request: UpstreamRequest,
        upstreams: Upstreams,
        replay: Replay,
        settings: ResponseCacheSettings,
        route_text: str,
    ) -> UpstreamQuery:
        key = upstream_key(request, route_text)
        return cls(request, key, owner_of(request.owner), upstreams, replay, settings, route_text)

    @property
    def form(self) -> Form:
        """In which the client wants the answer."""
        is_stream = streams(self.request)
        return Form(is_stream, is_stream and (not self.replay.usage_on_request or include_usage(self.request)))

    def _wants(self) -> tuple[Hashable, ...]:
        return self.form, orjson.dumps([self.request.values.get(name) for name in TIERS])

    async def generate(self, trace: Trace) -> AsyncGenerator[_Item, None]:
        async with self.upstreams.answer(replace(self.request, trace=trace)) as answer:
            yield answer
            async with aclosing(answer.chunks) as chunks:
                async for chunk in chunks:
                    yield chunk
        yield END

    def _off_path(self) -> dict[str, Any]:
        return {"headers": tuple(item for item in self.request.headers if item[0] not in ONCE)}

    def read(self, body: bytes, *, shared: bool) -> Stored[_Item] | None:
        recording = decode_upstream(body)
        chunks = None if recording is None else self._converted(recording.chunks, recording.form)
        if recording is None or chunks is None:
            return None
        media = recording.type if self.form.stream == recording.form.stream else MEDIA[self.form.stream]
        head = UpstreamAnswer("", 200, (("Content-Type", media),), _none(), recording.label)
        return Stored([head, *chunks], *recording.tokens, recording.ms)

    def record(self, items: Sequence[_Item], trace: Trace) -> Recorded | Refused:
        answer, chunks = _head(items), _chunks(items)
        ending, text = self._read(items)
        tools = self.settings.tool_calls or bool(self.reuse.asked)  # an upstream may have some of its own
        if ending is None or (ending == "tool_calls" and not tools):
            return "other"
        if ending == "length" and not self.settings.truncated:
            return "truncated"
        tokens = trace.prompt_tokens, trace.completion_tokens
        recording = UpstreamRecording(self.form, _content_type(answer), answer.label, tokens, self.age_ms, chunks)
        return Recorded(answer.label, encode_upstream(recording), text)

    def text(self, items: Sequence[_Item]) -> str | None:
        return self._read(items)[1]

    def label(self, items: Sequence[_Item]) -> str:
        return _head(items).label if items else self.model

    def succeeded(self, first: _Item) -> bool:
        return isinstance(first, UpstreamAnswer) and first.status < 400

    def find_unfit(self, max_temperature: float) -> str | None:
        return find_unfit(self.request, max_temperature)

    def find_situation(self) -> Situation | None:
        """None as well for a chat in which there is anything but text, and for a large one."""
        return find_upstream_situation(self.request, self.route_text)

    def _read(self, items: Sequence[_Item]) -> tuple[Ending | None, str | None]:
        """How an answer ended, and the text of one that ended by itself and is nothing else. None: it is not complete,
        or cannot be read."""
        answer, joined = _head(items), b"".join(_chunks(items))
        is_stream = "text/event-stream" in _content_type(answer)
        if answer.status != 200 or _is_encoded(answer) or is_stream != self.form.stream:
            return None, None
        replay = self.replay
        try:
            whole = replay.fold(joined, usage=False) if self.form.stream else _object(joined)
            ending = None if whole is None else replay.ending(whole)
        except _ODD:
            return None, None
        if whole is None or ending != "stop":
            return ending, None
        try:
            return ending, replay.text(whole)
        except _ODD:  # several answers, or something else than a text
            return ending, None

    def _converted(self, chunks: Sequence[bytes], form: Form) -> Sequence[bytes] | None:
        """A complete answer of one form in the one that is wanted; None where that cannot be."""
        wanted, replay = self.form, self.replay
        if form == wanted:
            return chunks
        joined = b"".join(chunks)
        try:
            if form.stream and wanted.stream:
                return replay.restream(joined, usage=wanted.usage)
            whole = replay.fold(joined) if form.stream else _object(joined)
            if whole is None:
                return None
            return replay.unfold(whole, usage=wanted.usage) if wanted.stream else [orjson.dumps(whole)]
        except _ODD:
            return None


class RememberedUpstreams:
    """The upstreams, with the response cache before them. See Upstreams."""

    def __init__(self, upstreams: Upstreams, replays: Mapping[str, Replay], cache: ResponseCache) -> None:
        """`replays` by route, as upstream_key.route_of names it."""
        self._upstreams = upstreams
        self._replays = replays
        self._cache = cache
        self.serves, self.speaks = upstreams.serves, upstreams.speaks
        self.models, self.reachable = upstreams.models, upstreams.reachable

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """See Upstreams. Raises NotCachedError, too."""
        reason = find_upstream_refusal(request, self._cache.settings, self._cache.mode(request.tenant.name))
        if reason is None:
            return self._looked_up(request)
        self._cache.bypass(request.trace, request.reuse, reason)
        return self._upstreams.answer(request)

    @asynccontextmanager
    async def _looked_up(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        settings, mode = self._cache.settings, self._cache.mode(request.tenant.name)
        replay = self._replays.get(route_of(request))
        find = partial(find_upstream_bypass, request, settings, mode, known=replay is not None)
        reason = await off_loop(request.work, find)
        if reason is not None or replay is None:
            self._cache.bypass(request.trace, request.reuse, reason or "route")
            async with self._upstreams.answer(request) as answer:
                yield answer
            return
        route_text = self._upstreams.route_text(request.model, request.tenant.name)
        make = partial(UpstreamQuery.of, request, self._upstreams, replay, settings, route_text)
        async with aclosing(self._cache.answer_query(request.work, make)) as items:
            head = await anext(items)
            assert isinstance(head, UpstreamAnswer)
            yield replace(head, chunks=cast("AsyncGenerator[bytes, None]", items))


def _head(items: Sequence[_Item]) -> UpstreamAnswer:
    head = items[0]
    assert isinstance(head, UpstreamAnswer)
    return head


def _chunks(items: Sequence[_Item]) -> list[bytes]:
    return [item for item in items if isinstance(item, bytes)]


async def _none() -> AsyncGenerator[bytes, None]:
    """Of a head whose chunks come after it."""
    for nothing in tuple[bytes, ...]():
        yield nothing


def _content_type(answer: UpstreamAnswer) -> str:
    """Empty where it has none."""
    return next((value for name, value in answer.headers if name.lower() == "content-type"), "")


def _is_encoded(answer: UpstreamAnswer) -> bool:
    plain = ("", "identity")
    return any(name.lower() == "content-encoding" and value.lower() not in plain for name, value in answer.headers)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None
