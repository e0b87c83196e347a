"""What is kept of responses, with the real openai SDK against the HTTP side."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from engine.protocol import Hello
from gateway.api.openai.responses.store import ResponseStore, StoredResponse
from gateway.config import StoredResponseSettings, TenantSettings
from gateway.errors import EngineLostError, OverloadedError
from gateway.storage.breaker import RedisBreaker
from gateway.storage.byte_store import Put, Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, connect
from gateway.types import CallDelta, Request
from tests.fakes.down_store import DownStore
from tests.fakes.gateway import LIMIT_S, Gateway, running
from tests.fakes.pipeline import FakeModels, FakePipeline, hello
from tests.fakes.redis_process import RedisProcess

TENANTS = (TenantSettings(name="north", keys=("north-key-1",)), TenantSettings(name="south", keys=("south-key-1",)))

QUOTA = Quota.of(StoredResponseSettings())


def messages(gateway: Gateway, number: int = -1) -> list[tuple[str, str]]:
    prompt: Any = gateway.pipeline.requests[number].prompt
    return [(message["role"], message["content"]) for message in prompt.messages]


class WatchedStore(MemoryBytes):
    """Says when something was put, and what the pipeline had done by then."""

    def __init__(self) -> None:
        super().__init__(QUOTA, time.time)
        self.changed = asyncio.Event()
        self.ids: list[str] = []

    async def put(self, tenant: str, response_id: str, *args: Any, **how: Any) -> Put:
        kept = await super().put(tenant, response_id, *args, **how)
        self.ids.append(response_id)
        self.changed.set()
        return kept


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_what_was_answered_can_be_retrieved_as_it_was_told(streamed: bool, reason: Any) -> None:
    async with running(FakePipeline(reason=reason)) as gateway, gateway.sdk() as client:
        if streamed:
            stream = await client.responses.create(model="demo", input="hi", stream=True)
            told = [event async for event in stream][-1].response  # type: ignore[union-attr]
        else:
            told = await client.responses.create(model="demo", input="hi")
        assert told.to_dict()["store"] is True
        assert (await client.responses.retrieve(told.id)).to_dict() == told.to_dict()


async def test_a_stream_is_kept_before_its_client_knows_that_it_is_over() -> None:
    store, pipeline = WatchedStore(), FakePipeline(hold_after=asyncio.Event())
    async with running(pipeline, response_store=store) as gateway, gateway.sdk() as client:
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        async for event in stream:
            if event.type == "response.created":
                assert not store.ids
                assert pipeline.hold_after is not None
                pipeline.hold_after.set()
            if event.type == "response.completed":
                assert store.ids == [event.response.id]


async def test_the_next_response_goes_on_from_what_was_said_but_not_from_the_instructions() -> None:
    async with running() as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input="one", instructions="Be brief.")
        second = await client.responses.create(model="demo", input="two", previous_response_id=first.id)
        await client.responses.create(
            model="demo", input="three", previous_response_id=second.id, instructions="Be long."
        )
        assert second.previous_response_id == first.id
        assert messages(gateway) == [
            ("system", "Be long."),
            ("user", "one"),
            ("assistant", "Hello world"),
            ("user", "two"),
            ("assistant", "Hello world"),
            ("user", "three"),
        ]
        await client.responses.delete(first.id)
        await client.responses.create(model="demo", input="again", previous_response_id=second.id)
        assert len(messages(gateway)) == 5


async def test_calls_are_answered_in_the_next_response() -> None:
    pipeline = FakePipeline(pieces=["Let me see.", CallDelta(0, "f", "{}")], reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input="hi")
        call = first.output[1]
        assert call.type == "function_call"
        outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        await client.responses.create(model="demo", input=outputs, previous_response_id=first.id)
        prompt: Any = pipeline.requests[1].prompt
        assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]
        assert prompt.messages[2]["tool_call_id"] == prompt.messages[1]["tool_calls"][0]["id"] == call.call_id


async def test_items_are_referred_to_by_their_ids() -> None:
    async with running() as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input="one")
        items = (await client.responses.input_items.list(first.id)).data
        again: Any = [{"type": "item_reference", "id": items[0].id}, {"id": first.output[0].id}]
        await client.responses.create(model="demo", input=[*again, {"role": "user", "content": "two"}])
        assert messages(gateway) == [("user", "one"), ("assistant", "Hello world"), ("user", "two")]
        for wrong in ("msg_1", f"msg_{'0' * 32}i0000"):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="demo", input=[*again, {"type": "item_reference", "id": wrong}])
            assert refused.value.param == "input[2].id"


async def test_references_lead_to_so_many_responses_and_no_more() -> None:
    async with running() as gateway, gateway.sdk() as client:
        said = [(await client.responses.create(model="demo", input="hi")).output[0].id for _ in range(17)]
        items: Any = [{"type": "item_reference", "id": item} for item in said]
        await client.responses.create(model="demo", input=items[:16])
        assert len(messages(gateway)) == 16
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="demo", input=items)
        assert refused.value.param == "input"


async def test_an_item_may_be_referred_to_once_so_that_no_input_becomes_longer_than_what_was_sent() -> None:
    async with running() as gateway, gateway.sdk() as client:
        said = (await client.responses.create(model="demo", input="hi")).output[0].id
        twice: Any = [{"type": "item_reference", "id": said}] * 2
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="demo", input=twice)
        assert refused.value.param == "input[1].id"


async def test_what_a_response_answered_is_listed_page_by_page() -> None:
    async with running() as gateway, gateway.sdk() as client:
        first = await client.responses.create(
            model="demo", input=[{"role": "user", "content": str(n)} for n in range(5)]
        )
        second = await client.responses.create(model="demo", input="last", previous_response_id=first.id)

        async def texts(**options: Any) -> list[str]:
            pages = client.responses.input_items.list(second.id, **options)
            return [item.content[0].text async for item in pages]  # type: ignore[union-attr]

        asc = ["0", "1", "2", "3", "4", "Hello world", "last"]
        assert await texts(order="asc") == await texts(order="asc", limit=2) == asc
        assert await texts() == await texts(limit=3) == asc[::-1]
        page = await client.responses.input_items.list(second.id, order="asc", limit=2)
        assert (page.has_more, page.first_id, page.last_id) == (True, page.data[0].id, page.data[1].id)
        assert await texts(order="asc", after=page.last_id) == asc[2:]
        assert {item.status for item in page.data} == {"completed"}  # type: ignore[union-attr]
        for options, param in (({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"after": "x"}, "after")):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.input_items.list(second.id, **options)  # type: ignore[arg-type]
            assert refused.value.param == param


async def test_what_was_deleted_or_never_kept_is_not_found() -> None:
    async with running() as gateway, gateway.sdk() as client:
        kept = await client.responses.create(model="demo", input="hi")
        forgotten = await client.responses.create(model="demo", input="hi", store=False)
        assert forgotten.to_dict()["store"] is False
        _, text, _ = await gateway.get(f"/v1/responses/{kept.id}")
        assert kept.id in text
        async with gateway.session.delete(f"{gateway.url}/v1/responses/{kept.id}") as answer:
            assert await answer.json() == {"id": kept.id, "object": "response", "deleted": True}
        asks: list[Callable[[str], Any]] = [
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
            client.responses.input_items.list,
        ]
        for name in (kept.id, forgotten.id, "resp_x", f"{kept.id}0", "\u00fc/x y"):
            for ask in asks:
                with pytest.raises(openai.NotFoundError):
                    await ask(name)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="demo", input="hi", previous_response_id=name)
            assert (refused.value.code, refused.value.param) == (
                "previous_response_not_found",
                "previous_response_id",
            )


async def test_a_name_that_is_no_text_is_not_found_in_redis_either(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    store = RedisBytes(RedisCalls(redis, LIMIT_S), "responses", QUOTA, time.time)
    try:
        async with running(response_store=store) as gateway, gateway.sdk() as client:
            kept = await client.responses.create(model="demo", input="hi")
            assert (await client.responses.retrieve(kept.id)).to_dict() == kept.to_dict()
            for name in ("%ff", "%00", "%ed%a0%bd", "*", "%2e.used"):
                assert (await gateway.get(f"/v1/responses/{name}"))[0] == 404
    finally:
        await redis.aclose()


async def test_what_one_tenant_kept_does_not_exist_for_another() -> None:
    async with (
        running(tenants=TENANTS) as gateway,
        gateway.sdk("north-key-1") as north,
        gateway.sdk("south-key-1") as south,
    ):
        kept = await north.responses.create(model="demo", input="secret")
        item = kept.output[0].id
        asks: list[Callable[[str], Any]] = [south.responses.retrieve, south.responses.delete, south.responses.cancel]
        for ask in asks:
            with pytest.raises(openai.NotFoundError):
                await ask(kept.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await south.responses.create(model="demo", input="hi", previous_response_id=kept.id)
        reference: Any = [{"type": "item_reference", "id": item}]
        with pytest.raises(openai.BadRequestError, match="no item"):
            await south.responses.create(model="demo", input=reference)
        assert (await north.responses.retrieve(kept.id)).output_text == "Hello world"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_store_that_is_down_costs_no_answer_and_is_told(streamed: bool) -> None:
    async with running(response_store=DownStore()) as gateway, gateway.sdk() as client:
        if streamed:
            stream = await client.responses.create(model="demo", input="hi", stream=True)
            told = [event async for event in stream][-1].response  # type: ignore[union-attr]
        else:
            told = await client.responses.create(model="demo", input="hi")
        assert (told.output_text, told.status, told.to_dict()["store"]) == ("Hello world", "completed", False)
        with pytest.raises(openai.InternalServerError) as down:
            await client.responses.retrieve(told.id)
        assert down.value.status_code == 503
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="demo", input="hi", previous_response_id=told.id)


async def test_a_stream_that_failed_is_kept_as_failed() -> None:
    pipeline = FakePipeline(fails_after=EngineLostError("Engine engine-1 went away."))
    async with running(pipeline) as gateway, gateway.sdk() as client:
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        failed = [event async for event in stream][-1].response  # type: ignore[union-attr]
        kept = await client.responses.retrieve(failed.id)
        assert (kept.status, kept.to_dict()) == ("failed", failed.to_dict())


async def test_a_client_that_leaves_a_stream_cancels_the_response() -> None:
    store, pipeline = WatchedStore(), FakePipeline(hold_after=asyncio.Event())
    async with running(pipeline, response_store=store) as gateway, gateway.sdk() as client:
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta" and event.delta == " world":
                break
        await stream.close()
        async with asyncio.timeout(LIMIT_S):
            await pipeline.closed.wait()
            await store.changed.wait()
        kept = await client.responses.retrieve(store.ids[0])
        assert (kept.status, kept.output_text, kept.usage) == ("cancelled", "Hello world", None)
        assert kept.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_nothing_is_kept_of_what_failed_before_its_client_knew_an_id() -> None:
    store = WatchedStore()
    async with running(FakePipeline(fails_before=EngineLostError("gone")), response_store=store) as gateway:
        for streamed in (False, True):
            status, _, _ = await gateway.post("/v1/responses", {"model": "demo", "input": "hi", "stream": streamed})
            assert status == 502
    assert not store.ids


async def test_what_does_not_run_in_the_background_cannot_be_cancelled() -> None:
    async with running() as gateway, gateway.sdk() as client:
        kept = await client.responses.create(model="demo", input="hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(kept.id)


async def test_a_kept_response_is_not_streamed() -> None:
    async with running() as gateway, gateway.sdk() as client:
        kept = await client.responses.create(model="demo", input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.retrieve(kept.id, stream=True)
        assert (refused.value.param, refused.value.code) == ("stream", "unsupported_parameter")


async def test_conversations_are_not_compacted_and_the_route_that_says_so_is_not_listed() -> None:
    async with running() as gateway, gateway.sdk() as client:
        for page in ("/", "/docs", "/openapi.json"):
            assert "/v1/responses/compact" not in (await gateway.get(page))[1]
        with pytest.raises(openai.BadRequestError, match="not compacted"):
            await client.responses.compact(model="demo", input="hi")


async def test_tokens_are_counted_of_the_whole_conversation() -> None:
    async with running() as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input="one")
        counted = await client.responses.input_tokens.count(
            model="demo", input="two", previous_response_id=first.id, instructions="Be brief."
        )
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", 40)
        assert [role for role, _ in messages(gateway)] == ["system", "user", "assistant", "user"]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.input_tokens.count(model="demo", input="x", personality="friendly")
        assert refused.value.param == "personality"


class CountingPipeline(FakePipeline):
    """A message is ten tokens."""

    async def count(self, request: Request) -> int:
        prompt: Any = request.prompt
        return 10 * len(prompt.messages)


@pytest.mark.parametrize(
    ("context", "kept"),
    [(200, "s0a1b2"), (51, "s0a1b2"[:1] + "1b2"), (41, "s1b2"), (30, "s2"), (21, "s2"), (5, "s0a1b2")],
)
async def test_the_oldest_turns_are_dropped_until_the_rest_fits(context: int, kept: str) -> None:
    small: Hello = hello(context_tokens=context)
    roles = {"s": "developer", "0": "user", "1": "user", "2": "user", "a": "assistant", "b": "assistant"}
    turns: Any = [{"role": roles[text], "content": text} for text in "s0a1b2"]
    async with running(CountingPipeline(), FakeModels([small])) as gateway, gateway.sdk() as client:
        answer = await client.responses.create(model="demo", input=turns, truncation="auto")
        assert "".join(text for _, text in messages(gateway)) == kept
        assert answer.truncation == "auto"
        items = await client.responses.input_items.list(answer.id)
        assert len(items.data) == 6


ID = f"resp_{'0a' * 16}"
RESPONSE = StoredResponse(
    {"id": ID, "object": "response", "status": "completed", "created_at": 1, "output": [{"id": "msg_2"}]},
    [{"id": "msg_1"}],
)


async def test_a_redis_that_is_away_costs_the_keeping_and_is_told_once(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.storage")
    redis, clock = connect(own_redis.url, LIMIT_S), [0.0]
    breaker = RedisBreaker(retry_s=10.0, clock=lambda: clock[0])
    store = RedisBytes(RedisCalls(redis, LIMIT_S, breaker), "responses", QUOTA, time.time)
    responses = ResponseStore(store)
    try:
        assert await responses.put("a", RESPONSE)
        assert await responses.find("a", ID) == RESPONSE
        own_redis.kill()
        for _ in range(3):
            assert not await responses.put("a", RESPONSE)
        assert not await responses.put("a", RESPONSE, RESPONSE.body)
        for ask in (responses.find, responses.delete):
            with pytest.raises(OverloadedError) as down:
                await ask("a", ID)
            assert down.value.retry_after_s == 10.0
        own_redis.start()
        assert not await responses.put("a", RESPONSE)  # not asked again so soon
        clock[0] += 10.0
        assert await responses.put("a", RESPONSE)
        found = await responses.find("a", ID)
        assert found == RESPONSE
        assert await responses.put("a", RESPONSE, found.body)
    finally:
        await redis.aclose()
    assert responses.outcomes == {"kept": 3, "too_large": 0, "failed": 5}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
