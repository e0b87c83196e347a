"""Requests for models of upstreams: they go on as the client wrote them, and the answer's bytes come back as they are,
as fast as the client reads and no faster.

Of the body nothing was checked but that it is a JSON object. Which upstream gets a request, and how often, is decided
behind `Upstreams`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Protocol
from urllib.parse import unquote_plus

from aiohttp import web
from multidict import CIMultiDict

from gateway.api.aliases import Aliases
from gateway.api.body import RAW
from gateway.api.cache_control import check_cache, from_body, stricter
from gateway.api.dialect import SSE
from gateway.api.fallback import judged
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.record import (
    CLIENT_LEFT,
    RECORD,
    REQUEST_ID,
    Record,
    common_headers,
    failed,
    known_error,
    kvasir_headers,
    listed,
)
from gateway.api.replies import data, event
from gateway.api.resend import Rendered, find_keeper
from gateway.api.stream import LAST_WRITE_S
from gateway.api.tenants import BYTES_PER_TOKEN, ONLY_COUNTED, Namespaces, set_aside
from gateway.api.tiers import find_tier
from gateway.config import ServerSettings
from gateway.errors import KvasirError, UpstreamLostError, UpstreamTimeoutError
from gateway.limits.limits import TenantLimits
from gateway.native import no_panic
from gateway.stages import Registry
from gateway.tasks import off_loop
from gateway.types import OWN_CONTENT, PLAIN_REUSE, Need, Tenant, Trace, UpstreamAnswer, UpstreamRequest

Headers = tuple[tuple[str, str], ...]

PASSED_ON: Final = frozenset(
    (
        *("accept", "anthropic-beta", "anthropic-version", "content-type", "idempotency-key", "openai-beta"),
        *("traceparent", "tracestate", "user-agent", "x-client-request-id", "x-goog-api-client"),
    )
)
"""Headers of a client that an upstream gets, besides those that begin with x-stainless-. No others: they are for us, or
secrets."""

MAX_ANSWERS: Final = 128
"""Answers to one prompt, at most, that are set aside of a tenant's limits."""

MAX_AT_ONCE: Final = 256 << 10
"""Bytes of a whole answer up to which it is written at once, when it is there."""

MAX_UNTIMED: Final = 16 << 10
"""The same up to which no write waits for the client: transports hold 64 KiB, and are down to 16 KiB of the answer
before."""

_KEYS: Final = frozenset(("key", "api_key", "access_token", "$key"))
"""Parameters of a URL that an upstream never gets."""

_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens")
"""Names of the limit on an answer's tokens."""

_ANSWERS: Final = ("n", "candidateCount")

_IN_CONTAINERS: Final = ("code_interpreter", "code_execution", "shell")
"""Beginnings of the types of tools that may run at an upstream, in a container."""

_UNBUFFERED: Final[Mapping[str, str]] = {"X-Accel-Buffering": "no"}
"""For proxies in front of us, which would collect a stream."""


