from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import ServerSettings
from gateway.errors import EngineLostError
from gateway.types import CallDelta, ScoredToken, Spelled, TextDelta
from tests.fakes.gateway import LIMIT_S, Gateway, running
from tests.fakes.pipeline import FakePipeline

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
LINE_ENDS = ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\n\n", "data: x"]
SCORED = TextDelta(
    " \u00fc",
    (
        ScoredToken(Spelled(" ", b" "), -0.5, ((Spelled("<|end|>", None), -0.25), (Spelled(" ", b" "), -0.5)), 0),
        ScoredToken(Spelled("\ufffd", b"\xc3"), -1.0, (), 1),
        ScoredToken(Spelled("\ufffd", b"\xbc"), -2.0, (), 1),
    ),
)
ECHO: Any = {"model": "demo", "prompt": "".join(LINE_ENDS), "stream": True, "echo": True}
DETAILS = (
    '"prompt_tokens_details":{"cached_tokens":32,"cache_write_tokens":0,"audio_tokens":0},'
    '"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,"accepted_prediction_tokens":0,'
    '"rejected_prediction_tokens":0}'
)


def still(text: str) -> str:
    """A transcript without what differs between two runs."""
    text = re.sub(r'"id":"(\w+)-[0-9a-f]{32}"', r'"id":"\1-1"', text)
    text = re.sub(r'"created":\d+', '"created":1', text)
    text = re.sub(r'"call_[0-9a-f]{24}"', '"call_1"', text)
    return re.sub(r'"system_fingerprint":"fp_[0-9a-f]{10}"', '"system_fingerprint":"fp_1"', text)


def chunk(rest: str) -> str:
    return (
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"demo",'
        f'"service_tier":"default","system_fingerprint":"fp_1",{rest}}}\n\n'
    )


def piece(rest: str) -> str:
    return (
        'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo",'
        f'"system_fingerprint":"fp_1",{rest}}}\n\n'
    )


async def test_a_chat_stream_to_the_letter() -> None:
    async with running(FakePipeline(pieces=["Hel", 'l"\u00f6\n\U0001f600'])) as gateway:
        assert still(await gateway.transcript("/v1/chat/completions", CHAT)) == (
            chunk(
                '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            )
            + chunk('"choices":[{"index":0,"delta":{"content":"Hel"},"logprobs":null,"finish_reason":null}]')
            + chunk(
                '"choices":[{"index":0,"delta":{"content":"l\\"\u00f6\\n\U0001f600"},"logprobs":null,'
                '"finish_reason":null}]'
            )
            + chunk('"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]')
            + "data: [DONE]\n\n"
        )


async def test_a_chat_stream_with_tool_calls_to_the_letter() -> None:
    calls = [CallDelta(0, "f"), CallDelta(0, "", '{"x":'), CallDelta(0, "", "1}"), CallDelta(1, "g", "{}")]
    async with running(FakePipeline(pieces=calls, reason="tool_calls")) as gateway:
        transcript = still(await gateway.transcript("/v1/chat/completions", CHAT))
    empty = '"logprobs":null,"finish_reason":null}]'
    told = [
        '{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}',
        '{"index":0,"function":{"arguments":"{\\"x\\":"}}',
        '{"index":0,"function":{"arguments":"1}"}}',
        '{"index":1,"id":"call_1","type":"function","function":{"name":"g","arguments":"{}"}}',
    ]
    assert transcript == (
        chunk(f'"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},{empty}')
        + "".join(chunk(f'"choices":[{{"index":0,"delta":{{"tool_calls":[{one}]}},{empty}') for one in told)
        + chunk('"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}]')
        + "data: [DONE]\n\n"
    )


async def test_a_chat_that_calls_tools_has_no_content_and_an_id_for_each_call() -> None:
    calls = [CallDelta(0, "f"), CallDelta(0, "", "{}"), CallDelta(1, "g", '{"x"'), CallDelta(1, "", ":1}")]
    async with running(FakePipeline(pieces=calls, reason="tool_calls")) as gateway:
        _, body, _ = await gateway.post("/v1/chat/completions", {**CHAT, "stream": False})
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    told = choice["message"]["tool_calls"]
    assert [one["function"] for one in told] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": '{"x":1}'},
    ]
    assert len({one["id"] for one in told}) == 2


