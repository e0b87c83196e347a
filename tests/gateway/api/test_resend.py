"""The resend path of requests that were seen before: it gives what the pipeline gives, counts what that counts, and is
left as soon as the response cache would not give the answer."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pytest

from gateway.api import middleware
from gateway.config import LedgerSettings, NamespaceSettings, PriceSettings, TenantSettings
from gateway.errors import NoEngineError
from gateway.ledger.books import MemoryBook
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import Prices
from gateway.responses.entry_stores import MemoryEntries
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.types import CallDelta
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.pipeline import FakeModels, FakePipeline, hello
from tests.fakes.upstream import upstream
from tests.gateway.api.test_upstream_answers import STREAM
from tests.gateway.api.test_upstream_answers import whole as whole_answer

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi."}], "temperature": 0}
MESSAGE: dict[str, Any] = {**ASK, "max_tokens": 64}
CONTENTS = {"contents": [{"parts": [{"text": "Hi."}]}], "generationConfig": {"temperature": 0}}
OLDER = {"anthropic-version": "2023-06-01"}
PIECES = ("One", " two", "\n\u2028 three \U0001f469\u200d\U0001f680", ' "id":"chatcmpl-0","created":1')
USAGE = {"stream_options": {"include_usage": True}}

REQUESTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (CHAT, ASK, {}),
    (CHAT, {**ASK, "stream": True}, {}),
    (CHAT, {**ASK, "stream": True, **USAGE}, {}),
    (CHAT, {**ASK, "n": 2}, {}),
    (CHAT, {**ASK, "service_tier": "flex"}, {}),
    (CHAT, {**ASK, "cache": {"max-age": 20}}, {}),
    (CHAT, {**ASK, "messages": [{"role": "user", "content": 3}]}, {}),
    (CHAT, {**ASK, "client_metadata": {"turn": 1}, "provider": {}}, {}),
    ("/v1/completions", {"model": "demo", "prompt": "Hi", "temperature": 0}, {}),
    ("/v1/completions", {"model": "demo", "prompt": "Hi", "temperature": 0, "stream": True, "echo": True}, {}),
    ("/v1/messages", MESSAGE, OLDER),
    ("/v1/messages", {**MESSAGE, "stream": True}, OLDER),
    ("/v1/messages", MESSAGE, {**OLDER, "anthropic-beta": "cache-diagnosis-2026-04-07"}),
    ("/v1beta/models/demo:generateContent", CONTENTS, {}),
    ("/v1beta/models/demo:streamGenerateContent?alt=sse", CONTENTS, {}),
    ("/v1beta/models/demo:streamGenerateContent", CONTENTS, {}),
    (CHAT, {**ASK, "model": "up-1"}, {}),
    (CHAT, {**ASK, "model": "up-1", "stream": True}, {}),
]
HEADERS: list[dict[str, str]] = [
    {},
    {"Cache-Control": "no-cache"},
    {"Cache-Control": "max-age=5"},
    {"Cache-Control": "only-if-cached"},
    {"x-kvasir-cache": "off"},
    {"x-kvasir-cache": "maybe"},
    {"x-kvasir-namespace": "both"},
    {"x-request-id": "mine"},
    {"Connection": "close"},
]
TENANTS = [TenantSettings(name=name, keys=(f"key-of-{name}",)) for name in ("north", "south")]
SPACES = [NamespaceSettings(name="both", tenants=("north", "south"))]
PRICES = [PriceSettings(model="demo", input=2, output=10)]

NEW = re.compile(
    rb'req_[0-9a-f]{32}|chatcmpl-[0-9a-f]{32}|cmpl-[0-9a-f]{32}|msg_[0-9a-f]{32}|(?<="responseId":")[\w-]{22}'
)
CREATED = re.compile(rb'"created":[0-9]+,"model"')
OTHER_EACH_TIME = {"date", "content-length", "transfer-encoding", "x-request-id", "request-id"}
OTHER_EACH_TIME |= {"x-kvasir-request-id", "x-kvasir-overhead-ms", "openai-processing-ms", "server-timing"}
OTHER_EACH_TIME |= {"anthropic-ratelimit-requests-reset"}


def told(status: int, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Without what is another in each answer."""
    kept = {name.lower(): value for name, value in headers.items() if name.lower() not in OTHER_EACH_TIME}
    return status, kept, CREATED.sub(b"created", NEW.sub(b"id", body))


class One:
    """A gateway before a pipeline and an upstream, at a time of its own."""

    def __init__(self) -> None:
        self.now = [1000.0]
        self.memory = MemoryEntries(1 << 20, lambda: self.now[0])
        self.cache: ResponseCache = response_cache(
            now=lambda: self.now[0], memory=self.memory, ttl_s=60, tool_calls=True
        )
        self.pipeline = FakePipeline(PIECES, responses=self.cache)
        self.ledger = Ledger(LedgerSettings(), Prices(PRICES, 0.5), MemoryBook(), lambda: self.now[0])

    def options(self, stub: Any) -> dict[str, Any]:
        return {
            "response_cache": self.cache,
            "tenants": TENANTS,
            "namespaces": SPACES,
            "upstreams": [stub.settings()],
            "ledger": self.ledger,
        }

    def counted(self) -> Any:
        rows = {
            row: {k: v for k, v in figures.items() if "micros" not in k} for row, figures in self.ledger.totals.items()
        }
        stats = self.cache.stats()
        del stats["bytes"]  # how long an answer took is kept with it
        stats["events"] = {name: count for name, count in stats["events"].items() if name != "resent"}
        return rows, stats


