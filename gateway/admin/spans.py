"""Finished requests as spans, by the conventions of OpenTelemetry for GenAI: no text of a prompt or an answer, no key.

An Observer of the middleware. A request for a model gets its span's ids as it begins, so that upstreams and replicas
can be told (propagation.py), and all else when it is over: a record knows how long each stage took. Of a request that
is not sampled nothing more is noted. Knows no SDK; otel.py exports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from gateway.admin.outcomes import hit_of
from gateway.api.record import CLIENT_LEFT, Record
from gateway.propagation import RequestSpan, new_span
from gateway.types import Trace

MAX_CHARS: Final = 200
"""Of a text; names of models may be a client's own."""

Attributes = dict[str, str | bool | int | float | tuple[str, ...]]

OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "generateContent": "generate_content",
    "streamGenerateContent": "generate_content",
    "embedContent": "embeddings",
    "batchEmbedContents": "embeddings",
}
"""Routes, or what is behind the colon of one, whose requests have spans."""

_PROVIDERS: Final = {"gemini": "gcp.gemini"}
"""As the conventions name them, where that is not the dialect's own name."""

OWN: Final = "kvasir"


class Stage(NamedTuple):
    """`begin_ms` and `end_ms` are from the request's arrival."""

    name: str
    begin_ms: float
    end_ms: float


class Ended(NamedTuple):
    """A request that is over, to be exported.

    name        of its span
    at_ns       of its end, since 1970
    at_s        of its end, by the monotonic clock of `span.calls`
    failed      by the server's fault
    is_http     it is a request of a client, and no line of a batch
    """

    span: RequestSpan
    name: str
    at_ns: int
    at_s: float
    total_ms: float
    attributes: Attributes
    stages: list[Stage]
    failed: bool
    is_http: bool


@lru_cache(256)
def operation_of(endpoint: str) -> str | None:
    """None for a route whose requests have no spans. Lines of batches are named after their route."""
    route = endpoint.partition(" ")[0]
    return OPERATIONS.get(route) or OPERATIONS.get(route.rpartition("}:")[2])


class Spans:
    """Gives spans to requests, and finished ones to `export`."""

    def __init__(self, sample: float, export: Callable[[Ended], None]) -> None:
        """`sample` is the share of the requests without a caller's decision."""
        self._bound = round(sample * 2**64)
        self._export = export

    def started(self, record: Record) -> None:
        """What was begun in the name of a request that has a span is in its trace."""
        if operation_of(record.endpoint) is not None:
            parent = record.parent if record.span is None else record.span.as_parent()
            record.span = new_span(parent, self._bound)

    def finished(self, record: Record) -> None:
        span = record.span
        if span is not None and span.sampled:
            self._export(ended(record, span, time.time_ns()))


def ended(record: Record, span: RequestSpan, at_ns: int) -> Ended:
    """Holds nothing of the record but what it says."""
    trace, operation = record.trace, operation_of(record.endpoint) or ""
    asked = record.model if record.target is None else record.target.alias
    return Ended(
        span=span,
        name=f"{operation} {_short(asked)}" if asked else operation,
        at_ns=at_ns,
        at_s=record.received_s + record.total_ms / 1e3,
        total_ms=record.total_ms,
        attributes=dict(_attributes(record, trace, operation, asked)),
        stages=list(_stages(record, trace)),
        failed=record.status >= 500,
        is_http=_is_http(record),
    )


def _is_http(record: Record) -> bool:
    """And no line of a batch, and not what runs in the background."""
    return " " not in record.endpoint


def provider_of(api: str) -> str:
    return _PROVIDERS.get(api, api)


def _attributes(record: Record, trace: Trace, operation: str, asked: str | None) -> Iterator[tuple[str, Any]]:
    status = record.status
    calls = record.span.calls if record.span is not None and trace.by_upstream else ()
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", provider_of(calls[-1].api) if calls else OWN
    if _is_http(record):
        yield "http.request.method", "POST"
        yield "http.route", record.endpoint
        yield "http.response.status_code", status
    else:
        yield "kvasir.endpoint", record.endpoint
    yield "kvasir.request_id", record.request_id
    yield "kvasir.lane", record.lane
    if asked:
        yield "gen_ai.request.model", _short(asked)
    if record.tenant is not None:
        yield "kvasir.tenant", record.tenant
    if record.stream:
        yield "gen_ai.request.stream", True
        if trace.first_token_ms is not None:
            yield "gen_ai.response.time_to_first_chunk", trace.first_token_ms / 1e3
    if status >= 400:
        error = record.error.partition(":")[0]
        yield "error.type", error or ("client_left" if status == CLIENT_LEFT else str(status))
    if trace.first_token_ms is not None or record.embedded_tokens:
        yield from _usage(record, trace)
    if hit := hit_of(trace, status):
        yield "kvasir.hit", hit
    if trace.engine:
        yield "kvasir.engine", _short(trace.engine)
    if trace.retries:
        yield "kvasir.retries", trace.retries
    if trace.predicted_tokens is not None:
        yield "kvasir.predicted_tokens", trace.predicted_tokens


def _usage(record: Record, trace: Trace) -> Iterator[tuple[str, Any]]:
    """Of what was answered, or begun to be; tokens that an upstream did not report are not there."""
    if record.model is not None:
        yield "gen_ai.response.model", _short(record.model)
    if finished := tuple(one.finish for one in record.traces if one.finish is not None):
        yield "gen_ai.response.finish_reasons", finished
    if any(one.unmetered for one in record.traces):
        return
    yield "gen_ai.usage.input_tokens", trace.prompt_tokens + record.embedded_tokens
    yield "gen_ai.usage.output_tokens", trace.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", trace.cached_tokens
    if trace.hit is None and (written := sum(one.cache_write_tokens for one in record.traces)):
        yield "gen_ai.usage.cache_creation.input_tokens", written
    if reasoning := sum(one.reasoning_tokens for one in record.traces):
        yield "gen_ai.usage.reasoning.output_tokens", reasoning


def _stages(record: Record, trace: Trace) -> Iterator[Stage]:
    """One behind the other, up to where the request came. All answers of one request together."""
    begin_ms, total_ms = 0.0, record.total_ms
    for name, reached_ms in _ends(record, trace):
        end_ms = min(max(reached_ms or total_ms, begin_ms), total_ms)
        yield Stage(name, begin_ms, end_ms)
        if not reached_ms:
            return
        begin_ms = end_ms


def _ends(record: Record, trace: Trace) -> Iterator[tuple[str, float]]:
    """Stages, and when each was over, in milliseconds from arrival; 0 where it never was."""
    yield "admit", record.admitted_ms
    first_ms, queued_ms = trace.first_token_ms or 0.0, trace.overhead_ms + trace.queue_ms
    if not record.traces:
        return
    if trace.lookup is not None and trace.lookup.outcome != "bypass":
        yield "response cache", trace.looked_up_ms if trace.hit is None else first_ms
    if trace.hit is not None:
        return
    if not trace.encoded_ms and trace.overhead_ms:  # an upstream's, whose calls are spans
        if trace.queue_ms or trace.engine is None:
            yield "queue", queued_ms if trace.engine is not None else 0.0
        return
    yield "prompt", trace.encoded_ms
    if trace.engine is None:
        yield "queue", 0.0
        return
    yield "index", trace.overhead_ms
    yield "queue", queued_ms
    yield "prefill", first_ms
    yield "decode", record.total_ms


def _short(text: str) -> str:
    """Without what UTF-8 has no bytes for."""
    return text[:MAX_CHARS].encode("utf-8", "replace").decode()