async def test_a_chat_stream_with_usage_to_the_letter() -> None:
    async with running(FakePipeline(pieces=["Hi"], reason="length")) as gateway:
        body = {**CHAT, "stream_options": {"include_usage": True}}
        assert still(await gateway.transcript("/v1/chat/completions", body)) == (
            chunk(
                '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
                '"usage":null'
            )
            + chunk(
                '"choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null'
            )
            + chunk('"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null')
            + chunk(f'"choices":[],"usage":{{"prompt_tokens":40,"completion_tokens":1,"total_tokens":41,{DETAILS}}}')
            + "data: [DONE]\n\n"
        )


async def test_a_completion_stream_to_the_letter() -> None:
    async with running(FakePipeline(pieces=["a", "b"])) as gateway:
        body = {"model": "demo", "prompt": "Say: ", "stream": True, "echo": True}
        assert still(await gateway.transcript("/v1/completions", body)) == (
            piece('"choices":[{"index":0,"text":"Say: ","logprobs":null,"finish_reason":null}]')
            + piece('"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]')
            + piece('"choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":null}]')
            + piece('"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]')
            + "data: [DONE]\n\n"
        )


async def test_a_chat_stream_with_log_probabilities_to_the_letter() -> None:
    async with running(FakePipeline(pieces=["Hi", SCORED])) as gateway:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        chunks = still(await gateway.transcript("/v1/chat/completions", body)).split("\n\n")
        assert chunks[1] + "\n\n" == chunk(
            '"choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]'
        )
        assert chunks[2] + "\n\n" == chunk(
            '"choices":[{"index":0,"delta":{"content":" \u00fc"},"logprobs":{"content":['
            '{"token":" ","logprob":-0.5,"bytes":[32],"top_logprobs":[{"token":"<|end|>","logprob":-0.25,"bytes":null},'
            '{"token":" ","logprob":-0.5,"bytes":[32]}]},'
            '{"token":"\ufffd","logprob":-1.0,"bytes":[195],"top_logprobs":[]},'
            '{"token":"\ufffd","logprob":-2.0,"bytes":[188],"top_logprobs":[]}'
            '],"refusal":null},"finish_reason":null}]'
        )


async def test_a_completion_stream_with_log_probabilities_to_the_letter() -> None:
    async with running(FakePipeline(pieces=[SCORED])) as gateway:
        body = {"model": "demo", "prompt": "Say:", "stream": True, "logprobs": 2}
        chunks = still(await gateway.transcript("/v1/completions", body)).split("\n\n")
        assert chunks[0] + "\n\n" == piece(
            '"choices":[{"index":0,"text":" \u00fc","logprobs":{"tokens":[" ","bytes:\\\\xc3","bytes:\\\\xbc"],'
            '"token_logprobs":[-0.5,-1.0,-2.0],"top_logprobs":[{"<|end|>":-0.25," ":-0.5},{"bytes:\\\\xc3":-1.0},'
            '{"bytes:\\\\xbc":-2.0}],"text_offset":[0,1,1]},"finish_reason":null}]'
        )