async def send(gateway: Gateway, path: str, body: Any, headers: Mapping[str, str] = {}, key: str = "") -> Any:
    given = {**headers, **({"x-api-key": key} if key else {}), "Content-Type": "application/json"}
    async with gateway.session.post(gateway.url + path, data=orjson.dumps(body), headers=given) as answer:
        return answer.status, dict(answer.headers), await answer.read()


def counters(exposition: str) -> list[str]:
    """Of requests and tokens."""
    totals = r"kvasir_(requests|response_cache_answers|\w+_tokens)_total"
    wanted = re.compile(totals + r"|kvasir_(?!event_loop)\w+_seconds_count")
    return [line for line in exposition.splitlines() if wanted.match(line)]


def resent(cache: ResponseCache) -> int:
    return int(cache.stats()["events"]["resent"])


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_asked_a_resend_says_and_counts_what_the_pipeline_does(seed: int) -> None:
    dice, short, long = random.Random(seed), One(), One()
    async with (
        upstream(whole_answer()) as stub,
        running(short.pipeline, **short.options(stub)) as one,
        running(long.pipeline, **long.options(stub), rendered_bytes=0) as other,
    ):
        for _ in range(90):
            path, body, needed = dice.choice(REQUESTS)
            headers = needed | dice.choice([{}, {}, {}, *HEADERS])
            key = f"key-of-{dice.choice(('north', 'north', 'south', 'nobody'))}"
            for _ in range(dice.randint(1, 4)):
                if dice.random() < 0.04:
                    short.now[0] = long.now[0] = short.now[0] + dice.choice([0.5, 4, 15, 70])
                answers = [told(*await send(gateway, path, body, headers, key)) for gateway in (one, other)]
                assert answers[0] == answers[1], (path, body, headers)
        assert short.counted() == long.counted()
        stats = [await (await gateway.session.get(f"{gateway.url}/metrics")).text() for gateway in (one, other)]
        assert counters(stats[0]) == counters(stats[1])
    assert resent(short.cache) > 20
    assert resent(long.cache) == 0


@pytest.mark.parametrize(("path", "body", "headers"), [REQUESTS[n] for n in (0, 2, 7, 9, 10, 12, 13)])
async def test_ids_are_new_in_every_piece_of_every_answer(path: str, body: Any, headers: dict[str, str]) -> None:
    one = One()
    async with running(one.pipeline, response_cache=one.cache) as gateway:
        texts = [(await send(gateway, path, body, headers))[2] for _ in range(5)]
    assert resent(one.cache) == 3
    ids = [set(NEW.findall(text)) for text in texts]
    assert [len(found) for found in ids] == [1] * 5
    assert len(set.union(*ids)) == 5
    assert len({NEW.sub(b"", CREATED.sub(b"", text)) for text in texts[1:]}) == 1


