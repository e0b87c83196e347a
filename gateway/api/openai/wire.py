"""Errors and headers as the OpenAI API writes them: every error body has all four keys."""

from __future__ import annotations

from typing import Any

from gateway.api.dialect import Dialect, printable
from gateway.errors import KvasirError

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


OPENAI = Dialect("openai", lambda http: True, _headers, error_json)