async def test_an_answer_without_text_still_begins_and_ends() -> None:
    async with running(FakePipeline(pieces=[])) as gateway:
        assert still(await gateway.transcript("/v1/chat/completions", CHAT)) == (
            chunk(
                '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            )
            + chunk('"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]')
            + "data: [DONE]\n\n"
        )


async def test_an_error_after_the_first_byte_is_the_last_event() -> None:
    pipeline = FakePipeline(pieces=["Hi"], fails_after=EngineLostError("Engine engine-1 went away."))
    async with running(pipeline) as gateway:
        text = await gateway.transcript("/v1/chat/completions", CHAT)
        events = text.split("\n\n")
        assert events[-2:] == [
            'data: {"error":{"message":"Engine engine-1 went away.","type":"server_error","param":null,"code":null}}',
            "",
        ]
        assert "[DONE]" not in text


async def test_a_bug_after_the_first_byte_tells_the_client_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakePipeline(fails_after=ZeroDivisionError("secret"))) as gateway:
        text = await gateway.transcript("/v1/chat/completions", CHAT)
        assert '"type":"server_error"' in text.split("\n\n")[-2]
        assert "secret" not in text
    assert "ZeroDivisionError" in caplog.text


async def test_headers_of_a_stream_say_what_was_reused() -> None:
    async with (
        running() as gateway,
        gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as answer,
    ):
        headers = answer.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-kvasir-cached-tokens"] == "32"
        assert headers["x-kvasir-engine"] == "engine-1"
        assert float(headers["x-kvasir-overhead-ms"]) == 0.5
        assert headers["x-request-id"].startswith("req_")
        assert headers["cache-control"] == "no-cache"


async def test_headers_say_what_was_predicted_and_leave_out_what_is_not_known_yet() -> None:
    for traced, cached in (({"predicted_tokens": 48}, "32"), ({"predicted_tokens": 48, "cached_late": True}, None)):
        async with running(FakePipeline(traced=traced)) as gateway:
            for body in (CHAT, {**CHAT, "stream": False}):
                async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
                    assert answer.headers["x-kvasir-predicted-tokens"] == "48"
                    assert answer.headers.get("x-kvasir-cached-tokens") == cached
    async with running() as gateway, gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as answer:
        assert "x-kvasir-predicted-tokens" not in answer.headers, "nothing was to be reused"


async def test_the_role_is_sent_when_the_first_token_is_there_and_not_before() -> None:
    pipeline = FakePipeline(pieces=[], hold_before=asyncio.Event(), hold_after=asyncio.Event())
    async with running(pipeline) as gateway:
        asking = asyncio.create_task(gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        assert not asking.done()
        assert pipeline.hold_before is not None
        pipeline.hold_before.set()
        async with await asyncio.wait_for(asking, LIMIT_S) as answer:
            assert b'"role":"assistant"' in await answer.content.readuntil(b"\n\n")
            assert pipeline.hold_after is not None
            pipeline.hold_after.set()
            assert (await answer.text()).endswith("data: [DONE]\n\n")


async def test_several_prompts_interleave_and_each_is_complete() -> None:
    async with running(FakePipeline(pieces=["a", "b"])) as gateway:
        body = {
            "model": "demo",
            "prompt": ["x", "y", "z"],
            "stream": True,
            "echo": True,
            "stream_options": {"include_usage": True},
        }
        text = await gateway.transcript("/v1/completions", body)
        texts = {index: "".join(re.findall(rf'"index":{index},"text":"(\w*)"', text)) for index in range(3)}
        assert texts == {0: "xab", 1: "yab", 2: "zab"}
        assert text.count('"finish_reason":"stop"') == 3
        assert '"prompt_tokens":120,"completion_tokens":6,"total_tokens":126' in text
        assert text.endswith("data: [DONE]\n\n")
        assert len(set(re.findall(r'"id":"([^"]+)"', text))) == 1


async def test_when_one_of_several_prompts_fails_the_stream_ends_with_its_error() -> None:
    class OneFails(FakePipeline):
        async def _events(self, request: Any) -> Any:
            async for event in super()._events(request):
                yield event
                if len(self.requests) == 3 and request is self.requests[1]:
                    raise EngineLostError("lost")

    pipeline = OneFails(hold_after=asyncio.Event())
    async with running(pipeline) as gateway:
        body = {"model": "demo", "prompt": ["x", "y", "z"], "stream": True}
        text = await gateway.transcript("/v1/completions", body)
        assert text.split("\n\n")[-2].startswith('data: {"error":{"message":"lost"')
        assert pipeline.open == 0


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(st.text(min_size=1, max_size=8) | st.sampled_from(LINE_ENDS), max_size=8))
def test_any_text_arrives_also_at_clients_that_end_lines_where_unicode_does(pieces: list[str]) -> None:
    async def work() -> None:
        async with running(FakePipeline(pieces=pieces)) as gateway:
            for body, path in ((CHAT, "/v1/chat/completions"), (ECHO, "/v1/completions")):
                text = await gateway.transcript(path, body)
                events = [json.loads(line[6:]) for line in text.splitlines() if line and line != "data: [DONE]"]
                choices = [event["choices"][0] for event in events]
                said = [choice.get("delta", {}).get("content", "") + choice.get("text", "") for choice in choices]
                assert "".join(said) == (ECHO["prompt"] if body is ECHO else "") + "".join(pieces)

    asyncio.run(work())


