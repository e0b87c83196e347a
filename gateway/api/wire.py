"""Errors and headers as the OpenAI dialect writes them. The other dialects will bring their own shapes.

Every answer carries x-request-id; every error body has all four keys (message, type, param, code).
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from aiohttp import web

from gateway.api.record import Record, elapsed_ms
from gateway.errors import DeadlineError, KvasirError

OPENAI_VERSION = "2020-10-01"
JSON = "application/json"


def error_json(error: KvasirError) -> dict[str, Any]:
    """The body of an error answer, and of an SSE error event."""
    message = error.message.encode("utf-8", "replace").decode()  # a URL may have brought bytes that are no text
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def error_headers(error: KvasirError) -> dict[str, str]:
    """When to retry, for SDKs and proxies. Empty where the status says it all."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1e3)))
    if isinstance(error, DeadlineError) and error.retry_after_s is None:
        headers["x-should-retry"] = "false"  # the time was spent on the answer itself, and would be again
    elif error.status in (429, 502, 503):
        headers["x-should-retry"] = "true"
    return headers


def error_response(error: KvasirError, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(error_json(error))
    return web.Response(
        status=error.status, body=body, content_type=JSON, headers={**error_headers(error), **(headers or {})}
    )


def json_text(text: str) -> bytes:
    """A JSON string that stays on one line for every SSE client: some end lines where Unicode does (str.splitlines)."""
    return orjson.dumps(text) if text.isascii() else json_line(text)


def json_line(value: Any) -> bytes:
    """As json_text, for any value."""
    return (
        orjson.dumps(value)
        .replace(b"\xc2\x85", rb"\u0085")
        .replace(b"\xe2\x80\xa8", rb"\u2028")
        .replace(b"\xe2\x80\xa9", rb"\u2029")
    )


def error_event(error: KvasirError) -> bytes:
    """An error after the first byte of an SSE answer."""
    return b"data: " + orjson.dumps(error_json(error)) + b"\n\n"


def common_headers(record: Record) -> dict[str, str]:
    """What every answer of /v1 carries."""
    return {
        "x-request-id": record.request_id,
        "openai-processing-ms": str(round(elapsed_ms(record))),
        "openai-version": OPENAI_VERSION,
    }


def kvasir_headers(record: Record, *, cached: bool = True) -> dict[str, str]:
    """What the gateway did for this answer. `cached` False leaves out the cached tokens, when they are not final."""
    headers = {"x-kvasir-overhead-ms": f"{record.overhead_ms:.2f}"}
    if engine := record.engine:
        headers["x-kvasir-engine"] = engine
    if cached:
        headers["x-kvasir-cached-tokens"] = str(record.cached_tokens)
    if lease := record.lease:
        kept = lease.kept
        headers["x-kvasir-lease"] = f"kept; tokens={kept.tokens}; ttl={kept.ttl_s:g}" if kept else "degraded"
    return headers
