"""All stages of the gateway wired as app.py wires them, between the real openai SDK and an engine without a model."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from engine.config import ConfigError, load
from engine.protocol import TOKEN_BYTES
from gateway.app import Gateway, replica_keys, upstream_keys
from gateway.config import LeaseSettings, LimitSettings, Settings, TenantSettings
from gateway.errors import RateLimitError
from gateway.serving import _introduce, close_with
from gateway.storage.redis_calls import connect
from gateway.types import ANONYMOUS, Event, Finished, Need, Request, Scope, Started, TextDelta, Usage
from gateway.workers import part_of
from tests.fakes import tokenisers
from tests.fakes.meanings import MODEL, chat
from tests.fakes.waiting import until
from tests.fakes.whole import whole

BOOK = " ".join(tokenisers.sentences(300, seed=11))


def user(*parts: tuple[str, str | None]) -> Any:
    """Parts of text, and the ttl of the breakpoint after each."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text} for text, _ in parts]
    for part, (_, ttl) in zip(content, parts, strict=True):
        if ttl is not None:
            part["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": ttl}
    return {"role": "user", "content": content}


def extra(usage: openai.types.CompletionUsage) -> tuple[int | None, Any, Any]:
    """cached_tokens, cache_write_tokens and cache_lease."""
    details = usage.prompt_tokens_details
    assert details is not None
    more = details.model_dump()
    return details.cached_tokens, more["cache_write_tokens"], more.get("cache_lease")


async def test_what_one_request_writes_is_what_the_next_one_reads_to_the_token() -> None:
    async with whole() as all_of_it:
        message = (BOOK, "1h")
        first, headers = await all_of_it.ask(user(message, (" What is it about?", None)))
        (point,) = all_of_it.submits[0].breakpoints
        assert point.ttl_s == 3600
        assert point.tokens % 16, "the test wants a breakpoint inside of a block"
        assert extra(first) == (0, point.tokens, "kept")
        assert (headers["x-kvasir-lease"], headers["x-kvasir-cached-tokens"]) == (
            f"kept; tokens={point.tokens}; ttl=3600",
            "0",
        )
        second, headers = await all_of_it.ask(user(message, (" And who wrote it?", None)))
        assert extra(second) == (point.tokens, 0, "kept")
        assert int(headers["x-kvasir-cached-tokens"]) == point.tokens // 16 * 16


async def test_a_breakpoint_changes_neither_tokens_nor_blocks() -> None:
    async with whole() as all_of_it:
        await all_of_it.ask(user((BOOK, "5m"), (" What?", "1h")))
        await all_of_it.ask({"role": "user", "content": BOOK + " What?"})
        marked, plain = all_of_it.submits
    assert (marked.tokens, marked.digests, marked.salt) == (plain.tokens, plain.digests, plain.salt)
    assert [point.ttl_s for point in marked.breakpoints] == [300, 3600]
    assert plain.breakpoints == ()
    assert (marked.tenant, marked.use_cache) == ("anonymous", True)


async def test_a_request_that_asks_for_nothing_says_nothing_of_leases() -> None:
    async with whole() as all_of_it:
        usage, headers = await all_of_it.ask({"role": "user", "content": BOOK})
        whole_blocks = len(all_of_it.submits[0].tokens) // TOKEN_BYTES // 16 * 16
        assert extra(usage) == (0, whole_blocks, None)
        assert "x-kvasir-lease" not in headers


