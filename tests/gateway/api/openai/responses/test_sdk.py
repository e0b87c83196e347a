"""The real openai SDK, and transcripts, of /v1/responses against the HTTP side."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from gateway.errors import ContextLengthError, EngineLostError, QueueFullError
from gateway.types import CallDelta, ScoredToken, Spelled, TextDelta, Usage
from tests.fakes.gateway import running
from tests.fakes.golden import assert_golden
from tests.fakes.pipeline import FakePipeline

CALLS: Any = [
    "Let me see.",
    CallDelta(0, "weather"),
    CallDelta(0, "", '{"city": '),
    CallDelta(0, "", '"Oslo"}'),
    CallDelta(1, "time", "{}"),
]


class City(pydantic.BaseModel):
    name: str
    people: int


def events(transcript: str) -> list[dict[str, Any]]:
    """Of a stream, whose names and numbers are checked on the way."""
    told = []
    for number, block in enumerate(transcript.strip().split("\n\n")):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        assert value["sequence_number"] == number
        told.append(value)
    return told


async def test_a_response_has_every_field_of_the_api() -> None:
    async with running() as gateway, gateway.sdk() as client:
        raw = await client.responses.with_raw_response.create(
            model="demo", input="hi", instructions="Be brief.", metadata={"a": "b"}, user="somebody", temperature=0.5
        )
        answer = raw.parse()
        assert (answer.object, answer.status, answer.model) == ("response", "completed", "demo")
        assert (answer.output_text, answer.error, answer.incomplete_details) == ("Hello world", None, None)
        assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"a": "b"}, "somebody")
        assert (answer.temperature, answer.top_p, answer.tool_choice, answer.tools) == (0.5, 1.0, "auto", [])
        assert answer.id.startswith("resp_")
        assert answer.completed_at is not None
        usage = answer.usage
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (40, 2, 42)
        assert (usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens) == (32, 0)
        assert usage.output_tokens_details.reasoning_tokens == 0
        assert raw.headers["x-kvasir-cached-tokens"] == "32"
        (message,) = answer.output
        assert message.type == "message"
        assert (message.role, message.status) == ("assistant", "completed")


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("text", FakePipeline()),
        ("calls", FakePipeline(pieces=CALLS, reason="tool_calls")),
        ("incomplete", FakePipeline(reason="length")),
        ("nothing", FakePipeline(pieces=[])),
        ("failed", FakePipeline(fails_after=EngineLostError("Engine engine-1 went away."))),
    ],
)
async def test_a_stream_is_this_transcript(name: str, pipeline: FakePipeline) -> None:
    async with running(pipeline) as gateway:
        transcript = await gateway.transcript("/v1/responses", {"model": "demo", "input": "hi", "stream": True})
    assert_golden(f"openai/responses_{name}.txt", transcript)
    events(transcript)


@pytest.mark.parametrize(
    "pipeline",
    [
        FakePipeline(),
        FakePipeline(pieces=CALLS),
        FakePipeline(reason="length"),
        FakePipeline(pieces=[]),
        FakePipeline(pieces=[CallDelta(0, "f", "{}")]),
        FakePipeline(
            pieces=["a", CallDelta(0, "f", "{}"), "b", CallDelta(1, "g", "{}"), CallDelta(2, "h", "{}"), "c", "d"]
        ),
    ],
)
async def test_a_stream_ends_with_the_response_that_is_answered_without_one(pipeline: FakePipeline) -> None:
    def stable(response: dict[str, Any]) -> dict[str, Any]:
        for one in (response, *response["output"]):
            for key in ("id", "call_id", "created_at", "completed_at"):
                one.pop(key, None)
        return response

    async with running(pipeline) as gateway:
        told = events(await gateway.transcript("/v1/responses", {"model": "demo", "input": "hi", "stream": True}))
        status, whole, _ = await gateway.post("/v1/responses", {"model": "demo", "input": "hi"})
    assert status == 200
    assert stable(told[-1]["response"]) == stable(whole)


async def test_the_streaming_helper_puts_the_response_together() -> None:
    async with (
        running(FakePipeline(pieces=CALLS)) as gateway,
        gateway.sdk() as client,
        client.responses.stream(model="demo", input="hi") as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Let me see."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments), call.status) for call in calls] == [
        ("weather", {"city": "Oslo"}, "completed"),
        ("time", {}, "completed"),
    ]
    assert len({call.call_id for call in calls}) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_parsed_response_is_the_clients_own_type(streamed: bool) -> None:
    pipeline = FakePipeline(pieces=['{"name": "Oslo", ', '"people": 700000}'])
    async with running(pipeline) as gateway, gateway.sdk() as client:
        if streamed:
            async with client.responses.stream(model="demo", input="hi", text_format=City) as stream:
                parsed = (await stream.get_final_response()).output_parsed
        else:
            parsed = (await client.responses.parse(model="demo", input="hi", text_format=City)).output_parsed
        assert parsed == City(name="Oslo", people=700000)
        constraint = gateway.pipeline.requests[0].constraint
        assert constraint is not None
        assert constraint.param == "text.format.schema"


async def test_what_was_parsed_can_be_sent_again() -> None:
    async with running(FakePipeline(pieces=['{"name": "Oslo", "people": 1}'])) as gateway, gateway.sdk() as client:
        first = await client.responses.parse(model="demo", input="hi", text_format=City)
        history: Any = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "and?"}]
        await client.responses.create(model="demo", input=history)
        prompt: Any = gateway.pipeline.requests[1].prompt
        assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prewarmed_prompt_is_a_response_without_output(streamed: bool) -> None:
    body = {"model": "demo", "input": "hi", "prompt_cache_options": {"prewarm": True, "ttl": "12h"}}
    async with running() as gateway:
        if streamed:
            response = events(await gateway.transcript("/v1/responses", body | {"stream": True}))[-1]["response"]
        else:
            _, response, _ = await gateway.post("/v1/responses", body)
        assert gateway.pipeline.requests[0].prewarm
    assert (response["status"], response["output"]) == ("completed", [])
    assert response["prompt_cache_options"] == {"mode": "implicit", "ttl": "12h", "comparison_response_id": None}
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (40, 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities_come_with_their_text(streamed: bool) -> None:
    scored = (ScoredToken(Spelled("Hi", b"Hi"), -0.5, ((Spelled("</s>", None), -0.7),), 0),)
    body = {"model": "demo", "input": "hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    async with running(FakePipeline(pieces=[TextDelta("Hi", scored)])) as gateway:
        if streamed:
            told = events(await gateway.transcript("/v1/responses", body | {"stream": True}))
            deltas = [event["logprobs"] for event in told if event["type"] == "response.output_text.delta"]
            response = told[-1]["response"]
        else:
            _, response, _ = await gateway.post("/v1/responses", body)
            deltas = []
    (part,) = response["output"][0]["content"]
    top = [{"token": "</s>", "logprob": -0.7, "bytes": []}]
    assert part["logprobs"] == [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": top}]
    assert deltas == [part["logprobs"]] * len(deltas)


async def test_what_breakpoints_wrote_is_told_by_time_to_live() -> None:
    leased = Usage(0, 0, cache_write_tokens=70, lease="kept", lease_writes=((300.0, 20), (1800.0, 30), (1800.0, 20)))
    async with running(FakePipeline(leased=leased)) as gateway, gateway.sdk() as client:
        answer = await client.responses.create(model="demo", input="hi")
        assert answer.usage is not None
        details = answer.usage.input_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (32, 70)
        assert details.to_dict()["cache_write_tokens_details"] == {
            "ttl_30m_tokens": 50,
            "ttl_12h_tokens": 0,
            "ttl_5m_tokens": 20,
        }
        assert details.to_dict()["cache_lease"] == "kept"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ContextLengthError(8192, 9000, 16, param="input"), openai.BadRequestError, "context_length_exceeded"),
        (QueueFullError("busy", retry_after_s=2.5), openai.RateLimitError, "rate_limit_exceeded"),
    ],
)
async def test_an_error_before_the_first_token_is_the_sdks_own_exception(
    error: Exception, kind: type[openai.APIStatusError], code: str, streamed: bool
) -> None:
    async with running(FakePipeline(fails_before=error)) as gateway, gateway.sdk() as client:
        with pytest.raises(kind) as raised:
            await client.responses.create(model="demo", input="hi", stream=streamed)
        assert raised.value.code == code


async def test_a_stream_that_failed_says_so_to_the_sdk() -> None:
    pipeline = FakePipeline(fails_after=EngineLostError("Engine engine-1 went away."))
    async with running(pipeline) as gateway, gateway.sdk() as client:
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        told = [event async for event in stream]
        assert [event.type for event in told[-2:]] == ["error", "response.failed"]
        failed: Any = told[-1]
        assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
        assert "went away" in failed.response.error.message
        assert failed.response.output[0].status == "incomplete"
        usage = failed.response.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (40, 2, 42)
        assert usage.input_tokens_details.cached_tokens == 32
        async with client.responses.stream(model="demo", input="hi") as helper:
            with pytest.raises(RuntimeError, match=r"response\.completed"):
                await helper.get_final_response()
