"""Lines of batches for models of upstreams: one request of the batch lane each, answered as the upstream wrote it."""

from __future__ import annotations

import asyncio
import json
import logging
from decimal import Decimal
from typing import Any

import pytest

from gateway.api.anthropic.handlers import endpoint_name
from gateway.api.lines import PAUSE_S, Answered, LineRequest, beginning_of_body, one_row
from gateway.api.routes import RUNNER
from gateway.config import BatchSettings, PriceSettings
from gateway.types import Tenant, Usage
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.tuned import tuned
from tests.fakes.upstream import CHAT as CHAT_TOLD
from tests.fakes.upstream import EMBEDDINGS, MESSAGE, RESPONSE, Told, error, nowhere, said, upstream
from tests.fakes.waiting import until

TENANT = Tenant("acme")
CHAT, MESSAGES = "/v1/chat/completions", endpoint_name("2023-06-01")
ASKED: dict[str, Any] = {
    "model": "up-1",
    "messages": [{"role": "user", "content": "é"}],
    "x_unknown": [1.5, {"a": None}],
}


def line(url: str = CHAT, body: dict[str, Any] = ASKED) -> LineRequest:
    return LineRequest(url, TENANT, body, "", "req_1")


async def answer(gateway: Gateway, url: str = CHAT, body: dict[str, Any] = ASKED) -> Answered:
    return await gateway.app[RUNNER].answer(line(url, body))


async def asked(told: Told, url: str = CHAT, body: dict[str, Any] = ASKED, **options: Any) -> Answered:
    """What became of a line that is told this."""
    async with upstream(told) as stub, running(upstreams=[stub.settings(retries=0, **options)]) as gateway:
        return await answer(gateway, url, body)


@pytest.mark.parametrize(
    ("url", "told", "usage"),
    [
        (CHAT, CHAT_TOLD, Usage(100, 7, 64)),
        ("/v1/completions", CHAT_TOLD, Usage(100, 7, 64)),
        ("/v1/responses", RESPONSE, Usage(50, 2, 40)),
        ("/v1/embeddings", EMBEDDINGS, Usage(8, 0)),
    ],
)
async def test_a_line_goes_to_its_path_as_it_was_written_and_comes_back_as_it_was_told(
    url: str, told: Told, usage: Usage
) -> None:
    settings = {"models": ("fast = up-1-2026",)}
    async with upstream(told) as stub, running(upstreams=[stub.settings(**settings)]) as gateway:
        came = await answer(gateway, url, ASKED | {"model": "fast", "cache": {"no-store": True}})
        assert came == Answered(200, told.pieces[0], usage)
        (got,) = stub.got
        assert (got.path, got.json) == (url, ASKED | {"model": "up-1-2026"})
        assert got.headers["Authorization"] == "Bearer sk-upstream"


async def test_a_line_takes_a_place_of_the_batch_lane_at_its_upstream() -> None:
    async with upstream(Told(then="stall")) as stub, running(upstreams=[stub.settings(batch_slots=1)]) as gateway:
        lines = [asyncio.ensure_future(answer(gateway)) for _ in range(2)]

        async def told() -> bool:
            figures = json.loads((await gateway.get("/admin/stats"))[1])["upstreams"]["up"]
            return (figures["batch_in_flight"], figures["batch_waiting"], len(stub.got)) == (1, 1, 1)

        await until(told)
        for one in lines:
            one.cancel()
        await asyncio.wait(lines)


async def test_a_message_says_the_version_of_its_api() -> None:
    async with upstream(MESSAGE) as stub, running(upstreams=[stub.settings(dialect="anthropic")]) as gateway:
        came = await answer(gateway, MESSAGES)
        assert (came.status, came.usage) == (200, Usage(1432, 9, 1400))
        (got,) = stub.got
        assert (got.path, got.headers["anthropic-version"]) == ("/v1/messages", "2023-06-01")
        assert got.headers["x-api-key"] == "sk-upstream"


async def test_what_the_upstream_says_against_a_line_is_its_result() -> None:
    told = error(404, "no such model")
    assert await asked(told) == Answered(404, told.pieces[0])


@pytest.mark.parametrize(
    ("told", "status", "retry", "after_s"),
    [
        (error(429, retry_after="7"), 429, "later", 7.0),
        (error(429), 429, "later", PAUSE_S),
        (error(503), 503, "later", PAUSE_S),
        (error(529, retry_after_ms="500"), 529, "later", 0.5),
        (error(500), 500, "again", PAUSE_S),
        (error(502, retry_after="3"), 502, "again", 3.0),
        (error(408), 408, "again", PAUSE_S),
        (error(501), 501, "no", None),
        (error(401), 502, "later", PAUSE_S),  # refuses our key, not the client's
        (Told(refuse=True), 502, "again", PAUSE_S),
        (Told([b'{"id": 1'], then="cut", sized=False), 502, "again", PAUSE_S),
        (Told([b"<html>"], 200), 502, "again", PAUSE_S),
        (Told([b"<html>"], 403), 403, "no", None),
        (Told([b""], 413), 413, "no", None),
    ],
)
async def test_a_failure_says_whether_and_when_the_line_is_tried_again(
    told: Told, status: int, retry: str, after_s: float | None
) -> None:
    came = await asked(told)
    assert (came.status, came.retry, came.retry_after_s) == (status, retry, after_s)
    assert json.loads(came.body)["error"]["message"]