@pytest.mark.parametrize("leases", ["degraded", None])
async def test_a_lease_that_was_not_granted_is_visible(leases: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with whole(leases=leases) as all_of_it:
        usage, headers = await all_of_it.ask(user((BOOK, "5m")))
        assert extra(usage) == (0, 0, "degraded")
        assert headers["x-kvasir-lease"] == "degraded"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    assert " lease=degraded " in line


async def test_a_stream_says_the_same_in_headers_and_usage() -> None:
    async with whole() as all_of_it:
        raw = await all_of_it.client.chat.completions.with_raw_response.create(
            model="demo",
            messages=[user((BOOK, "5m"))],
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert raw.headers["x-kvasir-lease"].startswith("kept; tokens=")
        chunks = [chunk async for chunk in raw.parse()]
        usage = chunks[-1].usage
        assert usage is not None
        assert extra(usage) == (0, all_of_it.submits[0].breakpoints[0].tokens, "kept")


async def test_explicit_mode_without_a_breakpoint_neither_reads_nor_writes() -> None:
    async with whole(engines=2) as all_of_it:
        message: Any = {"role": "user", "content": BOOK}
        for _ in range(2):
            usage, _ = await all_of_it.ask(message, prompt_cache_options={"mode": "explicit"})
            assert extra(usage) == (0, 0, None)
        assert [submit.use_cache for submit in all_of_it.submits] == [False, False]
        assert not [engine for engine in all_of_it.engines if engine.held]


async def test_leases_are_read_by_those_of_the_same_scope_only() -> None:
    async with whole() as all_of_it:
        message = user((BOOK, "5m"), (" Why?", None))
        await all_of_it.ask(message, prompt_cache_key="one")
        assert extra((await all_of_it.ask(message, prompt_cache_key="two"))[0])[0] == 0
        assert extra((await all_of_it.ask(message, prompt_cache_key="one"))[0])[0]


async def test_a_tokeniser_that_no_engine_has_any_more_is_unloaded() -> None:
    async with whole() as all_of_it:
        registry, prompts, fake = all_of_it.gateway.registry, all_of_it.gateway.prompts, all_of_it.engines[0]
        (client,) = registry.engines
        assert (list(registry.models()), list(prompts.stats())) == (["demo"], ["demo"])
        await fake.cut()  # away for a moment
        await until(lambda: not client.joined)
        registry.models()
        assert list(prompts.stats()) == ["demo"]
        fake.behaviour.tokenizer = other = tokenisers.llama3()
        await fake.restart(tokenizer=other.fingerprint(), model="another")
        await until(lambda: client.joined and client.model == "another")
        registry.models()
        assert list(prompts.stats()) == ["another"]


async def test_what_an_engine_counts_is_in_the_stats_and_the_metrics() -> None:
    stats = {"evictions": 5, "leases": {"kept": 1, "tenants": {"anonymous": {"blocks": 9}}}}
    async with whole(engines=2, stats=stats) as all_of_it, aiohttp.ClientSession(all_of_it.url) as session:
        await all_of_it.ask(user((BOOK, "5m")))
        async with session.get("/admin/stats") as answer:
            engines = (await answer.json())["engines"]
        assert [(engine["evictions"], engine["leases"]["kept"]) for engine in engines] == [(5, 1), (5, 1)]
        async with session.get("/metrics") as answer:
            metrics = await answer.text()
        assert metrics.count("kvasir_engine_evictions_total{") == 2
        assert 'kvasir_breakpoint_requests_total{lease="kept",model="demo",tenant="anonymous"} 1.0' in metrics


async def test_what_was_used_saved_and_remembered_is_on_the_operators_pages() -> None:
    async with whole(finish="stop") as all_of_it, aiohttp.ClientSession(all_of_it.url) as session:

        async def page(path: str, **asked: Any) -> Any:
            async with session.request("POST" if asked else "GET", path, json=asked or None) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        usage, first = await all_of_it.ask({"role": "user", "content": BOOK}, temperature=0)
        _, again = await all_of_it.ask({"role": "user", "content": BOOK}, temperature=0)
        assert (first["x-kvasir-cache"], again["x-kvasir-cache"]) == ("miss", "exact")
        total = (await page("/admin/ledger"))["total"]
        assert (total["requests"], total["used"]["prompt_tokens"]) == (2, usage.prompt_tokens)
        assert total["saved"]["exact"]["tokens"] == usage.total_tokens

        (kept,) = (await page("/admin/cache"))["data"]
        assert kept["id"] == first["x-kvasir-cache-key"]
        shown = await page("/admin/cache/invalidate", id=kept["id"])
        assert (await page("/admin/cache/invalidate", id=kept["id"], confirm=shown["confirm"]))["removed"] == 1
        assert len(all_of_it.submits) == 1
        _, anew = await all_of_it.ask({"role": "user", "content": BOOK}, temperature=0)
        assert (anew["x-kvasir-cache"], len(all_of_it.submits)) == ("miss", 2)


async def test_a_wish_that_no_engine_would_grant_stops_the_start() -> None:
    with pytest.raises(ValueError, match=r"24h is more than engine\.lease_max_s, 43200 s"):
        Settings(leases=LeaseSettings(ttls=("24h",)))


def test_keys_of_upstreams_come_from_the_environment_and_have_to_be_there() -> None:
    upstream = {"name": "a", "url": "http://a.test", "models": ["m"]}
    settings = Settings.model_validate({"upstreams": [{**upstream, "key_env": "A_KEY"}]})
    assert upstream_keys(settings, {"A_KEY": " sk-secret\n"}) == {"a": "sk-secret"}
    with pytest.raises(ConfigError, match="key_env of 'a': A_KEY is not set"):
        upstream_keys(settings, {"A_KEY": ""})
    assert upstream_keys(Settings.model_validate({"upstreams": [upstream]}), {}) == {}


def test_keys_of_replicas_come_from_the_file_or_the_environment() -> None:
    replica = {"kind": "vllm", "url": "http://a.test"}
    tables = [{**replica, "name": "a", "api_key_env": "A_KEY"}, {**replica, "name": "b", "key": "sk-b"}]
    settings = Settings.model_validate({"replicas": [*tables, {**replica, "name": "c"}]})
    assert replica_keys(settings, {"A_KEY": "sk-a"}) == {"a": "sk-a", "b": "sk-b"}
    with pytest.raises(ConfigError, match="replicas: api_key_env of 'a': A_KEY is not set"):
        replica_keys(settings, {})


def test_the_example_of_upstreams_is_one_that_works() -> None:
    file = Path(__file__).parent.parent.parent / "deploy/examples/upstreams.toml"
    settings = load(Settings, file=file, environ={}, flags={})
    environ = {f"{name}_API_KEY": "sk" for name in ("OPENAI", "ANTHROPIC", "GEMINI")}
    assert set(upstream_keys(settings, environ)) == {"openai", "anthropic", "gemini"}


def test_the_example_of_a_fleet_is_one_that_works() -> None:
    file = Path(__file__).parent.parent.parent / "deploy/examples/fleet.toml"
    settings = load(Settings, file=file, environ={}, flags={})
    assert set(replica_keys(settings, {"REPLICA_API_KEY": "sk"})) == {"gpu-1", "gpu-2"}
    assert {one.served.served for one in settings.replicas if one.served} == {"qwen"}
    assert part_of(settings, 0).replicas == settings.replicas


async def test_gateways_on_one_redis_share_the_limits_of_tenants(redis_url: str) -> None:
    settings = Settings(limits=LimitSettings(requests_per_minute=3, max_in_flight=2))
    redis = connect(redis_url, 5.0)
    gateways = [Gateway(settings, redis, redis_url) for _ in range(2)]
    try:
        for gateway in gateways:
            assert await gateway.limits.set_aside([ANONYMOUS], Need()) is not None
        with pytest.raises(RateLimitError, match="concurrent requests: Limit 2, Used 2"):
            await gateways[0].limits.set_aside([ANONYMOUS], Need())
    finally:
        for gateway in gateways:
            await gateway.limits.close()
            gateway.prompts.close()
            gateway.embedder.close()
        await redis.aclose()


@pytest.mark.parametrize(
    ("config", "there"),
    [
        ("", False),
        ("[semantic_cache]\nmode = 'ask'\n", True),
        ("[[tenants]]\nname = 'a'\nkeys = ['key-of-a-1']\nsemantic_cache = 'on'\n", True),
        ("[[tenants]]\nname = 'a'\nkeys = ['key-of-a-1']\nsemantic_cache = 'off'\n", False),
    ],
)
def test_the_semantic_cache_is_there_where_somebody_may_use_it(config: str, there: bool, tmp_path: Path) -> None:
    file = tmp_path / "kvasir.toml"
    file.write_text(config)
    gateway = Gateway(load(Settings, file=file, environ={}, flags={}), None, None)
    try:
        assert (gateway.semantic_cache is not None) is there
    finally:
        gateway.embedder.close()
        gateway.prompts.close()


@pytest.mark.parametrize(("allowed", "outcome"), [(False, "miss"), (True, "semantic")])
async def test_in_shared_namespaces_the_semantic_cache_is_off_unless_the_settings_say_otherwise(
    allowed: bool, outcome: str
) -> None:
    namespace = {"name": "n", "tenants": ["*"], **({"semantic_cache": True} if allowed else {})}
    tenants = [{"name": "a", "keys": ["key-of-a-1"]}]
    semantic = {"mode": "on", "judged": False, "lookup_timeout_s": 60}
    given = {"semantic_cache": semantic, "tenants": tenants, "namespaces": [namespace]}
    gateway = Gateway(Settings.model_validate(given), None, None)

    async def generate(request: Request) -> AsyncGenerator[Event, None]:
        yield Started("engine-1", Usage(10, 0))
        yield TextDelta("Click on it.")
        yield Finished("stop", Usage(10, 3))

    async with AsyncExitStack() as stack:
        close_with(stack, gateway)
        for tenant, text in (("a", "How do I reset my password?"), ("b", "how can i reset my password")):
            request = chat(text, tenant=tenant, scope=Scope(namespace="n"))
            async with aclosing(gateway.response_cache.answer(request, MODEL, generate)) as events:
                assert [event async for event in events]
    assert request.trace.lookup is not None
    assert request.trace.lookup.outcome == outcome


async def test_what_an_audit_of_the_semantic_cache_used_is_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)  # every hit is audited
    settings = Settings.model_validate({"semantic_cache": {"mode": "on", "lookup_timeout_s": 60}})
    gateway = Gateway(settings, None, None)
    assert gateway.semantic_cache is not None
    gateway.semantic_cache.start()

    async def generate(request: Request) -> AsyncGenerator[Event, None]:
        trace = request.trace
        trace.first_token_ms, trace.prompt_tokens, trace.completion_tokens = 1.0, 10, 3
        yield Started("engine-1", Usage(10, 0))
        yield TextDelta("Click on it.")
        yield Finished("stop", Usage(10, 3))

    outcomes = []
    for text in ("How do I reset my password?", "how can i reset my password"):
        request = chat(text)
        async with aclosing(gateway.response_cache.answer(request, MODEL, generate)) as events:
            assert [event async for event in events]
        assert request.trace.lookup is not None
        outcomes.append(request.trace.lookup.outcome)
    assert outcomes == ["miss", "semantic"]
    await until(lambda: bool(gateway.ledger.totals))
    ((row, figures),) = gateway.ledger.totals.items()
    assert (row.tenant, row.model, row.lane) == ("a", "demo", "audit")
    assert (figures["prompt_tokens"], figures["completion_tokens"], "requests" in figures) == (10, 3, False)
    await gateway.semantic_cache.close()
    gateway.embedder.close()
    gateway.prompts.close()


async def test_what_an_audit_has_used_is_in_the_ledger_when_the_gateway_is_closed_before_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)  # every hit is audited
    settings = Settings.model_validate({"semantic_cache": {"mode": "on", "lookup_timeout_s": 60}})
    gateway = Gateway(settings, None, None)
    assert gateway.semantic_cache is not None
    asked: list[Request] = []

    async def generate(request: Request) -> AsyncGenerator[Event, None]:
        asked.append(request)
        trace = request.trace
        trace.first_token_ms, trace.prompt_tokens, trace.completion_tokens = 1.0, 10, 3
        yield Started("engine-1", Usage(10, 0))
        yield TextDelta("Click on it.")
        if len(asked) > 1:
            await asyncio.Event().wait()
        yield Finished("stop", Usage(10, 3))

    async with AsyncExitStack() as stack:
        close_with(stack, gateway)
        for text in ("How do I reset my password?", "how can i reset my password"):
            async with aclosing(gateway.response_cache.answer(chat(text), MODEL, generate)) as events:
                assert [event async for event in events]
        await until(lambda: len(asked) == 2)
        assert not gateway.ledger.totals
    assert gateway.ledger.pending == 0, "it was written"
    ((row, figures),) = gateway.ledger.totals.items()
    assert (row.lane, figures["prompt_tokens"], figures["completion_tokens"]) == ("audit", 10, 3)


