"""Responses in the background, with the real openai SDK against the HTTP side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.api.openai.responses.keeping import settled
from gateway.api.openai.responses.store import StoredResponse
from gateway.config import ServerSettings, StoredResponseSettings, TenantSettings
from gateway.errors import EngineFailedError, RedisDownError
from gateway.storage.byte_store import Put, Quota
from gateway.storage.memory_bytes import MemoryBytes
from tests.fakes.gateway import LIMIT_S, Gateway, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

TENANTS = (TenantSettings(name="north", keys=("north-key-1",)), TenantSettings(name="south", keys=("south-key-1",)))


class WatchedStore(MemoryBytes):
    """Says when something was put."""

    def __init__(self) -> None:
        super().__init__(Quota.of(StoredResponseSettings()), time.time)
        self.puts: asyncio.Queue[str] = asyncio.Queue()
        self.down = False

    async def put(self, tenant: str, response_id: str, *args: Any, **how: Any) -> Put:
        if self.down:
            raise RedisDownError("away")
        kept = await super().put(tenant, response_id, *args, **how)
        self.puts.put_nowait(response_id)
        return kept


@asynccontextmanager
async def held(
    pipeline: FakePipeline | None = None, **options: Any
) -> AsyncIterator[tuple[Gateway, Any, WatchedStore]]:
    """A gateway whose answers wait for `hold_after`."""
    store, pipeline = WatchedStore(), pipeline or FakePipeline()
    pipeline.hold_after = asyncio.Event()
    server = ServerSettings(shutdown_s=0)
    async with running(pipeline, response_store=store, server=server, **options) as gateway, gateway.sdk() as client:
        yield gateway, client, store


async def ended(store: WatchedStore) -> None:
    """Until what was begun has been put a second time."""
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):
            await store.puts.get()


async def test_a_response_is_answered_later_and_polled() -> None:
    async with held() as (gateway, client, store):
        begun = await client.responses.create(model="demo", input="hi", background=True)
        assert (begun.status, begun.background, begun.output, begun.usage) == ("in_progress", True, [], None)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="in progress"):
            await client.responses.create(model="demo", input="hi", previous_response_id=begun.id)
        gateway.pipeline.hold_after.set()
        await ended(store)
        done = await client.responses.retrieve(begun.id)
        assert (done.status, done.output_text, done.background) == ("completed", "Hello world", True)
        assert done.usage is not None
        assert done.usage.total_tokens == 42
        goes_on = await client.responses.create(model="demo", input="and?", previous_response_id=begun.id)
        assert goes_on.status == "completed"


async def test_its_tokens_are_metered_once_and_when_it_is_done() -> None:
    async with held() as (gateway, client, store):
        begun = await client.responses.create(model="demo", input="hi", background=True)
        counted = 'kvasir_completion_tokens_total{model="demo",tenant="anonymous"}'
        assert f"{counted} 2.0" not in (await gateway.get("/metrics"))[1]
        gateway.pipeline.hold_after.set()
        await ended(store)
        assert (await client.responses.retrieve(begun.id)).status == "completed"
        shown = (await gateway.get("/metrics"))[1]
        assert f"{counted} 2.0" in shown
        assert 'kvasir_requests_total{endpoint="/v1/responses (background)"' in shown


async def test_one_that_is_cancelled_ends_and_stays_cancelled() -> None:
    async with held() as (gateway, client, _store):
        begun = await client.responses.create(model="demo", input="hi", background=True)
        async with asyncio.timeout(LIMIT_S):
            await gateway.pipeline.reached.wait()
        cancelled = await client.responses.cancel(begun.id)
        assert (cancelled.id, cancelled.status) == (begun.id, "cancelled")
        assert gateway.pipeline.open == 0
        for again in (await client.responses.cancel(begun.id), await client.responses.retrieve(begun.id)):
            assert again.status == "cancelled"


async def test_cancelling_what_is_complete_changes_nothing() -> None:
    async with held() as (gateway, client, store):
        gateway.pipeline.hold_after.set()
        begun = await client.responses.create(model="demo", input="hi", background=True)
        await ended(store)
        assert (await client.responses.cancel(begun.id)).status == "completed"


async def test_one_that_is_deleted_ends_and_does_not_come_back() -> None:
    async with held() as (gateway, client, _store):
        begun = await client.responses.create(model="demo", input="hi", background=True)
        await client.responses.delete(begun.id)
        async with asyncio.timeout(LIMIT_S):
            await gateway.pipeline.closed.wait()
        assert gateway.pipeline.open == 0
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_one_that_was_cancelled_through_another_gateway_is_thrown_away() -> None:
    async with held() as (first, client, store), running(response_store=store) as second, second.sdk() as other:
        begun = await client.responses.create(model="demo", input="hi", background=True)
        assert (await other.responses.cancel(begun.id)).status == "cancelled"
        assert first.pipeline.hold_after is not None
        first.pipeline.hold_after.set()
        async with asyncio.timeout(LIMIT_S):
            await first.pipeline.closed.wait()
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"


class GatedStore(WatchedStore):
    """Holds the second write back, once it is known what it will write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def put(self, tenant: str, response_id: str, *args: Any, **how: Any) -> Put:
        self.writes += 1
        if self.writes == 2:
            self.reached.set()
            await self.gate.wait()
        return await super().put(tenant, response_id, *args, **how)


