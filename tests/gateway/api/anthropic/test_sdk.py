"""The real anthropic SDK against the HTTP side over a fake pipeline."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from gateway.config import TenantSettings
from gateway.errors import DeadlineError, EngineLostError, OverloadedError, QueueFullError
from gateway.types import CallDelta, ChatPrompt
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakeModels, FakePipeline, hello

ASKED: Any = {"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
TENANT = TenantSettings(name="north", keys=("north-key",))


async def test_a_message_comes_as_the_sdk_has_it() -> None:
    async with running() as gateway, gateway.anthropic() as client:
        answer = await client.messages.create(**ASKED, system="Be brief.", stop_sequences=["END"])
    assert answer.id.startswith("msg_")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello world"}]
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "demo",
        "end_turn",
        None,
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.service_tier) == (40, 2, "standard")
    (request,) = gateway.pipeline.requests
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == [{"role": "system", "content": "Be brief."}, ASKED["messages"][0]]
    assert (request.stop, request.fit) == (("END",), True)
    assert answer._request_id == request.request_id


async def test_a_stream_adds_up_to_the_message() -> None:
    pipeline = FakePipeline(
        ("I", " look.", CallDelta(0, "weather"), CallDelta(0, arguments='{"city": "Oslo"}')), reason="tool_calls"
    )
    async with running(pipeline) as gateway, gateway.anthropic() as client:
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            kinds = [event.type async for event in stream if event.type not in ("text", "input_json")]
            streamed = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    assert same(streamed) == same(whole)


def same(answer: Any) -> Any:
    """Without the ids."""
    told = answer.to_dict()
    told["id"] = ""
    for block in told["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return told


async def test_counting() -> None:
    async with running() as gateway, gateway.anthropic() as client:
        counted = await client.messages.count_tokens(model="demo", messages=ASKED["messages"], system="x")
        assert counted.input_tokens == 40
        with pytest.raises(anthropic.NotFoundError, match="model: none"):
            await client.messages.count_tokens(model="none", messages=ASKED["messages"])


class City(BaseModel):
    name: str


async def test_a_parsed_answer() -> None:
    async with running(FakePipeline(('{"name": "Oslo"}',))) as gateway, gateway.anthropic() as client:
        answer = await client.messages.parse(**ASKED, output_format=City)
        assert answer.parsed_output == City(name="Oslo")
    constraint = gateway.pipeline.requests[0].constraint
    assert constraint is not None
    assert constraint.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OverloadedError("Full.", retry_after_s=1), anthropic.OverloadedError),
        (QueueFullError("Wait.", retry_after_s=1), anthropic.RateLimitError),
        (DeadlineError("Slow."), anthropic.GatewayTimeoutError),
        (EngineLostError("Gone."), anthropic.InternalServerError),
    ],
)
async def test_errors_are_those_of_the_sdk(error: Exception, kind: type[anthropic.APIStatusError]) -> None:
    async with running(FakePipeline(fails_before=error)) as gateway, gateway.anthropic() as client:
        with pytest.raises(kind) as raised:
            await client.messages.create(**ASKED)
        assert raised.value.request_id == gateway.pipeline.requests[0].request_id


async def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    pipeline = FakePipeline(("a",), fails_after=EngineLostError("Gone."))
    async with running(pipeline) as gateway, gateway.anthropic() as client:
        events = await client.messages.create(**ASKED, stream=True)
        seen = [(await anext(events)).type for _ in range(3)]
        with pytest.raises(anthropic.APIStatusError, match="Gone"):
            await anext(events)
    assert seen == ["message_start", "content_block_start", "content_block_delta"]


async def test_either_way_to_send_a_key_works() -> None:
    async with running(tenants=[TENANT]) as gateway:
        async with gateway.anthropic("north-key") as client:
            await client.messages.create(**ASKED)
            await client.messages.create(**ASKED, extra_headers={"x-api-key": "north-key"})
        async with gateway.anthropic("another") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**ASKED)


async def test_models_have_a_lifecycle_and_pages() -> None:
    names = ["a", "org/b", "c"]
    models = FakeModels([hello(name, created=1700000000 + number) for number, name in enumerate(names)])
    async with running(models=models) as gateway, gateway.anthropic() as client, gateway.sdk() as openai:
        first = await client.models.list(limit=2)
        assert ([model.id for model in first.data], first.has_more) == (["c", "org/b"], True)
        assert [model.id async for model in client.models.list(limit=2)] == ["c", "org/b", "a"]
        assert [model.id for model in (await client.models.list(before_id="a", limit=1)).data] == ["org/b"]
        assert (await client.models.list(lifecycle=["retired"])).data == []
        one = await client.models.retrieve("org/b")
        assert (one.id, one.lifecycle, one.max_input_tokens, one.created_at.year) == ("org/b", "active", 8192, 2023)
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("none")
        with pytest.raises(anthropic.BadRequestError, match="limit: integer below minimum"):
            await client.models.list(limit=0)
        with pytest.raises(anthropic.BadRequestError, match="after_id: there is no 'z'"):
            await client.models.list(after_id="z")
        assert (await openai.models.retrieve("org/b")).object == "model", "and OpenAI's own shape for its SDK"
