"""What is on the wire, byte for byte: streams and bodies against transcripts in tests/golden/anthropic."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from engine.protocol import Breakpoint
from gateway.config import ServerSettings, TenantSettings
from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    EngineFailedError,
    EngineLostError,
    KvasirError,
    NoEngineError,
    QueueFullError,
)
from gateway.types import CallDelta, Lease
from tests.fakes.gateway import Gateway, running
from tests.fakes.golden import assert_golden
from tests.fakes.pipeline import FakePipeline

VERSION = {"anthropic-version": "2026-10-21"}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
POINTS = (Breakpoint(10, 3600.0), Breakpoint(30, 300.0), Breakpoint(36, 300.0))
KEPT: dict[str, Any] = {"breakpoints": POINTS, "kept_tokens": 36, "lease_reads": (10,), "lease": Lease(0, POINTS[-1])}
CALLS = (
    "I",
    " look.",
    CallDelta(0, "weather"),
    CallDelta(0, arguments='{"city": "'),
    CallDelta(0, arguments='Oslo"}'),
    CallDelta(1, "time", "{}"),
)


ANSWERS: dict[str, tuple[FakePipeline, dict[str, Any]]] = {
    "text": (FakePipeline(("Hello", " wörld \u2028")), {}),
    "nothing": (FakePipeline(()), {}),
    "max_tokens": (FakePipeline(("a", "b"), reason="length"), {"max_tokens": 2}),
    "context_is_full": (FakePipeline(("a", "b"), reason="length"), {"max_tokens": 3}),
    "stop_sequence": (FakePipeline(("a",), stop="END"), {"stop_sequences": ["END"]}),
    "tool_use": (FakePipeline(CALLS, reason="tool_calls"), {}),
    "tool_use_cut": (FakePipeline(CALLS[2:4], reason="length"), {"max_tokens": 2}),
    "cached": (FakePipeline(("a",), traced=KEPT), {"diagnostics": {"previous_message_id": None}}),
    "degraded": (FakePipeline(("a",), traced={**KEPT, "kept_tokens": 0, "lease": Lease(2, None)}), {}),
    "failure": (FakePipeline(("a",), fails_after=EngineLostError("The engine was lost.")), {}),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_is_as_its_transcript(name: str) -> None:
    pipeline, fields = ANSWERS[name]
    async with running(pipeline) as gateway:
        told = await gateway.transcript("/v1/messages", BODY | fields | {"stream": True}, headers=VERSION)
    assert_golden(f"anthropic/{name}.sse", told)


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "failure"])
async def test_a_body_is_as_its_transcript(name: str) -> None:
    pipeline, fields = ANSWERS[name]
    async with (
        running(pipeline) as gateway,
        gateway.session.post(f"{gateway.url}/v1/messages", json=BODY | fields, headers=VERSION) as answer,
    ):
        assert answer.status == 200
        assert_golden(f"anthropic/{name}.json", await answer.text() + "\n")


async def refused(gateway: Gateway, body: object, **headers: str) -> tuple[int, str, str]:
    """Status, type and message of an error that carries its request's id."""
    status, told, got = await gateway.post("/v1/messages", body, headers=headers)
    assert told.keys() == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["request_id"] == got["request-id"]
    return status, told["error"]["type"], told["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (
            ContextLengthError(9, 12, 5, param="messages"),
            400,
            "invalid_request_error",
            "prompt is too long: 12 tokens > 8",
        ),
        (QueueFullError("Wait.", retry_after_s=2), 429, "rate_limit_error", "Wait."),
        (NoEngineError("demo", 1), 529, "overloaded_error", "No engine that serves `demo` is reachable"),
        (DeadlineError("Too long."), 504, "timeout_error", "Too long."),
        (EngineFailedError("It broke."), 500, "api_error", "It broke."),
        (EngineLostError("It went."), 500, "api_error", "It went."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_have_the_status_of_their_type(
    error: KvasirError, status: int, kind: str, message: str, stream: bool
) -> None:
    async with running(FakePipeline(fails_before=error)) as gateway:
        told = await refused(gateway, BODY | {"stream": stream}, **VERSION)
    assert told[:2] == (status, kind)
    assert told[2].startswith(message)


async def test_a_version_is_needed_and_has_to_be_known() -> None:
    async with running() as gateway:
        missing = (400, "invalid_request_error", "anthropic-version: header is required")
        assert await refused(gateway, BODY) == missing
        status, kind, message = await refused(gateway, BODY, **{"anthropic-version": "2024-01-01"})
        assert (status, kind) == (400, "invalid_request_error")
        assert message.startswith('anthropic-version: "2024-01-01" is not a valid version')
        assert (await gateway.post("/v1/messages", BODY, headers={"anthropic-version": "2023-06-01"}))[0] == 200


async def test_every_error_of_its_paths_is_in_its_shape() -> None:
    small = ServerSettings(max_body_bytes=1024)
    tenants = [TenantSettings(name="north", keys=("north-key",))]
    async with running(server=small, tenants=tenants) as gateway:
        key = {**VERSION, "x-api-key": "north-key"}
        assert (await refused(gateway, BODY, **VERSION))[:2] == (401, "authentication_error")
        assert (await refused(gateway, BODY, **VERSION, **{"x-api-key": "wrong"}))[:2] == (401, "authentication_error")
        assert (await refused(gateway, BODY | {"model": "none"}, **key)) == (404, "not_found_error", "model: none")
        assert (await refused(gateway, BODY | {"system": "x" * 2000}, **key))[:2] == (413, "request_too_large")
        assert (await refused(gateway, [], **key))[:2] == (400, "invalid_request_error")
        for method, path, status, kind in (
            ("GET", "/v1/messages", 405, "invalid_request_error"),
            ("GET", "/v1/messages/nothing/here", 404, "not_found_error"),
        ):
            async with gateway.session.request(method, gateway.url + path) as answer:
                told = await answer.json()
                assert (answer.status, told["error"]["type"]) == (status, kind)
                assert told["request_id"] == answer.headers["request-id"]
        async with gateway.session.get(f"{gateway.url}/v1/unknown", headers=VERSION) as answer:
            assert (await answer.json())["error"]["type"] == "not_found_error"
        async with gateway.session.get(f"{gateway.url}/v1/unknown") as answer:
            assert (await answer.json())["error"]["code"] == "unknown_url", "without the header it is OpenAI's"


async def test_what_fails_after_the_first_token_is_counted_with_its_own_status() -> None:
    async with running(FakePipeline(fails_after=DeadlineError("Too long."))) as gateway:
        told = await gateway.transcript("/v1/messages", BODY | {"stream": True}, headers=VERSION)
        assert '"type":"timeout_error"' in told.split("event: error")[1]
        assert 'status="504"' in (await gateway.get("/metrics"))[1]


@pytest.mark.parametrize(
    ("encoding", "data", "status", "code"),
    [
        ("br", b"{}", 400, "request_body_encoding_unsupported"),
        ("gzip", b"{}", 400, "request_body_encoding_invalid"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-9], 400, "request_body_encoding_invalid"),
        ("gzip", gzip.compress(b" " * 3000, mtime=0), 413, "request_body_too_large_after_decoding"),
    ],
)
async def test_what_is_wrong_with_a_compressed_body_has_a_code(
    encoding: str, data: bytes, status: int, code: str
) -> None:
    headers = VERSION | {"Content-Encoding": encoding}
    async with (
        running(server=ServerSettings(max_body_bytes=2000)) as gateway,
        gateway.session.post(f"{gateway.url}/v1/messages", data=data, headers=headers) as answer,
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["details"]) == (status, {"error_code": code})
        kind = "request_too_large" if status == 413 else "invalid_request_error"
        assert error["type"] == kind
