"""What upstreams keep under a key that several tenants share: each names what was made for it, and nothing else."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import orjson
import pytest

from gateway.api.lines import LineRequest
from gateway.api.routes import RUNNER
from gateway.config import TenantSettings
from gateway.types import Tenant
from tests.fakes.down_store import DownStore
from tests.fakes.gateway import running
from tests.fakes.upstream import CHAT, RESPONSE, RESPONSE_STREAM, error, said, upstream

TENANTS = (TenantSettings(name="north", keys=("north-key-1",)), TenantSettings(name="south", keys=("south-key-1",)))
NEXT: Any = {"model": "up-1", "input": "and then?", "previous_response_id": "resp_1"}
REFERENCE: Any = {"model": "up-1", "input": [{"type": "item_reference", "id": "msg_1"}]}
WHOLE = orjson.loads(RESPONSE.pieces[0])


@pytest.mark.parametrize("streamed", [False, True])
async def test_only_the_tenant_of_a_response_goes_on_from_it(streamed: bool) -> None:
    made = RESPONSE_STREAM if streamed else RESPONSE
    async with (
        upstream(made, RESPONSE, RESPONSE) as stub,
        running(upstreams=[stub.settings()], tenants=TENANTS) as gateway,
        gateway.sdk("north-key-1") as north,
        gateway.sdk("south-key-1") as south,
    ):
        answer: Any = await north.responses.create(model="up-1", input="hi", stream=streamed)
        if streamed:
            assert [event.type async for event in answer][-1] == "response.completed"
        for asking, param in ((NEXT, "previous_response_id"), (REFERENCE, "input[0].id")):
            with pytest.raises(openai.BadRequestError) as refused:
                await south.responses.create(**asking)
            assert refused.value.param == param
            with pytest.raises(openai.BadRequestError):
                await south.responses.input_tokens.count(**asking)
        assert len(stub.got) == 1
        assert (await north.responses.create(**NEXT)).id == "resp_1"
        assert (await north.responses.create(**REFERENCE)).id == "resp_1"
        assert [got.json.get("previous_response_id") for got in stub.got] == [None, "resp_1", None]


async def test_a_line_of_a_batch_names_no_more_than_a_request() -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(upstreams=[stub.settings()], tenants=TENANTS) as gateway,
        gateway.sdk("north-key-1") as north,
    ):
        await north.responses.create(model="up-1", input="hi")
        came = [
            await gateway.app[RUNNER].answer(LineRequest("/v1/responses", Tenant(name), NEXT, "", "req_1"))
            for name in ("south", "north")
        ]
        assert [answer.status for answer in came] == [400, 200]


async def test_a_response_that_came_in_the_background_tells_its_items_when_it_is_asked_for() -> None:
    queued = said({**WHOLE, "status": "queued", "output": []})
    async with (
        upstream(queued, RESPONSE, RESPONSE) as stub,
        running(upstreams=[stub.settings()], tenants=TENANTS) as gateway,
        gateway.sdk("north-key-1") as north,
    ):
        await north.responses.create(model="up-1", input="hi", background=True)
        with pytest.raises(openai.BadRequestError):
            await north.responses.create(**REFERENCE)
        await north.responses.retrieve("resp_1")
        await north.responses.create(**REFERENCE)


async def test_files_and_containers_that_others_made_are_refused_by_path() -> None:
    container = {"id": "container_1", "expires_at": "2026-11-24T00:00:00Z"}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "up-1",
        "content": [{"type": "text", "text": "Done."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
        "container": container,
    }
    tools: Any = [{"type": "code_execution_20250825", "name": "code_execution"}]
    asking: Any = {"model": "up-1", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    async with (
        upstream(said(message)) as stub,
        running(upstreams=[stub.settings(dialect="anthropic")], tenants=TENANTS) as gateway,
        gateway.anthropic("north-key-1") as north,
        gateway.anthropic("south-key-1") as south,
    ):
        await north.messages.create(**asking)
        await north.messages.create(**asking, extra_body={"container": "container_1"})
        with pytest.raises(anthropic.BadRequestError, match="foreign_ids"):
            await south.messages.create(**asking, extra_body={"container": "container_1"})
        document = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
        with pytest.raises(anthropic.BadRequestError, match="file_id"):
            await north.messages.create(**{**asking, "messages": [{"role": "user", "content": [document]}]})
        assert len(stub.got) == 2


@pytest.mark.parametrize(
    ("tenants", "options"),
    [
        ((), {}),
        (TENANTS[1:], {}),
        (TENANTS, {"tenants": ("south",)}),
        (TENANTS, {"foreign_ids": ("south",)}),
        (TENANTS, {"foreign_ids": ("*",)}),
    ],
)
async def test_an_id_made_elsewhere_goes_on_where_nobody_shares_the_key_or_it_is_allowed(
    tenants: tuple[TenantSettings, ...], options: dict[str, Any]
) -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(upstreams=[stub.settings(**options)], tenants=tenants) as gateway,
        gateway.sdk("south-key-1") as south,
    ):
        await south.responses.create(**NEXT)
        assert len(stub.got) == 1


async def test_two_upstreams_with_one_key_are_one_account() -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(
            upstreams=[
                stub.settings(name="n", models=("up-1",), tenants=("north",)),
                stub.settings(name="s", models=("up-1",), tenants=("south",)),
                stub.settings(name="both", models=("up-2",)),
            ],
            tenants=TENANTS,
        ) as gateway,
        gateway.sdk("north-key-1") as north,
        gateway.sdk("south-key-1") as south,
    ):
        await north.responses.create(model="up-1", input="hi")
        with pytest.raises(openai.BadRequestError):
            await south.responses.create(**NEXT)
        await north.responses.create(**{**NEXT, "model": "up-2"})


async def test_a_response_is_gone_on_from_where_it_is_kept() -> None:
    async with (
        upstream(error(500), CHAT) as first,
        upstream(RESPONSE, RESPONSE) as second,
        running(upstreams=[first.settings(name="a", retries=0), second.settings(name="b")]) as gateway,
        gateway.sdk() as client,
    ):
        await client.responses.create(model="up-1", input="hi")
        await client.responses.create(**NEXT)
        assert (len(first.got), len(second.got)) == (1, 2)


async def test_nothing_is_named_while_it_cannot_be_known_who_made_it() -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(upstreams=[stub.settings()], tenants=TENANTS, response_store=DownStore()) as gateway,
        gateway.sdk("north-key-1") as north,
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            await north.with_options(max_retries=0).responses.create(**NEXT)
        assert refused.value.status_code == 503
        await north.responses.create(model="up-1", input="hi")
