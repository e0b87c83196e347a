"""From the answers of every dialect to GET /admin/ledger."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Breakpoint, Load
from gateway.admin.ledger import GROUPS, as_csv, report
from gateway.admin.sources import EngineStatus
from gateway.api.lines import LineRequest
from gateway.api.routes import RUNNER
from gateway.config import AuthSettings, LedgerSettings, PriceSettings, TenantSettings
from gateway.errors import EngineLostError, QueueFullError, RedisDownError
from gateway.ledger.base import COLUMNS, Figures, Row
from gateway.ledger.books import MemoryBook
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import Prices
from gateway.types import Hit, Lease, Request, Tenant, TextDelta
from tests.fakes.gateway import LIMIT_S, Gateway, response_cache, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.upstream import said, upstream
from tests.fakes.waiting import until

DAY_S = 86_400.0
NOON_S = 20_000 * DAY_S + DAY_S / 2  # 2024-10-04
PRICE = PriceSettings(
    model="demo",
    input=Decimal(3),
    output=Decimal(15),
    cached_read=Decimal("0.3"),
    cache_write=Decimal("3.75"),
    cache_write_of={"1h": Decimal(6)},
)
ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
VERSION = {"anthropic-version": "2023-06-01"}
MESSAGE = {**ASK, "max_tokens": 10}
MARKED = {
    "model": "demo",
    "max_tokens": 10,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "c"},
            ],
        }
    ],
}
LEASED: dict[str, Any] = {
    "breakpoints": (Breakpoint(10, 3600.0), Breakpoint(20, 3600.0), Breakpoint(30, 300.0)),
    "lease_reads": (10,),
    "kept_tokens": 30,
    "lease": Lease(0, Breakpoint(30, 300.0)),
}
"""Of 40 tokens of a prompt 10 are read, 10 written for an hour and 10 for five minutes; 32 were reused physically."""


async def ledger_of(gateway: Gateway, query: str = "group_by=model", key: str | None = None) -> dict[str, Any]:
    status, text, _ = await gateway.get(f"/admin/ledger?{query}", key)
    assert status == 200, text
    told: dict[str, Any] = json.loads(text)
    return told


def openai_bill(usage: Mapping[str, Any]) -> Decimal:
    """Cached and written tokens are inside of `prompt_tokens` and of `input_tokens`."""
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    said = usage.get("completion_tokens", usage.get("output_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    read, written = details["cached_tokens"], details["cache_write_tokens"]
    plain = prompt - read - written
    return plain * PRICE.input + read * Decimal("0.3") + written * Decimal("3.75") + said * PRICE.output


def anthropic_bill(usage: Mapping[str, Any]) -> Decimal:
    """They are outside of `input_tokens`."""
    short, long = (usage["cache_creation"][f"ephemeral_{ttl}_input_tokens"] for ttl in ("5m", "1h"))
    paid = usage["input_tokens"] * PRICE.input + usage["cache_read_input_tokens"] * Decimal("0.3")
    return paid + short * Decimal("3.75") + long * Decimal(6) + usage["output_tokens"] * PRICE.output


def gemini_bill(usage: Mapping[str, Any]) -> Decimal:
    """They are inside of `promptTokenCount`, and nothing is said of what was written."""
    read = usage.get("cachedContentTokenCount", 0)
    plain = usage["promptTokenCount"] - read
    return plain * PRICE.input + read * Decimal("0.3") + usage["candidatesTokenCount"] * PRICE.output


WRITES = {"cache_write_tokens": 8}
DIALECTS: list[Any] = [
    pytest.param(CHAT, ASK, "usage", openai_bill, {}, id="chat"),
    pytest.param(CHAT, ASK | {"n": 3}, "usage", openai_bill, {}, id="chat with three answers"),
    pytest.param(
        "/v1/completions", {"model": "demo", "prompt": ["a", "b"]}, "usage", openai_bill, {}, id="completions"
    ),
    pytest.param("/v1/responses", {"model": "demo", "input": "hi"}, "usage", openai_bill, {}, id="responses"),
    pytest.param("/v1/messages", MESSAGE, "usage", anthropic_bill, WRITES, id="messages without a marker"),
    pytest.param("/v1/messages", MARKED, "usage", anthropic_bill, LEASED, id="messages"),
    pytest.param(
        "/v1beta/models/demo:generateContent", CONTENTS, "usageMetadata", gemini_bill, WRITES, id="generateContent"
    ),
]


@pytest.mark.parametrize(("path", "body", "name", "bill", "traced"), DIALECTS)
async def test_the_ledger_has_what_the_usage_of_the_answer_costs(
    path: str, body: dict[str, Any], name: str, bill: Callable[[Any], Decimal], traced: dict[str, Any]
) -> None:
    async with running(FakePipeline(traced=traced), prices=(PRICE,)) as gateway:
        status, answer, _ = await gateway.post(path, body, headers=VERSION if "messages" in path else {})
        assert status == 200, answer
        told = await ledger_of(gateway)
    (row,) = told["rows"]
    assert Decimal(row["used"]["cost"]["USD"]) * 1_000_000 == bill(answer[name])
    assert row["model"] == "demo"
    assert row["requests"] == 1


OPENAI_USAGE = {
    "prompt_tokens": 2006,
    "completion_tokens": 300,
    "prompt_tokens_details": {"cached_tokens": 1920, "cache_write_tokens": 0},
}
ANTHROPIC_USAGE = {
    "input_tokens": 10,
    "cache_read_input_tokens": 4000,
    "cache_creation_input_tokens": 500,
    "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 400},
    "output_tokens": 50,
}
GEMINI_USAGE = {"promptTokenCount": 1000, "candidatesTokenCount": 20, "cachedContentTokenCount": 900}
HOSTED: list[Any] = [
    pytest.param("openai", CHAT, ASK, "usage", OPENAI_USAGE, openai_bill, (2006, 1920, 0), id="openai"),
    pytest.param("anthropic", "/v1/messages", MESSAGE, "usage", ANTHROPIC_USAGE, anthropic_bill, (4510, 4000, 500)),
    pytest.param(
        "gemini",
        "/v1beta/models/demo:generateContent",
        CONTENTS,
        "usageMetadata",
        GEMINI_USAGE,
        gemini_bill,
        (1000, 900, 0),
        id="gemini",
    ),
]


@pytest.mark.parametrize(("dialect", "path", "body", "name", "usage", "bill", "tokens"), HOSTED)
async def test_no_token_of_a_hosted_api_counts_twice_whichever_way_it_counts_cached_ones(
    dialect: str,
    path: str,
    body: dict[str, Any],
    name: str,
    usage: dict[str, Any],
    bill: Callable[[Any], Decimal],
    tokens: tuple[int, int, int],
) -> None:
    headers = VERSION if dialect == "anthropic" else {}
    async with upstream(said({name: usage})) as stub:
        theirs = [stub.settings("demo", dialect=dialect, over_engines=True)]
        async with running(upstreams=theirs, prices=(PRICE,)) as gateway:
            assert (await gateway.post(path, body, headers=headers))[0] == 200
            (row,) = (await ledger_of(gateway))["rows"]
    used, saved = row["used"], row["saved"]
    assert (used["prompt_tokens"], used["cached_tokens"], used["cache_write_tokens"]) == tokens
    assert Decimal(used["cost"]["USD"]) * 1_000_000 == bill(usage)
    assert (saved["upstream"]["tokens"], saved["prefix"]["tokens"]) == (tokens[1], 0)
    assert Decimal(saved["upstream"]["money"]["USD"]) * 1_000_000 == tokens[1] * Decimal("2.7")


async def test_what_was_reused_is_saved_in_tokens_milliseconds_and_money() -> None:
    """32 tokens that an engine would compute at 1000 a second."""
    async with running(FakePipeline(), prices=(PRICE,)) as gateway:
        load = Load(prefill_tokens_per_s=1000.0)
        gateway.state["engines"] = [EngineStatus("engine-1", "http://x", "ready", "demo", "i", 100, 16, load)]
        for _ in range(2):
            await gateway.post(CHAT, ASK)
        told = await ledger_of(gateway)
    (row,) = told["rows"]
    assert row["used"] | {"ms": 0} == {
        "prompt_tokens": 80,
        "cached_tokens": 64,
        "cache_write_tokens": 0,
        "completion_tokens": 4,
        "embedded_tokens": 0,
        "ms": 0,
        "cost": {"USD": "0.0001272"},  # 16 x 3 + 64 x 0.3 + 4 x 15 = 127.2 for a million
    }
    assert row["used"]["ms"] > 0
    assert row["saved"]["prefix"] == {"requests": 2, "tokens": 64, "ms": 64.0, "money": {"USD": "0.0001728"}}
    assert told["total"] == {key: value for key, value in row.items() if key != "model"}


async def test_what_anthropic_does_not_tell_as_read_saves_time_and_no_money() -> None:
    async with running(FakePipeline(traced=LEASED), prices=(PRICE,)) as gateway:
        await gateway.post("/v1/messages", MARKED, headers=VERSION)
        (row,) = (await ledger_of(gateway))["rows"]
    assert (row["used"]["cached_tokens"], row["used"]["cache_write_tokens"]) == (10, 20)
    assert row["saved"]["prefix"]["tokens"] == 32
    assert row["saved"]["prefix"]["money"] == {"USD": "0.000027"}


async def test_an_engine_that_has_measured_nothing_is_measured_by_its_first_tokens() -> None:
    prompts = [(40 + 1000 * (number % 2), 100.0 + 500.0 * (number % 2)) for number in range(20)]
    pipeline = FakePipeline(traced={"overhead_ms": 0.0})
    async with running(pipeline) as gateway:
        for tokens, ms in prompts:
            pipeline.traced = {"prompt_tokens": tokens, "cached_tokens": 0, "first_token_ms": ms}
            await gateway.post(CHAT, ASK)
        pipeline.traced = {"cached_tokens": 1000}
        await gateway.post(CHAT, ASK)
        (row,) = (await ledger_of(gateway))["rows"]
    assert row["saved"]["prefix"]["ms"] == pytest.approx(500, abs=1)


class Remembering(FakePipeline):
    """Answers from what it remembers."""

    def _events(self, request: Request) -> Any:
        request.trace.hit = Hit("semantic", prompt_tokens=1000, completion_tokens=100, generation_ms=5000.0)
        return super()._events(request)


async def test_a_remembered_answer_is_saved_whole_and_uses_nothing() -> None:
    async with running(Remembering(), prices=(PRICE,)) as gateway:
        await gateway.post(CHAT, ASK)
        (row,) = (await ledger_of(gateway))["rows"]
    assert (row["used"]["prompt_tokens"], row["used"]["cost"]) == (0, {"USD": "0"})
    semantic = row["saved"]["semantic"]
    assert (semantic["requests"], semantic["tokens"], semantic["money"]) == (1, 1100, {"USD": "0.0045"})
    assert semantic["ms"] == pytest.approx(5000 - row["used"]["ms"])


@pytest.mark.parametrize("stream", [False, True])
async def test_what_several_token_time_once_is_paid_once_and_saved_for_all_others(stream: bool) -> None:
    """One generation of 40 tokens and 2, one more from memory, and one that was not the same."""
    body = {**ASK, "temperature": 0, "stream": stream}
    pipeline = FakePipeline(hold_before=asyncio.Event(), responses=response_cache(), cached_tokens=0)
    async with running(pipeline, prices=(PRICE,), response_cache=pipeline.responses) as gateway:

        async def ask(asked: dict[str, Any]) -> None:
            async with gateway.session.post(gateway.url + CHAT, json=asked) as answer:
                assert answer.status == 200
                await answer.read()

        asking = [asyncio.create_task(ask(body)) for _ in range(10)]
        await until(lambda: pipeline.responses.stats()["waiting"] == 10)
        pipeline.hold_before.set()
        await asyncio.gather(*asking)
        await ask(body)
        await ask({**body, "seed": 1})
        (row,) = (await ledger_of(gateway))["rows"]
    assert row["requests"] == 12
    assert (row["used"]["prompt_tokens"], row["used"]["completion_tokens"]) == (80, 4)
    assert row["used"]["cost"] == {"USD": "0.0003"}
    exact = row["saved"]["exact"]
    assert (exact["requests"], exact["tokens"], exact["money"]) == (10, 420, {"USD": "0.0015"})


class Halting(FakePipeline):
    """Stops after the first token of its first answer until it may go on."""

    half = asyncio.Event()

    async def _events(self, request: Request) -> Any:
        async for event in super()._events(request):
            yield event
            if isinstance(event, TextDelta) and not self.half.is_set():
                await self._hold(self.half)


async def test_tokens_after_the_first_of_several_left_are_paid_by_the_next() -> None:
    """Of a prompt of 40 tokens and an answer of 2 the first pays the prompt and a token, the second saves as much."""
    pipeline = Halting(responses=response_cache(), cached_tokens=0)
    pipeline.half = asyncio.Event()
    body = {**ASK, "temperature": 0, "stream": True}
    async with running(pipeline, prices=(PRICE,), response_cache=pipeline.responses) as gateway:
        first = await gateway.session.post(gateway.url + CHAT, json=body)
        await first.content.readany()
        second = asyncio.create_task(gateway.transcript(CHAT, body))
        await until(lambda: pipeline.responses.stats()["waiting"] == 2)
        first.close()
        await until(lambda: pipeline.responses.stats()["waiting"] == 1)
        pipeline.half.set()
        assert "[DONE]" in await second
        (row,) = (await ledger_of(gateway))["rows"]
    assert row["requests"] == 2
    assert (row["used"]["prompt_tokens"], row["used"]["completion_tokens"]) == (40, 2)
    assert row["used"]["cost"] == {"USD": "0.00015"}
    exact = row["saved"]["exact"]
    assert (exact["requests"], exact["tokens"]) == (1, 41)


async def test_several_remembered_answers_to_a_prompt_save_it_once() -> None:
    pipeline = FakePipeline(responses=response_cache(), cached_tokens=0)
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        for _ in range(2):
            await gateway.post(CHAT, {**ASK, "temperature": 0.5, "seed": 1, "n": 3})
        (row,) = (await ledger_of(gateway))["rows"]
    assert (row["used"]["prompt_tokens"], row["used"]["completion_tokens"]) == (40, 6)
    assert (row["saved"]["exact"]["requests"], row["saved"]["exact"]["tokens"]) == (3, 46)


async def test_who_is_refused_uses_nothing_and_who_leaves_pays_what_was_generated() -> None:
    pipeline = FakePipeline(fails_before=QueueFullError("full", retry_after_s=1), traced={"prompt_tokens": 40})
    async with running(pipeline, prices=(PRICE,)) as gateway:
        await gateway.post(CHAT, ASK)
        await gateway.post(CHAT, {})
        await gateway.post(CHAT, ASK | {"model": "invented"})
        assert (await ledger_of(gateway))["rows"] == []
        pipeline.fails_before, pipeline.hold_after = None, asyncio.Event()
        pipeline.closed.clear()
        asking = asyncio.create_task(gateway.post(CHAT, ASK | {"n": 2, "stream": True}))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        asking.cancel()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
        (row,) = (await ledger_of(gateway))["rows"]
        assert row["used"]["prompt_tokens"] == 40, "of two answers, which have one prompt"
        pipeline.hold_after, pipeline.fails_after = None, EngineLostError("gone")
        await gateway.post(CHAT, ASK)
        assert (await ledger_of(gateway))["total"]["used"]["prompt_tokens"] == 80


async def test_a_line_of_a_batch_costs_half_and_says_what_that_saved() -> None:
    async with running(FakePipeline(), prices=(PRICE,)) as gateway:
        line = LineRequest(CHAT, Tenant("north"), ASK)
        assert (await gateway.app[RUNNER].answer(line)).status == 200
        (row,) = (await ledger_of(gateway, "group_by=tenant,lane"))["rows"]
    assert (row["tenant"], row["lane"]) == ("north", "batch")
    assert row["used"]["cost"] == {"USD": "0.0000318"}
    assert row["saved"]["batch"] == {"requests": 1, "tokens": 42, "ms": 0, "money": {"USD": "0.0000318"}}


async def test_a_model_without_a_price_has_no_money() -> None:
    async with running() as gateway:
        await gateway.post(CHAT, ASK)
        total = (await ledger_of(gateway))["total"]
    assert (total["unpriced_requests"], total["used"]["cost"], total["saved"]["prefix"]["money"]) == (1, None, None)


NORTH, SOUTH = "north-key-1", "south-key-1"
TENANTS = (TenantSettings(name="north", keys=(NORTH,)), TenantSettings(name="south", keys=(SOUTH,)))


async def ask(gateway: Gateway, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert (await gateway.post(CHAT, ASK, headers=headers))[0] == 200


async def test_rows_are_chosen_by_day_tenant_and_model_and_grouped() -> None:
    clock = [NOON_S]
    admins = AuthSettings(admin_keys=("admin-key-1",))
    async with running(tenants=TENANTS, auth=admins, prices=(PRICE,), now=lambda: clock[0]) as gateway:

        async def requests(query: str) -> dict[str, Any]:
            told = await ledger_of(gateway, query, "admin-key-1")
            names = told["group_by"]
            rows = {"/".join(row[name] for name in names): row["requests"] for row in told["rows"]}
            return rows | {"total": told["total"]["requests"], "days": f"{told['from']} {told['to']}"}

        for _ in range(2):
            await ask(gateway, NORTH)
        clock[0] += DAY_S
        await ask(gateway, SOUTH)
        month = "2024-09-06 2024-10-05"
        assert await requests("") == {"2024-10-04": 2, "2024-10-05": 1, "total": 3, "days": month}
        assert await requests("group_by=tenant,day,tenant") == {
            "north/2024-10-04": 2,
            "south/2024-10-05": 1,
            "total": 3,
            "days": month,
        }
        assert await requests("group_by=") == {"": 3, "total": 3, "days": month}
        assert await requests("tenant=north&group_by=lane") == {"online": 2, "total": 2, "days": month}
        assert (await requests("model=other"))["total"] == 0
        for day, total in (("2024-10-03", 0), ("2024-10-04", 2), ("2024-10-05", 1)):
            assert (await requests(f"from={day}&to={day}"))["total"] == total
        assert await requests("to=2024-10-04") == {"2024-10-04": 2, "total": 2, "days": "2024-09-05 2024-10-04"}
        assert (await requests("to=0001-01-05"))["days"] == "0001-01-01 0001-01-05"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("from=yesterday", "Invalid 'from': a day is written like 2026-11-22."),
        ("to=2026-13-01", "Invalid 'to': a day is written like 2026-11-22."),
        ("to=20261122", "Invalid 'to': a day is written like 2026-11-22."),
        ("to=2026-W47-7", "Invalid 'to': a day is written like 2026-11-22."),
        ("from=2026-11-22&to=2026-11-21", "Invalid 'from': 2026-11-22 is after 2026-11-21, the last day."),
        ("group_by=day,week", "Invalid value for 'group_by': 'week'."),
        ("format=xml", "Invalid value for 'format': 'xml'."),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(query: str, words: str) -> None:
    async with running() as gateway:
        status, text, _ = await gateway.get(f"/admin/ledger?{query}")
    assert status == 400
    assert words in json.loads(text)["error"]["message"]


async def test_the_ledger_is_for_admins() -> None:
    async with running(tenants=TENANTS, auth=AuthSettings(admin_keys=("admin-key-1",))) as gateway:
        for key, status in ((None, 401), (NORTH, 403), ("wrong", 401), ("admin-key-1", 200)):
            assert (await gateway.get("/admin/ledger", key))[0] == status


@pytest.mark.parametrize(("query", "accept"), [("&format=csv", "*/*"), ("", "text/csv"), ("", "text/csv, */*;q=0.1")])
async def test_csv_is_written_for_who_asks_for_it(query: str, accept: str) -> None:
    async with running(prices=(PRICE,)) as gateway:
        await gateway.post(CHAT, ASK)
        url = f"{gateway.url}/admin/ledger?group_by=tenant,model{query}"
        async with gateway.session.get(url, headers={"Accept": accept}) as answer:
            assert answer.content_type == "text/csv"
            (line,) = csv.DictReader(io.StringIO(await answer.text()))
    assert (line["tenant"], line["model"], line["currency"]) == ("anonymous", "demo", "USD")
    assert (line["prompt_tokens"], line["cost"]) == ("40", "0.0000636")
    assert (line["saved_prefix_tokens"], line["saved_prefix_money"]) == ("32", "0.0000864")


async def test_json_is_written_for_who_takes_both() -> None:
    async with running() as gateway:
        for query, accept in (("", "application/json, text/csv"), ("?format=json", "text/csv"), ("", "*/*")):
            async with gateway.session.get(f"{gateway.url}/admin/ledger{query}", headers={"Accept": accept}) as answer:
                assert answer.content_type == "application/json"


class Away(MemoryBook):
    async def add(self, number: str, rows: Sequence[tuple[Row, Figures]]) -> None:
        raise RedisDownError("away")

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        raise RedisDownError("away")


async def test_while_redis_is_away_requests_are_answered_and_the_page_says_why_not() -> None:
    ledger = Ledger(LedgerSettings(), Prices((PRICE,), batch=0.5), Away(), lambda: NOON_S)
    async with running(ledger=ledger) as gateway:
        assert (await gateway.post(CHAT, ASK))[0] == 200
        status, text, headers = await gateway.get("/admin/ledger")
        assert status == 503
        assert "cannot be reached" in json.loads(text)["error"]["message"]
        assert headers["Retry-After"] == "1"
        stats = json.loads((await gateway.get("/admin/stats"))[1])["ledger"]
        assert (stats["requests"], stats["pending_rows"], stats["dropped"]) == (1, 1, 0)
        assert stats["used"]["cost"] == {"USD": "0.0000636"}


async def test_metrics_tell_what_was_paid_and_saved() -> None:
    async with running(FakePipeline(), prices=(PRICE,)) as gateway:
        load = Load(prefill_tokens_per_s=1000.0)
        gateway.state["engines"] = [EngineStatus("engine-1", "http://x", "ready", "demo", "i", 100, 16, load)]
        await gateway.post(CHAT, ASK)
        text = (await gateway.get("/metrics"))[1]
    labels = 'lane="online",model="demo",tenant="anonymous"'
    for line in (
        f'kvasir_cost_total{{currency="USD",{labels}}} 6.36e-05',
        f'kvasir_saved_tokens_total{{by="prefix",{labels}}} 32.0',
        f'kvasir_saved_seconds_total{{by="prefix",{labels}}} 0.032',
        f'kvasir_saved_cost_total{{by="prefix",currency="USD",{labels}}} 8.64e-05',
        "kvasir_ledger_pending_rows 1.0",
        "kvasir_ledger_dropped_total 0.0",
    ):
        assert line in text.splitlines(), line


ROW = Row("2026-11-22", "north", "demo", "online", "USD")
EVERY_GROUPING = [by for length in range(len(GROUPS) + 1) for by in combinations(GROUPS, length)]

rows = st.dictionaries(
    st.builds(
        Row,
        st.sampled_from(["2026-11-21", "2026-11-22"]),
        st.sampled_from("ab"),
        st.sampled_from("mn"),
        st.sampled_from(["online", "batch"]),
        st.sampled_from(["USD", "EUR", ""]),
        st.sampled_from(["", "key_1", "key_2"]),
    ),
    st.dictionaries(st.sampled_from(COLUMNS), st.integers(0, 2**52), max_size=6),
    max_size=12,
)


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_group_tells_what_was_used_and_what_was_saved() -> None:
    figures = {
        "requests": 2,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "micros": 1500,
        "cost_nano": 1_000_000_001,
        "prefix_requests": 1,
        "prefix_tokens": 64,
        "prefix_micros": 250,
        "prefix_nano": 20,
        "storage_token_s": 7200,
        "storage_nano": 500,
        "hints_nano": -200,
    }
    free = ROW._replace(model="free", currency="")
    told = report({ROW: figures, free: {"requests": 1, "unpriced_requests": 1}}, ("model",))
    nothing = {"requests": 0, "tokens": 0, "ms": 0, "money": {"USD": "0"}}
    used = {"prompt_tokens": 100, "cached_tokens": 60, "cache_write_tokens": 0, "completion_tokens": 0}
    demo = {
        "model": "demo",
        "requests": 2,
        "unpriced_requests": 0,
        "used": {**used, "embedded_tokens": 0, "ms": 1.5, "cost": {"USD": "1.000000001"}},
        "saved": {
            "prefix": {"requests": 1, "tokens": 64, "ms": 0.25, "money": {"USD": "0.00000002"}},
            "upstream": nothing,
            "exact": nothing,
            "semantic": nothing,
            "batch": nothing,
        },
        "hints": {"storage_token_s": 7200, "storage_money": {"USD": "0.0000005"}, "money": {"USD": "-0.0000002"}},
    }
    assert told["group_by"] == ["model"]
    assert told["rows"][0] == demo
    assert told["rows"][1]["used"]["cost"] is None
    assert told["rows"][1]["saved"]["prefix"]["money"] is None
    assert told["total"]["used"]["cost"] == {"USD": "1.000000001"}
    assert (told["total"]["requests"], told["total"]["unpriced_requests"]) == (3, 1)


def test_currencies_are_never_added_up() -> None:
    both = {ROW: {"cost_nano": 10**9}, ROW._replace(currency="EUR"): {"cost_nano": 2 * 10**9}}
    assert report(both, ())["total"]["used"]["cost"] == {"EUR": "2", "USD": "1"}
    assert [(line["currency"], line["cost"]) for line in lines(as_csv(both, ("tenant",)))] == [
        ("EUR", "2"),
        ("USD", "1"),
    ]


def test_no_name_is_a_formula_of_a_spreadsheet() -> None:
    names = ['=HYPERLINK("x")', "+1", "@a", "a,b", 'say "hi"', "a\nb"]
    text = as_csv({ROW._replace(model=name): {"requests": 1} for name in names}, ("model",))
    assert [line["model"] for line in lines(text)] == ["'+1", '\'=HYPERLINK("x")', "'@a", "a\nb", "a,b", 'say "hi"']


def test_an_empty_ledger_has_a_heading_and_no_line() -> None:
    heading = as_csv({}, GROUPS)
    assert heading.startswith("day,tenant,model,lane,key,currency,requests,unpriced_requests,prompt_tokens,")
    assert heading.count("\n") == 1
    told = report({}, GROUPS)
    assert (told["rows"], told["total"]["used"]["cost"]) == ([], None)


@given(rows)
def test_sums_by_any_grouping_are_equal(ledger: dict[Row, Figures]) -> None:
    whole = report(ledger, ())["total"]
    money = sum(figures.get("cost_nano", 0) for row, figures in ledger.items() if row.currency == "USD")
    assert Decimal((whole["used"]["cost"] or {}).get("USD", 0)) * 10**9 == money
    for by in EVERY_GROUPING:
        told = report(ledger, by)
        assert told["total"] == whole
        assert _sums(told["rows"]) == _sums([whole])
        total = sum(int(line["saved_exact_tokens"]) for line in lines(as_csv(ledger, by)))
        assert total == whole["saved"]["exact"]["tokens"]
        costs = sum(Decimal(line["cost"]) for line in lines(as_csv(ledger, by)) if line["currency"] == "USD")
        assert costs * 10**9 == money


def _sums(groups: Sequence[dict[str, dict[str, object]]]) -> dict[str, Decimal]:
    """Of everything that is money or a whole number, by its path."""
    found: dict[str, Decimal] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        elif isinstance(value, int) or (isinstance(value, str) and path.endswith(("USD", "EUR"))):
            found[path] = found.get(path, Decimal(0)) + Decimal(value)

    for group in groups:
        walk({key: inner for key, inner in group.items() if key not in GROUPS}, "")
    return {path: value for path, value in found.items() if value}