async def test_one_that_is_deleted_while_its_end_is_written_does_not_come_back() -> None:
    store = GatedStore()
    async with asyncio.timeout(LIMIT_S), running(response_store=store) as first, first.sdk() as client:
        begun = await client.responses.create(model="demo", input="hi", background=True)
        await store.reached.wait()
        async with running(response_store=store) as second, second.sdk() as other:
            await other.responses.delete(begun.id)
            store.gate.set()
        await first.app.shutdown()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_one_that_is_complete_before_its_cancelling_is_written_stays_complete() -> None:
    store, pipeline = GatedStore(), FakePipeline()
    pipeline.hold_after = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), running(pipeline, response_store=store) as first, first.sdk() as client:
        begun = await client.responses.create(model="demo", input="hi", background=True)
        async with running(response_store=store) as second, second.sdk() as other:
            cancelling = asyncio.ensure_future(other.responses.cancel(begun.id))
            await store.reached.wait()
            pipeline.hold_after.set()
            await first.app.shutdown()
            store.gate.set()
            assert (await cancelling).status == "completed"
        assert (await client.responses.retrieve(begun.id)).status == "completed"


async def test_a_failure_is_told_by_the_response() -> None:
    failures = FakePipeline(fails_before=EngineFailedError("NaN")), FakePipeline(fails_after=RuntimeError("bug"))
    for pipeline in failures:
        async with held(pipeline) as (gateway, client, store):
            gateway.pipeline.hold_after.set()
            begun = await client.responses.create(model="demo", input="hi", background=True)
            await ended(store)
            failed = await client.responses.retrieve(begun.id)
            assert failed.status == "failed"
            assert failed.error is not None
            assert failed.error.code == "server_error"


async def test_a_server_that_is_stopped_keeps_what_it_had_not_finished_as_failed() -> None:
    async with held() as (_, client, store):
        begun = await client.responses.create(model="demo", input="hi", background=True)
    async with running(response_store=store) as second, second.sdk() as client:
        failed = await client.responses.retrieve(begun.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "stopped" in failed.error.message


async def test_one_that_begins_while_the_server_is_stopped_ends_with_the_others() -> None:
    store, pipeline = WatchedStore(), FakePipeline()
    pipeline.hold_before = first = asyncio.Event()
    server = ServerSettings(shutdown_s=LIMIT_S)
    async with running(pipeline, response_store=store, server=server) as gateway, gateway.sdk() as client:
        await client.responses.create(model="demo", input="hi", background=True)
        await until(lambda: pipeline.open == 1)
        await gateway.app.shutdown()
        pipeline.hold_before = asyncio.Event()
        begun = await client.responses.create(model="demo", input="hi", background=True)
        first.set()
        await until(lambda: pipeline.open == 0)
        failed = await client.responses.retrieve(begun.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "stopped" in failed.error.message
        with pytest.raises(openai.InternalServerError, match="is being stopped"):
            await client.responses.create(model="demo", input="hi", background=True)


def test_what_is_past_its_time_is_told_as_failed() -> None:
    response = {"id": "x", "status": "in_progress", "created_at": int(time.time()) - 100, "error": None}
    assert settled(StoredResponse(response, []), 600.0).response is response
    lost = settled(StoredResponse(response, []), 10.0).response
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
    done = response | {"status": "completed"}
    assert settled(StoredResponse(done, []), 10.0).response is done


async def test_there_are_so_many_and_no_more() -> None:
    async with held(stored_responses=tuned(StoredResponseSettings, max_background=1)) as (gateway, client, store):
        await client.responses.create(model="demo", input="hi", background=True)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.responses.create(model="demo", input="hi", background=True)
        assert refused.value.response.headers["retry-after"] == "5"
        gateway.pipeline.hold_after.set()
        await ended(store)
        await client.responses.create(model="demo", input="hi", background=True)


async def test_one_that_cannot_be_kept_is_refused_before_it_begins() -> None:
    async with held() as (gateway, client, store):
        store.down = True
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="demo", input="hi", background=True)
        assert not gateway.pipeline.requests


async def test_another_tenant_cannot_cancel_it() -> None:
    async with (
        held(tenants=TENANTS) as (gateway, _, _store),
        gateway.sdk("north-key-1") as north,
        gateway.sdk("south-key-1") as south,
    ):
        begun = await north.responses.create(model="demo", input="hi", background=True)
        for ask in (south.responses.cancel, south.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(begun.id)
        assert (await north.responses.retrieve(begun.id)).status == "in_progress"


@pytest.mark.parametrize("fields", [{"stream": True}, {"store": False}], ids=str)
async def test_what_cannot_be_asked_for_later_does_not_run_in_the_background(fields: dict[str, Any]) -> None:
    async with running() as gateway, gateway.sdk() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="demo", input="hi", background=True, **fields)
        assert (refused.value.param, refused.value.code) == ("background", "invalid_parameter_combination")
