"""Requests for models that an upstream serves: they go on as the client wrote them, and the answer's bytes come back as
they are, as fast as the client reads and no faster.

The dialects ask here first, with what they have read; nothing of it was checked but that it is a JSON object. Who is
asked, and how often, is the upstreams' to say: anything that answers a request with a status, headers and pieces can
stand in their place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from aiohttp import web
from multidict import CIMultiDict

from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.body import RAW
from gateway.api.cache_control import stricter
from gateway.api.dialect import SSE
from gateway.api.gemini.wire import GEMINI
from gateway.api.openai.wire import OPENAI
from gateway.api.passed_on import headers_of, lower, need_of, priority_of, query_of, reuse_of
from gateway.api.record import CLIENT_LEFT, RECORD, REQUEST_ID, Record, common_headers, failed, kvasir_headers
from gateway.api.replies import data, event
from gateway.api.resend import Rendered, find_keeper
from gateway.api.stream import LAST_WRITE_S
from gateway.api.tenants import ONLY_COUNTED, Limits, Namespaces, set_aside
from gateway.api.tiers import find_tier
from gateway.api.upstream_objects import UpstreamObjects
from gateway.config import ServerSettings
from gateway.errors import KvasirError, UpstreamLostError, UpstreamTimeoutError
from gateway.native import no_panic
from gateway.stages import Registry
from gateway.tasks import off_loop
from gateway.types import Scope, Tenant, UpstreamAnswer, UpstreamRequest

log = logging.getLogger(__name__)


class Upstreams(Protocol):
    """Who answers."""

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        """Whether a request for a model goes to an upstream. `ours`: an engine, or the embedder, serves it as well."""
        ...

    def models(self, dialect: str, tenant: str) -> Mapping[str, int]:
        """Those that can be named -> Unix second since when they are served."""
        ...

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Entering it returns when the first byte is there, and raises a KvasirError when nobody answered; leaving it
        ends what is left of the answer."""
        ...


class Passthrough:
    """Holds what answering from an upstream needs. `embedding_models` are those of our own embedder."""

    def __init__(
        self,
        server: ServerSettings,
        upstreams: Upstreams,
        models: Registry,
        embedding_models: Mapping[str, int],
        limits: Limits,
        namespaces: Namespaces,
        upstream_objects: UpstreamObjects,
    ) -> None:
        self.upstream_objects = upstream_objects
        self._limits = limits
        self._namespaces = namespaces
        self._server = server
        self._upstreams = upstreams
        self._models = models
        self._embedding_models = embedding_models

    def models(self, record: Record) -> dict[str, int]:
        """Every model that can be asked for in the record's dialect -> Unix second. Our own come first."""
        ours = self._models.models()
        theirs = self._upstreams.models(record.dialect.name, record.tenant or "")
        return {**ours, **{name: since for name, since in theirs.items() if name not in ours}}

    def serves(self, model: str, tenant: Tenant) -> bool:
        """Whether a request of the tenant for this model goes to an upstream."""
        if not self._upstreams.serves(model, tenant.name, ours=False):
            return False  # nobody needs to know what our engines serve
        ours = model in self._models.models() or model in self._embedding_models
        return not ours or self._upstreams.serves(model, tenant.name, ours=True)

    def scope(self, record: Record, tenant: Tenant) -> Scope:
        """Who may get an answer of its request again. Raises ForbiddenError for a namespace that the tenant may not
        use."""
        return self._namespaces.scope(record.namespace, tenant)

    async def kept(self, http: web.Request, tenant: Tenant, upstream: str, path: str) -> web.StreamResponse:
        """What the upstream says of a response that it keeps. Raises only while nothing was sent."""
        record = http[RECORD]
        request = UpstreamRequest(
            request_id=record.request_id,
            tenant=tenant,
            dialect=OPENAI.name,
            model="",
            path=path,
            query=query_of(http.rel_url.raw_query_string),
            headers=tuple(header for header in headers_of(http) if header[0] != "content-type"),
            body=b"",
            values={},
            received_s=record.received_s,
            deadline_s=record.received_s + self._server.request_timeout_s,
            metered=False,
            method="GET" if http.method == "HEAD" else http.method,
            only=upstream,
            made=self.upstream_objects.recorder(tenant.name) if http.method == "GET" else None,
        )
        await set_aside(self._limits, record, lambda: ONLY_COUNTED)
        record.traces = [request.trace]
        async with self._upstreams.answer(request) as answer:
            record.stream = SSE in dict(lower(answer.headers)).get("content-type", "")
            return await _pass_back(http, record, answer, request.deadline_s)

    async def answer(
        self,
        http: web.Request,
        tenant: Tenant,
        model: object,
        values: Mapping[str, Any],
        *,
        metered: bool = True,
    ) -> web.StreamResponse | None:
        """The upstream's answer, complete; None when the model, as the client wrote it, is none of an upstream's.

        values   what the body says
        metered  whether the answer tells a usage
        Raises only while nothing was sent.
        """
        body = http.pop(RAW)
        if not isinstance(model, str) or not self.serves(model, tenant):
            return None
        record = http[RECORD]
        request = await off_loop(record.work, lambda: self._request(http, tenant, model, body, values, metered))
        need = need_of(request)
        await set_aside(self._limits, record, lambda: need)
        record.traces = [request.trace]
        async with self._upstreams.answer(request) as answer:
            record.model = answer.label
            record.stream = SSE in dict(lower(answer.headers)).get("content-type", "")
            keep = find_keeper(http)
            chunks: list[bytes] | None = None if keep is None else []
            response = await _pass_back(http, record, answer, request.deadline_s, chunks)
            if keep is not None and chunks is not None and not record.status:
                headers = {**dict(answer.headers), **(_UNBUFFERED if record.stream else {})}
                keep(Rendered(model, None, need, headers, b"".join(chunks)))
            return response

    def _request(
        self, http: web.Request, tenant: Tenant, model: str, body: bytes, values: Mapping[str, Any], metered: bool
    ) -> UpstreamRequest:
        """Raises BadRequestError for what it says of the cache, ForbiddenError for a namespace."""
        record = http[RECORD]
        dialect = _dialect(record.endpoint)
        return UpstreamRequest(
            request_id=record.request_id,
            tenant=tenant,
            dialect=dialect,
            model=model,
            path=record.endpoint,
            query=query_of(http.rel_url.raw_query_string),
            headers=headers_of(http),
            body=body,
            values=values,
            received_s=record.received_s,
            deadline_s=record.received_s + self._server.request_timeout_s,
            metered=metered,
            reuse=stricter(record.reuse, reuse_of(values)),
            scope=self.scope(record, tenant),
            tier=find_tier(dialect, values, tenant),
            priority=priority_of(values),
            made=self.upstream_objects.recorder_for(record.endpoint, values, tenant.name),
            maker=self.upstream_objects.maker(tenant.name),
            work=record.work,
        )


