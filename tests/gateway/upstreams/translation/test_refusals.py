"""What upstreams answer in the place of an answer, as clients of all dialects are told it: one table."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.dialect import Dialect, retry_headers
from gateway.api.gemini.wire import GEMINI
from gateway.api.openai.wire import OPENAI
from gateway.errors import KvasirError, UpstreamLostError, UpstreamRefusedError
from gateway.types import UpstreamAnswer
from gateway.upstreams.translation.refusals import refusal, settled


def openai(message: str, kind: str = "invalid_request_error", code: str | None = None) -> Any:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def claude(message: str, kind: str = "invalid_request_error") -> Any:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


def google(status: int, message: str, name: str = "INVALID_ARGUMENT", *details: Any) -> Any:
    return {"error": {"code": status, "message": message, "status": name, "details": details}}


def _info(reason: str) -> dict[str, str]:
    return {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason, "domain": "googleapis.com"}


_OURS = ("server_error", "upstream_failed"), "api_error", "UNAVAILABLE"
_WRONG = ("invalid_request_error", None), "invalid_request_error", "INVALID_ARGUMENT"
_LONG = ("invalid_request_error", "context_length_exceeded"), "invalid_request_error", "INVALID_ARGUMENT"
_LIMIT = ("requests", "rate_limit_exceeded"), "rate_limit_error", "RESOURCE_EXHAUSTED"
_BUSY = ("server_error", "server_is_overloaded"), "overloaded_error", "UNAVAILABLE"

TABLE: list[tuple[int, Any, tuple[int, int, int], Any]] = [
    # its status and body; the statuses for clients of OpenAI, Anthropic and Gemini; type and code, type, and status
    (401, openai("Incorrect API key provided: sk-ab***yz"), (502, 500, 502), _OURS),
    (403, openai("You are not allowed to sample from this model"), (502, 500, 502), _OURS),
    (401, claude("invalid x-api-key", "authentication_error"), (502, 500, 502), _OURS),
    (402, claude("Your credit balance is too low", "billing_error"), (502, 500, 502), _OURS),
    (403, claude("Your account does not have access", "permission_error"), (502, 500, 502), _OURS),
    (400, google(400, "API key not valid.", "INVALID_ARGUMENT", _info("API_KEY_INVALID")), (502, 500, 502), _OURS),
    (
        403,
        google(403, "Blocked", "PERMISSION_DENIED", _info("API_KEY_SERVICE_BLOCKED")),
        (502, 500, 502),
        _OURS,
    ),
    (400, openai("Unknown parameter: 'x'.", code="unknown_parameter"), (400, 400, 400), None),
    (400, claude("messages: roles must alternate"), (400, 400, 400), _WRONG),
    (400, google(400, "Invalid JSON payload"), (400, 400, 400), _WRONG),
    (
        404,
        claude("model: claude-9", "not_found_error"),
        (404, 404, 404),
        (("invalid_request_error", "model_not_found"), "not_found_error", "NOT_FOUND"),
    ),
    (
        413,
        claude("Request exceeds the maximum size", "request_too_large"),
        (413, 413, 413),
        (("invalid_request_error", None), "request_too_large", "INVALID_ARGUMENT"),
    ),
    (422, openai("Unprocessable"), (422, 422, 422), _WRONG),
    (429, openai("Rate limit reached", "tokens", "rate_limit_exceeded"), (429, 429, 429), _LIMIT),
    (429, claude("This request would exceed your limit", "rate_limit_error"), (429, 429, 429), _LIMIT),
    (429, [google(429, "Quota exceeded", "RESOURCE_EXHAUSTED")], (429, 429, 429), _LIMIT),
    (529, claude("Overloaded", "overloaded_error"), (503, 529, 503), _BUSY),
    (503, openai("The engine is overloaded", "server_error"), (503, 529, 503), _BUSY),
    (503, google(503, "The model is overloaded", "UNAVAILABLE"), (503, 529, 503), _BUSY),
    (
        500,
        claude("Failed", "api_error"),
        (500, 500, 500),
        (("server_error", None), "api_error", "INTERNAL"),
    ),
    (
        504,
        google(504, "Deadline expired", "DEADLINE_EXCEEDED"),
        (504, 504, 504),
        (("server_error", None), "timeout_error", "DEADLINE_EXCEEDED"),
    ),
    (
        408,
        openai("Request timed out", "server_error"),
        (504, 504, 504),
        (("server_error", None), "timeout_error", "DEADLINE_EXCEEDED"),
    ),
    (400, claude("prompt is too long: 208310 tokens > 200000 maximum"), (400, 400, 400), _LONG),
    (413, claude("Prompt is too long", "request_too_large"), (400, 400, 400), _LONG),
    (
        400,
        openai("Your input exceeds the window", code="context_length_exceeded"),
        (400, 400, 400),
        _LONG,
    ),
    (
        400,
        google(400, "The input token count exceeds the maximum allowed"),
        (400, 400, 400),
        _LONG,
    ),
]


async def _nothing() -> AsyncGenerator[bytes, None]:
    yield b""


def told(status: int, body: Any, retry_after_s: float | None = None) -> KvasirError:
    answer = UpstreamAnswer("up", status, (), _nothing(), "m", retry_after_s)
    return refusal(answer, orjson.dumps(body), "messages")


@pytest.mark.parametrize(("status", "body", "statuses", "kinds"), TABLE)
def test_an_error_is_what_the_clients_own_api_would_have_answered(
    status: int, body: Any, statuses: tuple[int, int, int], kinds: Any
) -> None:
    error = told(status, body)
    dialects: tuple[Dialect, ...] = (OPENAI, ANTHROPIC, GEMINI)
    written = [dialect.error_json(error, "req_1")["error"] for dialect in dialects]
    assert tuple(dialect.status(error) for dialect in dialects) == statuses
    if kinds is not None:
        assert (written[0]["type"], written[0]["code"]) == kinds[0]
        assert (written[1]["type"], written[2]["status"]) == kinds[1:]
    if kinds is _OURS:
        text = orjson.dumps(written).decode()
        assert "the gateway's own key or account" in text
        assert "sk-ab" not in text
        assert isinstance(error, UpstreamLostError)
        assert not error.begun, "so that an upstream of another API is asked"


@pytest.mark.parametrize(
    "said",
    [
        "prompt is too long: 208310 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 208310 + 4096 > 200000, decrease input length",
        "This model's maximum context length is 200000 tokens. However, your messages resulted in 208310 tokens.",
        "This model's maximum context length is 200000 tokens. However, you requested 212406 tokens "
        "(208310 in the messages, 4096 in the completion). Please reduce the length.",
        "This model's maximum context length is 200000 tokens. However, your request has 208310 input tokens.",
        "The input token count (208310) exceeds the maximum number of tokens allowed (200000).",
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(said: str) -> None:
    error = told(400, openai(said))
    written = [dialect.error_json(error, "req_1")["error"] for dialect in (OPENAI, ANTHROPIC, GEMINI)]
    assert written[0]["message"].startswith("This model's maximum context length is 200000 tokens. However, ")
    assert (written[0]["code"], written[0]["param"]) == ("context_length_exceeded", "messages")
    assert written[1]["message"] == "prompt is too long: 208310 tokens > 199999 maximum"
    assert written[2]["message"].startswith("The input token count (208310) exceeds the maximum number of tokens")


def test_a_prompt_that_is_too_long_without_numbers_is_found_as_well() -> None:
    error = told(400, openai("Your input exceeds the context window of this model.", code="context_length_exceeded"))
    assert ANTHROPIC.error_json(error, "r")["error"]["message"].startswith(
        "prompt is too long: Upstream up: Your input"
    )


@pytest.mark.parametrize(
    ("told_s", "delay", "wanted"), [(7.0, "9s", "7"), (None, "9.5s", "10"), (None, "9999s", "3600"), (None, "x", None)]
)
def test_when_to_try_again_is_in_a_header_or_in_geminis_details(
    told_s: float | None, delay: str, wanted: str | None
) -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}
    error = told(429, google(429, "Quota", "RESOURCE_EXHAUSTED", info), told_s)
    assert retry_headers(error).get("Retry-After") == wanted


def test_an_error_in_a_stream_is_settled_alike() -> None:
    assert settled(UpstreamRefusedError("Overloaded", 529), "up", "input").status == 503
    assert settled(UpstreamRefusedError("no", 403), "up", "input").status == 502


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b'{"error": null}', b'{"error": {"message": 1}}'])
def test_a_body_without_a_message_is_an_error_all_the_same(body: bytes) -> None:
    error = refusal(UpstreamAnswer("up", 418, (), _nothing(), "m"), body, "messages")
    assert (error.status, error.message) == (418, "Upstream up: it answered HTTP 418 and does not say why")
