"""Errors and headers as the OpenAI API writes them: every error body has all four keys."""

from __future__ import annotations

from typing import Any

from gateway.api.dialect import Dialect, printable
from gateway.api.fields import closed_object
from gateway.errors import KvasirError
from gateway.types import Allowance, Room

OPENAI_VERSION = "2020-10-01"


def error_json(error: KvasirError, request_id: str = "") -> dict[str, Any]:
    """The body of an error answer, and of an SSE error event. The request's id is in a header."""
    return {
        "error": {"message": printable(error.message), "type": error.type, "param": error.param, "code": error.code}
    }


def _headers(request_id: str, elapsed_ms: float) -> dict[str, str]:
    return {
        "x-request-id": request_id,
        "openai-processing-ms": str(round(elapsed_ms)),
        "openai-version": OPENAI_VERSION,
    }


_nullable = {"type": ["string", "null"]}
_ERROR = closed_object(
    {"message": {"type": "string"}, "type": {"type": "string"}, "param": _nullable, "code": _nullable}
)


def _allowance(allowance: Allowance) -> dict[str, str]:
    requests = {} if allowance.requests is None else _room("requests", allowance.requests)
    return requests if allowance.tokens is None else requests | _room("tokens", allowance.tokens)


def _room(kind: str, room: Room) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(room.limit),
        f"x-ratelimit-remaining-{kind}": str(room.remaining),
        f"x-ratelimit-reset-{kind}": _duration(room.reset_s),
    }


def _duration(seconds: float) -> str:
    """As this API writes one: `120ms`, `1s`, `6m0s`."""
    ms = round(seconds * 1e3)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


OPENAI = Dialect(
    name="openai",
    title="OpenAI",
    speaks=lambda http: True,
    headers=_headers,
    error_json=error_json,
    error_schema=closed_object({"error": _ERROR}),
    asking_headers={"Authorization": "Bearer KEY"},
    allowance=_allowance,
)
