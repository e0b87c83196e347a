"""Batches for models of upstreams through the SDKs, over a real batch lane and a hosted API that fails as they do."""

from __future__ import annotations

import asyncio
import json
import socket
from decimal import Decimal
from typing import Any

import pytest

from gateway.api import lines
from gateway.config import PriceSettings
from tests.fakes.batch_sdk import CHAT, ENDS, content, ended, idle, message, reached, row, settings, submit
from tests.fakes.gateway import running
from tests.fakes.upstream import CHAT as TOLD
from tests.fakes.upstream import EMBEDDINGS, MESSAGE, Told, error, nowhere, upstream
from tests.fakes.waiting import until

BODY: dict[str, Any] = {"model": "up-1", "messages": [{"role": "user", "content": "Hi"}]}
BUSY = error(429, retry_after_ms="1")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PAUSE_S", 0.01)


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    return row(custom_id, BODY | {"user": custom_id} | more)


def asked(stub: Any) -> list[str]:
    return [got.json["user"] for got in stub.got]


async def test_a_batch_for_a_model_of_an_upstream_goes_from_a_file_to_its_answers() -> None:
    prices = [PriceSettings(model="up-1", input=Decimal(2), output=Decimal(8))]
    async with upstream() as stub, running(**settings(), prices=prices, upstreams=[stub.settings()]) as gateway:
        gateway.worker.start()
        client = gateway.sdk()
        batch = await submit(client, *(line(name) for name in "abc"))
        batch = await reached(client, batch.id, *ENDS)
        assert (batch.status, batch.model, batch.error_file_id) == ("completed", "up-1", None)
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.input_tokens_details.cached_tokens) == (300, 192)
        answers = await content(client, batch.output_file_id)
        assert sorted(answers) == sorted(asked(stub)) == ["a", "b", "c"]
        told = json.loads(TOLD.pieces[0])
        assert [one["response"]["body"] for one in answers.values()] == [told] * 3
        (paid,) = json.loads((await gateway.get("/admin/ledger?group_by=lane"))[1])["rows"]
        assert (paid["lane"], paid["requests"]) == ("batch", 3)
        full = 3 * (36 * Decimal(2) + 64 * Decimal(2) + 7 * Decimal(8)) / 10**6
        assert Decimal(paid["used"]["cost"]["USD"]) == full, "as the upstream bills it"
        assert paid["saved"]["batch"]["requests"] == 0


async def test_what_an_upstream_fails_for_a_while_is_answered_in_the_end_and_each_line_once() -> None:
    failing = [BUSY, error(500), error(503, retry_after_ms="1"), Told(refuse=True), BUSY, error(502)]
    async with upstream(*failing, TOLD) as stub:
        options = {"retries": 0, "batch_slots": 4, "breaker_open_s": 0.01}
        async with running(**settings(), upstreams=[stub.settings(**options)]) as gateway:
            gateway.worker.start()
            client = gateway.sdk()
            names = [str(number) for number in range(20)]
            batch = await reached(client, (await submit(client, *map(line, names))).id, *ENDS)
            assert (batch.status, batch.error_file_id) == ("completed", None)
            assert sorted(await content(client, batch.output_file_id)) == sorted(names)
            assert len(stub.got) == len(names) + len(failing)


async def test_a_line_that_its_upstream_fails_each_time_ends_with_what_was_said() -> None:
    async with upstream(error(500, "poison")) as stub:
        options = {"retries": 0, "breaker_failures": 100}
        async with running(**settings(max_attempts=3), upstreams=[stub.settings(**options)]) as gateway:
            gateway.worker.start()
            client = gateway.sdk()
            batch = await reached(client, (await submit(client, line("a"))).id, *ENDS)
            (told,) = (await content(client, batch.error_file_id)).values()
            assert (told["response"]["status_code"], len(stub.got)) == (500, 3)
            assert told["response"]["body"]["error"]["message"] == "poison"


async def test_what_an_upstream_refuses_is_the_result_of_the_line_at_once() -> None:
    async with upstream(error(400, "too long")) as stub, running(**settings(), upstreams=[stub.settings()]) as gateway:
        gateway.worker.start()
        client = gateway.sdk()
        batch = await reached(client, (await submit(client, line("a"))).id, *ENDS)
        (told,) = (await content(client, batch.error_file_id)).values()
        assert told["response"]["status_code"] == 400
        assert told["response"]["body"] == json.loads(error(400, "too long").pieces[0])
        assert len(stub.got) == 1


async def test_lines_for_a_dead_upstream_wait_until_it_lives_again() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))  # nobody listens yet
        url = f"http://127.0.0.1:{place.getsockname()[1]}/v1"
        dead = nowhere(url=url, retries=0, breaker_failures=1, breaker_open_s=0.01)
        async with running(**settings(max_attempts=1), upstreams=[dead]) as gateway:
            gateway.worker.start()
            client = gateway.sdk()
            batch = await submit(client, line("a"), line("b"))
            await until(lambda: gateway.worker.figures()["put_back"] >= 3)
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            async with upstream(at=place) as stub:
                batch = await reached(client, batch.id, *ENDS)
                assert batch.status == "completed"
                assert sorted(asked(stub)) == ["a", "b"]


async def test_lines_that_an_upstream_never_had_room_for_expire_with_their_job() -> None:
    now = [1_790_000_000.0]
    async with upstream(BUSY) as stub:
        options = {**settings(), "now": lambda: now[0], "upstreams": [stub.settings()]}
        async with running(**options) as gateway:
            gateway.worker.start()
            client = gateway.sdk()
            batch = await submit(client, line("a"))
            await until(lambda: gateway.worker.figures()["put_back"] >= 2)
            now[0] += 86400.0
            batch = await reached(client, batch.id, *ENDS)
            assert (batch.status, batch.output_file_id) == ("expired", None)


