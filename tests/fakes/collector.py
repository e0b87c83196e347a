"""A collector of OpenTelemetry on a real port: OTLP over HTTP, decoded with the protocol's own messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Told:
    """A span. Ids are in hex; `attributes` of a list are tuples."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin_ns: int
    end_ns: int
    status: int
    state: str
    attributes: dict[str, Any]


@dataclass
class Collector:
    """`status` is that of its answers."""

    url: str = ""
    status: int = 200
    raw: bytes = b""
    requests: int = 0
    spans: list[Told] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def roots(self) -> list[Told]:
        """Spans of requests."""
        return [span for span in self.spans if "kvasir.request_id" in span.attributes]

    def of(self, trace_id: str) -> dict[str, Told]:
        """The spans of one trace, by name."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    def children(self, parent: Told) -> list[Told]:
        return sorted((one for one in self.spans if one.parent_id == parent.span_id), key=lambda one: one.begin_ns)

    async def handle(self, http: web.Request) -> web.Response:
        assert http.path == "/v1/traces"
        body = await http.read()
        self.requests += 1
        if self.status == 200:
            self.raw += body
            self.headers.append(dict(http.headers))
            self._take(ExportTraceServiceRequest.FromString(body))
        return web.Response(status=self.status)

    def _take(self, request: Any) -> None:
        for resource in request.resource_spans:
            self.resources.append(_attributes(resource.resource.attributes))
            for scope in resource.scope_spans:
                assert scope.scope.name == "kvasir"
                self.spans += [_told(span) for span in scope.spans]


def _told(span: Any) -> Told:
    return Told(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        span.trace_state,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return tuple(map(_value, value.array_value.values)) if kind == "array_value" else getattr(value, kind)


@asynccontextmanager
async def collector(at: socket | None = None) -> AsyncIterator[Collector]:
    """Until the block is left. `at` is a socket that is bound already."""
    own = Collector()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", own.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await (web.TCPSite(runner, "127.0.0.1", 0) if at is None else web.SockSite(runner, at)).start()
    own.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield own
    finally:
        await runner.cleanup()
