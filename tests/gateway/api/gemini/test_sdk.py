"""The real google-genai SDK against the HTTP side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.genai import errors, types
from pydantic import BaseModel
from yarl import URL

from gateway.errors import EngineLostError, QueueFullError
from gateway.types import CallDelta, ChatPrompt
from tests.fakes.gateway import Gateway, running
from tests.fakes.gemini import gemini
from tests.fakes.pipeline import FakeModels, FakePipeline, hello


class Recipe(BaseModel):
    name: str
    grams: list[int] | None = None


@asynccontextmanager
async def client(gateway: Gateway, **options: Any) -> AsyncIterator[Any]:
    """The asynchronous half of the SDK."""
    made = gemini(gateway.url, **options)
    try:
        yield made.aio
    finally:
        await made.aio.aclose()
        made.close()


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_an_answer_has_every_field_of_the_api(version: str) -> None:
    async with running() as gateway, client(gateway, api_version=version) as sdk:
        answer = await sdk.models.generate_content(model="demo", contents="hi")
        assert answer.text == "Hello world"
        assert answer.model_version == "demo"
        assert answer.response_id
        (candidate,) = answer.candidates
        assert (candidate.index, candidate.finish_reason) == (0, types.FinishReason.STOP)
        assert candidate.content.role == "model"
        usage = answer.usage_metadata
        assert (usage.prompt_token_count, usage.candidates_token_count, usage.total_token_count) == (40, 2, 42)
        assert usage.cached_content_token_count == 32


async def test_a_stream_is_its_pieces() -> None:
    async with running() as gateway, client(gateway) as sdk:
        stream = await sdk.models.generate_content_stream(model="models/demo", contents="hi")
        chunks = [chunk async for chunk in stream]
        assert [chunk.text for chunk in chunks] == ["Hello", " world", ""]
        assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
        assert chunks[-1].usage_metadata.total_token_count == 42


async def test_everything_that_the_sdk_sends_arrives() -> None:
    config = types.GenerateContentConfig(
        system_instruction="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        max_output_tokens=5,
        stop_sequences=["x"],
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        response_logprobs=True,
        logprobs=2,
        response_mime_type="application/json",
        response_schema=Recipe,
        thinking_config=types.ThinkingConfig(thinking_budget=0),
        response_modalities=["TEXT"],
        safety_settings=[
            types.SafetySetting(
                category=types.HarmCategory.HARM_CATEGORY_HARASSMENT, threshold=types.HarmBlockThreshold.BLOCK_NONE
            )
        ],
    )
    pipeline = FakePipeline(('{"name": "cake", ', '"grams": [1]}'))
    async with running(pipeline) as gateway, client(gateway) as sdk:
        answer = await sdk.models.generate_content(model="demo", contents=["a", "b"], config=config)
        assert answer.parsed == Recipe(name="cake", grams=[1])
    (request,) = pipeline.requests
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
    ]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 5)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (3, 0.5, -0.5)
    assert (sampling.logprobs, request.stop) == (2, ("x",))
    assert request.constraint is not None
    assert request.constraint.grammar.kind == "json_schema"


async def test_functions_are_called_and_their_results_come_back() -> None:
    def weather(city: str) -> str:
        """What the weather is like.

        Args:
            city: where
        """
        return f"rain in {city}"

    pipeline = FakePipeline([CallDelta(0, "weather", '{"city":'), CallDelta(0, "", ' "Bergen"}')], reason="tool_calls")
    declared = types.GenerateContentConfig(
        tools=[weather], automatic_function_calling=types.AutomaticFunctionCallingConfig(maximum_remote_calls=2)
    )
    async with running(pipeline) as gateway, client(gateway) as sdk:
        answer = await sdk.models.generate_content(model="demo", contents="Rain?", config=declared)
        (call,) = answer.function_calls
        assert (call.name, call.args) == ("weather", {"city": "Bergen"})
    first, second = pipeline.requests[:2]
    assert first.tool_use is not None
    (tool,) = first.tool_use.callable
    assert (tool.name, first.tool_use.mode) == ("weather", "auto")
    assert tool.parameters is not None
    assert tool.parameters["properties"]["city"]["type"] == "string"
    assert isinstance(second.prompt, ChatPrompt)
    asked, called, returned = second.prompt.messages
    assert asked == {"role": "user", "content": "Rain?"}
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bergen"}}
    assert (returned["role"], returned["tool_call_id"]) == ("tool", called["tool_calls"][0]["id"])
    assert "rain in Bergen" in returned["content"]


async def test_a_chat_sends_what_was_said() -> None:
    async with running() as gateway, client(gateway) as sdk:
        chat = sdk.chats.create(model="demo")
        await chat.send_message("one")
        async for _ in await chat.send_message_stream("two"):
            pass
        await chat.send_message("three")
        prompt = gateway.pipeline.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert [(one["role"], one["content"]) for one in prompt.messages] == [
            ("user", "one"),
            ("assistant", "Hello world"),
            ("user", "two"),
            ("assistant", "Hello world"),
            ("user", "three"),
        ]


async def test_a_model_with_slashes_and_colons_in_its_name_is_found() -> None:
    name = "org/Some Model:x y"
    async with running(models=FakeModels([hello(name)])) as gateway, client(gateway) as sdk:
        assert (await sdk.models.generate_content(model=name, contents="hi")).text == "Hello world"
        assert (await sdk.models.get(model=name)).name == f"models/{name}"
        encoded = "/v1beta/models/org%2FSome%20Model:x%20y:generateContent"
        url = URL(gateway.url + encoded, encoded=True)
        async with gateway.session.post(url, json={"contents": {"parts": {"text": "hi"}}}) as answer:
            assert answer.status == 200


async def test_models_are_listed_page_by_page() -> None:
    models = FakeModels([hello(name) for name in ("a", "b", "c")])
    async with running(models=models) as gateway, client(gateway) as sdk:
        pager = await sdk.models.list(config={"page_size": 2})
        assert len(pager) == 2
        found = [model async for model in pager]
        assert [model.name for model in found] == ["models/a", "models/b", "models/c"]
        assert (found[0].input_token_limit, found[0].output_token_limit) == (8192, 8192)
        assert "generateContent" in found[0].supported_actions


async def test_errors_are_the_sdks_own_before_and_after_the_first_byte() -> None:
    async with running(FakePipeline(fails_before=QueueFullError("full", retry_after_s=2.0))) as gateway:
        async with client(gateway) as sdk:
            with pytest.raises(errors.ClientError) as refused:
                await sdk.models.generate_content(model="demo", contents="hi")
        assert (refused.value.code, refused.value.status, refused.value.message) == (429, "RESOURCE_EXHAUSTED", "full")
    async with running(FakePipeline(fails_after=EngineLostError("lost"))) as gateway, client(gateway) as sdk:
        stream = await sdk.models.generate_content_stream(model="demo", contents="hi")
        said = ""
        with pytest.raises(errors.ServerError) as lost:
            async for chunk in stream:
                said += chunk.text
        assert (said, lost.value.code, lost.value.status) == ("Hello world", 502, "UNAVAILABLE")