async def test_a_batch_for_a_model_that_no_upstream_has_any_more_says_so_and_expires() -> None:
    now = [1_790_000_000.0]
    async with running(**settings(), now=lambda: now[0], upstreams=[nowhere("other")]) as gateway:
        gateway.state["engines"] = []  # one may come, and have it
        gateway.worker.start()
        client = gateway.sdk()
        batch = await submit(client, line("a"))

        async def has_errors() -> bool:
            return (await client.batches.retrieve(batch.id)).errors is not None

        await until(has_errors)
        told = (await client.batches.retrieve(batch.id)).errors
        assert told is not None
        assert [one.code for one in told.data or ()] == ["model_not_available"]
        now[0] += 86400.0
        batch = await reached(client, batch.id, *ENDS)
        assert (batch.status, batch.errors) == ("expired", None)


async def test_a_batch_that_is_cancelled_sends_no_more_and_ends_what_runs() -> None:
    async with upstream(Told(then="stall")) as stub:
        up = stub.settings(batch_slots=2, idle_timeout_s=2.0, first_byte_timeout_s=2.0, retries=0)
        async with running(**settings(max_attempts=1, max_in_flight=2), upstreams=[up]) as gateway:
            gateway.worker.start()
            client = gateway.sdk()
            batch = await submit(client, *(line(str(number)) for number in range(6)))
            await until(lambda: len(stub.got) == 2)
            await client.batches.cancel(batch.id)
            batch = await reached(client, batch.id, *ENDS)
            assert (batch.status, len(stub.got)) == ("cancelled", 2)
            told = await content(client, batch.error_file_id)
            never = [name for name, one in told.items() if (one["error"] or {}).get("code") == "batch_cancelled"]
            assert len(told) == 6
            assert sorted({*never, *asked(stub)}) == sorted(told)
            await idle(gateway)


async def test_a_gateway_that_stops_hangs_up_on_the_upstream_and_its_lines_wait() -> None:
    async with upstream(Told(then="stall")) as stub, running(**settings(), upstreams=[stub.settings()]) as gateway:
        gateway.worker.start()
        client = gateway.sdk()
        batch = await submit(client, line("a"))
        async with asyncio.timeout(30):
            await stub.reached.wait()
        await gateway.worker.close()
        await until(lambda: stub.open == 0)
        batch = await client.batches.retrieve(batch.id)
        assert (batch.status, batch.request_counts.completed if batch.request_counts else None) == ("in_progress", 0)


async def test_vectors_of_an_upstream_come_in_a_batch() -> None:
    url = "/v1/embeddings"
    async with upstream(EMBEDDINGS) as stub, running(**settings(), upstreams=[stub.settings()]) as gateway:
        gateway.worker.start()
        client = gateway.sdk()
        batch = await submit(client, row("a", {"model": "up-1", "input": "x"}, url), url=url)
        batch = await reached(client, batch.id, *ENDS)
        (told,) = (await content(client, batch.output_file_id)).values()
        assert told["response"]["body"]["data"][0]["embedding"] == [0.5, -1.0]
        assert batch.usage is not None
        assert batch.usage.input_tokens == 8


async def test_messages_of_an_upstream_come_in_a_batch_beside_those_of_an_engine() -> None:
    async with upstream(MESSAGE, error(400, "no")) as stub:
        up = stub.settings(dialect="anthropic", retries=0)
        async with running(**settings(max_in_flight=1), upstreams=[up]) as gateway:
            gateway.worker.start()
            client = gateway.anthropic()
            requests = [message("ours"), *(message(name, model="up-1") for name in ("theirs", "wrong"))]
            batch = await ended(client, (await client.messages.batches.create(requests=requests)).id)
            counts = batch.request_counts
            assert (counts.succeeded, counts.errored) == (2, 1)
            found = {one.custom_id: one.result async for one in await client.messages.batches.results(batch.id)}
            told = [one.message.usage.input_tokens for one in found.values() if one.type == "succeeded"]
            assert 12 in told
            (failed,) = [one for one in found.values() if one.type == "errored"]
            assert failed.error.error.message == "no"


async def test_betas_that_a_message_batch_asks_for_reach_the_upstream_with_each_message() -> None:
    async with (
        upstream(MESSAGE) as stub,
        running(**settings(), upstreams=[stub.settings(dialect="anthropic")]) as gateway,
    ):
        gateway.worker.start()
        client = gateway.anthropic()
        requests = [message("a", model="up-1")]
        batch = await client.beta.messages.batches.create(requests=requests, betas=["long-2026-01-01", "x-1"])
        await ended(client, batch.id)
        (got,) = stub.got
        assert got.headers["anthropic-beta"] == "long-2026-01-01,x-1"


async def test_a_model_that_nobody_has_is_an_error_of_its_line_as_before() -> None:
    async with running(**settings(), upstreams=[nowhere("gpt-*")]) as gateway:
        gateway.worker.start()
        client = gateway.sdk()
        batch = await submit(client, row("a", BODY | {"model": "unknown"}, CHAT))
        batch = await reached(client, batch.id, *ENDS)
        (told,) = (await content(client, batch.error_file_id)).values()
        assert told["response"]["body"]["error"]["code"] == "model_not_found"