# -- clients that leave, or stop reading ------------------------------------------------------------------------------


async def first_bytes(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = b'{"model":"demo","messages":[{"role":"user","content":"hi"}],"stream":true}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await writer.drain()
    await asyncio.wait_for(reader.readuntil(b'"assistant"'), LIMIT_S)
    return reader, writer


async def test_hanging_up_closes_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvasir.access")
    pipeline = FakePipeline(hold_after=asyncio.Event())
    async with running(pipeline) as gateway:
        _, writer = await first_bytes(gateway)
        writer.close()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
        await writer.wait_closed()
    assert pipeline.open == 0
    assert "status=499" in caplog.text
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_hanging_up_before_the_first_token_closes_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvasir.access")
    pipeline = FakePipeline(hold_before=asyncio.Event())
    async with running(pipeline) as gateway:
        asking = asyncio.create_task(gateway.post("/v1/chat/completions", {**CHAT, "stream": False}))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        asking.cancel()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
    assert "status=499" in caplog.text


async def test_hanging_up_closes_every_prompts_answer() -> None:
    pipeline = FakePipeline(hold_before=asyncio.Event())
    async with running(pipeline) as gateway:
        body = {"model": "demo", "prompt": ["a", "b", "c"]}
        asking = asyncio.create_task(gateway.post("/v1/completions", body))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        asking.cancel()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
    assert pipeline.open == 0


async def test_writing_to_a_client_that_left_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pipeline = FakePipeline(pieces=["x" * 1000] * 20_000)
    async with running(pipeline) as gateway:
        _, writer = await first_bytes(gateway)
        writer.transport.abort()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
    assert "status=499" in caplog.text
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_client_that_stops_reading_is_given_up_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.api.stream.LAST_WRITE_S", 0.05)
    caplog.set_level("INFO", "kvasir.access")
    pipeline = FakePipeline(pieces=["x" * 100_000] * 1000)
    async with running(pipeline, server=ServerSettings(request_timeout_s=0.5)) as gateway:
        _, writer = await first_bytes(gateway)
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
        writer.transport.abort()
    assert "status=499" in caplog.text


async def test_an_answer_past_its_deadline_ends_with_an_error() -> None:
    pipeline = FakePipeline(hold_after=asyncio.Event())
    async with running(pipeline, server=ServerSettings(request_timeout_s=0.05)) as gateway:
        assert "request_timeout_s" in await gateway.transcript("/v1/chat/completions", CHAT)
        status, body, headers = await gateway.post("/v1/chat/completions", {**CHAT, "stream": False})
        assert (status, body["error"]["code"]) == (503, "server_is_overloaded")
        assert headers["x-should-retry"] == "false"
    assert pipeline.open == 0
