"""Responses that an upstream keeps, asked for through the gateway with the real openai SDK."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncStream

from gateway.api.lines import LineRequest
from gateway.api.routes import RUNNER
from gateway.config import StoredResponseSettings, TenantSettings
from gateway.storage.byte_store import Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.types import Tenant
from tests.fakes.down_store import DownStore
from tests.fakes.gateway import LIMIT_S, running
from tests.fakes.upstream import RESPONSE, RESPONSE_STREAM, SSE, StubUpstream, Told, error, said, upstream

TENANTS = (TenantSettings(name="north", keys=("north-key-1",)), TenantSettings(name="south", keys=("south-key-1",)))
ITEMS = said({"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False})
DELETED = said({"id": "resp_1", "object": "response", "deleted": True})


def asked(stub: StubUpstream) -> list[tuple[str, str, bytes]]:
    return [(got.method, got.path, got.body) for got in stub.got]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_an_upstream_keeps_is_asked_of_the_one_that_made_it(streamed: bool) -> None:
    made = RESPONSE_STREAM if streamed else RESPONSE
    answers = (made, RESPONSE, ITEMS, RESPONSE, DELETED)
    async with (
        upstream(error(500)) as broken,
        upstream(*answers) as stub,
        running(upstreams=[broken.settings(name="a", retries=0), stub.settings(name="b")]) as gateway,
        gateway.sdk() as client,
    ):
        response: Any = await client.responses.create(model="up-1", input="hi", background=True, stream=streamed)
        if isinstance(response, AsyncStream):
            response = [one async for one in response][-1].response  # type: ignore[union-attr]
        assert (await client.responses.retrieve(response.id, include=["reasoning.encrypted_content"])).id == "resp_1"
        assert (await client.responses.input_items.list(response.id, limit=7)).data == []
        await client.responses.cancel(response.id)
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        assert len(broken.got) == 1
        assert asked(stub)[1:] == [
            ("GET", "/v1/responses/resp_1?include%5B%5D=reasoning.encrypted_content", b""),
            ("GET", "/v1/responses/resp_1/input_items?limit=7", b""),
            ("POST", "/v1/responses/resp_1/cancel", b""),
            ("DELETE", "/v1/responses/resp_1", b""),
        ]
        assert {got.headers["Authorization"] for got in stub.got} == {"Bearer sk-upstream"}


async def test_another_tenant_does_not_reach_it() -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(upstreams=[stub.settings()], tenants=TENANTS) as gateway,
        gateway.sdk("north-key-1") as north,
        gateway.sdk("south-key-1") as south,
    ):
        await north.responses.create(model="up-1", input="hi")
        for ask in (
            south.responses.retrieve,
            south.responses.cancel,
            south.responses.delete,
            south.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                await ask("resp_1")
        assert len(stub.got) == 1
        assert (await north.responses.retrieve("resp_1")).id == "resp_1"


async def test_it_can_be_asked_for_as_soon_as_its_stream_has_named_it() -> None:
    begun = Told(RESPONSE_STREAM.pieces[:1], media=SSE, then="stall")
    async with (
        asyncio.timeout(LIMIT_S),
        upstream(begun, RESPONSE) as stub,
        running(upstreams=[stub.settings()]) as gateway,
        gateway.sdk() as client,
    ):
        stream = await client.responses.create(model="up-1", input="hi", stream=True, background=True)
        created = await anext(aiter(stream))
        assert created.type == "response.created"
        assert (await client.responses.cancel(created.response.id)).id == "resp_1"
        await stream.close()


async def test_a_stored_response_is_streamed_again_from_where_the_client_was() -> None:
    async with (
        upstream(RESPONSE, RESPONSE_STREAM) as stub,
        running(upstreams=[stub.settings()]) as gateway,
        gateway.sdk() as client,
    ):
        await client.responses.create(model="up-1", input="hi")
        again = await client.responses.retrieve("resp_1", stream=True, starting_after=3)
        assert [one.type async for one in again][-1] == "response.completed"
        assert stub.got[1].path == "/v1/responses/resp_1?starting_after=3&stream=true"


async def test_what_is_not_kept_or_has_no_sane_id_or_failed_is_not_asked_for() -> None:
    whole = orjson.loads(RESPONSE.pieces[0])
    odd = [{**whole, "id": "../files"}, {**whole, "id": None}, {**whole, "id": "resp_1\n"}]
    answers = (RESPONSE, error(400), *map(said, odd), Told([b"no JSON"]), Told([b"data: nothing\n\n"], media=SSE))
    async with upstream(*answers) as stub, running(upstreams=[stub.settings()]) as gateway, gateway.sdk() as client:
        await client.responses.create(model="up-1", input="hi", store=False)
        for _ in answers[1:]:
            await gateway.session.post(f"{gateway.url}/v1/responses", json={"model": "up-1", "input": "hi"})
        for response_id in ("resp_1", "..%2Ffiles", "resp_1%0A", "None", "resp_2"):
            status, *_ = await gateway.get(f"/v1/responses/{response_id}")
            assert status == 404
        assert len(stub.got) == len(answers)


async def test_an_id_of_a_line_of_a_batch_is_known_too() -> None:
    async with upstream(RESPONSE) as stub, running(upstreams=[stub.settings()]) as gateway, gateway.sdk() as client:
        line = LineRequest("/v1/responses", Tenant("anonymous"), {"model": "up-1", "input": "hi"}, "", "req_1")
        assert (await gateway.app[RUNNER].answer(line)).status == 200
        assert (await client.responses.retrieve("resp_1")).id == "resp_1"


async def test_an_upstream_that_is_gone_or_of_other_tenants_by_now_is_not_asked() -> None:
    store = MemoryBytes(Quota.of(StoredResponseSettings()), time.time)
    async with upstream(RESPONSE) as stub:
        async with running(upstreams=[stub.settings()], response_store=store) as gateway, gateway.sdk() as client:
            await client.responses.create(model="up-1", input="hi")
        for settings in ((), (stub.settings(tenants=("north",)),)):
            async with running(upstreams=settings, response_store=store) as gateway, gateway.sdk() as client:
                with pytest.raises(openai.NotFoundError, match="not there any more"):
                    await client.responses.retrieve("resp_1")
        assert len(stub.got) == 1


async def test_a_store_that_is_down_costs_no_answer() -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(upstreams=[stub.settings()], response_store=DownStore()) as gateway,
        gateway.sdk() as client,
    ):
        assert (await client.responses.create(model="up-1", input="hi")).id == "resp_1"
        with pytest.raises(openai.InternalServerError, match="cannot be reached"):
            await client.responses.retrieve("resp_1")


async def test_a_head_request_has_no_body_that_would_be_taken_for_the_next_answer() -> None:
    async with upstream(RESPONSE) as stub, running(upstreams=[stub.settings()]) as gateway:
        await gateway.session.post(f"{gateway.url}/v1/responses", json={"model": "up-1", "input": "hi"})
        for _ in range(2):
            async with gateway.session.head(f"{gateway.url}/v1/responses/resp_1") as answer:
                assert (answer.status, await answer.read()) == (200, b"")
        assert (await gateway.get("/v1/responses/resp_1"))[1].encode() == RESPONSE.pieces[0]