async def _pass_back(
    http: web.Request, record: Record, answer: UpstreamAnswer, deadline_s: float, chunks: list[bytes] | None = None
) -> web.StreamResponse:
    """Each write waits until the client has room for it, and so does reading from the upstream. `chunks` gets what was
    written."""
    response = web.StreamResponse(status=answer.status, headers=_reply_headers(record, answer))
    try:
        async with asyncio.timeout(deadline_s - time.monotonic()) as scope:
            with no_panic():
                await response.prepare(http)
                if http.method != "HEAD":  # aiohttp would write the body
                    async for chunk in answer.pieces:
                        if chunks is not None:
                            chunks.append(chunk)
                        await response.write(chunk)
                await response.write_eof()
    except ConnectionResetError:
        record.status = CLIENT_LEFT
    except Exception as error:
        if not response.prepared:
            raise
        late = isinstance(error, TimeoutError) and scope.expired()
        shown = UpstreamTimeoutError("The client read too slowly.") if late else _known(error, record)
        await _cut(http, record, response, shown)
    return response


def _known(error: Exception, record: Record) -> KvasirError:
    """As one that clients may see."""
    if isinstance(error, KvasirError):
        return error
    log.error("request %s failed in the middle of its answer", record.request_id, exc_info=error)
    return KvasirError("The server had an error while processing your request.")


async def _cut(http: web.Request, record: Record, response: web.StreamResponse, error: KvasirError) -> None:
    """Ends an answer that is not whole so that nobody takes it for one: with an error event where the upstream's last
    event is complete, else by closing the connection."""
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
    theirs = [(name, value) for name, value in answer.headers if not name.lower().startswith("x-kvasir-")]
    for name, _ in theirs:
        headers.popall(name, None)
    if any(_tells_limits(name) for name, _ in theirs):  # half of ours beside half of its would be nobody's
        for name in [name for name in headers if _tells_limits(name)]:
            del headers[name]
    headers.extend(theirs)
    if SSE in headers.get("Content-Type", ""):
        for name, value in _UNBUFFERED.items():
            headers.setdefault(name, value)
    headers.update(own)
    return headers


_UNBUFFERED: Final[Mapping[str, str]] = {"X-Accel-Buffering": "no"}
"""For proxies in front of us, which would collect a stream."""


def _tells_limits(name: str) -> bool:
    return name.lower().startswith(("x-ratelimit-", "anthropic-ratelimit-"))


def _dialect(endpoint: str) -> str:
    """Of a route that generates. The request itself may look like one of another dialect, by a header."""
    if "{model}" in endpoint:
        return GEMINI.name
    return ANTHROPIC.name if endpoint.startswith("/v1/messages") else OPENAI.name