async def test_its_lines_in_the_log_are_made_later_and_say_what_those_of_the_long_way_say(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    made_later: list[Callable[[], str]] = []
    monkeypatch.setattr(middleware, "later", lambda logger, level, said: made_later.append(said))
    one = One()
    async with running(one.pipeline, response_cache=one.cache) as gateway:
        for number in range(4):
            await send(gateway, CHAT, ASK, {"x-request-id": f"r{number}"})
    lines = [str(said()) for said in made_later]
    assert len(lines) == 4
    assert [line.split()[0] for line in lines] == [f"request_id=r{n}" for n in range(4)]
    changing = re.compile(r"(overhead_ms|first_token_ms|total_ms|request_id)=\S+ ?")
    _, long, *short = [changing.sub("", line) for line in lines]
    assert short == [long, long]
    assert " hit=exact " in long


async def test_what_an_operator_removed_is_not_given_any_more() -> None:
    one = One()
    answers = StoredAnswers(one.memory, None)
    async with running(one.pipeline, response_cache=one.cache, answers=answers, now=lambda: one.now[0]) as gateway:
        for _ in range(3):
            await send(gateway, CHAT, ASK)
        _, shown, _ = await gateway.post("/admin/cache/invalidate", {"everything": True})
        await gateway.post("/admin/cache/invalidate", {"everything": True, "confirm": shown["confirm"]})
        assert (await send(gateway, CHAT, ASK))[1]["x-kvasir-cache"] == "miss"
    assert (resent(one.cache), len(one.pipeline.requests)) == (1, 2)


async def test_what_is_too_old_is_not_given() -> None:
    one = One()
    async with running(one.pipeline, response_cache=one.cache) as gateway:
        outcomes, ages = [], []
        for step in (0, 0, 0, 50, 11, 0, 0):
            one.now[0] += step
            _, headers, _ = await send(gateway, CHAT, ASK)
            outcomes.append(headers["x-kvasir-cache"])
            ages.append(headers.get("Age"))
    assert outcomes == ["miss", "exact", "exact", "exact", "miss", "exact", "exact"]
    assert ages == [None, "0", "0", "50", None, "0", "0"]
    assert resent(one.cache) == 3


@pytest.mark.parametrize("said", [{"Cache-Control": "max-age=5"}, {"x-kvasir-cache": "max-age=5"}])
async def test_what_is_older_than_the_request_wants_is_not_given(said: dict[str, str]) -> None:
    one = One()
    async with running(one.pipeline, response_cache=one.cache) as gateway:
        outcomes = []
        for step in (0, 0, 5, 1, 0, 0):
            one.now[0] += step
            outcomes.append((await send(gateway, CHAT, ASK, said))[1]["x-kvasir-cache"])
    assert outcomes == ["miss", "exact", "exact", "miss", "exact", "exact"]
    assert resent(one.cache) == 2


async def test_a_request_of_another_tenant_or_with_another_header_is_another_one() -> None:
    one = One()
    async with running(one.pipeline, response_cache=one.cache, tenants=TENANTS, namespaces=SPACES) as gateway:

        async def outcome(tenant: str, **headers: str) -> str:
            return str((await send(gateway, CHAT, ASK, headers, f"key-of-{tenant}"))[1].get("x-kvasir-cache"))

        assert [await outcome("north") for _ in range(3)] == ["miss", "exact", "exact"]
        assert resent(one.cache) == 1
        assert await outcome("south") == "miss"
        assert await outcome("north", **{"Cache-Control": "no-cache"}) == "miss"
        assert await outcome("north", **{"x-kvasir-cache": "off"}) == "bypass; reason=off"
        assert await outcome("north", **{"x-kvasir-namespace": "both"}) == "miss"
        status, _, _ = await send(gateway, CHAT, ASK, {}, "key-of-nobody")
        assert status == 401
        assert resent(one.cache) == 1


async def test_limits_hold_for_a_resend_too() -> None:
    one = One()
    few = TenantSettings(name="few", keys=("key-of-few",), requests_per_minute=3)
    async with running(one.pipeline, response_cache=one.cache, tenants=[few]) as gateway:
        answers = [await send(gateway, CHAT, ASK, {}, "key-of-few") for _ in range(5)]
    assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
    remaining = [headers["x-ratelimit-remaining-requests"] for _, headers, _ in answers[:3]]
    assert remaining == ["2", "1", "0"]
    assert resent(one.cache) == 1


async def test_a_model_without_engines_and_one_that_changed_are_told_as_ever() -> None:
    one, models = One(), FakeModels()
    async with running(one.pipeline, models, response_cache=one.cache) as gateway:
        for _ in range(3):
            await send(gateway, CHAT, ASK)
        models.away = NoEngineError("demo", 1.0)
        assert (await send(gateway, CHAT, ASK))[0] == 503
        models.away, models.hellos = None, [hello(incarnation="demo-2")]
        assert (await send(gateway, CHAT, ASK))[1]["x-kvasir-cache"] == "exact"
        assert resent(one.cache) == 1


async def test_answers_with_calls_always_go_the_long_way() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    one = One()
    one.pipeline.pieces = [CallDelta(0, "look", "{}")]
    one.pipeline.reason = "tool_calls"
    async with running(one.pipeline, response_cache=one.cache) as gateway:
        outcomes = [(await send(gateway, CHAT, {**ASK, "tools": tools}))[1]["x-kvasir-cache"] for _ in range(4)]
    assert outcomes == ["miss", "exact", "exact", "exact"]
    assert resent(one.cache) == 0


async def test_the_bytes_of_an_upstream_come_again_as_they_were() -> None:
    one = One()
    body = {**ASK, "model": "up-1", "stream": True, **USAGE}
    async with upstream(STREAM) as stub, running(response_cache=one.cache, upstreams=[stub.settings()]) as gateway:
        answers = [await send(gateway, CHAT, body) for _ in range(4)]
        assert len(stub.got) == 1
    assert {text for _, _, text in answers} == {b"".join(STREAM.pieces)}
    assert resent(one.cache) == 2


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (12_000, 0), (1 << 20, 12)])
async def test_what_is_known_stays_within_its_bytes_and_what_was_used_longest_ago_goes_first(
    limit: int, found: int
) -> None:
    one = One()
    async with running(one.pipeline, response_cache=one.cache, rendered_bytes=limit) as gateway:
        for number in 3 * [*range(12)]:
            await send(gateway, CHAT, {**ASK, "seed": number})
        assert resent(one.cache) == found
        await send(gateway, CHAT, {**ASK, "seed": 11})
    assert resent(one.cache) == found + (limit > 0)
