"""The real openai SDK against the HTTP side."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gateway.errors import (
    ContextLengthError,
    DeadlineError,
    EngineFailedError,
    EngineLostError,
    KvasirError,
    NoEngineError,
    QueueFullError,
)
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakeModels, FakePipeline, hello

HI: Any = [{"role": "user", "content": "hi"}]


async def test_a_chat_answer_has_every_field_of_the_api() -> None:
    async with running() as gateway, gateway.sdk() as client:
        raw = await client.chat.completions.with_raw_response.create(model="demo", messages=HI)
        answer = raw.parse()
        assert answer.id.startswith("chatcmpl-")
        assert (answer.object, answer.model, answer.service_tier) == ("chat.completion", "demo", "default")
        assert answer.system_fingerprint is not None
        assert answer.system_fingerprint.startswith("fp_")
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
        assert (choice.message.refusal, choice.message.annotations) == (None, [])
        usage = answer.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 2, 42)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 32
        assert raw.headers["x-kvasir-cached-tokens"] == "32"
        assert raw.headers["x-kvasir-engine"] == "engine-1"
        assert raw.request_id == raw.headers["x-request-id"] == gateway.pipeline.requests[0].request_id


async def test_the_streaming_helper_puts_the_answer_together() -> None:
    async with running() as gateway, gateway.sdk() as client:
        options: Any = {"stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(model="demo", messages=HI, **options) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert deltas == ["", "Hello", " world"]
        assert final.choices[0].message.content == "Hello world"
        assert final.choices[0].message.role == "assistant"
        assert final.usage is not None
        assert final.usage.total_tokens == 42


async def test_a_connection_is_used_again_after_a_stream() -> None:
    async with running() as gateway, gateway.sdk() as client:
        for _ in range(3):
            stream = await client.chat.completions.create(model="demo", messages=HI, stream=True)
            assert [chunk.choices[0].delta.content async for chunk in stream][:2] == ["", "Hello"]


async def test_an_error_in_a_stream_is_raised() -> None:
    pipeline = FakePipeline(fails_after=EngineLostError("Engine engine-1 went away."))
    async with running(pipeline) as gateway, gateway.sdk() as client:
        stream = await client.chat.completions.create(model="demo", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="went away"):
            async for _ in stream:
                pass


async def test_completions_of_several_prompts_are_numbered_by_prompt() -> None:
    async with running() as gateway, gateway.sdk() as client:
        answer = await client.completions.create(model="demo", prompt=["a ", "b "], echo=True)
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
        assert [(choice.index, choice.text) for choice in answer.choices] == [
            (0, "a Hello world"),
            (1, "b Hello world"),
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (80, 4)


async def test_prompts_run_side_by_side_but_not_all_at_once() -> None:
    async with running() as gateway, gateway.sdk() as client:
        await client.completions.create(model="demo", prompt=["x"] * 100)
        assert len(gateway.pipeline.requests) == 100
        assert gateway.pipeline.most_open == 16


async def test_token_ids_are_echoed_as_their_text() -> None:
    async with running() as gateway, gateway.sdk() as client:
        answer = await client.completions.create(model="demo", prompt=[[5, 6], [7]], echo=True)
        assert [choice.text for choice in answer.choices] == ["<5><6>Hello world", "<7>Hello world"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_computes_the_prompt_and_returns_none(stream: bool) -> None:
    async with running() as gateway, gateway.sdk() as client:
        options: Any = {"stream_options": {"include_usage": True}} if stream else {}
        given = await client.completions.create(model="demo", prompt="warm", max_tokens=0, stream=stream, **options)
        chunks = [chunk async for chunk in given] if stream else [given]
        texts = [choice.text for chunk in chunks for choice in chunk.choices]
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert ("".join(texts), reasons) == ("", ["length"])
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 0)
        assert (gateway.pipeline.requests[0].prewarm, gateway.pipeline.sampling.max_tokens) == (True, 0)


ERRORS = [
    (
        ContextLengthError(8192, 9000, 10, param="messages"),
        openai.BadRequestError,
        "context_length_exceeded",
        "messages",
    ),
    (QueueFullError("busy", retry_after_s=2.5), openai.RateLimitError, "rate_limit_exceeded", None),
    (NoEngineError("demo", 1.0), openai.InternalServerError, "server_is_overloaded", None),
    (DeadlineError("late"), openai.InternalServerError, "server_is_overloaded", None),
    (EngineLostError("gone"), openai.InternalServerError, None, None),
    (EngineFailedError("NaN"), openai.InternalServerError, None, None),
    (KvasirError("bug"), openai.InternalServerError, None, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "kind", "code", "param"), ERRORS, ids=lambda value: type(value).__name__)
async def test_each_error_is_the_sdks_own_exception(
    error: KvasirError, kind: type[openai.APIStatusError], code: str | None, param: str | None, stream: bool
) -> None:
    async with running(FakePipeline(fails_before=error)) as gateway, gateway.sdk() as client:
        with pytest.raises(kind) as raised:
            await client.chat.completions.create(model="demo", messages=HI, stream=stream)
        assert type(raised.value) is kind
        assert (raised.value.code, raised.value.param) == (code, param)
        assert raised.value.status_code == error.status
        assert raised.value.request_id is not None
        assert raised.value.request_id.startswith("req_")
        assert raised.value.response.headers["content-type"].startswith("application/json")
        assert error.message in raised.value.message
    assert gateway.pipeline.open == 0


async def test_chats_are_not_kept_so_that_there_are_none_to_list() -> None:
    async with running() as gateway, gateway.sdk() as client:
        made = await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}])
        page = await client.chat.completions.list(limit=3, order="desc", model="demo")
        assert (page.data, page.has_more, page.has_next_page()) == ([], False, False)
        expected = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        assert json.loads((await gateway.get("/v1/chat/completions"))[1]) == expected
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.list(limit=0)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.retrieve(made.id)


async def test_unknown_models_are_not_found_everywhere() -> None:
    async with running() as gateway, gateway.sdk() as client:
        for ask in (
            lambda: client.chat.completions.create(model="other", messages=HI),
            lambda: client.completions.create(model="other", prompt="x"),
            lambda: client.models.retrieve("other"),
        ):
            with pytest.raises(openai.NotFoundError) as missing:
                await ask()
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_a_busy_server_says_when_to_retry_and_the_sdk_does() -> None:
    pipeline = FakePipeline(fails_before=QueueFullError("busy", retry_after_s=0.02))

    class Recovers(FakePipeline):
        async def _events(self, request: Any) -> Any:
            self.fails_before = pipeline.fails_before if len(self.requests) == 1 else None
            async for event in super()._events(request):
                yield event

    async with running(Recovers()) as gateway, gateway.sdk(max_retries=1) as client:
        answer = await client.chat.completions.create(model="demo", messages=HI)
        assert answer.choices[0].message.content == "Hello world"
        assert len(gateway.pipeline.requests) == 2


@pytest.mark.parametrize("name", ["demo", "org/model:x y", "a%2Fb", "\u00fc/\u65e5\u672c"])
async def test_models_are_listed_and_found_by_names_with_any_character(name: str) -> None:
    models = FakeModels([hello(name), hello("other", created=5)])
    async with running(models=models) as gateway, gateway.sdk() as client:
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.object, model.created, model.owned_by) for model in listed] == [
            (name, "model", 1700000000, "kvasir"),
            ("other", "model", 5, "kvasir"),
        ]
        assert (await client.models.retrieve(name)).id == name


async def test_a_model_with_slashes_is_found_unescaped_too() -> None:
    async with running(models=FakeModels([hello("org/model")])) as gateway:
        assert (await gateway.get("/v1/models/org/model"))[0] == 200
        assert (await gateway.get("/v1/models/org%2Fmodel"))[0] == 200


async def test_a_model_whose_engines_are_away_is_overloaded_and_not_unknown() -> None:
    models = FakeModels(away=NoEngineError("demo", 1.0))
    async with running(models=models) as gateway:
        status, _, headers = await ask(gateway)
        assert (status, headers["retry-after"], headers["retry-after-ms"]) == (503, "1", "1000")
        assert headers["x-should-retry"] == "true"
        assert (await gateway.get("/v1/models/demo"))[0] == 200


async def ask(gateway: Gateway) -> Any:
    return await gateway.post("/v1/chat/completions", {"model": "demo", "messages": HI})