async def test_an_upstream_that_cannot_be_reached_is_asked_later() -> None:
    async with running(upstreams=[nowhere(retries=0, breaker_failures=2)]) as gateway:
        came = [await answer(gateway) for _ in range(3)]
        assert [(one.status, one.retry) for one in came] == [(502, "later"), (502, "later"), (503, "later")]
        assert came[2].retry_after_s is not None


async def test_a_text_is_not_translated_for_upstreams_that_speak_another_api() -> None:
    came = await asked(MESSAGE, "/v1/completions", dialect="anthropic")
    assert (came.status, came.retry) == (400, "no")
    assert json.loads(came.body)["error"]["code"] == "wrong_api"


@pytest.mark.parametrize("name", ["stream", "background"])
async def test_what_no_line_may_ask_for_reaches_no_upstream(name: str) -> None:
    async with upstream() as stub, running(upstreams=[stub.settings()]) as gateway:
        came = await answer(gateway, "/v1/responses", {"model": "up-1", "input": "x", name: True})
        assert (came.status, came.retry, json.loads(came.body)["error"]["param"]) == (400, "no", name)
        assert not stub.got


async def test_an_answer_of_several_lines_is_one_row() -> None:
    pretty = b'{\r\n  "id": "a\\nb",\n  "x": 1e2\n}\n'
    came = await asked(Told([pretty[:7], pretty[7:]]))
    assert came.body == b'{    "id": "a\\nb",   "x": 1e2 }'
    assert (await asked(Told([b"x"]))).retry == "again"


async def test_an_answer_beyond_the_limit_is_no_answer() -> None:
    big = said({"x": "y" * 2000})
    async with upstream(big) as stub:
        options = {"upstreams": [stub.settings()], "batches": tuned(BatchSettings, max_answer_bytes=1024)}
        async with running(**options) as gateway:
            came = await answer(gateway)
    assert came.status == 502
    assert "more than 1024 bytes" in json.loads(came.body)["error"]["message"]


async def test_a_line_has_its_line_in_the_log_without_keys_or_texts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await asked(CHAT_TOLD)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    for part in ("request_id=req_1", f'endpoint="{CHAT} (batch)"', "engine=up", "lane=batch", "prompt_tokens=100"):
        assert part in told
    assert "sk-upstream" not in caplog.text
    assert "é" not in caplog.text


# -- the response cache -----------------------------------------------------------------------------------------------

KEPT = ASKED | {"temperature": 0}


async def test_lines_and_online_requests_have_each_others_remembered_answers() -> None:
    async with (
        upstream() as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        first = await answer(gateway, body=KEPT)
        again = await answer(gateway, body=KEPT)
        assert (first.body, len(stub.got)) == (again.body, 1)
        assert again.usage == Usage(100, 7, 100)


async def test_a_remembered_answer_saves_a_line_what_its_upstream_would_have_billed() -> None:
    prices = [PriceSettings(model="up-1", input=Decimal(2), output=Decimal(8))]
    options: dict[str, Any] = {"prices": prices, "response_cache": response_cache()}
    async with upstream() as stub, running(upstreams=[stub.settings()], **options) as gateway:
        for _ in range(2):
            await answer(gateway, body=KEPT)
        (row,) = json.loads((await gateway.get("/admin/ledger?group_by=lane"))[1])["rows"]
        billed, saved = row["used"]["cost"]["USD"], row["saved"]["exact"]["money"]["USD"]
        assert Decimal(billed) == Decimal(saved) > 0, "and not the half that an engine's line costs"


async def test_an_online_request_never_waits_for_a_line_that_asks_the_same() -> None:
    async with (
        upstream(Told(then="stall"), CHAT_TOLD) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        waiting = asyncio.ensure_future(answer(gateway, body=KEPT))
        await stub.reached.wait()
        tenant = gateway.sdk()
        assert (await tenant.chat.completions.create(**KEPT_ONLINE)).choices[0].message.content == "Hello"
        assert len(stub.got) == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: stub.open == 0)


KEPT_ONLINE: dict[str, Any] = {"model": "up-1", "messages": ASKED["messages"], "temperature": 0}


async def test_a_line_that_wants_a_remembered_answer_or_none_is_not_tried_again() -> None:
    async with (
        upstream() as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        came = await answer(gateway, body=KEPT | {"cache": {"only-if-cached": True}})
        assert (came.status, came.retry, stub.got) == (504, "no", [])


# -- pure -------------------------------------------------------------------------------------------------------------


def test_only_json_is_a_row() -> None:
    assert [one_row(body) for body in (b"", b"x", b"{} {}", b"\xff")] == [None] * 4
    assert one_row(b"[1,\n2]\n") == b"[1, 2]"


async def test_a_prompt_for_an_upstream_is_known_by_its_text_and_vectors_have_none() -> None:
    async with running(upstreams=[nowhere()]) as gateway:
        lines = gateway.app[RUNNER]
        body = ASKED | {"messages": [{"role": "user", "content": "long " * 100}]}
        assert await lines.find_beginning(line(CHAT, body)) == beginning_of_body(body)
        assert await lines.find_beginning(line("/v1/embeddings", {"model": "up-1", "input": "x"})) is None
