"""Prompts of [[warm]]: computed where an engine comes up, kept, and counted before the gateway is called ready."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.api.aliases import Aliases
from gateway.api.answering import Answering
from gateway.api.routes import WARMING
from gateway.api.tenants import Namespaces
from gateway.api.warming import MAX_RETRY_S, RENEW_SHARE, RETRY_S, Warming, warm_targets
from gateway.config import ConfigError, LimitSettings, Settings
from gateway.errors import NoEngineError, OverloadedError
from gateway.limits.counters import MemoryCounters, SharedCounters
from gateway.limits.limits import TenantLimits
from gateway.types import ChatPrompt, Trace
from tests.fakes.cached_gemini import KEY, cached_gemini
from tests.fakes.clock import Clock
from tests.fakes.gateway import make_app, running
from tests.fakes.hosted import answers
from tests.fakes.pipeline import FakeDecoders, FakeModels, FakePipeline, hello
from tests.fakes.upstream import error, upstream
from tests.fakes.whole import whole

RULES = "You are the clerk of a railway station. A passenger of class 1 may take 3 bags. " * 4
ENTRY: dict[str, Any] = {"model": "demo", "text": RULES}
TENANTS: list[dict[str, Any]] = [{"name": name, "keys": [f"{name}-key-1"]} for name in ("north", "south", "east")]


@dataclass
class FakeClaims:
    """Of gateways that share a Redis."""

    taken: dict[str, float] = field(default_factory=dict)

    async def take(self, name: str, ttl_s: float) -> bool:
        if name in self.taken:
            return False
        self.taken[name] = ttl_s
        return True

    async def drop(self, name: str) -> None:
        del self.taken[name]


class Bench:
    """Warming over a fake pipeline, with a clock that stands."""

    def __init__(self, *entries: Mapping[str, Any], **sections: Any) -> None:
        self.settings = Settings.model_validate({"warm": entries, **sections})
        self.clock, self.pipeline, self.models = Clock(), FakePipeline(), FakeModels()
        self.costs: list[tuple[str, str, int]] = []
        limits = SharedCounters(None, MemoryCounters(lease_s=60.0))
        named = Namespaces(self.settings.namespaces, self.settings.tenants, "separate")
        of_tenants = TenantLimits(LimitSettings(), (), limits)
        pipeline: Any = self.pipeline
        nothing: Any = None
        self.answering = Answering(
            self.settings.server,
            named,
            pipeline,
            self.models,
            FakeDecoders(),
            {},
            of_tenants,
            nothing,
            nothing,
            line_timeout_s=60.0,
        )
        targets = warm_targets(self.settings, self.answering, Aliases(self.settings.aliases))
        server = self.settings.server
        self.warming = Warming(server, targets, self.answering, self.audited, None, clock=self.clock, wall=self.clock)

    def audited(self, tenant: str, model: str, trace: Trace, total_ms: float) -> None:
        self.costs.append((tenant, model, trace.prompt_tokens))

    async def look(self) -> int:
        """Computes what is due, one after the other. How many requests that made."""
        before = -1
        began = len(self.pipeline.requests)
        while before != len(self.pipeline.requests):
            before = len(self.pipeline.requests)
            self.warming.look()
            await self.warming.settled()
        return before - began

    def place(self, name: str = "engine-1", prompt: int = 0) -> dict[str, Any]:
        shown: dict[str, Any] = self.warming.figures()["prompts"][prompt]["places"][name]
        return shown


async def test_every_engine_computes_it_in_the_batch_lane_and_leases_it_for_the_next_request() -> None:
    async with whole(engines=2, sections={"warm": [ENTRY]}) as running:
        warming = running.gateway.warming
        assert warming is not None
        warming.look()
        await warming.settled()
        submits = [engine.submits for engine in running.engines]
        assert [len(one) for one in submits] == [1, 1]
        for (submit,) in submits:
            assert (submit.lane, submit.sampling.max_tokens, len(submit.breakpoints)) == ("batch", 0, 1)
            assert submit.breakpoints[0].ttl_s == 3600
        usage, _ = await running.ask({"role": "system", "content": RULES}, {"role": "user", "content": "May I?"})
        warm, asked = submits[0][0], running.submits[-1]
        leased = 4 * warm.breakpoints[0].tokens
        assert asked.tokens[:leased] == warm.tokens[:leased]
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == warm.breakpoints[0].tokens
        totals = running.gateway.ledger.totals
        (audit,) = [figures for row, figures in totals.items() if row.lane == "audit"]
        assert audit["prompt_tokens"] == 2 * len(warm.tokens) // 4
        assert "requests" not in audit
        assert "prefix_tokens" not in audit
        (prompt,) = warming.figures()["prompts"]
        assert RULES not in json.dumps(prompt)
        assert all(place["computed_at"] and place["lease"] == "kept" for place in prompt["places"].values())


async def test_it_is_computed_again_before_it_ends_and_where_an_engine_was_restarted() -> None:
    bench = Bench(ENTRY | {"ttl": "10m"})
    assert await bench.look() == 1
    assert await bench.look() == 0
    bench.clock.now_s += 600 * RENEW_SHARE - 1
    assert await bench.look() == 0
    bench.clock.now_s += 1
    assert await bench.look() == 1
    bench.models.hellos = [hello(incarnation="demo-2")]
    assert await bench.look() == 1
    assert bench.costs == [("anonymous", "demo", 40)] * 3
    groups = [request.group and request.group.incarnation for request in bench.pipeline.requests]
    assert groups == ["demo-1", "demo-1", "demo-2"]
    assert all(request.prewarm and request.lane == "batch" for request in bench.pipeline.requests)


async def test_it_is_computed_once_for_all_that_share_blocks() -> None:
    shared = {"name": "book", "tenants": ["north", "south"]}
    own = Bench(ENTRY, tenants=TENANTS)
    assert await own.look() == 3
    assert len({request.salt for request in own.pipeline.requests}) == 3
    some = Bench(ENTRY | {"tenants": ["east"]}, tenants=TENANTS)
    await some.look()
    assert [request.tenant.name for request in some.pipeline.requests] == ["east"]
    named = Bench(ENTRY | {"namespace": "book"}, tenants=TENANTS, namespaces=[shared])
    assert await named.look() == 1
    default = Bench(ENTRY, tenants=TENANTS, namespaces=[shared | {"default": True}])
    await default.look()
    assert [request.tenant.name for request in default.pipeline.requests] == ["north", "east"]
    aliased = Bench(ENTRY | {"model": "clerk"}, aliases=[{"name": "clerk", "target": "demo"}])
    await aliased.look()
    assert [request.model for request in aliased.pipeline.requests] == ["demo"]


async def test_a_file_has_a_system_prompt_or_the_body_of_a_chat(tmp_path: Path) -> None:
    text, chat = tmp_path / "rules.md", tmp_path / "chat.json"
    text.write_text(RULES, encoding="utf-8")
    tool = {"type": "function", "function": {"name": "bags", "parameters": {"type": "object"}}}
    messages = [{"role": "developer", "content": [{"type": "text", "text": RULES}]}, {"role": "user", "content": "Hi"}]
    chat.write_bytes(orjson.dumps({"messages": messages, "tools": [tool], "stream": True, "max_tokens": 5}))
    bench = Bench(*({"model": "demo", "file": str(path)} for path in (text, chat)))
    assert await bench.look() == 2
    of_text, of_chat = [request.prompt for request in bench.pipeline.requests]
    assert isinstance(of_text, ChatPrompt)
    assert isinstance(of_chat, ChatPrompt)
    assert [(one.message, one.chars) for one in of_text.markers] == [(0, len(RULES))]
    assert [message["role"] for message in of_text.messages] == ["system", "user"]
    assert [(one.tool, one.message, one.chars) for one in of_chat.markers] == [(0, 0, 0), (None, 1, 2)]
    assert [message["content"] for message in of_chat.messages] == [RULES, "Hi"]
    assert of_chat.tools[0].name == "bags"


async def test_what_fails_says_why_and_is_tried_again_ever_later(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(ENTRY)
    bench.pipeline.fails_before = OverloadedError(f"no room for {RULES}", retry_after_s=1.0)
    for failures in range(1, 12):
        assert await bench.look() == 1
        place = bench.place()
        assert (place["failures"], place["computed_at"], place["failed"][:11]) == (failures, None, "no room for")
        bench.clock.now_s += min(RETRY_S * 2 ** (failures - 1), MAX_RETRY_S)
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "warm[0] of [[warm]] at engine-1" in line.getMessage()
    assert "railway" not in caplog.text
    bench.pipeline.fails_before = None
    await bench.look()
    assert bench.place()["computed_at"] == bench.clock.now_s
    assert (bench.place()["failures"], bench.place()["failed"]) == (0, None)


async def test_the_gateway_is_ready_when_an_engine_of_each_model_has_enough() -> None:
    bench = Bench(*[ENTRY] * 3, ENTRY | {"model": "big"}, server={"min_warm": 0.5})
    bench.models.hellos.append(hello("big"))
    bench.models.away = NoEngineError("demo", 1.0)
    await bench.look()
    reason = bench.warming.not_ready()
    assert reason == "no engine of demo has 2 of its [[warm]] prompts: the best one has 0"
    bench.models.away = None
    bench.warming.look()
    await bench.warming.settled()
    assert bench.place(prompt=0)["computed_at"]
    assert "the best one has 1" in (bench.warming.not_ready() or "")
    await bench.look()
    assert bench.warming.not_ready() is None
    bench.models.hellos = []
    await bench.look()
    assert bench.warming.not_ready() is None  # a restart later is no cold start


async def test_it_is_ready_without_them_in_the_end_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(ENTRY, server={"min_warm": 1, "warm_timeout_s": 20})
    bench.pipeline.fails_before = OverloadedError("full", retry_after_s=1.0)
    await bench.look()
    bench.clock.now_s += 19
    assert bench.warming.not_ready()
    caplog.clear()
    bench.clock.now_s += 1
    assert bench.warming.not_ready() is None
    assert bench.warming.not_ready() is None
    (line,) = caplog.messages
    assert line.startswith("ready after 20 s (server.warm_timeout_s), though no engine of demo has 1")
    assert Bench(ENTRY).warming.not_ready() is None


async def test_readiness_and_figures_are_on_the_admin_pages() -> None:
    state: dict[str, Any] = {"cold": "no engine of demo has 1 of its [[warm]] prompts: the best one has 0"}
    async with running() as gateway:
        gateway.state.update(state)
        status, text, _ = await gateway.get("/health/readiness")
        assert (status, json.loads(text)["reason"]) == (503, state["cold"])
        gateway.state["cold"] = None
        assert (await gateway.get("/health/readiness"))[0] == 200
        assert json.loads((await gateway.get("/admin/stats"))[1])["warm"] == {"entries": 0, "prompts": []}


async def test_a_hosted_cache_is_written_by_one_gateway_and_only_where_the_entry_says_so() -> None:
    told = answers("anthropic", ["Yes"], stream=False)
    async with upstream(error(400), told) as stub:
        table = {"name": "up", "url": stub.url, "dialect": "anthropic", "key": "sk", "models": ["up-1"], "retries": 0}
        entries = [{"model": "up-1", "text": RULES, "hosted": True}, {"model": "up-1", "text": "Not this."}]
        async with whole(engines=0, sections={"upstreams": [table], "warm": entries}) as running:
            clock, claims = Clock(), FakeClaims()
            answering: Answering = running.gateway.warming._answering  # type: ignore[union-attr]
            settings = running.gateway.settings
            two = [
                Warming(
                    settings.server,
                    warm_targets(settings, answering, Aliases(())),
                    answering,
                    lambda *_: None,
                    claims,
                    clock=clock,
                )
                for _ in range(2)
            ]
            for pause_s in (0, RETRY_S, MAX_RETRY_S):  # the first is refused, the second writes it
                clock.now_s += pause_s
                for warming in two:
                    warming.look()
                    await warming.settled()
    bodies = [got.json for got in stub.got]
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    assert (bodies[0]["max_tokens"], bodies[0]["messages"][0]["role"]) == (1, "user")
    (block,) = bodies[0]["system"]
    assert block == {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


async def test_a_cached_content_of_gemini_is_there_before_the_first_request() -> None:
    rules = RULES * 100
    async with cached_gemini() as fake:
        table = fake.settings().model_dump(exclude={"key"}) | {"headers": {"x-goog-api-key": KEY}}
        entry = {"model": "up-pro", "text": rules, "hosted": True}
        async with whole(engines=0, sections={"upstreams": [table], "warm": [entry]}) as running:
            assert running.gateway.warming is not None
            running.gateway.warming.look()
            await running.gateway.warming.settled()
            (held,) = fake.held.values()
            marked = {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}
            messages: Any = [{"role": "system", "content": [marked]}, {"role": "user", "content": "May I?"}]
            answer = await running.client.chat.completions.create(model="up-pro", messages=messages)
    assert fake.count("POST cachedContents") == 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == held.tokens > 1024


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"text": ""}, "has either text or file"),
        ({"text": "x", "file": "y"}, "has either text or file"),
        ({"text": "x", "ttl": "13h"}, "warm[0].ttl: 13h is more than engine.lease_max_s"),
        ({"text": "x", "ttl": "30m", "hosted": True}, "caches of hosted APIs keep a prefix for 5m or 1h, not 30m"),
        ({"text": "x", "tenants": ["west"]}, "'demo' is for 'west', which is no tenant"),
        ({"text": "x", "namespace": "book"}, "warm[0]: none of its tenants may use the namespace 'book'"),
        ({"file": "missing.txt"}, "warm[0] (missing.txt): [Errno 2] No such file"),
        ({"file": "list.json"}, "it is no JSON object"),
        ({"file": "empty.txt"}, "it is empty"),
        ({"file": "bad.json"}, "messages[0].role"),
        ({"file": "latin.txt"}, "'utf-8' codec can't decode"),
    ],
)
def test_what_cannot_be_computed_is_one_line_at_the_start(
    entry: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("empty.txt").write_text("  \n")
    Path("bad.json").write_text('{"messages": [{"role": "king", "content": "x"}]}')
    Path("latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises((ConfigError, ValueError)) as raised:
        Bench({"model": "demo", **entry})
    assert says in str(raised.value)


async def test_a_model_that_nothing_serves_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    up = {"name": "up", "url": "http://127.0.0.1:9", "dialect": "anthropic", "models": ["up-1"]}
    entries = [ENTRY, ENTRY | {"model": "nix"}, ENTRY | {"model": "up-1"}]
    async with whole(sections={"upstreams": [up], "warm": entries}) as running:
        assert running.gateway.warming is not None
        running.gateway.warming.warn_of_unknown_models()
    assert [line.partition(" prompts of model ")[2] for line in caplog.messages if "[[warm]]" in line] == [
        "nix are not computed: nothing here serves it; they are computed when an engine does",
        "up-1 are not computed: only an upstream serves it; `hosted = true` has it cached there, which costs money",
    ]


def test_an_application_without_entries_warms_nothing() -> None:
    assert make_app()[WARMING].figures() == {"entries": 0, "prompts": []}
