"""Requests that go on to an upstream as they were written, and answers that come back as they are."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import logging
import re
from typing import Any
from urllib.parse import quote

import aiohttp
import anthropic
import openai
import orjson
import pytest
from google import genai
from yarl import URL

from gateway.api.lines import LineRequest
from gateway.api.passthrough import need_of
from gateway.api.routes import RUNNER
from gateway.config import LimitSettings, ServerSettings, TenantSettings
from gateway.types import Need, Tenant, UpstreamRequest
from gateway.upstreams import stage
from tests.fakes.gateway import LIMIT_S, Gateway, running
from tests.fakes.upstream import (
    CHAT,
    CHAT_STREAM,
    CHUNK,
    CONTENT,
    CONTENT_STREAM,
    EMBEDDINGS,
    MESSAGE,
    MESSAGE_STREAM,
    RESPONSE,
    SSE,
    USAGE,
    Then,
    Told,
    chunk,
    error,
    events,
    nowhere,
    said,
    upstream,
)

ASK = {"model": "up-1", "messages": [{"role": "user", "content": "Hello."}]}
MESSAGES: Any = [{"role": "user", "content": "Hello."}]


async def ask(gateway: Gateway, body: Any = ASK, path: str = "/v1/chat/completions", **headers: str) -> Any:
    """Status, headers, body as bytes."""
    options = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with gateway.session.post(URL(gateway.url + path, encoded=True), headers=headers, **options) as answer:
        return answer.status, answer.headers, await answer.read()


async def figures(gateway: Gateway, name: str = "up") -> dict[str, Any]:
    async with gateway.session.get(f"{gateway.url}/admin/stats") as answer:
        found: dict[str, Any] = (await answer.json())["upstreams"][name]
        return found


# -- byte for byte ----------------------------------------------------------------------------------------------------

ODD = (
    b'{ "messages" :[{"role":"user","content":"\\u00e9 \xc3\xa9"}],\r\n "x_unknown": 1e2, "model": "up-1","seed":7.0 }'
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
async def test_a_body_goes_on_as_it_was_written_with_unknown_fields(path: str) -> None:
    async with upstream() as stub, running(upstreams=[stub.settings()]) as gateway:
        status, _, told = await ask(gateway, ODD, path + "?beta=true&key=client-key&%6bey=x&x=%20y")
        assert (status, told) == (200, CHAT.pieces[0])
        (got,) = stub.got
        assert got.body == ODD
        assert got.path == path + "?beta=true&x=%20y"
        assert got.headers["Authorization"] == "Bearer sk-upstream"


async def test_an_answer_that_is_compressed_unasked_comes_back_plain_and_is_metered() -> None:
    told = Told([gzip.compress(CHAT.pieces[0])], headers={"Content-Encoding": "gzip"})
    async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
        status, headers, body = await ask(gateway)
        assert (status, body, "Content-Encoding" in headers) == (200, CHAT.pieces[0], False)
        assert (await figures(gateway))["unmetered"] == 0


@pytest.mark.parametrize("told", [CHAT_STREAM, MESSAGE_STREAM, CONTENT_STREAM], ids=["openai", "anthropic", "gemini"])
async def test_a_stream_comes_back_byte_for_byte(told: Told) -> None:
    async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
        status, headers, body = await ask(gateway, {**ASK, "stream": True})
        assert (status, body) == (200, b"".join(told.pieces))
        assert headers["Content-Type"] == SSE
        assert (headers["x-kvasir-engine"], headers["X-Accel-Buffering"]) == ("up", "no")


async def test_each_piece_is_there_before_the_next_one_is_sent() -> None:
    first = events(chunk("Hel"))
    async with (
        asyncio.timeout(LIMIT_S),
        upstream(Told(first, media=SSE, then="stall")) as stub,
        running(upstreams=[stub.settings()]) as gateway,
        gateway.session.post(f"{gateway.url}/v1/chat/completions", json=ASK) as answer,
    ):
        assert await answer.content.readexactly(len(first[0])) == first[0]
        await stub.reached.wait()


async def test_only_the_name_of_a_renamed_model_is_another_one() -> None:
    settings = ("fast = up-1-2026", "openai/* = *")
    async with upstream() as stub, running(upstreams=[stub.settings(*settings)]) as gateway:
        await ask(gateway, b'{"x":1e2 ,"model" : "fast","messages":[ ]}')
        await ask(gateway, b'{"model":"openai/gpt","messages":[{"model":"fast"}]}')
        assert [got.body for got in stub.got] == [
            b'{"x":100.0,"model":"up-1-2026","messages":[]}',
            b'{"model":"gpt","messages":[{"model":"fast"}]}',
        ]


async def test_the_upstream_gets_the_one_model_that_was_looked_up() -> None:
    async with upstream() as stub, running(upstreams=[stub.settings("b")]) as gateway:
        for body in (
            b'{"model":"a","model":"b"}',
            b'{"mod\\u0065l":"b"}',
            b'{"mod\\u0065l":"a","model":"b"}',
            b'{"model":"a","mod\\u0065l":"b"}',
        ):
            await ask(gateway, body)
        assert [got.body for got in stub.got] == [b'{"model":"b"}'] * 4


async def test_a_compressed_body_goes_on_decoded() -> None:
    import gzip

    async with upstream() as stub, running(upstreams=[stub.settings()]) as gateway:
        body = b'{"model":"up-1","messages":[]}'
        assert (await ask(gateway, gzip.compress(body), **{"Content-Encoding": "gzip"}))[0] == 200
        assert stub.got[0].body == body
        assert "Content-Encoding" not in stub.got[0].headers


# -- SDKs -------------------------------------------------------------------------------------------------------------


async def test_the_openai_sdk_asks_through_the_gateway() -> None:
    answers = (CHAT, CHAT_STREAM, RESPONSE, EMBEDDINGS)
    async with upstream(*answers) as stub, running(upstreams=[stub.settings()]) as gateway:
        sdk = gateway.sdk()
        whole = await sdk.chat.completions.create(model="up-1", messages=MESSAGES)
        assert whole.choices[0].message.content == "Hello"
        assert whole.model_extra == {"x_unknown": {"kept": True}}
        stream = await sdk.chat.completions.create(model="up-1", messages=MESSAGES, stream=True)
        assert "".join([one.choices[0].delta.content or "" async for one in stream if one.choices]) == "Hello ✓"
        assert (await sdk.responses.create(model="up-1", input="Hello.")).output_text == "Hello"
        vectors = await sdk.embeddings.create(model="up-1", input="x", encoding_format="float")
        assert vectors.data[0].embedding == [0.5, -1.0]
        assert [got.path for got in stub.got] == [
            "/v1/chat/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/embeddings",
        ]


async def test_the_anthropic_sdk_asks_through_the_gateway() -> None:
    answers = (MESSAGE, MESSAGE_STREAM, said({"input_tokens": 12}))
    async with (
        upstream(*answers) as stub,
        running(upstreams=[stub.settings("claude-*", dialect="anthropic")]) as gateway,
    ):
        sdk = gateway.anthropic(default_headers={"anthropic-beta": "some-beta-1"})
        whole = await sdk.messages.create(model="claude-9", max_tokens=9, messages=MESSAGES)
        assert whole.content[0].type == "text"
        assert whole.usage.cache_read_input_tokens == 1400
        async with sdk.messages.stream(model="claude-9", max_tokens=9, messages=MESSAGES) as stream:
            assert await stream.get_final_text() == "Hello"
        assert (await sdk.messages.count_tokens(model="claude-9", messages=MESSAGES)).input_tokens == 12
        for got in stub.got:
            assert got.headers["x-api-key"] == "sk-upstream"
            assert got.headers["anthropic-version"] == "2026-10-21"
            assert got.headers["anthropic-beta"] == "some-beta-1"
            assert "Authorization" not in got.headers
        found = await figures(gateway)
        assert (found["requests"], found["unmetered"]) == (3, 0)


async def test_the_gemini_sdk_asks_through_the_gateway() -> None:
    answers = (CONTENT, CONTENT_STREAM, said({"totalTokens": 5}))
    async with upstream(*answers) as stub:
        settings = stub.settings("gemini-9", "fast = gemini-9-flash", dialect="gemini")
        async with running(upstreams=[settings]) as gateway:
            client = genai.Client(api_key="client-key", http_options={"base_url": gateway.url})
            try:
                whole = await client.aio.models.generate_content(model="gemini-9", contents="Hello.")
                assert whole.text == "Hello"
                stream = await client.aio.models.generate_content_stream(model="fast", contents="Hello.")
                assert [one.text async for one in stream] == ["Hello"]
                assert (await client.aio.models.count_tokens(model="fast", contents="x")).total_tokens == 5
            finally:
                await client.aio.aclose()
                client.close()
            assert [got.path for got in stub.got] == [
                "/v1/models/gemini-9:generateContent",
                "/v1/models/gemini-9-flash:streamGenerateContent?alt=sse",
                "/v1/models/gemini-9-flash:countTokens",
            ]
            assert {got.headers["x-goog-api-key"] for got in stub.got} == {"sk-upstream"}


@pytest.mark.parametrize("model", ["../admin", "a/../../b", "a//b", "."])
async def test_a_models_name_cannot_lead_to_another_path_of_the_upstream(model: str) -> None:
    async with upstream() as stub, running(upstreams=[stub.settings("*", dialect="gemini")]) as gateway:
        from urllib.parse import quote

        status, _, _ = await ask(gateway, {"contents": []}, f"/v1beta/models/{quote(model, safe='')}:generateContent")
        assert status == 404
        assert not stub.got


async def test_an_upstreams_error_reaches_the_sdk_as_it_came() -> None:
    told = error(400, "Unknown parameter: 'x'.", x_request_id="req_upstream")
    async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
        with pytest.raises(openai.BadRequestError, match="Unknown parameter: 'x'") as caught:
            await gateway.sdk().chat.completions.create(model="up-1", messages=MESSAGES)
        assert caught.value.request_id == "req_upstream"
        assert caught.value.response.content == told.pieces[0]
        assert len(stub.got) == 1


async def test_what_cannot_be_translated_for_a_model_of_another_api_says_which_sdk_to_use() -> None:
    async with upstream() as stub, running(upstreams=[stub.settings("claude", dialect="anthropic")]) as gateway:
        with pytest.raises(openai.BadRequestError, match=r"ask for it with the Anthropic SDK \(POST /v1/messages\)"):
            await gateway.sdk().completions.create(model="claude", prompt="Hi")
    async with upstream() as stub, running(upstreams=[stub.settings("gpt")]) as gateway:
        with pytest.raises(anthropic.BadRequestError, match="with the OpenAI SDK"):
            await gateway.anthropic().messages.count_tokens(model="gpt", messages=MESSAGES)
        assert not stub.got


# -- who is asked -----------------------------------------------------------------------------------------------------


async def test_an_engine_of_ours_wins_over_an_upstream_unless_the_settings_say_otherwise() -> None:
    body = {**ASK, "model": "demo"}
    async with upstream() as stub, running(upstreams=[stub.settings("demo")]) as gateway:
        assert (await ask(gateway, body))[1]["x-kvasir-engine"] == "engine-1"
    async with upstream() as stub, running(upstreams=[stub.settings("demo", over_engines=True)]) as gateway:
        assert (await ask(gateway, body))[1]["x-kvasir-engine"] == "up"


async def test_an_upstream_of_other_tenants_is_as_if_it_were_not_there() -> None:
    tenants = [TenantSettings(name=name, keys=(f"the-key-of-{name}",)) for name in ("a", "b")]
    async with upstream() as stub, running(upstreams=[stub.settings(tenants=("a",))], tenants=tenants) as gateway:
        assert (await ask(gateway, Authorization="Bearer the-key-of-a"))[0] == 200
        status, _, told = await ask(gateway, Authorization="Bearer the-key-of-b")
        assert (status, b"does not exist" in told) == (404, True)
        assert (await ask(gateway))[0] == 401
        assert len(stub.got) == 1
        listed = [(await gateway.get("/v1/models", f"the-key-of-{name}"))[1] for name in "ab"]
        assert ["up-1" in models for models in listed] == [True, False]


async def test_models_are_listed_by_their_exact_names_to_those_who_can_ask_for_them() -> None:
    async with upstream() as stub:
        settings = [
            stub.settings("gpt-5", "fast = gpt-5-mini", "x-*", name="a"),
            stub.settings("claude-9", name="b", dialect="anthropic"),
        ]
        async with running(upstreams=settings) as gateway:
            names = [model.id async for model in gateway.sdk().models.list()]
            assert names[:3] == ["demo", "gpt-5", "fast"]
            assert "claude-9" in names
            assert (await gateway.sdk().models.retrieve("gpt-5")).id == "gpt-5"
            assert {model.id async for model in gateway.anthropic().models.list()} == {
                "demo",
                "gpt-5",
                "fast",
                "claude-9",
            }
            assert (await gateway.anthropic().models.retrieve("claude-9")).id == "claude-9"


# -- retries, fallbacks, failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure", [error(500), error(503), error(408), error(429, retry_after="0"), Told(refuse=True)]
)
async def test_what_may_pass_is_tried_again(failure: Told) -> None:
    async with upstream(failure, CHAT) as stub, running(upstreams=[stub.settings()]) as gateway:
        status, _, body = await ask(gateway)
        assert (status, body) == (200, CHAT.pieces[0])
        assert len(stub.got) == 2
        assert stub.got[0].body == stub.got[1].body


@pytest.mark.parametrize(
    ("failure", "tries"),
    [
        (error(400), 1),
        (error(404), 1),
        (error(500, x_should_retry="false"), 1),
        (error(429, retry_after="60"), 1),
        (error(503), 3),
    ],
)
async def test_the_upstreams_last_error_is_passed_on_as_it_came(failure: Told, tries: int) -> None:
    async with upstream(failure) as stub, running(upstreams=[stub.settings()]) as gateway:
        status, headers, body = await ask(gateway)
        assert (status, body) == (failure.status, failure.pieces[0])
        assert headers.get("retry-after") == failure.headers.get("retry-after")
        assert len(stub.got) == tries


async def test_fallbacks_are_asked_in_order_and_at_once_when_an_upstream_wants_time() -> None:
    async with upstream(error(429, retry_after="5")) as one, upstream(error(502)) as two, upstream() as three:
        settings = [stub.settings(name=name) for stub, name in ((one, "one"), (two, "two"), (three, "three"))]
        async with running(upstreams=[nowhere(), *settings]) as gateway:
            status, headers, _ = await ask(gateway)
            assert (status, headers["x-kvasir-engine"]) == (200, "three")
            assert [len(stub.got) for stub in (one, two, three)] == [1, 3, 1]


@pytest.mark.parametrize(
    ("failure", "why"), [(error(500), "status 500"), (error(429), "status 429"), (Told(refuse=True), "lost")]
)
async def test_failing_over_is_in_the_log_without_what_was_asked_or_a_key(
    failure: Told, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        upstream(failure) as first,
        upstream() as second,
        running(upstreams=[first.settings(name="a", retries=0), second.settings(name="b")]) as gateway,
    ):
        assert (await ask(gateway, **{"X-Request-Id": "r1"}))[0] == 200
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert line == f"upstream a failed request r1 ({why}): b is tried"


async def test_an_answered_error_is_told_before_one_of_ours() -> None:
    async with upstream(error(500, "theirs")) as stub, running(upstreams=[stub.settings(), nowhere()]) as gateway:
        status, _, body = await ask(gateway)
        assert (status, b"theirs" in body) == (500, True)


async def test_an_upstream_that_cannot_be_reached_is_a_502_in_the_clients_dialect() -> None:
    async with running(upstreams=[nowhere()]) as gateway:
        with pytest.raises(openai.InternalServerError, match="nowhere cannot be reached") as caught:
            await gateway.sdk().chat.completions.create(model="up-1", messages=MESSAGES)
        assert caught.value.status_code == 502
    async with running(upstreams=[nowhere(dialect="anthropic")]) as gateway:
        with pytest.raises(anthropic.InternalServerError, match="nowhere cannot be reached"):
            await gateway.anthropic().messages.create(model="up-1", max_tokens=1, messages=MESSAGES)


async def test_an_upstream_that_does_not_begin_is_a_504_or_the_next_ones_to_answer() -> None:
    stalls = Told(then="stall")
    async with upstream(stalls) as slow, upstream() as quick:
        settings = slow.settings(name="slow", first_byte_timeout_s=0.1)
        async with running(upstreams=[settings]) as gateway:
            status, headers, body = await ask(gateway)
            assert (status, b"slow did not begin its answer in time" in body) == (504, True)
            assert headers["x-should-retry"] == "true"
            await asyncio.wait_for(slow.left.wait(), LIMIT_S)
        async with running(upstreams=[settings, quick.settings()]) as gateway:
            assert (await ask(gateway))[1]["x-kvasir-engine"] == "up"


async def test_an_upstream_that_took_all_the_time_there_is_is_not_asked_again() -> None:
    async with upstream(Told(then="stall")) as stub, running(upstreams=[stub.settings(timeout_s=0.1)]) as gateway:
        status, headers, body = await ask(gateway)
        assert (status, b"upstreams.timeout_s" in body, headers["x-should-retry"]) == (504, True, "false")


async def test_an_upstream_that_fails_again_and_again_is_left_alone_with_a_time_to_retry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with upstream(error(500)) as stub:
        settings = stub.settings(breaker_failures=2, breaker_open_s=30.0, retries=0)
        async with running(upstreams=[settings]) as gateway:
            assert [(await ask(gateway))[0] for _ in range(2)] == [500, 500]
            status, headers, _ = await ask(gateway)
            assert status == 503
            assert 1 <= int(headers["Retry-After"]) <= 30
            assert len(stub.got) == 2
            assert (await figures(gateway))["breaker"] == "open"
            assert 'kvasir_upstream_breaker_open{upstream="up"} 1.0' in (await gateway.get("/metrics"))[1]
    assert sum("circuit breaker open" in record.message for record in caplog.records) == 1


async def test_an_upstream_whose_answers_all_break_off_is_left_alone_until_one_comes_to_its_end() -> None:
    cut, fine = Told(CHAT_STREAM.pieces[:1], media=SSE, then="cut"), CHAT_STREAM
    async with (
        upstream(cut, cut, fine, cut, cut, cut) as stub,
        running(upstreams=[stub.settings(breaker_failures=3)]) as gateway,
    ):
        told = [(await ask(gateway))[2] for _ in range(5)]
        assert [b"upstream_failed" in body for body in told] == [True, True, False, True, True]
        assert (await figures(gateway))["breaker"] == "closed"
        await ask(gateway)
        assert (await figures(gateway))["breaker"] == "open"
        assert (await ask(gateway))[0] == 503


async def test_an_upstream_that_wants_to_speak_another_protocol_has_not_answered() -> None:
    switching = Told(status=101, headers={"Upgrade": "websocket", "Connection": "Upgrade"})
    async with upstream(switching) as stub, running(upstreams=[stub.settings()]) as gateway:
        status, _, body = await ask(gateway)
        assert (status, orjson.loads(body)["error"]["code"]) == (502, "upstream_failed")


async def test_a_header_that_is_there_twice_goes_on_as_one_list() -> None:
    async with upstream(MESSAGE) as stub, running(upstreams=[stub.settings(dialect="anthropic")]) as gateway:
        headers = [("anthropic-beta", "one-2025"), ("anthropic-beta", "two-2025"), ("anthropic-version", "2023-06-01")]
        url = f"{gateway.url}/v1/messages"
        async with gateway.session.post(url, json=ASK | {"max_tokens": 5}, headers=headers) as answer:
            assert answer.status == 200
        assert stub.got[0].headers["anthropic-beta"] == "one-2025, two-2025"


async def test_an_upstream_without_a_free_connection_is_busy() -> None:
    settings = {"max_connections": 1, "max_waiting": 0}
    async with (
        upstream(Told(events(chunk("x")), media=SSE, then="stall")) as stub,
        running(upstreams=[stub.settings(**settings)]) as gateway,
        gateway.session.post(f"{gateway.url}/v1/chat/completions", json=ASK),
    ):
        status, headers, _ = await ask(gateway)
        assert (status, headers["Retry-After"]) == (503, "1")


async def test_a_stream_that_is_cut_between_events_ends_with_an_error_event() -> None:
    cut = Told(events(chunk("Hel")), media=SSE, then="cut")
    async with upstream(cut) as stub, running(upstreams=[stub.settings()]) as gateway:
        stream = await gateway.sdk().chat.completions.create(model="up-1", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="ended in the middle of its answer"):
            async for _ in stream:
                pass
        assert len(stub.got) == 1
    begun = Told(MESSAGE_STREAM.pieces[:4], media=SSE, then="cut")
    async with upstream(begun) as stub, running(upstreams=[stub.settings(dialect="anthropic")]) as gateway:
        with pytest.raises(anthropic.APIStatusError, match="ended in the middle of its answer"):
            async with gateway.anthropic().messages.stream(model="up-1", max_tokens=9, messages=MESSAGES) as messages:
                await messages.get_final_text()


PATHS = {
    "openai": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/up-1:streamGenerateContent",
}


@pytest.mark.parametrize(
    ("dialect", "told", "begins"),
    [
        ("openai", events(chunk("Hel")), b'data: {"error"'),
        ("anthropic", MESSAGE_STREAM.pieces[:4], b"event: error\ndata: {"),
        ("gemini", CONTENT_STREAM.pieces[:1], b'data: {"error"'),
    ],
)
async def test_broken_chunk_framing_ends_a_stream_at_once_with_an_error_event(
    dialect: str, told: list[bytes], begins: bytes
) -> None:
    garbled = Told(told, media=SSE, then="garble")
    async with upstream(garbled) as stub, running(upstreams=[stub.settings(dialect=dialect)]) as gateway:
        status, _, body = await ask(gateway, {"model": "up-1", "stream": True}, PATHS[dialect])
        assert status == 200
        assert body.startswith(b"".join(told) + begins)
        assert b"ended in the middle of its answer" in body
        found = await figures(gateway)
        assert (found["errors"], found["in_flight"]) == ({"lost": 1}, 0)


@pytest.mark.parametrize("then", ["cut", "stall", "garble"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_stream_that_is_cut_within_an_event_ends_with_an_error_event(dialect: str, then: Then) -> None:
    begins = b"event: error\ndata: {" if dialect == "anthropic" else b'data: {"error"'
    cut = Told([b"data: {}\n\ndata: {", b'"choices'], media=SSE, then=then)
    settings: dict[str, Any] = {"dialect": dialect, "idle_timeout_s": 0.1}
    async with upstream(cut) as stub, running(upstreams=[stub.settings(**settings)]) as gateway:
        status, _, body = await ask(gateway, {"model": "up-1", "stream": True}, PATHS[dialect])
        assert status == 200
        assert body.startswith(b"data: {}\n\n" + begins)
        assert body.endswith(b"}\n\n")
        assert (await figures(gateway))["errors"] in ({"lost": 1}, {"timeout": 1})


async def test_a_whole_answer_that_is_cut_is_cut_for_the_client_too() -> None:
    import aiohttp

    cut = Told([b'{"id":', b"1"], then="cut")
    async with upstream(cut) as stub, running(upstreams=[stub.settings()]) as gateway:
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(gateway)
        assert (await figures(gateway))["errors"] == {"lost": 1}


async def test_a_client_that_hangs_up_ends_the_request_at_the_upstream() -> None:
    for told in (Told(events(chunk("x")), media=SSE, then="stall"), Told(then="stall")):
        async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
            task = asyncio.ensure_future(ask(gateway))
            await asyncio.wait_for(stub.reached.wait(), LIMIT_S)
            task.cancel()
            await asyncio.wait_for(stub.left.wait(), LIMIT_S)
            assert (await figures(gateway))["breaker"] == "closed"


async def test_connections_are_used_again() -> None:
    async with upstream() as stub, running(upstreams=[stub.settings()]) as gateway:
        for _ in range(5):
            assert (await ask(gateway))[0] == 200
        assert len(stub.connections) == 1


async def test_a_client_that_reads_slowly_is_not_read_ahead_of() -> None:
    piece = b"data: " + b"x" * 65536 + b"\n\n"
    huge = Told([piece] * 600, media=SSE)
    async with upstream(huge) as stub, running(upstreams=[stub.settings()]) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = b'{"model":"up-1","stream":true}'
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(stub.blocked.wait(), LIMIT_S)
        assert stub.written < 20 << 20
        writer.close()
        await asyncio.wait_for(stub.left.wait(), LIMIT_S)


async def test_a_client_that_stops_reading_is_cut_off_when_its_time_is_over() -> None:
    huge = Told([b"data: " + b"x" * 65536 + b"\n\n"] * 600, media=SSE)
    server = ServerSettings(request_timeout_s=1.0)
    async with upstream(huge) as stub, running(upstreams=[stub.settings()], server=server) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = b'{"model":"up-1","stream":true}'
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(stub.left.wait(), LIMIT_S)
        page = (await gateway.get("/metrics"))[1]
        assert 'status="504"' in page
        writer.close()


# -- secrets ----------------------------------------------------------------------------------------------------------


async def test_keys_go_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    quoting = error(403, "The key sk-upstream may not do this.")
    echoing = said({"x": 1}, x_echo="Bearer sk-upstream", x_fine="1")
    tenants = [TenantSettings(name="a", keys=("the-key-of-a",))]
    answers = (quoting, error(401, "Incorrect API key provided: sk-up***am"), echoing)
    seen = b""
    async with upstream(*answers) as stub:
        settings = stub.settings("*", headers={"X-Team": "sk-team-secret"})
        assert "sk-" not in repr(settings)
        async with running(upstreams=[settings], tenants=tenants) as gateway:
            told = [
                await ask(gateway, Authorization="Bearer the-key-of-a", Cookie="a=b", **{"x-api-key": "the-key-of-a"})
                for _ in answers
            ]
            for status, headers, body in told:
                seen += b"%d %b %b" % (status, repr(dict(headers)).encode(), body)
            assert [status for status, _, _ in told] == [502, 502, 200]
            assert told[2][1]["x-fine"] == "1"
            seen += (await gateway.get("/metrics"))[1].encode()
        for got in stub.got:
            assert got.headers["X-Team"] == "sk-team-secret"
            assert "the-key-of-a" not in repr(got)
            assert "Cookie" not in got.headers
    seen += caplog.text.encode()
    assert b"refuses the key of the gateway" in seen
    for secret in (b"sk-up", b"sk-team", b"the-key-of-a"):
        assert secret not in seen


@pytest.mark.parametrize(
    "quoting",
    [
        Told([gzip.compress(b"the key sk-upstream is wrong")], 400, headers={"Content-Encoding": "gzip"}),
        Told([b"nobody knows what this says"], 400, headers={"Content-Encoding": "zstd"}),
        said({"error": {"message": "the key sk-upstream is wrong"}}),
        error(400, "your-other-key is wrong"),
    ],
)
async def test_an_answer_that_quotes_a_key_is_a_failure_of_its_upstream(quoting: Told) -> None:
    headers = {"Authorization": "Bearer your-other-key", "X-Env": "t"}
    async with upstream(quoting) as one, upstream() as other:
        first, last = one.settings(name="first", headers=headers), other.settings(name="last", headers=headers)
        async with running(upstreams=[first]) as gateway:
            status, _, body = await ask(gateway)
            assert (status, orjson.loads(body)["error"]["code"]) == (502, "upstream_failed")
        async with running(upstreams=[first, last]) as gateway:
            assert (await ask(gateway))[2] == CHAT.pieces[0]


async def test_a_stream_that_quotes_a_key_is_cut_before_any_of_it() -> None:
    begun = events(chunk("Hel"))[0]
    quoting = Told([begun, b'data: {"error": "sk-ups', b'tream"}\n\n'], media=SSE)
    async with upstream(quoting) as stub, running(upstreams=[stub.settings()]) as gateway:
        _, _, got = await ask(gateway, ASK | {"stream": True})
        assert got.startswith(begun + b'data: {"error"')
        assert b"failed in the middle of its answer" in got
        assert b"sk-" not in got


async def test_a_key_that_is_refused_is_told_once_until_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    no = error(401, "no")
    async with upstream(no, no, said({}), no) as stub, running(upstreams=[stub.settings()]) as gateway:
        assert [(await ask(gateway))[0] for _ in range(4)] == [502, 502, 200, 502]
    assert caplog.text.count("refuses the key of the gateway") == 2


async def test_headers_of_one_connection_and_of_the_operators_account_are_not_passed_on() -> None:
    told = said(
        {},
        set_cookie="a=b",
        openai_organization="org-1",
        connection="x-hop",
        x_hop="1",
        alt_svc="h3",
        x_ratelimit_remaining_requests="7",
        x_request_id="req_theirs",
        x_other="1",
        x_kvasir_engine="forged",
    )
    async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
        _, headers, _ = await ask(
            gateway, **{"X-Request-Id": "req_ours", "X-Kvasir-Namespace": "", "Forwarded": "for=1"}
        )
        for name in ("Set-Cookie", "openai-organization", "x-hop", "alt-svc"):
            assert name not in headers
        assert headers["x-other"] == "1"
        assert headers.getall("x-ratelimit-remaining-requests") == ["7"]
        assert headers.getall("x-request-id") == ["req_theirs"]
        assert headers["x-kvasir-request-id"] == "req_ours"
        assert headers.getall("x-kvasir-engine") == ["up"]
        assert "Forwarded" not in stub.got[0].headers


async def test_an_upstream_that_tells_of_its_limits_tells_all_of_them() -> None:
    for told in (said({}, x_ratelimit_limit_tokens="7"), error(429, "slow down", x_ratelimit_limit_tokens="7")):
        async with (
            upstream(told) as stub,
            running(upstreams=[stub.settings(retries=0)], limited=LimitSettings(requests_per_minute=9)) as gateway,
        ):
            _, headers, _ = await ask(gateway)
            assert {name for name in headers if "ratelimit" in name} == {"x-ratelimit-limit-tokens"}
    limited = LimitSettings(requests_per_minute=9)
    async with upstream(said({})) as stub, running(upstreams=[stub.settings()], limited=limited) as gateway:
        _, headers, _ = await ask(gateway)
        assert "x-ratelimit-limit-requests" in headers


async def test_long_headers_of_an_upstream_are_passed_on() -> None:
    told = said({}, content_security_policy="a" * 30_000, **{f"x_more_{number}": "1" for number in range(300)})
    async with (
        upstream(told) as stub,
        running(upstreams=[stub.settings()]) as gateway,
        aiohttp.ClientSession(max_field_size=1 << 16, max_headers=1000) as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=ASK) as answer,
    ):
        assert answer.status == 200
        assert len(answer.headers["content-security-policy"]) == 30_000
        assert answer.headers["x-more-299"] == "1"


async def test_an_upstream_that_redirects_is_not_followed() -> None:
    elsewhere = Told(status=307, headers={"Location": "http://127.0.0.1:9/"})
    async with upstream(elsewhere) as stub, running(upstreams=[stub.settings()]) as gateway:
        status, headers, body = await ask(gateway)
        assert (status, b"sends the gateway elsewhere" in body, "Location" in headers) == (502, True, False)


# -- accounting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "dialect", "path", "expected"),
    [
        (CHAT, "openai", "/v1/chat/completions", (100, 64, 7)),
        (CHAT_STREAM, "openai", "/v1/chat/completions", (100, 64, 7)),
        (RESPONSE, "openai", "/v1/responses", (50, 40, 2)),
        (EMBEDDINGS, "openai", "/v1/embeddings", (8, 0, 0)),
        (MESSAGE, "anthropic", "/v1/messages", (1432, 1400, 9)),
        (MESSAGE_STREAM, "anthropic", "/v1/messages", (1432, 1400, 9)),
        (CONTENT, "gemini", "/v1beta/models/up-1:generateContent", (90, 80, 7)),
    ],
)
async def test_tokens_are_accounted_for_as_each_provider_counts_them(
    told: Told, dialect: str, path: str, expected: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with upstream(told) as stub, running(upstreams=[stub.settings(dialect=dialect)]) as gateway:
        await ask(gateway, ASK, path)
        _, page, _ = await gateway.get("/metrics")
        labels = '{model="up-1",tenant="anonymous"}'
        for name, count in zip(("prompt", "cached", "completion"), expected, strict=True):
            assert f"kvasir_{name}_tokens_total{labels} {float(count)}" in page
        assert 'kvasir_upstream_requests_total{upstream="up"} 1.0' in page
    line = caplog.messages[0]
    assert "model=up-1 engine=up lane=online" in line
    fields = dict(part.split("=", 1) for part in line.split(" "))
    assert (int(fields["prompt_tokens"]), int(fields.get("cached_tokens", 0))) == expected[:2]  # zeros are left out
    assert "first_token_ms" in fields


async def test_a_stream_without_usage_is_passed_on_unchanged_and_counted_as_unmetered() -> None:
    told = Told([*events(chunk("x")), b"data: [DONE]\n\n"], media=SSE)
    async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
        _, _, body = await ask(gateway, {**ASK, "stream": True})
        assert body == b"".join(told.pieces)
        assert (await figures(gateway))["unmetered"] == 1


async def test_an_absurd_usage_reaches_the_client_and_is_in_no_figure_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    told = said({**orjson.loads(CHAT.pieces[0]), "usage": {**USAGE, "prompt_tokens": 9_200_000_000_000_000_000}})
    async with upstream(told, told, CHAT) as stub, running(upstreams=[stub.settings()]) as gateway:
        for expected in (*told.pieces, *told.pieces, *CHAT.pieces):
            assert (await ask(gateway))[2] == expected
        found = await figures(gateway)
        assert (found["errors"], found["unmetered"]) == ({"usage": 2}, 2)
        _, stats, _ = await gateway.get("/admin/stats")
        (row,) = orjson.loads(stats)["tenants"].values()
        assert row["prompt_tokens"] == USAGE["prompt_tokens"]
    assert len([one for one in caplog.records if "usage of more than" in one.message]) == 1


async def test_names_that_clients_make_up_are_no_labels_of_metrics() -> None:
    async with upstream(error(404), CHAT) as stub, running(upstreams=[stub.settings("x-*")]) as gateway:
        for name in ("x-made-up", "x-there"):
            await ask(gateway, {**ASK, "model": name})
        _, page, _ = await gateway.get("/metrics")
        assert 'model="x-*"' in page
        assert 'model="x-there"' in page
        assert "x-made-up" not in page


FORGED = "up-1\n2026-11-22 10:00:00,000 INFO kvasir.access request_id=forged status=200\x1b[2K"
GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


async def test_a_model_name_that_cannot_be_printed_goes_to_no_upstream_and_into_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with upstream() as stub, contextlib.AsyncExitStack() as stack:
        every = [stub.settings("*", name=name, dialect=name) for name in ("openai", "anthropic", "gemini")]
        gateway = await stack.enter_async_context(running(upstreams=every))
        for path in GENERATING:
            status, *_ = await ask(gateway, {**ASK, "model": FORGED, "input": "x", "max_tokens": 1}, path)
            assert status in (400, 404), path
        for method in ("generateContent", "streamGenerateContent", "countTokens"):
            path = f"/v1beta/models/{quote(FORGED)}:{method}"
            assert (await ask(gateway, {"contents": [{"parts": [{"text": "x"}]}]}, path))[0] == 404, method
        line = LineRequest("/v1/chat/completions", Tenant("acme"), {**ASK, "model": FORGED}, "", "req_1")
        assert (await gateway.app[RUNNER].answer(line)).status == 404
        assert stub.got == []
        assert "forged" not in (await gateway.get("/metrics"))[1]
    assert not [one for one in caplog.records if "forged" in one.getMessage()]


async def test_a_name_with_spaces_and_equals_signs_is_one_field_of_the_access_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with upstream() as stub, running(upstreams=[stub.settings("*")]) as gateway:
        assert (await ask(gateway, {**ASK, "model": 'up status=500 "x"'}))[0] == 200
    (line,) = [one.getMessage() for one in caplog.records if one.name == "kvasir.access"]
    assert r' model="up status=500 \"x\"" ' in line


async def test_names_of_models_are_labels_up_to_a_length_and_to_a_number_for_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage, "MAX_LABELS_OF_ONE", 2)
    tenants = [TenantSettings(name=name, keys=(f"the-key-of-{name}",)) for name in "ab"]
    async with upstream() as stub, running(upstreams=[stub.settings("x-*")], tenants=tenants) as gateway:
        for model in ("x-1", "x-" + "l" * 300, "x-2", "x-3"):
            await ask(gateway, {**ASK, "model": model}, Authorization="Bearer the-key-of-a")
        for model in ("x-4", "x-1"):
            await ask(gateway, {**ASK, "model": model}, Authorization="Bearer the-key-of-b")
        _, page, _ = await gateway.get("/metrics")
        assert set(re.findall(r'model="(x-[^"]*)"', page)) == {"x-1", "x-2", "x-4", "x-*"}


async def test_a_gateway_with_upstreams_and_no_engine_is_ready() -> None:
    async with running(upstreams=[nowhere()]) as gateway:
        gateway.state["engines"] = []
        assert (await gateway.get("/health/readiness"))[0] == 200


async def test_the_limits_of_a_tenant_hold_for_upstreams_too() -> None:
    tenants = [TenantSettings(name="a", keys=("the-key-of-a",), requests_per_minute=1)]
    async with upstream() as stub, running(upstreams=[stub.settings()], tenants=tenants) as gateway:
        told = [await ask(gateway, Authorization="Bearer the-key-of-a") for _ in range(2)]
        assert [status for status, _, _ in told] == [200, 429]
        assert len(stub.got) == 1


@pytest.mark.parametrize("then", ["end", "cut"])
async def test_an_answer_that_tells_no_usage_uses_what_was_set_aside_for_it(then: Any) -> None:
    tenants = [TenantSettings(name="a", keys=("the-key-of-a",), tokens_per_minute=100)]
    told = Told(events(chunk("Hello")), media=SSE, then=then)
    async with upstream(told) as stub, running(upstreams=[stub.settings()], tenants=tenants) as gateway:
        asked = ASK | {"stream": True, "max_tokens": 60}
        got = [await ask(gateway, asked, Authorization="Bearer the-key-of-a") for _ in range(2)]
        assert [status for status, _, _ in got] == [200, 429]
        assert len(stub.got) == 1


@pytest.mark.parametrize(
    ("path", "values", "expected"),
    [
        ("/v1/chat/completions", {"max_tokens": 7, "n": 3}, Need(25, 7, 3)),
        ("/v1/chat/completions", {"max_tokens": "7", "n": 10**9}, Need(25, None, 128)),
        ("/v1/responses", {"max_output_tokens": 7}, Need(25, 7, 1)),
        ("/v1/embeddings", {}, Need(25)),
        ("/v1/models/{model}:x", {"generationConfig": {"maxOutputTokens": 7, "candidateCount": 2}}, Need(25, 7, 2)),
    ],
)
def test_what_a_request_needs_of_its_limits_is_what_it_says_itself(
    path: str, values: dict[str, Any], expected: Need
) -> None:
    request = UpstreamRequest("r", Tenant("a"), "openai", "m", path, "", (), b" " * 100, values, 0.0, 1.0)
    assert need_of(request) == expected


async def test_a_stream_whose_usage_the_operator_wants_is_metered_and_the_client_does_not_see_it() -> None:
    seen_by_client = [*events(chunk("Hel", usage=None)), b"data: [DONE]\n\n"]
    usage = events({**CHUNK, "choices": [], "usage": USAGE})
    told = Told([seen_by_client[0], *usage, seen_by_client[1]], media=SSE)
    async with upstream(told) as stub, running(upstreams=[stub.settings(meter=("*",))]) as gateway:
        _, _, body = await ask(gateway, {**ASK, "stream": True})
        assert body == b"".join(seen_by_client)
        assert stub.got[0].json == {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        _, _, body = await ask(gateway, {**ASK, "stream": True, "stream_options": {"include_usage": True}})
        assert body == b"".join(told.pieces)
        await ask(gateway)
        assert "stream_options" not in stub.got[2].json
        page = (await gateway.get("/metrics"))[1]
        assert 'kvasir_completion_tokens_total{model="up-1",tenant="anonymous"} 21.0' in page


async def test_hints_are_added_for_tenants_whose_operator_allows_it_and_for_no_others() -> None:
    tenants = [TenantSettings(name=name, keys=(f"the-key-of-{name}",)) for name in ("a", "b")]
    async with upstream(MESSAGE) as stub:
        settings = stub.settings(dialect="anthropic", hints=("a",))
        async with running(upstreams=[settings], tenants=tenants) as gateway:
            for name in ("a", "a", "b", "b"):
                await ask(gateway, ASK, "/v1/messages", Authorization=f"Bearer the-key-of-{name}")
            assert [b"cache_control" in got.body for got in stub.got] == [False, True, False, False]
            assert (await figures_of(gateway))["hints"] == 1


async def figures_of(gateway: Gateway) -> dict[str, Any]:
    """Of a gateway with tenants, whose /admin is closed."""
    page = (await gateway.get("/metrics"))[1]
    return {"hints": int(float(re.findall(r'kvasir_upstream_hints_total{upstream="up"} (\S+)', page)[0]))}


async def test_the_ledger_knows_whose_cache_it_was() -> None:
    written = {"cache_creation_input_tokens": 30, "cache_creation": {"ephemeral_1h_input_tokens": 30}}
    told = said({"usage": {"input_tokens": 10, "cache_read_input_tokens": 60, "output_tokens": 5, **written}})
    async with upstream(told) as stub, running(upstreams=[stub.settings(dialect="anthropic")]) as gateway:
        await ask(gateway, ASK, "/v1/messages")
        async with gateway.session.get(f"{gateway.url}/admin/stats") as answer:
            ledger = (await answer.json())["ledger"]
        used = ledger["used"]
        assert (used["prompt_tokens"], used["cached_tokens"], used["cache_write_tokens"]) == (100, 60, 30)
        assert (ledger["saved"]["upstream"]["tokens"], ledger["saved"]["prefix"]["tokens"]) == (60, 0)


async def test_a_large_body_goes_on_whole() -> None:
    body = b'{"model":"up-1","input":"%b"}' % (b"x" * (3 << 20))
    async with upstream(EMBEDDINGS) as stub, running(upstreams=[stub.settings()]) as gateway:
        async with gateway.session.post(f"{gateway.url}/v1/embeddings", data=io.BytesIO(body)) as answer:
            assert answer.status == 200
        assert stub.got[0].body == body
        assert stub.got[0].headers["Content-Length"] == str(len(body))
