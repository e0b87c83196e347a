"""Message batches through the Anthropic SDK, over a real batch lane and a pipeline that is not."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import aiohttp
import anthropic
import pytest

from gateway.api.anthropic import message_batches
from gateway.api.anthropic.batch_body import RequestSplitter
from gateway.api.anthropic.message_batches import ROWS
from gateway.api.body import CHUNK_BYTES
from gateway.config import TenantSettings
from tests.fakes.batch_sdk import PARAMS, ended, message, settings
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakePipeline

NOW_S = 1_790_000_000.9
PATH = "/v1/messages/batches"
VERSION = {"anthropic-version": "2026-10-21"}


async def results(gateway: Gateway, batch_id: str) -> dict[str, Any]:
    client = gateway.anthropic()
    found = [one async for one in await client.messages.batches.results(batch_id)]
    assert len({one.custom_id for one in found}) == len(found)
    return {one.custom_id: one.result for one in found}


async def test_a_batch_goes_from_its_requests_to_their_messages() -> None:
    async with running(**settings(), now=lambda: NOW_S) as gateway:
        batches = gateway.anthropic().messages.batches
        refused = [message("stream", stream=True), message("nothing", max_tokens=0), message("fast", speed="fast")]
        made = await batches.create(requests=[message("a"), message("b", model="other"), *refused])
        status, told, _ = await gateway.get(f"{PATH}/{made.id}")
        assert status == 400, "a version is asked for"
        async with gateway.session.get(f"{gateway.url}{PATH}/{made.id}", headers=VERSION) as answer:
            told = await answer.json()
        assert told == {
            "id": made.id,
            "type": "message_batch",
            "processing_status": "in_progress",
            "request_counts": {"processing": 5, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
            "created_at": "2026-09-21T14:13:20Z",
            "expires_at": "2026-09-22T14:13:20Z",
            "ended_at": None,
            "cancel_initiated_at": None,
            "archived_at": None,
            "results_url": None,
        }
        assert made.id.startswith("msgbatch_")
        gateway.worker.start()
        batch = await ended(gateway.anthropic(), made.id)
        assert batch.request_counts.to_dict() == {
            "processing": 0,
            "succeeded": 1,
            "errored": 4,
            "canceled": 0,
            "expired": 0,
        }
        assert batch.ended_at == batch.created_at
        assert batch.results_url == f"{PATH}/{made.id}/results"
        found = await results(gateway, made.id)
        assert found["a"].type == "succeeded"
        assert found["a"].message.content[0].text == "Hello world"
        assert found["a"].message.usage.service_tier == "batch"
        for custom_id, kind in (("b", "not_found_error"), ("stream", "invalid_request_error")):
            assert found[custom_id].type == "errored"
            assert found[custom_id].error.error.type == kind
            assert found[custom_id].error.request_id
        assert {found[name].error.error.message.partition(":")[0] for name in ("stream", "nothing", "fast")} == {
            "stream",
            "max_tokens",
            "speed",
        }


async def test_counts_stay_at_processing_until_all_has_ended_and_cancelling_keeps_what_ran() -> None:
    pipeline = FakePipeline(hold_before=asyncio.Event())
    assert pipeline.hold_before is not None
    async with running(pipeline, **settings(max_in_flight=1)) as gateway:
        batches = gateway.anthropic().messages.batches
        gateway.worker.start()
        made = await batches.create(requests=[message("a"), message("b"), message("c")])
        async with asyncio.timeout(30):
            await pipeline.reached.wait()
        with pytest.raises(anthropic.BadRequestError, match="in_progress"):
            await gateway.anthropic().get(f"{PATH}/{made.id}/results", cast_to=object)
        with pytest.raises(anthropic.BadRequestError):
            await batches.delete(made.id)
        cancelling = await batches.cancel(made.id)
        assert cancelling.processing_status == "canceling"
        assert cancelling.cancel_initiated_at is not None
        assert cancelling.request_counts.processing == 3
        pipeline.hold_before.set()
        batch = await ended(gateway.anthropic(), made.id)
        assert (batch.request_counts.succeeded, batch.request_counts.canceled) == (1, 2)
        kinds = [one.type for one in (await results(gateway, made.id)).values()]
        assert sorted(kinds) == ["canceled", "canceled", "succeeded"]
        with pytest.raises(anthropic.BadRequestError):
            await batches.cancel(made.id)
        deleted = await batches.delete(made.id)
        assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
        for call in (batches.retrieve, batches.cancel, batches.delete, batches.results):
            with pytest.raises(anthropic.NotFoundError):
                await call(made.id)


@pytest.mark.parametrize(("why", "kind"), [("cancelled", "canceled"), ("expired", "expired"), ("failed", "errored")])
def test_the_result_of_a_request_that_never_ran_says_why(why: Any, kind: str) -> None:
    found = json.loads(ROWS.unrun({"custom_id": "a"}, why))
    assert (found["custom_id"], found["result"]["type"]) == ("a", kind)
    assert why != "failed" or found["result"]["error"]["error"]["type"] == "api_error"


async def test_what_has_not_begun_in_time_expires() -> None:
    now_s = [NOW_S]
    pipeline = FakePipeline(hold_before=asyncio.Event())
    assert pipeline.hold_before is not None
    async with running(pipeline, **settings(max_in_flight=1), now=lambda: now_s[0]) as gateway:
        batches = gateway.anthropic().messages.batches
        gateway.worker.start()
        made = await batches.create(requests=[message("a"), message("b")])
        async with asyncio.timeout(30):
            await pipeline.reached.wait()
        now_s[0] += 86400
        pipeline.hold_before.set()
        batch = await ended(gateway.anthropic(), made.id)
        assert (batch.request_counts.succeeded, batch.request_counts.expired) == (1, 1)
        assert sorted(one.type for one in (await results(gateway, made.id)).values()) == ["expired", "succeeded"]


async def test_the_sdk_pages_through_all_batches_in_either_direction() -> None:
    async with running(**settings()) as gateway:
        batches = gateway.anthropic().messages.batches
        made = [(await batches.create(requests=[message("a")])).id for _ in range(5)][::-1]
        for limit in (1, 2, 5, 6):
            assert [one.id async for one in batches.list(limit=limit)] == made
        assert [one.id async for one in batches.list(after_id=made[1], limit=2)] == made[2:]
        before = await batches.list(before_id=made[3], limit=2)
        assert ([one.id for one in before.data], before.has_more) == (made[1:3], True)
        assert (before.first_id, before.last_id) == (made[1], made[2])
        for query in ("after_id=x", f"after_id={made[0]}&before_id={made[1]}", "limit=0", "limit=1001"):
            async with gateway.session.get(f"{gateway.url}{PATH}?{query}", headers=VERSION) as answer:
                assert answer.status == 400


async def test_a_body_is_told_what_is_wrong_with_it_and_leaves_nothing() -> None:
    async with running(**settings(max_requests=2, max_request_bytes=2000)) as gateway:
        client = gateway.anthropic()
        for requests, told in (
            ([], "requests"),
            ([message("a b")], "requests.0.custom_id"),
            ([message("a"), message("a")], "requests.1.custom_id"),
            ([message(str(number)) for number in range(3)], "requests: "),
            ([{"custom_id": "a"}], "requests.0.params"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=told):
                await client.messages.batches.create(requests=requests)  # type: ignore[arg-type]
        with pytest.raises(anthropic.APIStatusError, match=r"batches\.max_request_bytes") as large:
            await client.messages.batches.create(requests=[message("a", system="x" * 2000)])
        assert large.value.status_code == 413
        assert (await client.messages.batches.list()).data == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
async def test_a_body_may_be_compressed_and_cut_anywhere(encoding: str) -> None:
    data = json.dumps({"requests": [message(f"r-{number}") for number in range(300)]}).encode()
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding](data)

    async def parts() -> Any:
        for start in range(0, len(packed), 777):
            yield packed[start : start + 777]

    async with running(**settings()) as gateway:
        headers = VERSION | {"Content-Encoding": encoding}
        async with gateway.session.post(gateway.url + PATH, data=parts(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["request_counts"]["processing"] == 300
        bomb = gzip.compress(b" " * (1 << 20))
        headers = VERSION | {"Content-Encoding": "gzip"}
        for body, code in ((gzip.compress(data)[:-20], "invalid"), (b"x", "invalid"), (bomb, None)):
            async with gateway.session.post(gateway.url + PATH, data=body, headers=headers) as answer:
                assert answer.status == 400
                error = (await answer.json())["error"]
                assert error.get("details", {}).get("error_code") == (code and "request_body_encoding_invalid")


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_others_have_their_turn_while_a_large_body_is_read(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    fed: list[tuple[int, int]] = []

    class Watched(RequestSplitter):
        def feed(self, data: bytes) -> list[bytes]:
            fed.append((turns, len(data)))
            return super().feed(data)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(message_batches, "RequestSplitter", Watched)
    data = json.dumps({"requests": [message(f"r-{number}") for number in range(5000)]}).encode()
    packed = {"gzip": gzip.compress, "identity": bytes}[encoding](data)
    async with running(**settings()) as gateway, asyncio.TaskGroup() as group:
        task = group.create_task(others())
        headers = VERSION | {"Content-Encoding": encoding}
        async with gateway.session.post(gateway.url + PATH, data=packed, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        task.cancel()
    assert sum(size for _, size in fed) == len(data) > 10 * CHUNK_BYTES
    assert max(size for _, size in fed) <= CHUNK_BYTES
    assert len({turn for turn, _ in fed}) == len(fed)


async def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async with running(**settings()) as gateway:

        async def half() -> Any:
            yield json.dumps({"requests": [message("a")]}).encode()[:-1]
            raise ConnectionResetError

        with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
            await gateway.session.post(gateway.url + PATH, data=half(), headers=VERSION)
        assert (await gateway.anthropic().messages.batches.list()).data == []


async def test_a_batch_is_its_tenants_and_its_apis_alone() -> None:
    tenants = (TenantSettings(name="a", keys=("key-of-a",)), TenantSettings(name="b", keys=("key-of-b",)))
    async with running(**settings(), tenants=tenants) as gateway:
        made = await gateway.anthropic("key-of-a").messages.batches.create(requests=[message("a")])
        other = gateway.anthropic("key-of-b").messages.batches
        for call in (other.retrieve, other.cancel, other.delete):
            with pytest.raises(anthropic.NotFoundError):
                await call(made.id)
        assert (await gateway.sdk("key-of-a").batches.list()).data == []
        status, _, _ = await gateway.get(f"/v1/batches/batch_{made.id.removeprefix('msgbatch_')}", "key-of-a")
        assert status == 404


async def test_a_request_is_read_in_the_version_that_the_batch_was_made_with() -> None:
    async with running(**settings()) as gateway:
        gateway.worker.start()
        body = {"requests": [{"custom_id": "a", "params": PARAMS | {"temperature": 0.5}}]}
        for version, kind in (("2023-06-01", "succeeded"), ("2026-10-21", "errored")):
            headers = {"anthropic-version": version}
            async with gateway.session.post(gateway.url + PATH, json=body, headers=headers) as answer:
                made = (await answer.json())["id"]
            await ended(gateway.anthropic(), made)
            assert (await results(gateway, made))["a"].type == kind
