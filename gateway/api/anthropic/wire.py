"""Errors, headers, versions and pages of lists as the Anthropic API has them: messages begin with the path of the field
that is wrong, and every error carries its request's id.

A request is of this dialect by its path or by the header `anthropic-version`, which some paths share with OpenAI's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, cast

from aiohttp import web
from multidict import MultiMapping

from gateway.api.body import ENCODING_CODES
from gateway.api.dialect import Dialect, printable
from gateway.api.fields import choice, closed_object, in_url, integer, invalid, read_query, shown, table, text, used
from gateway.errors import BadRequestError, ContextLengthError, DeadlineError, KvasirError
from gateway.types import Allowance, Room

Version = Literal["2023-06-01", "2026-10-21"]

VERSION_HEADER: Final = "anthropic-version"
VERSIONS: Final = ("2023-06-01", "2026-10-21")

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
ERROR_TYPES: Final = (*_TYPES.values(), "api_error", "invalid_request_error")

NO_THREADS: Final = "thread_unsupported_request"
_REPORTED_CODES: Final = (*ENCODING_CODES, NO_THREADS)
"""Codes that SDKs act upon."""

_INDEX: Final = re.compile(r"\[(\d+)\]")

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1000

_lifecycle = choice("active", "deprecated", "retired")
MODELS: Final = table(
    used("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 20", "Models of one page, at most."),
    used("after_id", text(), "string", "The page right after this model."),
    used("before_id", text(), "string", "The page right before this model."),
    used("lifecycle", _lifecycle, "`active`, `deprecated`, `retired`, several times", "Only models of these stages."),
)


def read_version(http: web.Request) -> Version:
    """The version in the request's header. Raises BadRequestError without one, and for an unknown one."""
    version = http.headers.get(VERSION_HEADER, "").strip()
    if not version:
        raise BadRequestError("header is required", param=VERSION_HEADER, reason="header is required")
    if version not in VERSIONS:
        why = f'"{shown(version)}" is not a valid version; this server knows {" and ".join(VERSIONS)}'
        raise BadRequestError(why, param=VERSION_HEADER, reason=why)
    return cast("Version", version)


def status(error: KvasirError) -> int:
    """Of an error, as the SDKs take it for one of their classes."""
    if isinstance(error, DeadlineError):
        return 504
    return {502: 500, 503: 529}.get(error.status, error.status)


def error_json(error: KvasirError, request_id: str) -> dict[str, Any]:
    """The body of an error answer, and of an error event."""
    code = status(error)
    kind = _TYPES.get(code, "api_error" if code >= 500 else "invalid_request_error")
    error_fields: dict[str, Any] = {"type": kind, "message": printable(_message(error))}
    if error.code in _REPORTED_CODES:
        error_fields["details"] = {"error_code": error.code}
    return {"type": "error", "error": error_fields, "request_id": request_id}


def dotted(path: str) -> str:
    """A path as this API writes it: `messages.0.content`."""
    return _INDEX.sub(r".\1", path)


def time_text(seconds: float) -> str:
    """Seconds since 1970 as this API writes a time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _message(error: KvasirError) -> str:
    match error:
        case ContextLengthError():
            room = min(error.context_tokens, error.prompt_tokens) - 1
            return f"prompt is too long: {error.prompt_tokens} tokens > {room} maximum"
        case KvasirError(param=None, code="context_length_exceeded"):
            return f"prompt is too long: {error.message}"
        case KvasirError(param=None):
            return error.message
    return f"{dotted(error.param or '')}: {error.message if error.reason is None else error.reason}"


def _speaks(http: web.Request) -> bool:
    path = http.path
    return VERSION_HEADER in http.headers or path == "/v1/messages" or path.startswith("/v1/messages/")


def _headers(request_id: str, elapsed_ms: float) -> dict[str, str]:
    return {"request-id": request_id}


def _allowance(allowance: Allowance) -> dict[str, str]:
    headers: dict[str, str] = {}
    for kind in ("requests", "tokens", "input_tokens", "output_tokens"):
        room: Room | None = getattr(allowance, kind)
        if room is not None:
            reset = datetime.now(UTC) + timedelta(seconds=math.ceil(room.reset_s))
            name = f"anthropic-ratelimit-{kind.replace('_', '-')}"
            headers[f"{name}-limit"] = str(room.limit)
            headers[f"{name}-remaining"] = str(room.remaining)
            headers[f"{name}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


_ERROR: Final = {
    "type": "object",
    "properties": {
        "type": {"enum": list(ERROR_TYPES)},
        "message": {"type": "string"},
        "details": closed_object({"error_code": {"enum": list(_REPORTED_CODES)}}),
    },
    "required": ["type", "message"],
    "additionalProperties": False,
}

ANTHROPIC = Dialect(
    name="anthropic",
    title="Anthropic",
    speaks=_speaks,
    headers=_headers,
    error_json=error_json,
    error_schema=closed_object({"type": {"const": "error"}, "error": _ERROR, "request_id": {"type": "string"}}),
    asking_headers={"x-api-key": "KEY", VERSION_HEADER: VERSIONS[-1]},
    status=status,
    error_event="error",
    check=read_version,
    allowance=_allowance,
)


def read_page(query: MultiMapping[str], ids: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The page of `ids` for the query, and whether there are more in its direction. All are active. Raises
    BadRequestError with the parameter's name."""
    wanted = [item for key in ("lifecycle", "lifecycle[]") for item in query.getall(key, [])]
    stages = {_lifecycle(stage, "lifecycle") for stage in wanted}
    if stages and "active" not in stages:
        ids = ()
    values = read_query(query, MODELS)
    limit, after, before = values.get("limit", DEFAULT_LIMIT), values.get("after_id"), values.get("before_id")
    if after is not None and before is not None:
        raise invalid("before_id", "only one of `after_id` and `before_id` is possible")
    if before is not None:
        end = _place(ids, before, "before_id")
        start = max(0, end - limit)
        return ids[start:end], start > 0
    start = 0 if after is None else _place(ids, after, "after_id") + 1
    return ids[start : start + limit], len(ids) > start + limit


def _place(ids: Sequence[str], one: str, name: str) -> int:
    if one not in ids:
        raise invalid(name, f"there is no {shown(one)!r} in this list")
    return ids.index(one)