class Upstreams(Protocol):
    """What answers requests for models of upstreams."""

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        """Whether a request for a model goes to an upstream. `ours`: an engine, or the embedder, serves it as well."""
        ...

    def speaks(self, model: str, tenant: str, dialect: str, path: str) -> bool:
        """Whether an upstream of the model has the path of a dialect, so that nothing has to be translated."""
        ...

    def models(self, tenant: str) -> Mapping[str, int]:
        """Those that can be named -> Unix second since when they are served."""
        ...

    def reachable(self, model: str, tenant: str) -> Mapping[str, bool]:
        """Its upstreams, by name -> whether they can be asked now, as far as is known."""
        ...

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Entering it returns with the first byte, and raises a KvasirError when no upstream answered; leaving it ends
        what is left of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Passthrough:
    """Answers from upstreams. `embedding_models` are those of our own embedder; `responses` knows which upstream made
    what for a tenant."""

    server: ServerSettings
    upstreams: Upstreams
    registry: Registry
    embedding_models: Mapping[str, int]
    limits: TenantLimits
    namespaces: Namespaces
    responses: ResponseStore
    aliases: Aliases

    def models(self, record: Record) -> dict[str, int]:
        """Every model that the record's tenant can name -> Unix second. Our own come first."""
        ours = self.registry.models()
        theirs = self.upstreams.models(record.tenant or "")
        known = {**ours, **{name: since for name, since in theirs.items() if name not in ours}}
        for name, targets in self.aliases.listed(record.tenant or "").items():
            if served := [known[target] for target in targets if target in known]:
                known.setdefault(name, served[0])
        return listed(known, record)

    def serves(self, model: str, tenant: Tenant) -> bool:
        """Whether a request of the tenant for this model goes to an upstream."""
        if not self.upstreams.serves(model, tenant.name, ours=False):
            return False  # and what our engines serve is not looked up
        ours = model in self.registry.models() or model in self.embedding_models
        return not ours or self.upstreams.serves(model, tenant.name, ours=True)

    @property
    def timeout_s(self) -> float:
        """For an answer."""
        return self.server.request_timeout_s

    async def kept(self, http: web.Request, tenant: Tenant, upstream: str, path: str) -> web.StreamResponse:
        """The upstream's answer about a response that it keeps. Raises only while nothing was sent."""
        record = http[RECORD]
        request = self.request(
            record,
            tenant,
            {},
            timeout_s=self.server.request_timeout_s,
            keeps=http.method == "GET",
            dialect=record.dialect.name,
            model="",
            path=path,
            query=_query_of(http),
            headers=tuple(header for header in _headers_of(http) if header[0] != "content-type"),
            body=b"",
            metered=False,
            method="GET" if http.method == "HEAD" else http.method,
            only=upstream,
        )
        await set_aside(self.limits, record, lambda: ONLY_COUNTED)
        record.traces = [request.trace]
        async with self.upstreams.answer(request) as answer:
            return await _pass_back(http, answer, request.deadline_s)

    async def answer(
        self,
        http: web.Request,
        tenant: Tenant,
        dialect: str,
        model: object,
        values: Mapping[str, Any],
        *,
        metered: bool,
        translated: bool,
    ) -> web.StreamResponse | None:
        """The upstream's answer, complete; None when the model, as the client wrote it, is none of an upstream's, or
        when its upstreams speak other dialects and the request can be `translated`. Raises only while nothing was sent.

        values   the parsed body
        metered  whether the answer tells a usage
        """
        body = http.pop(RAW)
        if not isinstance(model, str) or not self.serves(model, tenant):
            return None
        record = http[RECORD]
        target = record.target
        is_read = target is not None and target.check is not None and target.check.reads_logprobs
        content = values.get(
            "cachedContent", values.get("cached_content")
        )  # one that is stored here is none of an upstream's
        is_read |= isinstance(content, str) and OWN_CONTENT.fullmatch(content) is not None
        if translated and (is_read or not self.upstreams.speaks(model, tenant.name, dialect, record.endpoint)):
            return None
        build = partial(
            self.request,
            record,
            tenant,
            values,
            timeout_s=self.server.request_timeout_s,
            keeps=may_keep(record.endpoint, values),
            dialect=dialect,
            model=model,
            path=record.endpoint,
            query=_query_of(http),
            headers=_headers_of(http),
            body=body,
            metered=metered,
            tier=find_tier(dialect, values, tenant),
            priority=values.get("priority", 0) if type(values.get("priority")) is int else 0,
        )
        request = await off_loop(record.work, build)
        await set_aside(self.limits, record, lambda: need_of(request), model)
        record.traces = [request.trace]
        async with self.upstreams.answer(request) as answer:
            record.model = answer.label
            if target is not None and target.has_others:
                answer = await judged(answer, target)
            keep = find_keeper(http)
            chunks: list[bytes] | None = None if keep is None else []
            response = await _pass_back(http, answer, request.deadline_s, chunks)
            if keep is not None and chunks is not None and not record.status:
                headers = {**dict(answer.headers), **(_UNBUFFERED if record.stream else {})}
                keep(Rendered(model, None, need_of(request), headers, b"".join(chunks)))
            return response

    def request(
        self,
        record: Record,
        tenant: Tenant,
        values: Mapping[str, Any],
        *,
        timeout_s: float,
        keeps: bool,
        **more: Any,
    ) -> UpstreamRequest:
        """A request of the record. Raises BadRequestError for its body's `cache`, ForbiddenError for its namespace.

        keeps  whether the upstream may keep something of it, whose ids are remembered for the tenant
        more   fields of the UpstreamRequest
        """
        cache = values.get("cache")
        reuse = PLAIN_REUSE if cache is None else from_body(check_cache(cache, "cache"))
        return UpstreamRequest(
            request_id=record.request_id,
            tenant=tenant,
            values=values,
            received_s=record.received_s,
            deadline_s=record.received_s + timeout_s,
            reuse=stricter(record.reuse, reuse),
            lane=record.lane,
            scope=self.namespaces.scope(record.namespace, tenant),
            on_created=partial(self.responses.remember_upstream, tenant.name) if keeps else None,
            find_creator=partial(self.responses.find_upstream, tenant.name),
            work=record.work,
            trace=Trace(body=None if str(more["path"]).endswith("/embeddings") else values),
            **more,
        )