def test_without_the_extra_the_semantic_cache_says_so_and_exact_answers_are_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.responses.embedding.text_model.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        gateway = Gateway(Settings.model_validate({"semantic_cache": {"mode": "on"}}), None, None)
    assert gateway.semantic_cache is None
    assert any("extra `semantic`" in record.getMessage() for record in caplog.records)
    gateway.embedder.close()
    gateway.prompts.close()


@pytest.mark.parametrize("tenants", [(), (TenantSettings(name="north", keys=("north-key-1",)),)])
async def test_what_is_said_at_the_start_names_a_key_that_opens_the_server(tenants: tuple[TenantSettings, ...]) -> None:
    async with AsyncExitStack() as stack:
        gateway = Gateway(Settings(tenants=tenants), None, None)
        close_with(stack, gateway)
        told: list[str] = []
        _introduce(gateway, 1, False, told.append)
    assert ('api_key="any"' in told[0], "north-key-1" in told[0]) == (not tenants, False)


async def test_every_answer_says_what_was_predicted_beside_what_was_reused() -> None:
    async with whole(engines=2) as all_of_it:
        said = []
        for text in (BOOK, BOOK, BOOK + " And then?"):
            _, headers = await all_of_it.ask({"role": "user", "content": text})
            said.append((headers["x-kvasir-predicted-tokens"], headers["x-kvasir-cached-tokens"]))
            memory, engines = all_of_it.gateway.memory, all_of_it.engines
            await until(lambda: all(memory.blocks(one.hello.incarnation) == len(one.held) for one in engines))  # noqa: B023
        assert all(predicted == cached for predicted, cached in said)
        assert said[0] == ("0", "0")
        assert int(said[2][0]) > 100
        statuses = [one.receipts for one in all_of_it.gateway._engine_statuses()]
        assert sum(one.get("receipts", 0) for one in statuses) == sum(one.get("exact", 0) for one in statuses) == 3
        async with aiohttp.ClientSession() as session, session.get(f"{all_of_it.url}/metrics") as answer:
            text = await answer.text()
        assert re.search(
            r'^kvasir_engine_receipts_exact_total\{engine="[^"]+",model="demo"\} [1-3]', text, re.MULTILINE
        )


