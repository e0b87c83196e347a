"""Batches through the OpenAI SDK, over a real batch lane and a pipeline that is not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from gateway.config import NamespaceSettings, TenantSettings
from gateway.errors import EngineLostError, OverloadedError
from gateway.queues.batch.jobs import MemoryJobs
from tests.fakes.batch_sdk import BODY, CHAT, ENDS, content, reached, row, settings, submit
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline

NOW_S = 1_790_000_000.9
EMBEDDED = {"model": "fake", "input": "Hi"}


async def test_a_batch_goes_from_a_file_to_its_answers() -> None:
    async with running(**settings()) as gateway:
        client = gateway.sdk()
        wrong = BODY | {"temperature": "hot"}
        batch = await submit(client, row("a"), row("b"), row("bad", wrong), metadata={"of": "me"})
        assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "24h")
        assert batch.status == "validating"
        assert batch.expires_at == batch.created_at + 86400
        await client.files.delete(batch.input_file_id)
        gateway.worker.start()
        batch = await reached(client, batch.id, *ENDS)
        assert (batch.status, batch.model, batch.errors, batch.metadata) == ("completed", "demo", None, {"of": "me"})
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
        assert batch.in_progress_at
        assert batch.finalizing_at
        assert batch.completed_at
        assert (batch.failed_at, batch.expired_at, batch.cancelling_at, batch.cancelled_at) == (None,) * 4
        assert batch.usage is not None
        assert batch.usage.to_dict() == {
            "input_tokens": 80,
            "input_tokens_details": {"cached_tokens": 64},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 84,
        }
        answers = await content(client, batch.output_file_id)
        assert set(answers) == {"a", "b"}
        for one in answers.values():
            assert one["id"].startswith("batch_req_")
            assert one["error"] is None
            assert one["response"]["status_code"] == 200
            assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
        (failed,) = (await content(client, batch.error_file_id)).values()
        assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("bad", None, 400)
        assert failed["response"]["body"]["error"]["param"] == "temperature"
        assert failed["response"]["request_id"]
        files = [await client.files.retrieve(one or "") for one in (batch.output_file_id, batch.error_file_id)]
        assert [one.purpose for one in files] == ["batch_output"] * 2
        assert all(one.expires_at == one.created_at + 30 * 86400 for one in files)
        assert [one.id async for one in client.files.list(purpose="batch_output")] == [files[1].id, files[0].id]


async def test_a_batch_is_told_in_full_from_its_beginning() -> None:
    async with running(**settings(), now=lambda: NOW_S) as gateway:
        batch = await submit(gateway.sdk(), row("a"))
        status, told, _ = await gateway.get(f"/v1/batches/{batch.id}")
        assert (status, json.loads(told)) == (
            200,
            {
                "id": batch.id,
                "object": "batch",
                "endpoint": CHAT,
                "model": None,
                "errors": None,
                "input_file_id": batch.input_file_id,
                "completion_window": "24h",
                "status": "validating",
                "output_file_id": None,
                "error_file_id": None,
                "created_at": 1_790_000_000,
                "in_progress_at": None,
                "expires_at": 1_790_086_400,
                "finalizing_at": None,
                "completed_at": None,
                "failed_at": None,
                "expired_at": None,
                "cancelling_at": None,
                "cancelled_at": None,
                "request_counts": {"total": 0, "completed": 0, "failed": 0},
                "metadata": None,
                "usage": {
                    "input_tokens": 0,
                    "input_tokens_details": {"cached_tokens": 0},
                    "output_tokens": 0,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": 0,
                },
            },
        )
        assert batch.id.startswith("batch_")


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"model": "demo", "prompt": "Hi"}),
        ("/v1/responses", {"model": "demo", "input": "Hi"}),
        ("/v1/embeddings", EMBEDDED),
    ],
)
async def test_every_endpoint_that_generates_can_be_asked(url: str, body: dict[str, Any]) -> None:
    embedder = fake_embedder(FakeTextModel())
    if body is EMBEDDED:
        body = body | {"model": next(iter(embedder.models()))}
    async with running(**settings(), embedder=embedder) as gateway:
        client = gateway.sdk()
        gateway.worker.start()
        batch = await submit(client, row("a", body, url), row("b", body | {"stream": True, "x": 1}, "/"), url=url)
        assert (await reached(client, batch.id, *ENDS)).status == "failed"
        batch = await submit(client, row("a", body, url), url=url)
        batch = await reached(client, batch.id, *ENDS)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        answer = (await content(client, batch.output_file_id))["a"]["response"]
        status, direct, _ = await gateway.post(url, body)
        assert answer["status_code"] == status == 200
        assert set(answer["body"]) == set(direct)


async def test_lines_that_are_wrong_fail_the_batch_before_anything_runs() -> None:
    pipeline = FakePipeline()
    async with running(pipeline, **settings()) as gateway:
        client = gateway.sdk()
        gateway.worker.start()
        batch = await submit(client, row("a"), row("a"), "x", row("c", url="/v1/embeddings"))
        batch = await reached(client, batch.id, *ENDS)
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.failed_at
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.object == "list"
        assert [(one.line, one.code, one.param) for one in batch.errors.data] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_json_line", None),
            (4, "mismatched_url", "url"),
        ]
        assert pipeline.requests == []


async def test_cancelling_lets_what_runs_end_and_keeps_it() -> None:
    pipeline = FakePipeline(hold_before=asyncio.Event())
    assert pipeline.hold_before is not None
    async with running(pipeline, **settings(max_in_flight=1)) as gateway:
        client = gateway.sdk()
        gateway.worker.start()
        batch = await submit(client, row("a"), row("b"), row("c"))
        async with asyncio.timeout(30):
            await pipeline.reached.wait()
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        pipeline.hold_before.set()
        batch = await reached(client, batch.id, *ENDS)
        assert batch.status == "cancelled"
        assert batch.cancelling_at
        assert batch.cancelled_at
        assert len(await content(client, batch.output_file_id)) == 1
        dropped = await content(client, batch.error_file_id)
        assert [(one["response"], one["error"]["code"]) for one in dropped.values()] == [(None, "batch_cancelled")] * 2
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(batch.id)


async def test_what_has_not_begun_in_time_expires() -> None:
    now_s = [NOW_S]
    pipeline = FakePipeline(hold_before=asyncio.Event())
    assert pipeline.hold_before is not None
    async with running(pipeline, **settings(max_in_flight=1), now=lambda: now_s[0]) as gateway:
        client = gateway.sdk()
        gateway.worker.start()
        batch = await submit(client, row("a"), row("b"))
        async with asyncio.timeout(30):
            await pipeline.reached.wait()
        now_s[0] += 86400
        pipeline.hold_before.set()
        batch = await reached(client, batch.id, *ENDS)
        assert (batch.status, batch.expired_at) == ("expired", 1_790_086_400)
        assert len(await content(client, batch.output_file_id)) == 1
        (expired,) = (await content(client, batch.error_file_id)).values()
        assert (expired["response"], expired["error"]["code"]) == (None, "batch_expired")


async def test_a_line_whose_engine_was_lost_is_tried_again() -> None:
    pipeline = FakePipeline(fails_after=EngineLostError("It is gone."))
    async with running(pipeline, **settings(max_attempts=3)) as gateway:
        client = gateway.sdk()
        gateway.worker.start()
        batch = await reached(client, (await submit(client, row("a"))).id, *ENDS)
        assert (batch.status, batch.output_file_id) == ("completed", None)
        assert (await content(client, batch.error_file_id))["a"]["response"]["status_code"] == 502
        assert len([one for one in pipeline.requests if one.lane == "batch"]) == 3


async def test_the_sdk_pages_through_all_batches_newest_first() -> None:
    async with running(**settings()) as gateway:
        client = gateway.sdk()
        made = [(await submit(client, row("a"))).id for _ in range(5)][::-1]
        for limit in (1, 2, 5, 6):
            assert [one.id async for one in client.batches.list(limit=limit)] == made
        assert [one.id async for one in client.batches.list(after=made[1])] == made[2:]
        page = await client.batches.list(limit=2)
        assert page.has_more
        assert (page.first_id, page.last_id) == (made[0], made[1])  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            await client.batches.list(after="file-1")


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata.x"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"meta_data": {}}, "meta_data"),
    ],
)
async def test_what_is_wrong_with_a_batch_is_told_at_once(changed: dict[str, Any], param: str) -> None:
    async with running(**settings()) as gateway:
        client = gateway.sdk()
        file = await client.files.create(file=b"x", purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        status, told, _ = await gateway.post("/v1/batches", asked | changed)
        assert (status, told["error"]["param"]) == (400, param)
        assert (await client.batches.list()).data == []


async def test_the_file_has_to_be_there_and_for_batches() -> None:
    async with running(**settings()) as gateway:
        client = gateway.sdk()
        for file_id in ("file-" + "0" * 32, "x", (await submit(client, row("a"))).id):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
            assert refused.value.param == "input_file_id"
        other = await client.files.create(file=b"x", purpose="user_data")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.batches.create(input_file_id=other.id, endpoint=CHAT, completion_window="24h")


async def test_files_of_results_are_kept_as_long_as_was_asked() -> None:
    async with running(**settings()) as gateway:
        client = gateway.sdk()
        gateway.worker.start()
        expiry = {"anchor": "created_at", "seconds": 7200}
        batch = await submit(client, row("a"), output_expires_after=expiry)
        batch = await reached(client, batch.id, *ENDS)
        file = await client.files.retrieve(batch.output_file_id or "")
        assert file.expires_at == file.created_at + 7200


async def test_a_batch_is_its_tenants_alone() -> None:
    tenants = (TenantSettings(name="a", keys=("key-of-a",)), TenantSettings(name="b", keys=("key-of-b",)))
    async with running(**settings(), tenants=tenants) as gateway:
        batch = await submit(gateway.sdk("key-of-a"), row("a"))
        other = gateway.sdk("key-of-b")
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match=batch.id):
                await call(batch.id)
        assert (await other.batches.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


async def test_a_tenant_has_so_many_batches_and_lines_at_a_time() -> None:
    async with running(**settings(max_jobs=1, max_waiting_lines=1)) as gateway:
        client = gateway.sdk(max_retries=2)
        first = await submit(client, row("a"), row("b"))
        with pytest.raises(openai.RateLimitError, match=r"batches\.max_jobs") as refused:
            await submit(client, row("a"))
        assert refused.value.response.headers["x-should-retry"] == "false"
        gateway.worker.start()
        failed = await reached(client, first.id, *ENDS)
        assert failed.status == "failed"
        assert "batches.max_waiting_lines" in str(failed.errors)
        assert (await reached(client, (await submit(client, row("a"))).id, *ENDS)).status == "completed"


async def test_lines_run_in_the_namespace_that_was_asked_for_with_the_batch() -> None:
    pipeline = FakePipeline()
    shared = NamespaceSettings(name="shared", tenants=("*",))
    async with running(pipeline, **settings(), namespaces=(shared,)) as gateway:
        gateway.worker.start()
        client = gateway.sdk(default_headers={"x-kvasir-namespace": "shared"})
        assert (await reached(client, (await submit(client, row("a"))).id, *ENDS)).status == "completed"
        assert {one.scope.namespace for one in pipeline.requests if one.scope} == {"shared"}
        asked = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        for path, body in (("/v1/batches", asked), ("/v1/messages/batches", {"requests": []})):
            headers = {"x-kvasir-namespace": "nobody", "anthropic-version": "2026-10-21"}
            assert (await gateway.post(path, body, headers=headers))[0] == 403


class AwayJobs(MemoryJobs):
    """A Redis that does not answer."""

    async def page(self, *_: Any, **__: Any) -> Any:
        raise OverloadedError("Batches cannot be reached at the moment.", retry_after_s=2.0)


async def test_while_redis_is_away_both_apis_say_so_and_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.queues.batch.store.MemoryJobs", AwayJobs)
    async with running(**settings()) as gateway:
        with pytest.raises(openai.InternalServerError, match="Batches cannot be reached") as away:
            await gateway.sdk().batches.list()
        assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "2")
        with pytest.raises(anthropic.APIStatusError, match="Batches cannot be reached") as busy:
            await gateway.anthropic().messages.batches.list()
        assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (529, "2")
