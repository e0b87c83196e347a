"""GET /admin/overview, /admin/requests and /admin/live."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from typing import Any

import aiohttp
import pytest

from gateway.admin import overview
from gateway.admin.outcomes import BUCKETS, FIRST_TOKEN, bucket, percentile
from gateway.admin.overview import MAX_PAGES
from gateway.admin.requests import MAX_FAILED, MAX_ROWS, MOST, RequestLog
from gateway.admin.sources import EngineStatus
from gateway.api.lines import LineRequest
from gateway.api.openai.wire import OPENAI
from gateway.api.record import Record
from gateway.api.routes import RUNNER
from gateway.config import AuthSettings, PriceSettings, TenantSettings
from gateway.storage.ring import Ring
from gateway.types import Tenant, Trace
from tests.fakes.gateway import ENGINE, LIMIT_S, Gateway, response_cache, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess
from tests.fakes.upstream import upstream, whole_chat
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

CHAT = "/v1/chat/completions"
ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PRICE = PriceSettings(model="*", input=Decimal(3), output=Decimal(15), cached_read=Decimal("0.3"))


async def page(gateway: Gateway, path: str) -> Any:
    status, text, _ = await gateway.get(path)
    assert status == 200, text
    return json.loads(text)


async def _mixed(gateway: Gateway, number: int) -> None:
    """One request of each kind."""
    cached = {"x-kvasir-cache": "on"}
    asks: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        (CHAT, ASK | {"temperature": 0, "seed": number}, cached),
        (CHAT, ASK | {"temperature": 0, "seed": number}, cached),
        (CHAT, ASK | {"n": 2, "seed": number}, {}),
        ("/v1/responses", {"model": "demo", "input": f"hi {number}"}, {}),
        ("/v1/messages", ASK | {"max_tokens": 5}, {"anthropic-version": "2023-06-01"}),
        ("/v1beta/models/demo:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}, {}),
        (CHAT, ASK | {"model": "up-1"}, {}),
        (CHAT, ASK | {"max_tokens": -1}, {}),
    ]
    for path, body, headers in asks:
        await gateway.post(path, body, headers=headers)
    assert (await gateway.app[RUNNER].answer(LineRequest(CHAT, Tenant("anonymous"), ASK))).status == 200


@pytest.mark.parametrize("times", [20, pytest.param(1112, marks=pytest.mark.slow)])
async def test_sums_equal_the_ledger_to_the_token(times: int) -> None:
    """9 mixed requests a time: the slow one has ten thousand."""
    pipeline = FakePipeline(responses=response_cache())
    async with (
        upstream(whole_chat()) as stub,
        running(
            pipeline,
            prices=(PRICE,),
            upstreams=(stub.settings("up-1"),),
            response_cache=pipeline.responses,
        ) as gateway,
    ):
        for number in range(times):
            await _mixed(gateway, number)
            if number % 5 == 4:  # before there are so many that only a sample becomes rows
                await page(gateway, "/admin/requests?limit=1")
        told = await page(gateway, "/admin/overview?span=day")
        ledger = (await page(gateway, "/admin/ledger?group_by="))["total"]
        rows = await page(gateway, "/admin/requests?limit=2000")
    totals = told["totals"]
    assert {name: totals[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")} == {
        name: ledger["used"][name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    }
    assert (totals["requests"], totals["saved"], totals["cost"]) == (
        ledger["requests"],
        ledger["saved"],
        ledger["used"]["cost"],
    )
    assert totals["errors"] == times
    assert totals["ended"] == totals["requests"] + totals["errors"]
    assert totals["hits"]["exact"] == times
    assert sum(told["series"]["requests"]) == totals["requests"]
    assert len(rows["requests"]) <= min(2000, 9 * times)
    assert Counter(row["hit"] for row in rows["requests"]).keys() == {"exact", "prefix", ""}


async def test_a_request_has_a_life_without_its_text() -> None:
    pipeline = FakePipeline(cached_tokens=16)
    async with running(pipeline, prices=(PRICE,)) as gateway:
        _, _, headers = await gateway.post(CHAT, {"model": "demo", "messages": [{"role": "user", "content": "xyzzy"}]})
        told = await page(gateway, f"/admin/requests/{headers['x-request-id']}")
        (row,) = (await page(gateway, "/admin/requests"))["requests"]
        missing = await gateway.get("/admin/requests/req_0")
    assert missing[0] == 404
    assert "xyzzy" not in json.dumps(told)
    assert {name: told[name] for name in row} == row
    assert (row["tenant"], row["model"], row["hit"], row["status"]) == ("anonymous", "demo", "prefix", 200)
    assert (told["receipt"]["cached_tokens"], told["cost"]) == (16, row["cost"])
    (segment,) = told["segments"]
    assert (segment["part"], segment["tokens"], segment["cached_tokens"], told["route"]) == ("messages", 40, 16, [])


@pytest.mark.parametrize(
    "asked",
    [
        {"headers": {"x-kvasir-cache": "off"}},
        {"headers": {"Cache-Control": "no-store, no-cache"}},
        {"cache": {"use-cache": False}},
        {"prompt_cache_options": {"mode": "explicit"}},
    ],
    ids=str,
)
async def test_what_its_client_kept_from_the_caches_is_no_miss(asked: dict[str, Any]) -> None:
    headers = asked.pop("headers", {})
    async with running(FakePipeline(cached_tokens=0, responses=response_cache())) as gateway:
        for more, sent in ({}, {}), (asked, headers):
            status, text, _ = await gateway.post(CHAT, ASK | {"temperature": 0.5} | more, headers=sent)
            assert status == 200, text
        rows = (await page(gateway, "/admin/requests"))["requests"]
        assert [row["hit"] for row in rows] == ["bypass", "miss"]
        assert len((await page(gateway, "/admin/requests?hit=bypass"))["requests"]) == 1
        hits = (await page(gateway, "/admin/overview"))["totals"]["hits"]
        assert {name: count for name, count in hits.items() if count} == {"bypass": 1, "miss": 1}
        _, metrics, _ = await gateway.get("/metrics")
        assert 'kvasir_first_token_seconds_count{hit="bypass",model="demo"} 1.0' in metrics


async def test_requests_are_found_by_what_they_were() -> None:
    tenants = tuple(TenantSettings(name=name, keys=(f"{name}-key-1",)) for name in ("north", "south"))
    auth = AuthSettings(admin_keys=("admin-key-1",))
    async with running(FakePipeline(), tenants=tenants, auth=auth) as gateway:

        async def found(query: str) -> list[str]:
            status, text, _ = await gateway.get(f"/admin/requests?{query}", "admin-key-1")
            assert status == 200, text
            return [row["tenant"] for row in json.loads(text)["requests"]]

        for tenant, more in (("north", {}), ("south", {}), ("south", {"max_tokens": -1})):
            await gateway.post(CHAT, ASK | more, headers={"Authorization": f"Bearer {tenant}-key-1"})
        await gateway.post(CHAT, ASK, headers={"Authorization": "Bearer nobodys-key"})
        assert await found("") == ["south", "south", "north"]
        assert await found("tenant=north") == ["north"]
        assert await found("error=any") == ["south"]
        assert await found("error=none&limit=1") == ["south"]
        assert await found("model=other") == []
        _, text, _ = await gateway.get("/admin/requests", "admin-key-1")
        newest = json.loads(text)["requests"][0]["row"]
        assert await found(f"before={newest}") == ["south", "north"]
        assert (await gateway.get("/admin/requests?hit=none", "admin-key-1"))[0] == 400


async def test_live_sends_the_overview_and_new_requests_and_ends_with_the_server() -> None:
    async with running(FakePipeline()) as gateway, gateway.session.get(gateway.url + "/admin/live") as live:
        assert live.content_type == "text/event-stream"
        assert live.headers["x-request-id"]
        assert await live.content.readline() == b"event: overview\n"
        assert json.loads((await live.content.readline()).removeprefix(b"data: "))["span"] == "hour"
        _, _, headers = await gateway.post(CHAT, ASK)
        line = b""
        while line != b"event: requests\n":
            line = await live.content.readline()
        rows = json.loads((await live.content.readline()).removeprefix(b"data: "))
        assert [row["id"] for row in rows] == [headers["x-request-id"]]
        await gateway.app.shutdown()
        assert b"event: requests" not in await live.content.read()


async def test_a_head_of_live_does_not_hold_its_connection() -> None:
    async with running() as gateway, gateway.session.head(gateway.url + "/admin/live") as live:
        assert live.status == 405


async def test_live_ends_after_a_while_so_that_a_key_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "LIVE_S", 0.0)
    async with running() as gateway, gateway.session.get(gateway.url + "/admin/live") as live:
        assert await live.content.read() == b""


async def test_no_more_pages_are_live_than_a_gateway_can_serve() -> None:
    async with running(FakePipeline()) as gateway:
        pages = [await gateway.session.get(gateway.url + "/admin/live") for _ in range(MAX_PAGES)]
        assert (await gateway.get("/admin/live"))[0] == 503
        for live in pages:
            live.close()
        await until(lambda: _opens(gateway), LIMIT_S)


async def _opens(gateway: Gateway) -> bool:
    async with gateway.session.get(gateway.url + "/admin/live") as live:
        return live.status == 200


async def test_two_gateways_show_the_same_and_go_on_without_redis(own_redis: RedisProcess) -> None:
    async with (
        aiohttp.ClientSession() as session,
        whole(engines=2, redis_url=own_redis.url, redis_timeout_s=1.0) as one,
        whole(redis_url=own_redis.url, redis_timeout_s=1.0) as other,
    ):

        async def show(gateway: Whole, path: str) -> Any:
            async with session.get(gateway.url + path) as answer:
                assert answer.status == 200
                return await answer.json()

        for number, gateway in enumerate((one, other, one)):
            await gateway.ask({"role": "user", "content": f"question {number} " * 40})
        for gateway in (one, other):  # each writes its own
            await gateway.gateway.presence.beat()
        await one.gateway.presence.beat()
        for gateway in (one, other):
            await show(gateway, "/admin/overview")
            await show(gateway, "/admin/requests")
        first, second = [await show(gateway, "/admin/overview") for gateway in (one, other)]
        assert first["totals"] == second["totals"]
        assert (first["totals"]["requests"], first["stale"], first["redis"]) == (3, False, "up")
        assert first["gateways"] == second["gateways"] == 2
        rows = [(await show(gateway, "/admin/requests"))["requests"] for gateway in (one, other)]
        assert rows[0] == rows[1]
        lives = [await show(one, f"/admin/requests/{row['row']}") for row in rows[0]]
        assert sorted(len(life["route"]) for life in lives) == [1, 2, 2]
        assert all(sum(way["chosen"] for way in life["route"]) == 1 for life in lives)
        (only,) = next(life["route"] for life in lives if len(life["route"]) == 1)
        assert (only["engine"] != "", only["cached_tokens"], only["score_ms"]) == (True, 0, None)
        own_redis.kill()
        await one.ask({"role": "user", "content": "is anybody there?"})
        away = await show(one, "/admin/overview")
        assert (away["stale"], away["redis"], away["totals"]) == (True, "down", first["totals"])
        found = await show(one, "/admin/requests")
        assert (found["stale"], len(found["requests"])) == (True, 4)


async def test_what_is_wrong_is_said_in_sentences() -> None:
    lost = EngineStatus("engine-2", "http://127.0.0.1:2", "lost", replica={"index": {"trust": "degraded"}})
    async with running(FakePipeline()) as gateway:
        assert (await page(gateway, "/admin/overview"))["wrong"] == []
        gateway.state |= {"engines": [ENGINE, lost], "redis": {"up": False, "outages": 1}, "cold": "0 of 2 are warm"}
        wrong = (await page(gateway, "/admin/overview"))["wrong"]
    assert [(one["kind"], one["name"]) for one in wrong] == [
        ("redis", ""),
        ("engine", "engine-2"),
        ("index", "engine-2"),
        ("warm", ""),
    ]
    assert all(one["text"].endswith(".") for one in wrong)


def test_percentiles_are_within_their_buckets() -> None:
    times = [0.2 * 1.01**number for number in range(1400)]
    figures = Counter(FIRST_TOKEN[bucket(ms)] for ms in times)
    for share in (0.01, 0.5, 0.9, 0.99):
        found = percentile(figures, FIRST_TOKEN, share)
        assert found == pytest.approx(times[int(share * len(times))], rel=0.11)
    assert (bucket(0), bucket(1e12)) == (0, BUCKETS - 1)
    assert percentile({}, FIRST_TOKEN, 0.5) is None


async def test_of_very_many_requests_the_failed_ones_and_a_sample_are_kept_and_all_are_counted() -> None:
    counted, ring = Counter[str](), Ring("latest", MOST, None)

    async def secret() -> str:
        return "s"

    log = RequestLog(ring, lambda _, figures: counted.update(figures), lambda _: ("", {}), lambda: 0.0, secret)
    for number in range(5000):
        record = Record(f"req_{number}", CHAT, 0.0, OPENAI, tenant="t", status=500 if number % 100 == 7 else 200)
        record.traces = [Trace(first_token_ms=1.0)]
        log.finished(record)
    rows, _ = await log.read()
    assert (counted["ended"], counted["errors"], counted["miss"]) == (5000, 50, 4950)
    assert sum(row["status"] == 500 for row in rows) == MAX_FAILED
    assert MAX_ROWS - 10 <= len(rows) <= MAX_ROWS
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), key=lambda one: -int(one[4:]))