async def test_an_index_that_predicts_what_is_not_there_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with whole(redis_url=None) as all_of_it:
        await all_of_it.ask({"role": "user", "content": BOOK})
        (engine,) = all_of_it.engines
        incarnation = engine.hello.incarnation
        await until(lambda: all_of_it.gateway.memory.blocks(incarnation) == len(engine.held) > 0)
        engine.behaviour.cached_tokens, engine.behaviour.stores_blocks = 0, False
        for number in range(11):
            assert all_of_it.gateway.memory.blocks(incarnation), f"after {number} requests"
            await all_of_it.ask({"role": "user", "content": BOOK})
        assert not all_of_it.gateway.memory.blocks(incarnation)
        assert [line for line in caplog.messages if line.startswith("index of engine")]
        _, headers = await all_of_it.ask({"role": "user", "content": BOOK})
        assert headers["x-kvasir-predicted-tokens"] == "0"


async def test_a_tenant_made_by_one_worker_is_one_of_the_other_with_its_limits_and_modes(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "server": {"data_dir": tmp_path},
            "tenants": [{"name": "north", "keys": ["north-key-1"]}],
        }
    )
    async with AsyncExitStack() as stack:
        here, there = Gateway(settings, None, None), Gateway(settings, None, None)
        for one in (here, there):
            close_with(stack, one)
            one.web_app()
        await here.directory.make_tenant({"name": "south", "max_in_flight": 1, "response_cache": "off"}, ())
        assert here.limits.has("south")
        assert not there.limits.has("south")
        assert await there.directory.refresh()
        assert there.limits.has("south")
        assert there.response_cache.modes == {"south": "off"}
        there.plan(settings.model_copy(update={"limits": LimitSettings(requests_per_minute=9)}), {})()
        assert there.limits.has("north")
        assert there.response_cache.modes == {"south": "off"}, "a reload of the file keeps what was made"
        assert await there.directory.remove_tenant("south") == 0
        assert not there.limits.has("south")
