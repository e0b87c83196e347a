"""Exports spans over OTLP, with the SDK of OpenTelemetry: the only file that needs the extra `otel`.

The SDK's batch processor has a thread of its own, which makes spans of what is over, encodes and sends them; requests
wait for none of it. Of what a collector is too slow for, or not there for, the newest are dropped and counted. Headers,
certificates and the service's name are the SDK's own variables, as OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from gateway.admin.spans import Attributes, Ended, provider_of
from gateway.propagation import Call, RequestSpan, new_id

log = logging.getLogger(__name__)

MAX_PENDING: Final = 2048
"""Requests that wait to be exported."""

AT_ONCE: Final = 128
"""Requests of one export: about a thousand spans, half a megabyte."""

EVERY_MS: Final = 2000.0
"""From one export to the next, of fewer."""

STOP_S: Final = 1.5
"""In which a stop lets the last spans be exported."""

MAX_REASON_CHARS: Final = 400

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class _Heard(logging.Filter):
    """Keeps the SDK's lines about each failed try from the log, and the first one as the reason for ours: later ones
    may only say that it gave up."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def filter(self, record: logging.LogRecord) -> bool:
        why = record.getMessage()[:MAX_REASON_CHARS]
        self.why = self.why or (_BAD_HEADER if "header value" in why else why)
        return False


_BAD_HEADER: Final = (
    "a header of OTEL_EXPORTER_OTLP_HEADERS is not valid: they are written as name=value, percent-encoded"
)


def _unquoted(record: logging.LogRecord) -> bool:
    """The SDK quotes a header that it cannot read, and a key may be in it."""
    record.msg, record.args = _BAD_HEADER, ()
    return True


_heard: Final = _Heard()
logging.getLogger(OTLPSpanExporter.__module__).addFilter(_heard)
logging.getLogger("opentelemetry.util.re").addFilter(_unquoted)


class Exporter:
    """Exports what is over, once it is started, until it is closed."""

    def __init__(self, endpoint: str, version: str) -> None:
        """`endpoint` is the base URL of the collector."""
        own = {"service.name": "kvasir", "service.version": version, "service.instance.id": str(uuid4())}
        self._spans = _Spans(endpoint, _Resource(Resource.create(own).merge(OTELResourceDetector().detect())))
        self._scope = InstrumentationScope("kvasir", version)
        self._processor: BatchSpanProcessor | None = None
        self._given = self._dropped = 0

    def start(self) -> None:
        self._processor = BatchSpanProcessor(
            self._spans, max_queue_size=MAX_PENDING, schedule_delay_millis=EVERY_MS, max_export_batch_size=AT_ONCE
        )

    def add(self, ended: Ended) -> None:
        """Never waits, never raises."""
        if self._processor is None or self._given - self._spans.taken >= MAX_PENDING:
            self._dropped += 1
            return
        self._given += 1
        self._processor.on_end(_Root(ended, self._spans.resource, self._scope))

    def figures(self) -> dict[str, int]:
        """Sampled requests since the start, by what became of their spans."""
        return {"exported": self._spans.exported, "failed": self._spans.failed, "dropped": self._dropped}

    async def close(self) -> None:
        """Exports what is left, for STOP_S at most."""
        processor, self._processor = self._processor, None
        if processor is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            processor.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # the loop is closed by now
                loop.call_soon_threadsafe(done.set)

        # No thread that the end of the process would wait for.
        threading.Thread(target=end, name="end of traces", daemon=True).start()
        try:
            async with asyncio.timeout(STOP_S):
                await done.wait()
        except TimeoutError:
            self._spans.shutdown()


class _Resource(Resource):
    """Hashed once: the SDK's own is written as JSON for each span, which is a quarter of encoding it."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class _Root(ReadableSpan):
    """The span of a request, and what its children are made of."""

    def __init__(self, ended: Ended, resource: Resource, scope: InstrumentationScope) -> None:
        span = ended.span
        parent = span.parent
        super().__init__(
            ended.name,
            _context(span, span.span_id),
            None if parent is None else SpanContext(parent.trace_id, parent.span_id, True, _SAMPLED),
            resource,
            ended.attributes,
            kind=SpanKind.SERVER if ended.is_http else SpanKind.INTERNAL,
            status=_FAILED if ended.failed else _UNSET,
            start_time=ended.at_ns - round(ended.total_ms * 1e6),
            end_time=ended.at_ns,
            instrumentation_scope=scope,
        )
        self._ended = ended

    def all(self) -> Iterator[ReadableSpan]:
        """With its children."""
        yield self
        ended = self._ended
        begin_ns = ended.at_ns - round(ended.total_ms * 1e6)
        for name, begin_ms, end_ms in ended.stages:
            yield self._child(name, begin_ns + round(begin_ms * 1e6), begin_ns + round(end_ms * 1e6))
        for call in ended.span.calls:
            begun = ended.at_ns - round((ended.at_s - call.begun_s) * 1e9)
            over = ended.at_ns - round((ended.at_s - call.ended_s) * 1e9) if call.ended_s else ended.at_ns
            name = f"{ended.attributes['gen_ai.operation.name']} {call.model}"
            yield self._child(name, begun, max(begun, over), call)

    def _child(self, name: str, begin_ns: int, end_ns: int, call: Call | None = None) -> ReadableSpan:
        span = self._ended.span
        return ReadableSpan(
            name,
            _context(span, new_id() if call is None else call.span_id),
            self.context,
            self.resource,
            {} if call is None else _attributes_of(call, self._ended),
            kind=SpanKind.INTERNAL if call is None else SpanKind.CLIENT,
            status=_FAILED if call is not None and (call.error or call.status >= 400) else _UNSET,
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=self.instrumentation_scope,
        )


class _Spans(SpanExporter):
    """Sends requests with their children. Called by the processor's thread."""

    def __init__(self, endpoint: str, resource: Resource) -> None:
        self.resource = resource
        self.taken = self.exported = self.failed = 0
        self._endpoint = endpoint
        self._otlp = OTLPSpanExporter(f"{endpoint}/v1/traces")
        self._is_up = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        _heard.why = ""
        result = self._otlp.export([one for root in spans if isinstance(root, _Root) for one in root.all()])
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            if not self._is_up:
                log.warning("traces: the collector at %s takes spans again", self._endpoint)
        else:
            self.failed += len(spans)
            if self._is_up:
                log.warning(
                    "traces: the collector at %s (otel.endpoint) does not take spans, which are lost until it does: %s",
                    self._endpoint,
                    _heard.why,
                )
        self._is_up = result is SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        """Ends a pause between two tries as well. May be called several times."""
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


_FAILED: Final = Status(StatusCode.ERROR)
_UNSET: Final = Status(StatusCode.UNSET)


def _context(span: RequestSpan, span_id: int) -> SpanContext:
    return SpanContext(span.trace_id, span_id, False, _SAMPLED, _state(span.state))


@lru_cache(64)
def _state(written: str) -> TraceState:
    return TraceState.from_header([written]) if written else TraceState()


def _attributes_of(call: Call, ended: Ended) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": ended.attributes["gen_ai.operation.name"],
        "gen_ai.provider.name": provider_of(call.api),
        "gen_ai.request.model": call.model,
        "kvasir.upstream": call.name,
    }
    if call.status:
        attributes["http.response.status_code"] = call.status
    if call.error or call.status >= 400:
        attributes["error.type"] = call.error or str(call.status)
    return attributes
