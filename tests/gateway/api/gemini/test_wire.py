"""What is Gemini's, and how errors are written, before and after the first byte."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.gemini.wire import duration, duration_s, page, timestamp, timestamp_s
from gateway.config import ServerSettings, TenantSettings
from gateway.errors import BadRequestError, EngineLostError, KvasirError, NoEngineError, QueueFullError
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakeModels, FakePipeline

HI = {"contents": [{"parts": [{"text": "hi"}]}]}
TYPE = "type.googleapis.com/google.rpc."


@pytest.mark.parametrize(
    ("method", "path", "headers", "is_gemini"),
    [
        ("GET", "/v1/models", {"x-goog-api-key": "k"}, True),
        ("GET", "/v1/models", {"x-goog-api-client": "gl-node/1"}, True),
        ("GET", "/v1/models?key=k", {}, True),
        ("GET", "/v1/models", {"Authorization": "Bearer k"}, False),
        ("GET", "/v1/models", {}, False),
        ("GET", "/v1beta/models", {}, True),
        ("GET", "/v1beta/nothing", {}, True),
        ("GET", "/v1/models/demo:tag", {}, False),
        ("GET", "/v1/models/demo:generateContent", {}, True),
        ("POST", "/v1/models/demo:doSomething", {}, True),
        ("POST", "/v1/tunedModels/x:generateContent", {}, True),
        ("GET", "/v1/cachedContents", {}, True),
        ("POST", "/v1/chat/completions", {}, False),
        ("GET", "/nothing", {}, False),
    ],
)
async def test_a_request_is_told_by_path_and_header_and_never_by_its_key(
    method: str, path: str, headers: dict[str, str], is_gemini: bool
) -> None:
    async with running() as gateway, gateway.session.request(method, gateway.url + path, headers=headers) as answer:
        body = await answer.json()
        if answer.status == 200:
            assert bool({"models", "cachedContents"} & set(body)) == is_gemini
        else:
            assert ("status" in body["error"]) == is_gemini


@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        ("GET", "/v1beta/nothing", 404, "NOT_FOUND"),
        ("POST", "/v1/models/other:generateContent", 404, "NOT_FOUND"),
        ("POST", "/v1/models/tunedModels/x:generateContent", 404, "NOT_FOUND"),
        ("GET", "/v1beta/models/other", 404, "NOT_FOUND"),
        ("PUT", "/v1beta/models/demo:generateContent", 405, "UNIMPLEMENTED"),
        ("POST", "/v1beta/models/demo", 405, "UNIMPLEMENTED"),
        ("POST", "/v1/models/demo:predict", 404, "NOT_FOUND"),
        ("POST", "/v1beta/models/demo:doSomething", 404, "NOT_FOUND"),
    ],
)
async def test_what_is_not_there_is_said_in_this_shape(method: str, path: str, status: int, name: str) -> None:
    async with running() as gateway, gateway.session.request(method, gateway.url + path, json=HI) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["status"]) == (status, status, name)
        assert error["message"]
        assert answer.headers["x-request-id"]


async def test_a_wrong_field_is_named_in_the_details() -> None:
    async with running() as gateway:
        body = {**HI, "generationConfig": {"topP": 3}}
        status, answer, _ = await gateway.post("/v1/models/demo:generateContent", body)
        error = answer["error"]
        assert (status, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
        violation = {"field": "generationConfig.topP", "description": error["message"]}
        assert error["details"] == [{"@type": f"{TYPE}BadRequest", "fieldViolations": [violation]}]


async def test_a_body_that_is_too_large_is_413() -> None:
    async with running(server=ServerSettings(max_body_bytes=2000)) as gateway:
        status, answer, _ = await gateway.post("/v1/models/demo:generateContent", {"contents": "x" * 3000})
        assert (status, answer["error"]["code"], answer["error"]["status"]) == (413, 413, "INVALID_ARGUMENT")


async def test_keys_travel_in_a_header_or_the_url() -> None:
    tenants = [TenantSettings(name="north", keys=("north-key-123",))]
    url = "/v1beta/models/demo:generateContent"
    async with running(tenants=tenants) as gateway:
        status, answer, _ = await gateway.post(url, HI)
        assert (status, answer["error"]["status"]) == (401, "UNAUTHENTICATED")
        status, answer, _ = await gateway.post(f"{url}?key=somebody-elses", HI)
        assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
        reasons = [{"@type": f"{TYPE}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"}]
        assert answer["error"]["details"] == reasons
        assert (await gateway.post(f"{url}?key=north-key-123", HI))[0] == 200
        assert (await gateway.post(url, HI, headers={"x-goog-api-key": "north-key-123"}))[0] == 200
        assert {request.tenant.name for request in gateway.pipeline.requests} == {"north"}


@pytest.mark.parametrize(
    ("error", "code", "name", "delay"),
    [
        (QueueFullError("full", retry_after_s=1.5), 429, "RESOURCE_EXHAUSTED", "1.5s"),
        (NoEngineError("demo", 2.0), 503, "UNAVAILABLE", "2s"),
        (EngineLostError("lost"), 502, "UNAVAILABLE", None),
        (KvasirError("oh"), 500, "INTERNAL", None),
    ],
)
async def test_an_error_before_the_first_byte_says_when_to_try_again(
    error: KvasirError, code: int, name: str, delay: str | None
) -> None:
    for verb in ("generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"):
        async with running(FakePipeline(fails_before=error)) as gateway:
            status, answer, headers = await gateway.post(f"/v1/models/demo:{verb}", HI)
            told = answer["error"]
            assert (status, told["code"], told["status"], told["message"]) == (code, code, name, error.message)
            expected = [{"@type": f"{TYPE}RetryInfo", "retryDelay": delay}] if delay else None
            assert told.get("details") == expected
            assert ("Retry-After" in headers) == (delay is not None)


async def test_an_error_after_the_first_byte_is_the_last_event() -> None:
    pipeline = FakePipeline(fails_after=EngineLostError("lost", retry_after_s=1.0))
    async with running(pipeline) as gateway:
        text = await gateway.transcript("/v1/models/demo:streamGenerateContent?alt=sse", HI)
        events = [json.loads(event.removeprefix("data: ")) for event in text.rstrip().split("\n\n")]
        assert [next(iter(event)) for event in events] == ["candidates", "candidates", "error"]
        retry: list[Any] = [{"@type": f"{TYPE}RetryInfo", "retryDelay": "1s"}]
        lost = {"code": 502, "message": "lost", "status": "UNAVAILABLE", "details": retry}
        assert events[-1] == {"error": lost}
        async with gateway.session.post(f"{gateway.url}/v1/models/demo:streamGenerateContent", json=HI) as answer:
            assert answer.content_type == "application/json"
            assert (await answer.json())[-1] == {"error": lost}


async def test_a_model_whose_engines_are_away_is_listed_without_limits() -> None:
    async with running(models=FakeModels(away=NoEngineError("demo", 2.0))) as gateway:
        (model,) = json.loads((await gateway.get("/v1beta/models"))[1])["models"]
        assert model["name"] == "models/demo"
        assert "inputTokenLimit" not in model


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"), [("3.5s", 3.5), ("300s", 300), ("0.000000001s", 1e-9), ("-1s", -1), ("0s", 0)]
)
def test_durations_are_seconds_that_end_with_s(written: str, seconds: float) -> None:
    assert duration_s(written, "ttl") == seconds
    assert duration(seconds) == written


@pytest.mark.parametrize("written", ["300", "5m", "1.0000000001s", ".5s", "1e3s", "s", "٣s", "9" * 13 + "s", 300, None])
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(BadRequestError) as refused:
        duration_s(written, "ttl")
    assert refused.value.param == "ttl"


TEN = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2026-11-21T10:00:00Z", TEN),
        ("2026-11-21t10:00:00z", TEN),
        ("2026-11-21T10:00:00+00:00", TEN),
        ("2026-11-21T12:30:00+02:30", TEN),
        ("2026-11-21T10:00:00.25Z", TEN + 0.25),
        ("2026-11-21T10:00:00.250000000Z", TEN + 0.25),
    ],
)
def test_timestamps_are_rfc_3339(written: str, seconds: float) -> None:
    assert timestamp_s(written, "expireTime") == seconds


@pytest.mark.parametrize("written", ["2026-11-21", "2026-11-21T10:00:00", "2026-13-21T10:00:00Z", "soon", 5, ""])
def test_what_is_no_timestamp_is_refused(written: object) -> None:
    with pytest.raises(BadRequestError) as refused:
        timestamp_s(written, "expireTime")
    assert refused.value.param == "expireTime"


def test_a_timestamp_is_written_in_utc() -> None:
    assert timestamp(TEN + 0.25) == "2026-11-21T10:00:00.250000Z"
    assert timestamp_s(timestamp(TEN + 0.25), "x") == TEN + 0.25


# -- pages ------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(), max_size=30), st.integers(1, 10))
def test_all_pages_together_are_all_items_once(items: dict[str, int], size: int) -> None:
    found: list[tuple[str, int]] = []
    query = {"pageSize": str(size)}
    while True:
        shown, token = page(items, query)
        found += shown
        if not token:
            break
        assert len(shown) == size
        query["pageToken"] = token
    assert found == sorted(items.items())


def test_an_item_that_went_away_ends_no_walk() -> None:
    items = dict.fromkeys("abcd", 0)
    _, token = page(items, {"pageSize": "2"})
    del items["b"]
    assert [key for key, _ in page(items, {"pageToken": token})[0]] == ["c", "d"]


@pytest.mark.parametrize("query", [{"pageSize": "-1"}, {"pageSize": "x"}, {"pageToken": "?"}, {"pageToken": "_w=="}])
def test_a_size_or_token_that_is_none_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(BadRequestError) as refused:
        page({}, query)
    assert refused.value.param in query


def test_a_page_has_at_most_a_thousand_items_and_fifty_without_a_size() -> None:
    items = {f"{number:05d}": 0 for number in range(2000)}
    sizes = [len(page(items, query)[0]) for query in ({"pageSize": "5000"}, {"pageSize": "0"}, {})]
    assert sizes == [1000, 50, 50]
