from __future__ import annotations

import asyncio
import logging
import re
import socket
import time

import aiohttp
import openai
import pytest
from aiohttp import web
from yarl import URL

from gateway.config import ServerSettings
from gateway.errors import EngineLostError, NoEngineError, QueueFullError
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakeModels, FakePipeline

ASK = {"model": "demo", "messages": [{"role": "user", "content": "a secret"}]}
KEYS = {"message", "type", "param", "code"}


async def chat(gateway: Gateway, **headers: str) -> tuple[int, object, object]:
    return await gateway.post("/v1/chat/completions", ASK, headers=headers)


@pytest.mark.parametrize("sane", ["abc", "req_1", "0198c7b2-aaaa-7bbb-8ccc-1234567890ab", "a" * 128])
async def test_a_sane_request_id_of_the_client_is_kept(sane: str) -> None:
    async with running() as gateway:
        async with gateway.session.post(
            f"{gateway.url}/v1/chat/completions", json=ASK, headers={"X-Request-Id": sane}
        ) as answer:
            assert answer.headers["x-request-id"] == sane
        assert gateway.pipeline.requests[0].request_id == sane


@pytest.mark.parametrize("odd", ["", " ", "a b", "a" * 129, "x=1 status=200", "\u00fc", "-x"])
async def test_any_other_is_replaced(odd: str) -> None:
    async with (
        running() as gateway,
        gateway.session.get(f"{gateway.url}/v1/models", headers={"X-Request-Id": odd}) as answer,
    ):
        assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_every_answer_has_its_own_request_id() -> None:
    async with running() as gateway:
        ids = [(await gateway.get(path))[2]["x-request-id"] for path in ("/", "/health", "/nothing", "/v1/models") * 2]
        assert len(set(ids)) == 8


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1", "/v1/chat/completions/", "/v2/chat/completions"])
async def test_unknown_urls_are_404_in_the_shape_of_the_api(path: str) -> None:
    async with running() as gateway:
        status, body, _ = await gateway.post(path, {})
        assert (status, set(body["error"]), body["error"]["code"]) == (404, KEYS, "unknown_url")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/v1/responses", "/v1/responses"),
        ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/v1/v1beta/models/demo:generateContent", "/v1beta/models/demo:generateContent"),
        ("/models/org%2Fdemo:generateContent", "/v1/models/org%2Fdemo:generateContent"),
    ],
)
async def test_a_url_that_is_nearly_right_is_told_the_right_one(path: str, meant: str) -> None:
    async with running() as gateway, gateway.session.post(URL(gateway.url + path, encoded=True), json={}) as answer:
        assert answer.status == 404
        assert f"Did you mean {meant}?" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/conversations", "/v1/conversations/conv_1/items", "/v1/moderations", "/v1/images/generations"]
)
async def test_an_api_that_is_not_served_here_is_named(path: str) -> None:
    async with running() as gateway, gateway.sdk() as client:
        with pytest.raises(openai.NotFoundError, match=f"The {path.split('/')[2]} API is not served here"):
            await client.post(path.removeprefix("/v1"), cast_to=object)


async def test_what_is_like_nothing_gets_no_hint() -> None:
    async with running() as gateway:
        for path in ("/nothing", "/" + "v1/" * 40, "/v1/" + "x" * 5000):
            _, body, _ = await gateway.post(path, {})
            assert "Did you mean" not in body["error"]["message"]
            assert len(body["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/chat/completions", "GET, HEAD, POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/demo", "GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
        ("PATCH", "/admin/stats", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(method: str, path: str, allowed: str) -> None:
    async with running() as gateway, gateway.session.request(method, gateway.url + path) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, allowed)
        assert set((await answer.json())["error"]) == KEYS


@pytest.mark.parametrize("path", ["/", "/health", "/health/liveness", "/metrics", "/docs", "/v1/models", "/v1/files"])
async def test_head_is_answered_as_get_is_without_a_body(path: str) -> None:
    async with running() as gateway:
        async with gateway.session.get(gateway.url + path) as whole:
            status, kind = whole.status, whole.content_type
        async with gateway.session.head(gateway.url + path) as answer:
            assert (answer.status, answer.content_type, await answer.read()) == (status, kind, b"")
            assert (answer.status, int(answer.headers["content-length"]) > 0) == (200, True)


async def test_a_head_of_what_is_not_there_is_an_error_without_a_body_on_a_connection_that_goes_on() -> None:
    async with running() as gateway:
        for path, status in (("/v1/models/other", 404), ("/v1/files/file-1/content", 405), ("/v1/completions", 405)):
            async with gateway.session.head(gateway.url + path) as answer:
                assert (answer.status, await answer.read()) == (status, b"")
            assert (await gateway.get("/health/liveness"))[0] == 200


@pytest.mark.parametrize(
    "path", [b"/\xff", b"/v1/models/\xff\xfe", b"/v1/models/%ff%fe", b"/%00", b"/v1/models/%0a", b"//", b"/../x"]
)
async def test_urls_that_are_no_text_are_not_found_either(path: bytes) -> None:
    async with running() as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.0 400 ")), answer


async def test_a_bug_is_a_500_that_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakePipeline(fails_before=ZeroDivisionError("a secret"))) as gateway:
        status, body, headers = await gateway.post("/v1/chat/completions", ASK)
        assert (status, set(body["error"]), body["error"]["type"]) == (500, KEYS, "server_error")
        assert "secret" not in body["error"]["message"]
        assert headers["x-request-id"] in caplog.text


async def test_errors_of_one_of_several_prompts_arrive_unwrapped() -> None:
    async with running(FakePipeline(fails_before=QueueFullError("full", retry_after_s=70.2))) as gateway:
        status, body, headers = await gateway.post("/v1/completions", {"model": "demo", "prompt": ["a", "b"]})
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "requests", "rate_limit_exceeded")
        assert (headers["retry-after"], headers["retry-after-ms"], headers["x-should-retry"]) == ("71", "70200", "true")
        assert gateway.pipeline.open == 0


