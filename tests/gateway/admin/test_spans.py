"""Traces, as a collector gets them: all of the gateway over an engine without a model, upstreams and replicas."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine.config import ConfigError
from gateway.admin import otel
from gateway.admin.otel import Exporter
from gateway.admin.spans import OPERATIONS, Spans, operation_of
from gateway.api.lines import LineRequest
from gateway.api.routes import ROUTES, RUNNER
from gateway.app import Gateway
from gateway.config import OtelSettings, ResponseCacheSettings, Settings, TenantSettings
from gateway.types import Tenant
from tests.fakes.collector import Collector, Told, collector
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.gateway import make_app, running
from tests.fakes.upstream import CHAT, CHAT_STREAM, MESSAGE, StubUpstream, error, upstream
from tests.fakes.waiting import until
from tests.fakes.whole import whole

SECRET_TEXT = "the lighthouse keeper counted seventeen ships"
KEY = "kv-very-secret-key"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
NEVER_MS = 3_600_000.0
SERVER, CLIENT, INTERNAL = 2, 3, 1
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EVERY_MS", 20.0)


@dataclass
class Setup:
    """A gateway with traces, a collector, and an upstream for `up-1`. `engine` is only there `over_all_stages`."""

    url: str
    there: Collector
    hosted: StubUpstream
    exporter: Exporter
    app: web.Application
    engine: FakeEngine | None = None

    async def post(self, model: str = "demo", headers: Mapping[str, str] = NO_HEADERS, **more: Any) -> int:
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        body = {"model": model, "messages": [{"role": "user", "content": SECRET_TEXT}], "max_tokens": 3, **more}
        url = f"{self.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status


NORTH = TenantSettings(name="north", keys=(KEY,))


@asynccontextmanager
async def traced(*answers: Any, sample: float = 1.0, endpoint: str = "") -> AsyncIterator[Setup]:
    """Over a pipeline that answers by itself."""
    async with collector() as there, upstream(*(answers or (CHAT,))) as hosted:
        exporter = Exporter(endpoint or there.url, "0.0.test")
        exporter.start()
        spans = Spans(sample, exporter.add)
        async with running(spans=spans, tenants=[NORTH], upstreams=[hosted.settings("up-1")]) as gateway:
            yield Setup(gateway.url, there, hosted, exporter, gateway.app)
        await exporter.close()


@asynccontextmanager
async def over_all_stages(*answers: Any, dialect: str = "openai", **sections: Any) -> AsyncIterator[Setup]:
    """As app.py wires them, and an engine without a model."""
    async with collector() as there, upstream(*(answers or (CHAT,))) as hosted:
        sections = {
            "otel": OtelSettings(endpoint=there.url, sample=1.0),
            "tenants": (NORTH,),
            "upstreams": (hosted.settings("up-1", dialect=dialect),),
            **sections,
        }
        async with whole(sections=sections) as gateway:
            exporter = gateway.gateway.exporter
            assert exporter is not None
            yield Setup(gateway.url, there, hosted, exporter, gateway.app, gateway.engines[0])


async def root_of(there: Collector) -> Told:
    """The only one."""
    await until(lambda: there.roots)
    (root,) = there.roots
    return root


def stages(there: Collector, root: Told) -> list[str]:
    return [one.name for one in there.children(root) if one.kind == INTERNAL]


async def test_a_chat_is_a_span_with_a_child_for_each_stage_and_none_of_its_text() -> None:
    async with over_all_stages() as setup:
        before_ns = time.time_ns()
        assert await setup.post() == 200
        root = await root_of(setup.there)
        assert (root.name, root.kind, root.parent_id, root.status) == ("chat demo", SERVER, "", 0)
        assert before_ns <= root.begin_ns < root.end_ns <= time.time_ns()
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "kvasir",
            "gen_ai.request.model": "demo",
            "gen_ai.response.model": "demo",
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.response.finish_reasons": ("length",),
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "kvasir.tenant": "north",
            "kvasir.lane": "online",
            "kvasir.hit": "miss",
        }
        assert {name: root.attributes.get(name) for name in expected} == expected
        assert root.attributes["gen_ai.usage.input_tokens"] > 5
        assert stages(setup.there, root) == ["admit", "prompt", "index", "queue", "prefill", "decode"]
        children = setup.there.children(root)
        assert {child.trace_id for child in children} == {root.trace_id}
        assert len({child.span_id for child in (root, *children)}) == 1 + len(children)
        assert children[0].begin_ns == root.begin_ns
        assert children[-1].end_ns == root.end_ns
        assert all(one.end_ns == other.begin_ns for one, other in itertools.pairwise(children))
        (resource,) = setup.there.resources[:1]
        assert resource["service.name"] == "kvasir"
        assert resource["telemetry.sdk.name"] == "opentelemetry"
        for secret in (SECRET_TEXT, *SECRET_TEXT.split(" ")[1:3], KEY, KEY[3:]):
            assert secret.encode() not in setup.there.raw


async def test_a_remembered_answer_is_a_look_up_in_the_response_cache() -> None:
    sections = {"response_cache": ResponseCacheSettings(mode="on", requests="all", truncated=True)}
    async with over_all_stages(**sections) as setup:
        for count in (1, 2, 3):  # generated, from the cache, from the resend path
            await setup.post()
            await until(lambda count=count: len(setup.there.roots) == count)
        by_hit = {one.attributes["kvasir.hit"]: one for one in setup.there.roots}
        assert stages(setup.there, by_hit["miss"])[:3] == ["admit", "response cache", "prompt"]
        assert [stages(setup.there, one) for one in setup.there.roots[1:]] == [["admit", "response cache"]] * 2
        assert by_hit["exact"].attributes["gen_ai.usage.output_tokens"] == 3


async def test_a_stream_says_when_its_first_chunk_came() -> None:
    async with traced() as setup:
        await setup.post(stream=True)
        root = await root_of(setup.there)
        assert root.attributes["gen_ai.request.stream"] is True
        first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
        assert 0 < first_s < (root.end_ns - root.begin_ns) / 1e9


@pytest.mark.parametrize("answer", [CHAT, CHAT_STREAM], ids=["whole", "stream"])
async def test_an_upstream_gets_the_trace_and_the_span_of_its_call_as_parent(answer: Any) -> None:
    async with traced(answer) as setup:
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1, other=2"}
        assert await setup.post("up-1", headers=headers, stream=answer is CHAT_STREAM) == 200
        root = await root_of(setup.there)
        assert (root.trace_id, root.parent_id, root.state) == (TRACE, CALLER, "vendor=1,other=2")
        assert root.attributes["gen_ai.provider.name"] == "openai"
        assert root.attributes["gen_ai.usage.input_tokens"] == 100
        assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
        assert root.attributes["kvasir.engine"] == "up"
        (call,) = (one for one in setup.there.children(root) if one.kind == CLIENT)
        assert (call.name, call.status) == ("chat up-1", 0)
        assert call.attributes["http.response.status_code"] == 200
        assert root.begin_ns <= call.begin_ns < call.end_ns <= root.end_ns
        (got,) = setup.hosted.got
        assert got.headers["traceparent"] == f"00-{TRACE}-{call.span_id}-01"
        assert got.headers["tracestate"] == "vendor=1,other=2"


async def test_a_translated_request_carries_the_trace_too() -> None:
    async with over_all_stages(MESSAGE, dialect="anthropic") as setup:
        assert await setup.post("up-1") == 200
        root = await root_of(setup.there)
        (call,) = (one for one in setup.there.children(root) if one.kind == CLIENT)
        assert setup.hosted.got[0].headers["traceparent"] == f"00-{root.trace_id}-{call.span_id}-01"
        assert call.attributes["gen_ai.provider.name"] == root.attributes["gen_ai.provider.name"] == "anthropic"


async def test_each_try_is_a_span_and_an_error_has_its_type() -> None:
    async with traced(error(500), error(500), error(500)) as setup:
        assert await setup.post("up-1") == 500
        root = await root_of(setup.there)
        assert (root.status, root.attributes["error.type"]) == (2, "500")
        calls = [one for one in setup.there.children(root) if one.kind == CLIENT]
        assert len(calls) == len(setup.hosted.got) > 1
        assert {(one.status, one.attributes["error.type"]) for one in calls} == {(2, "500")}
        parents = [got.headers["traceparent"].split("-")[2] for got in setup.hosted.got]
        assert parents == [call.span_id for call in calls]


async def test_a_request_that_is_refused_says_why_and_is_no_fault_of_the_server() -> None:
    async with traced() as setup:
        assert await setup.post(messages=[{"role": SECRET_TEXT}]) == 400
        root = await root_of(setup.there)
        assert (root.status, root.attributes["error.type"]) == (0, "BadRequest")
        assert root.attributes["http.response.status_code"] == 400
        assert stages(setup.there, root) == ["admit"]
        assert SECRET_TEXT.encode() not in setup.there.raw


async def test_a_client_that_leaves_ends_the_span_where_it_was() -> None:
    async with over_all_stages() as setup:
        assert setup.engine is not None
        setup.engine.behaviour.silent = True
        asking = asyncio.create_task(setup.post())
        await until(lambda: setup.engine is not None and setup.engine.submits)
        asking.cancel()
        await asyncio.wait([asking])
        root = await root_of(setup.there)
        assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (499, "client_left")
        assert stages(setup.there, root)[-2:] == ["queue", "prefill"]
        assert (root.status, root.attributes["kvasir.engine"]) == (0, setup.engine.url.removeprefix("http://"))


async def test_a_line_of_a_batch_is_a_trace_of_its_own() -> None:
    async with traced() as setup:
        for number in range(2):
            body = {"model": "demo", "messages": [{"role": "user", "content": SECRET_TEXT}], "max_tokens": 3}
            line = LineRequest("/v1/chat/completions", Tenant("north"), body, request_id=f"line-{number}")
            assert (await setup.app[RUNNER].answer(line)).status == 200
        await until(lambda: len(setup.there.roots) == 2)
        one, other = setup.there.roots
        assert one.trace_id != other.trace_id
        for root in (one, other):
            assert (root.parent_id, root.kind, root.attributes["kvasir.lane"]) == ("", INTERNAL, "batch")
            assert root.attributes["kvasir.endpoint"] == "/v1/chat/completions (batch)"
            assert "http.route" not in root.attributes


async def test_what_goes_on_in_the_background_is_in_the_trace_of_its_request() -> None:
    async with traced() as setup:
        body = {"model": "demo", "input": SECRET_TEXT, "max_output_tokens": 16, "background": True}
        headers = {"Authorization": f"Bearer {KEY}", "traceparent": SAMPLED}
        url = f"{setup.url}/v1/responses"
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
        await until(lambda: len(setup.there.roots) == 2)
        work, request = sorted(setup.there.roots, key=lambda one: one.kind)
        assert (request.parent_id, request.kind, work.kind) == (CALLER, SERVER, INTERNAL)
        assert (work.trace_id, work.parent_id) == (TRACE, request.span_id)
        assert work.attributes["gen_ai.usage.output_tokens"] > 0
        assert "gen_ai.usage.output_tokens" not in request.attributes


async def test_the_callers_decision_holds_and_without_one_a_share_is_sampled() -> None:
    async with traced(sample=0.0) as setup:
        await setup.post("up-1", headers={"traceparent": NOT_SAMPLED})
        await setup.post("up-1")
        await setup.post("up-1", headers={"traceparent": SAMPLED, "tracestate": "not valid"})
        root = await root_of(setup.there)
        assert root.trace_id == TRACE
        first, second, third = [got.headers["traceparent"].split("-") for got in setup.hosted.got]
        assert (first[1], first[3]) == (TRACE, "00")
        assert first[2] != CALLER
        assert (second[1] != TRACE, second[3]) == (True, "00")
        assert (third[1], third[3]) == (TRACE, "01")
        assert not any("tracestate" in got.headers for got in setup.hosted.got)
        await until(lambda: setup.exporter.figures() == {"exported": 1, "failed": 0, "dropped": 0})


async def test_without_traces_that_of_a_client_passes_to_upstreams_untouched() -> None:
    headers = {"traceparent": "of a client", "tracestate": "a=b"}
    body = {"model": "up-1", "messages": [{"role": "user", "content": "Hi"}]}
    async with upstream() as hosted, running(upstreams=[hosted.settings()]) as gateway:
        await gateway.post("/v1/chat/completions", body, headers=headers)
        assert headers.items() <= dict(hosted.got[0].headers).items()


async def test_the_line_of_a_request_has_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with traced() as setup:
        await setup.post(headers={"traceparent": SAMPLED})
        await until(lambda: any(f"trace_id={TRACE}" in one.getMessage() for one in caplog.records))


async def test_a_collector_that_refuses_costs_two_lines_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async with traced() as setup:
        setup.there.status = 400
        for count in (1, 2, 3):
            assert await setup.post() == 200
            await until(lambda count=count: setup.exporter.figures()["failed"] == count)
        setup.there.status = 200
        assert await setup.post() == 200
        await root_of(setup.there)
    lines = [one.getMessage() for one in caplog.records if "opentelemetry" in one.name or "traces:" in one.getMessage()]
    assert len(lines) == 2
    assert re.search(r"does not take spans.*400, reason: Bad Request", lines[0])
    assert "takes spans again" in lines[1]


async def test_a_stop_does_not_wait_for_a_collector_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async with traced(endpoint="http://127.0.0.1:9") as setup:
        assert await setup.post() == 200
        began_s = time.monotonic()
        await setup.exporter.close()
        assert time.monotonic() - began_s < 5.0  # the exporter alone would try for ten seconds
        await until(lambda: setup.exporter.figures()["failed"] == 1)
    (line,) = [one.getMessage() for one in caplog.records if "traces:" in one.getMessage()]
    assert "Connection refused" in line


@pytest.mark.parametrize("headers", ["Bearer the-key-of-the-collector", "authorization=the-key%0Aof-the-collector"])
async def test_a_header_for_the_collector_that_is_not_valid_is_not_quoted(
    headers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    async with traced() as setup:
        await setup.post()
        await until(lambda: setup.exporter.figures()["exported"] + setup.exporter.figures()["failed"] == 1)
    assert "a header of OTEL_EXPORTER_OTLP_HEADERS is not valid" in caplog.text
    assert "collector" not in caplog.text.replace("the collector at", "")


async def test_what_waits_for_the_collector_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_PENDING", 2), ("AT_ONCE", 2), ("EVERY_MS", NEVER_MS)):
        monkeypatch.setattr(otel, name, value)
    async with traced() as setup:
        monkeypatch.setattr(setup.exporter._spans, "export", lambda spans: None)
        for _ in range(5):
            await setup.post()
        assert setup.exporter.figures() == {"exported": 0, "failed": 0, "dropped": 3}


async def test_spans_of_the_last_requests_are_exported_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EVERY_MS", NEVER_MS)
    async with traced() as setup:
        await setup.post()
        await setup.exporter.close()
        assert len(setup.there.roots) == 1


def test_without_the_extra_the_start_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.admin.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    settings = Settings(otel=OtelSettings(endpoint="http://127.0.0.1:4318"))
    with pytest.raises(ConfigError, match=r"\[otel\] needs opentelemetry\.sdk\.resources: install the extra `otel`"):
        Gateway(settings, None, None)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://there:4317", "http://me:secret@there:4318"])
def test_an_endpoint_has_to_be_an_url_and_is_not_quoted(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"otel\.endpoint") as refused:
        OtelSettings(endpoint=endpoint)
    assert "secret" not in refused.value.errors()[0]["msg"]  # type: ignore[attr-defined]


def test_every_route_that_answers_with_a_model_has_spans() -> None:
    routes = [route for own in make_app()[ROUTES].values() for route in own if route.passes is not None]
    counts = ("countTokens", "count_tokens", "input_tokens")
    wanted = {route.path for route in routes if not route.path.endswith(counts)}
    assert {route.path for route in routes if operation_of(route.path) is not None} == wanted
    assert {operation_of(path) for path in wanted} == set(OPERATIONS.values())
    assert operation_of("/v1/files") is operation_of("unknown") is operation_of("/v1/models/{model:.+}") is None