async def _pass_back(
    http: web.Request, answer: UpstreamAnswer, deadline_s: float, chunks: list[bytes] | None = None
) -> web.StreamResponse:
    """Each write waits until the client has room for it, and so does reading from the upstream. The written chunks are
    added to `chunks`."""
    record = http[RECORD]
    headers = _reply_headers(record, answer)
    record.stream = SSE in headers.get("Content-Type", "")
    is_short = not record.stream and int(headers.get("Content-Length", MAX_AT_ONCE)) < MAX_AT_ONCE
    response: web.StreamResponse | None = None
    limit = asyncio.timeout(deadline_s - time.monotonic())
    try:
        with no_panic():
            if is_short and http.method != "HEAD":  # in one write with its headers
                body = b"".join([chunk async for chunk in answer.chunks])  # which has no more time than this
                if chunks is not None:
                    chunks.append(body)
                response = web.Response(body=body, status=answer.status, headers=headers)
                async with limit if len(body) > MAX_UNTIMED else nullcontext():
                    await response.prepare(http)
                    await response.write_eof()
                return response
            async with limit:
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(http)
                if http.method != "HEAD":  # aiohttp would write the body
                    async for chunk in answer.chunks:
                        if chunks is not None:
                            chunks.append(chunk)
                        await response.write(chunk)
                await response.write_eof()
    except ConnectionResetError:
        record.status = CLIENT_LEFT
    except Exception as error:
        if response is None or not response.prepared:
            raise
        late = isinstance(error, TimeoutError) and limit.expired()
        shown = UpstreamTimeoutError("The client read too slowly.") if late else known_error(error, record)
        await _cut(http, record, response, shown)
    return web.Response(status=CLIENT_LEFT) if response is None else response


async def _cut(http: web.Request, record: Record, response: web.StreamResponse, error: KvasirError) -> None:
    """Ends an incomplete answer so that no client takes it for a complete one: with an error event where the upstream's
    last event is complete, else by closing the connection."""
    failed(record, error)
    if isinstance(error, UpstreamLostError) and error.between_events:
        body = record.dialect.error_json(error, record.request_id)
        name = record.dialect.error_event
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await response.write_eof(data(body) if name is None else event(name, body))
                return
        except (TimeoutError, ConnectionResetError):
            record.status = CLIENT_LEFT
    if http.transport is not None:
        http.transport.abort()


def _reply_headers(record: Record, answer: UpstreamAnswer) -> CIMultiDict[str]:
    """Ours, and the upstream's in the place of those that it has as well, such as the id of the request."""
    own = kvasir_headers(record, cached=False) | {REQUEST_ID: record.request_id}
    headers = CIMultiDict(common_headers(record))
    theirs = [item for item in answer.headers if item[0][:9].lower() != "x-kvasir-"]
    for name, _ in theirs:
        headers.popall(name, None)
    # Never a mix of ours and its own.
    if record.allowance is not None and any(_tells_limits(name) for name, _ in theirs):
        for name in [name for name in headers if _tells_limits(name)]:
            del headers[name]
    headers.extend(theirs)
    if SSE in headers.get("Content-Type", ""):
        for name, value in _UNBUFFERED.items():
            headers.setdefault(name, value)
    headers.update(own)
    return headers


def _tells_limits(name: str) -> bool:
    return name.lower().startswith(("x-ratelimit-", "anthropic-ratelimit-"))


def may_keep(path: str, values: Mapping[str, Any]) -> bool:
    """Whether the upstream may keep something of a request: the response, a container in which tools run, or spoken
    output."""
    if path == "/v1/responses" and values.get("store") is not False:
        return True
    tools, modalities = values.get("tools"), values.get("modalities")
    if values.get("container") or (isinstance(modalities, list) and "audio" in modalities):
        return True
    types = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else ()
    return any(isinstance(kind, str) and kind.startswith(_IN_CONTAINERS) for kind in types)


def _headers_of(http: web.Request) -> Headers:
    """The client's headers that an upstream gets."""
    return tuple((passed, value) for name, value in http.headers.items() if (passed := _passed_on(name)))


@lru_cache(1024)
def _passed_on(name: str) -> str:
    """In small letters; empty for a header that no upstream gets."""
    name = name.lower()
    return name if name in PASSED_ON or name.startswith("x-stainless-") else ""


def need_of(request: UpstreamRequest) -> Need:
    """As far as the request itself tells; only the upstream counts its prompt."""
    if not request.metered:
        return ONLY_COUNTED
    values = request.values
    inputs = -(-len(request.body) // BYTES_PER_TOKEN)
    if request.path.endswith("/embeddings"):
        return Need(inputs)
    inside = values.get("generationConfig")
    given = {**values, **inside} if isinstance(inside, dict) else values
    most, answers = _first_count(given, _LIMITS), _first_count(given, _ANSWERS)
    return Need(inputs, None if most is None else max(0, most), min(max(1, answers or 1), MAX_ANSWERS))


def _first_count(given: Mapping[str, Any], names: Iterable[str]) -> int | None:
    for name in names:
        if name in given and type(given[name]) is int:
            return int(given[name])
    return None


def _query_of(http: web.Request) -> str:
    """The URL's query without parameters that may be a key, in any spelling."""
    if not (query := http.rel_url.raw_query_string):
        return ""
    parts = [part for part in query.split("&") if part]
    return "&".join(part for part in parts if unquote_plus(part.partition("=")[0]).strip().lower() not in _KEYS)