async def test_one_line_tells_all_of_a_request_but_not_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with running() as gateway:
        await chat(gateway, **{"X-Request-Id": "mine"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    fields = dict(part.split("=", 1) for part in line.split(" "))
    assert fields | {"first_token_ms": "0.1", "total_ms": "0.2"} == {
        "request_id": "mine",
        "tenant": "anonymous",
        "endpoint": "/v1/chat/completions",
        "model": "demo",
        "engine": "engine-1",
        "lane": "online",
        "prompt_tokens": "40",
        "cached_tokens": "32",
        "completion_tokens": "2",
        "overhead_ms": "0.5",
        "first_token_ms": "0.1",
        "total_ms": "0.2",
        "status": "200",
    }


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("messages", [{"role": "poet", "content": "a secret"}], "BadRequest:messages[0].role"),
        ("model", "a secret", "ModelNotFound:model"),
        ("a secret\nstatus=200", 1, ""),
        ("modalities", ["audio"], "Unsupported:modalities"),
    ],
)
async def test_the_line_says_why_a_request_was_refused_and_quotes_nothing_of_it(
    field: str, value: object, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running() as gateway:
        status, _, _ = await gateway.post("/v1/chat/completions", {**ASK, field: value})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    assert line.endswith(f" status={status}{told and ' error='}{told}")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        (FakePipeline(fails_before=QueueFullError("Full.", retry_after_s=1.0)), "status=429 error=QueueFull"),
        (FakePipeline(fails_before=ValueError("a secret")), "status=500 error=Kvasir"),
        (FakePipeline(fails_after=EngineLostError("It went away.")), "status=502 error=EngineLost"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_line_says_why_a_request_failed(
    pipeline: FakePipeline, told: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with (
        running(pipeline) as gateway,
        gateway.session.post(f"{gateway.url}/v1/chat/completions", json={**ASK, "stream": stream}) as answer,
    ):
        await answer.read()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    assert line.endswith(f" {told}")


async def test_a_line_cannot_be_forged_by_the_name_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with running() as gateway:
        await gateway.post("/v1/chat/completions", {**ASK, "model": "x status=200\nrequest_id=other"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    assert " model=" not in line
    assert "\n" not in line


async def test_probes_and_scrapes_leave_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with running() as gateway:
        for path in ("/health", "/health/liveness", "/metrics"):
            await gateway.get(path)
        gateway.state["engines"] = []  # as while the server starts
        for path in ("/health", "/health/readiness"):
            assert (await gateway.get(path))[0] == 503
    assert not caplog.records


async def test_a_known_model_without_engines_is_named_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with running(models=FakeModels(away=NoEngineError("demo", 1.0))) as gateway:
        await chat(gateway)
    assert "model=demo " in caplog.text
    assert "status=503" in caplog.text


async def test_small_writes_leave_at_once() -> None:
    seen: list[int] = []

    async def look(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    async with running() as gateway:
        handlers = [route for route in gateway.app.router.routes() if route.resource is not None]
        liveness = next(route for route in handlers if route.resource.canonical == "/health/liveness")  # type: ignore[union-attr]
        liveness._handler = look
        await gateway.get("/health/liveness")
    assert seen == [1]


async def test_an_answer_that_does_not_end_holds_the_shutdown_up_for_shutdown_s_and_no_longer() -> None:
    pipeline, body = FakePipeline(hold_after=asyncio.Event()), {**ASK, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with running(pipeline, server=ServerSettings(shutdown_s=2.0)) as gateway:
            answer = await session.post(f"{gateway.url}/v1/chat/completions", json=body)
            await pipeline.reached.wait()
            background = {"model": "demo", "input": "hi", "background": True}
            assert (await gateway.post("/v1/responses", background))[0] == 200
            begun_s = time.monotonic()
        assert 1.9 < time.monotonic() - begun_s < 3.8  # for all together
        assert pipeline.open == 0
        answer.close()
