"""Errors, headers, times and pages of lists as the Gemini API has them, and which requests are its own.

Errors have the shape of google.rpc.Status: a number, a message, a name for the number, and details that say which
field was wrong and when to try again.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from aiohttp import web

from gateway.api.dialect import Dialect, printable
from gateway.api.fields import Check, closed_object, in_url, integer, invalid, made, read_query, table, text, used
from gateway.errors import BadRequestError, ContextLengthError, KvasirError, UnauthorizedError

_DURATION: Final = re.compile(r"(-?[0-9]{1,12})(?:\.([0-9]{1,9}))?s")
_OWN_PATHS: Final = re.compile(
    r"(/upload)?/v1beta(/.*)?|/upload/v1(/.*)?"
    r"|/v1/(cachedContents|tunedModels)(/.*)?"
    r"|/v1/models/.+:(generateContent|streamGenerateContent|countTokens|embedContent|batchEmbedContents|predict)"
)
_VERB: Final = re.compile(r"/v1(beta)?/models/.+:[A-Za-z]+")  # of a POST; a model that is got may be `name:tag`
_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE: Final = "type.googleapis.com/google.rpc."

_T = TypeVar("_T")
DEFAULT_SIZE: Final = 50
MAX_SIZE: Final = 1000

PAGE: Final = table(
    used("pageSize", in_url(integer(0, 2**31 - 1)), "integer, default 50", "Items of a page, 1000 at most."),
    used("pageToken", text(), "string", "The `nextPageToken` of the page before."),
)


def _duration_s(written: str, path: str) -> float:
    if not _DURATION.fullmatch(written):
        raise invalid(path, "a duration is seconds that end with 's', as in '3.5s'")
    return float(written[:-1])


def _timestamp_s(written: str, path: str) -> float:
    try:
        time = datetime.fromisoformat(written.upper())
        if time.tzinfo is not None:
            return time.timestamp()
    except (ValueError, OverflowError):
        pass
    raise invalid(path, "a time is written as in '2026-11-21T10:00:00.5Z' (RFC 3339)")


duration_s: Final[Check[float]] = made(text(), _duration_s)
"""Seconds, possibly negative."""

timestamp_s: Final[Check[float]] = made(text(), _timestamp_s)
"""Seconds since 1970."""


def duration(seconds: float) -> str:
    """`2s`, `0.5s`."""
    written = f"{seconds:.9f}".rstrip("0").rstrip(".")
    return f"{written}s"


def timestamp(seconds: float) -> str:
    """In UTC, to the microsecond: `2026-11-21T10:00:00.500000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def speaks(http: web.Request) -> bool:
    """By the path, or by a header or parameter that only Google's clients send."""
    path = http.path
    if _OWN_PATHS.fullmatch(path) or unknown(http):
        return True
    headers = http.headers
    if "x-goog-api-key" in headers or "x-goog-api-client" in headers:
        return True
    return bool(http.rel_url.raw_query_string) and "key" in http.query  # hardly any other request has a query


def unknown(http: web.Request) -> bool:
    """A POST to a model with a verb that is not there."""
    return http.method == "POST" and bool(_VERB.fullmatch(http.path))


def error_json(error: KvasirError, request_id: str = "") -> dict[str, Any]:
    """The body of an error answer, and of an error in a stream. The request's id is in a header."""
    status = _status(error)
    name = _STATUS.get(status, "INVALID_ARGUMENT" if status < 500 else "UNKNOWN")
    message = error.message
    if isinstance(error, ContextLengthError):
        most, asked = error.context_tokens, error.prompt_tokens
        message = f"The input token count ({asked}) exceeds the maximum number of tokens allowed ({most}). {message}"
    status_json: dict[str, Any] = {"code": status, "message": printable(message), "status": name}
    if details := _details(error):
        status_json["details"] = details
    return {"error": status_json}


def _status(error: KvasirError) -> int:
    """A wrong key is a wrong argument in this API; none at all is not."""
    return 400 if _wrong_key(error) else error.status


def _wrong_key(error: KvasirError) -> bool:
    return isinstance(error, UnauthorizedError) and error.code is not None


def _details(error: KvasirError) -> list[dict[str, Any]]:
    details: list[dict[str, Any]] = []
    if _wrong_key(error):
        details.append({"@type": f"{_TYPE}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"})
    if isinstance(error, BadRequestError) and error.param:
        violation = {"field": printable(error.param), "description": printable(error.message)}
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if error.retry_after_s is not None:
        details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": duration(error.retry_after_s)})
    return details


def _headers(request_id: str, elapsed_ms: float) -> dict[str, str]:
    return {"x-request-id": request_id, "Server-Timing": f"gfet4t7; dur={elapsed_ms:.0f}"}


_DETAIL: Final = {"type": "object", "required": ["@type"], "properties": {"@type": {"type": "string"}}}
_ERROR: Final = {
    "type": "object",
    "properties": {
        "code": {"type": "integer"},
        "message": {"type": "string"},
        "status": {"enum": [*sorted(set(_STATUS.values())), "UNKNOWN"]},
        "details": {"type": "array", "items": _DETAIL, "minItems": 1},
    },
    "required": ["code", "message", "status"],
    "additionalProperties": False,
}

GEMINI = Dialect(
    name="gemini",
    title="Gemini",
    speaks=speaks,
    headers=_headers,
    error_json=error_json,
    error_schema=closed_object({"error": _ERROR}),
    asking_headers={"x-goog-api-key": "KEY"},
    status=_status,
    unknown=unknown,
    tells_writes=False,
)


def page(items: Mapping[str, _T], query: Mapping[str, str]) -> tuple[Sequence[tuple[str, _T]], str]:
    """The items of the page of the query, in the order of their keys, and the token of the next one, empty at the
    end. A token stays valid while items are added and deleted. Raises BadRequestError."""
    values = read_query(query, PAGE)
    size, after = min(values.get("pageSize") or DEFAULT_SIZE, MAX_SIZE), _after(values)
    keys = sorted(key for key in items if after is None or key > after)
    shown = keys[:size]
    token = base64.urlsafe_b64encode(shown[-1].encode()).decode() if len(keys) > size else ""
    return [(key, items[key]) for key in shown], token


def _after(query: Mapping[str, Any]) -> str | None:
    if not (written := query.get("pageToken")):
        return None
    try:
        return base64.b64decode(written.encode(), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid("pageToken", "it is none that was given out") from None
