"""A server of others as an engine: it joins, answers, is lost, joins again. All of the gateway over fake servers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from aiohttp import web

from gateway import serving
from gateway.digests import UNSALTED, derived_salt
from gateway.replicas import joining
from gateway.replicas.secret import FILE, FleetSecret
from gateway.storage.redis_calls import RedisCalls, close, connect
from tests.fakes.collector import collector
from tests.fakes.replica_server import DEMO, ReplicaServer, replica_server
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

HELLO: Any = {"role": "user", "content": "Hello there. " * 20}
TOKENS = [44, 71, 71]


class Streams:
    """Answers of /v1/completions: three tokens, and the usage at the end. `hold` keeps them from going on after the
    first."""

    def __init__(self, cached: int = 0) -> None:
        self.cached = cached
        self.hold = asyncio.Event()
        self.hold.set()
        self.left = 0
        self.refuse: tuple[int, Any] | None = None
        self.headers: list[Mapping[str, str]] = []

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        if not body.get("stream"):  # the question at join whether usage has cached tokens
            details = {"prompt_tokens_details": {"cached_tokens": 0}}
            return web.json_response({"choices": [{"token_ids": [7]}], "usage": details})
        self.headers.append(http.headers.copy())
        if self.refuse is not None:
            return web.json_response(self.refuse[1], status=self.refuse[0])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        try:
            for at, token in enumerate(TOKENS):
                choice = {"index": 0, "text": "x", "token_ids": [token]}
                choice |= {"finish_reason": "length" if at == len(TOKENS) - 1 else None}
                await response.write(b"data: %b\n\n" % orjson.dumps({"choices": [choice]}))
                await self.hold.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": self.cached}}
        await response.write(b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"choices": [], "usage": usage}))
        return response


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_S", 0.05)
    monkeypatch.setattr(joining, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(joining, "LONGEST_RETRY_S", 0.1)


@asynccontextmanager
async def gateway_of(*servers: ReplicaServer, **sections: Any) -> AsyncIterator[Whole]:
    tables = [server.settings(f"r{number}", kv_events="off").model_dump() for number, server in enumerate(servers)]
    async with whole(engines=0, sections={"replicas": tables, **sections}) as running:
        running.gateway.attach_replicas()
        yield running


async def ready(running: Whole, count: int = 1) -> None:
    await until(lambda: sum(engine.joined for engine in running.gateway.registry.engines) == count)


def sent(server: ReplicaServer) -> list[dict[str, Any]]:
    return [body for path, body in server.got if path == "/v1/completions" and body.get("stream")]


async def test_a_request_goes_as_ids_and_its_usage_is_the_servers_own() -> None:
    streams = Streams(cached=16)
    async with replica_server(completions=streams) as server, gateway_of(server) as running:
        await ready(running)
        usage, headers = await running.ask(HELLO, temperature=0)
        (body,) = sent(server)
        assert usage.prompt_tokens == len(body["prompt"])
        assert usage.prompt_tokens_details.cached_tokens == 16
        assert headers["x-kvasir-cached-tokens"] == "16"
        assert headers["x-kvasir-engine"] == "r0"
        hello = running.gateway.registry.engines[0].hello
        assert hello.namespace.block_size == 16  # of the index; the server's are larger
        assert len(body["cache_salt"]) == 64


async def test_the_server_gets_the_trace_with_the_span_of_its_call_as_parent() -> None:
    streams = Streams()
    async with collector() as there, replica_server(completions=streams) as server:
        async with gateway_of(server, otel={"endpoint": there.url, "sample": 1.0}) as running:
            await ready(running)
            await running.ask(HELLO)
        (root,) = there.roots
        (call,) = (span for span in there.spans if span.kind == 3)
        assert streams.headers[0]["traceparent"] == f"00-{root.trace_id}-{call.span_id}-01"
        assert (call.parent_id, call.name, call.status) == (root.span_id, "chat demo", 0)
        assert call.attributes["gen_ai.provider.name"] == "vllm"
        assert call.attributes["http.response.status_code"] == 200
        assert {"prompt", "queue", "prefill", "decode"} <= {span.name for span in there.children(root)}


async def test_a_stream_does_not_say_what_was_cached_before_the_server_does() -> None:
    async with replica_server(completions=Streams(cached=16)) as server, gateway_of(server) as running:
        await ready(running)
        create = running.client.chat.completions.with_raw_response.create
        options: Any = {"stream_options": {"include_usage": True}}
        raw = await create(model="demo", messages=[HELLO], stream=True, max_tokens=3, **options)
        chunks = [chunk async for chunk in raw.parse()]
        assert "x-kvasir-cached-tokens" not in raw.headers
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 16


async def test_tenants_have_salts_of_their_own_that_only_the_fleet_can_derive() -> None:
    tenants = [{"name": name, "keys": [f"key-of-{name}-1"]} for name in ("a", "b")]
    async with replica_server(completions=Streams()) as server, gateway_of(server, tenants=tenants) as running:
        await ready(running)
        for key in ("key-of-a-1", "key-of-a-1", "key-of-b-1"):
            client = running.client.with_options(api_key=key)
            await client.chat.completions.create(model="demo", messages=[HELLO], max_tokens=2)
        first, again, other = (body["cache_salt"] for body in sent(server))
        assert first == again != other
        assert "a" not in (first, other)
        secret = running.gateway.registry.engines[0].hello.namespace.salt
        assert first == derived_salt(secret, "tenant:a") or len(first) == 64


async def test_a_server_without_salts_is_not_used_for_several_tenants(caplog: pytest.LogCaptureFixture) -> None:
    tenants = [{"name": "a", "keys": ["key-of-a-1"]}]
    async with replica_server("tensorrt-llm", completions=Streams()) as server:
        tokenizer = {"tokenizer": str(server.tokenizer)}
        table = server.settings("t", **tokenizer).model_dump()
        async with whole(engines=0, sections={"replicas": [table], "tenants": tenants}) as running:
            running.gateway.attach_replicas()
            await until(lambda: "its API takes no cache_salt" in caplog.text)
        async with whole(engines=0, sections={"replicas": [table]}) as running:
            running.gateway.attach_replicas()
            await ready(running)
            usage, _ = await running.ask(HELLO)
            assert usage.completion_tokens == 3
            assert running.gateway.registry.engines[0].hello.namespace.salt == UNSALTED


async def test_what_the_server_refuses_is_the_clients_and_says_why() -> None:
    streams = Streams()
    async with replica_server(completions=streams) as server, gateway_of(server) as running:
        await ready(running)
        streams.refuse = 400, {"error": {"message": "top_k is odd", "code": 400}}
        with pytest.raises(openai.BadRequestError, match=r"vLLM 0\.32\.0, which serves .* refuses.*top_k is odd"):
            await running.ask(HELLO)


async def test_another_replica_takes_over_from_one_that_is_busy() -> None:
    busy, free = Streams(), Streams()
    async with (
        replica_server(completions=busy) as one,
        replica_server(completions=free) as two,
        gateway_of(one, two) as running,
    ):
        await ready(running, 2)
        busy.refuse = 503, {"error": "busy"}
        for _ in range(3):
            _, headers = await running.ask(HELLO)
            assert headers["x-kvasir-engine"] == "r1"


async def test_another_replica_takes_over_from_one_that_takes_no_connection_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        replica_server(completions=Streams()) as one,
        replica_server(completions=Streams()) as two,
        gateway_of(one, two) as running,
    ):
        await ready(running, 2)
        post = aiohttp.ClientSession.post

        def unreachable(session: aiohttp.ClientSession, url: Any, **options: Any) -> Any:
            if session._base_url is not None and str(session._base_url).rstrip("/") == one.url:
                raise aiohttp.ConnectionTimeoutError("no connection")
            return post(session, url, **options)

        monkeypatch.setattr(aiohttp.ClientSession, "post", unreachable)
        for _ in range(3):
            _, headers = await running.ask(HELLO)
            assert headers["x-kvasir-engine"] == "r1"


async def test_a_client_that_leaves_ends_the_request_at_the_server() -> None:
    streams = Streams()
    async with replica_server(completions=streams) as server, gateway_of(server) as running:
        await ready(running)
        streams.hold.clear()
        stream = await running.client.chat.completions.create(model="demo", messages=[HELLO], stream=True)
        await anext(aiter(stream))
        replica = running.gateway.registry.engines[0]
        assert (replica.in_flight, replica.load.running) == (1, 1)
        await stream.close()
        await until(lambda: streams.left == 1)
        assert replica.in_flight == 0


async def test_a_silent_server_is_lost_in_one_line_and_joins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "LOOK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(joining, "SILENT_S", 0.3)
    streams = Streams()
    async with replica_server(completions=streams) as server, gateway_of(server) as running:
        await ready(running)
        replica = running.gateway.registry.engines[0]
        streams.hold.clear()
        asking = asyncio.create_task(running.ask(HELLO))
        await until(lambda: replica.load.running == 1)
        server.stalled |= {"/metrics"}
        server.answers["/v1/models"] = 503
        await until(lambda: not replica.joined)
        with pytest.raises(openai.APIStatusError):  # no other engine could go on with it
            await asking
        assert running.gateway.memory.blocks(replica.hello.incarnation) == 0
        assert replica.figures()["reason"]
        await until(lambda: "HTTP 503" in caplog.text)
        streams.hold.set()
        server.stalled.clear()
        del server.answers["/v1/models"]
        await ready(running)
        usage, _ = await running.ask(HELLO)
        assert usage.completion_tokens == 3
        lines = [record.getMessage() for record in caplog.records if "HTTP 503" in record.getMessage()]
        assert len(lines) == 1


async def test_servers_that_are_left_for_their_silence_have_not_died_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "LOOK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(joining, "SILENT_S", 0.3)
    streams = Streams()
    async with (
        replica_server(completions=streams) as one,
        replica_server(completions=streams) as two,
        replica_server(completions=streams) as three,
        gateway_of(one, two, three) as running,
    ):
        await ready(running, 3)
        streams.hold.clear()
        create = running.client.chat.completions.create
        asking = asyncio.create_task(create(model="demo", messages=[HELLO], max_tokens=9))
        engines, had = running.gateway.registry.engines, list[str]()
        for number in range(3):
            await until(lambda: any(one.joined and one.load.running for one in engines))
            has_it = next(one for one in engines if one.joined and one.load.running)
            had.append(has_it.name)
            if number < 2:
                next(server for server in (one, two, three) if server.url == has_it.url).stalled |= {"/metrics"}
                await until(lambda: not has_it.joined)  # noqa: B023 - awaited here
        streams.hold.set()
        usage = (await asking).usage
    assert usage is not None
    assert (usage.completion_tokens, len(set(had))) == (5, 3)


async def test_servers_that_are_none_are_one_line_each_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async with replica_server(completions=Streams()) as server, replica_server("sglang") as other:
        tables = [
            server.settings("good", kv_events="off").model_dump(),
            {**other.settings("wrong").model_dump(), "kind": "vllm"},
            {**server.settings("closed").model_dump(), "url": "http://127.0.0.1:9"},
        ]
        async with whole(engines=0, sections={"replicas": tables}) as running:
            running.gateway.attach_replicas()
            await ready(running)
            await running.ask(HELLO)
            await until(lambda: "replica wrong" in caplog.text and "replica closed" in caplog.text)
            await until(lambda: "nothing can be reached there" in caplog.text)
        lines = [record.getMessage() for record in caplog.records if "replica wrong" in record.getMessage()]
        assert len(lines) == 1
        assert 'it is a SGLang: write kind = "sglang"' in lines[0]


async def test_a_server_without_events_is_one_line_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    def said(why: str) -> int:
        return caplog.messages.count(f"replica r: no KV events: the server {why} (kv_events sets an endpoint)")

    async with replica_server(events_port=None) as server:
        table = server.settings("r", tokenizer="/no/such/folder").model_dump()
        async with whole(engines=0, sections={"replicas": [table]}) as running:
            running.gateway.attach_replicas()
            await until(lambda: sum(path == "/v1/completions" for path, _ in server.got) >= 3)  # three tries to join
            assert said("publishes none") == 1
            server.answers["/kv_event_sources"] = 404
            await until(lambda: said("does not say where") == 1)
            del server.answers["/kv_event_sources"]
            await until(lambda: said("publishes none") == 2)


async def test_an_end_of_text_that_ends_no_turn_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "LOOK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(joining, "SILENT_S", 0.3)
    folder = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = orjson.loads((DEMO / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps({**config, "eos_token": "<|im_end|>"}))
    async with replica_server() as odd, replica_server() as usual:
        tables = [odd.settings("odd").model_dump(), usual.settings("usual", tokenizer=str(folder)).model_dump()]
        async with whole(engines=0, sections={"replicas": tables}) as running:
            running.gateway.attach_replicas()
            await ready(running, 2)
            for server in (odd, usual):
                server.stalled |= {"/metrics"}
            await ready(running, 0)
            for server in (odd, usual):
                server.stalled.clear()
            await ready(running, 2)
    lines = [line for line in caplog.messages if "structured output" in line]
    why = "no turn ends with eos_token '<|endoftext|>', and vLLM lets it end with no other token"
    assert lines == [f"replica odd: structured output may not end: {why}"]


async def test_a_start_does_not_wait_for_servers_that_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replica_server(completions=Streams()) as server, replica_server(stalled={"/v1/models"}) as silent:
        tables = [server.settings("good", kv_events="off").model_dump()]
        tables += [{**tables[0], "name": "closed", "url": "http://127.0.0.1:9"}]
        async with whole(engines=0, sections={"replicas": tables}) as running:
            gateway, stop, told = running.gateway, asyncio.Event(), list[str]()
            gateway.attach_replicas()
            monkeypatch.setattr(serving, "FIRST_ENGINES_S", 600.0)
            await serving._first_engines(gateway, (), stop)
            assert [engine.joined for engine in gateway.registry.engines] == [True, False]
            serving._introduce(gateway, 1, False, told.append)
            assert "\n  engines  1 of 2, with room for " in told[0]
            assert "\n  waiting  for closed (http://127.0.0.1:9): nothing can be reached there: Connect" in told[0]

            monkeypatch.setattr(serving, "FIRST_ENGINES_S", 0.1)
            await gateway.fleet.add(silent.settings("silent", kv_events="off").model_dump(exclude_none=True))
            await serving._first_engines(gateway, (), stop)
            serving._introduce(gateway, 1, False, told.append)
            assert f"\n  waiting  for silent ({silent.url}): it has not answered yet\n" in told[1]


async def test_a_start_waits_for_the_server_that_is_started_here() -> None:
    async with replica_server(completions=Streams()) as server:
        server.answers["/v1/models"] = 503
        async with gateway_of(server) as running:
            (engine,) = running.gateway.registry.engines
            waiting = asyncio.create_task(serving._first_engines(running.gateway, {server.url}, asyncio.Event()))
            await until(lambda: "HTTP 503" in engine.why)
            assert not waiting.done()
            del server.answers["/v1/models"]
            await waiting
            assert engine.joined


async def test_an_answer_that_breaks_off_goes_on_behind_what_was_generated() -> None:
    class Broken(Streams):
        async def __call__(self, http: web.Request) -> web.StreamResponse:
            body = orjson.loads(await http.read())
            if not body.get("stream"):
                return await super().__call__(http)
            response = web.StreamResponse()
            await response.prepare(http)
            await response.write(b'data: {"choices":[{"token_ids":[44],"finish_reason":null}]}\n\n')
            return response

    async with replica_server(completions=Broken()) as server, gateway_of(server) as running:
        await ready(running)
        usage, _ = await running.ask(HELLO)
        assert usage.completion_tokens == 2
        first, second = (body["prompt"] for body in sent(server))
        assert second == [*first, 44]


async def test_gateways_of_one_redis_have_one_secret_and_others_a_file(tmp_path: Path, redis_url: str) -> None:
    redis = connect(redis_url, 5.0)
    try:
        here, there = (FleetSecret(tmp_path / name, RedisCalls(redis, 5.0)) for name in ("here", "there"))
        assert await here.of_model("m") == await there.of_model("m") != await here.of_model("n")
        alone = FleetSecret(tmp_path / "alone", None)
        assert await alone.of_model("m") == await FleetSecret(tmp_path / "alone", None).of_model("m")
        assert await alone.of_model("m") != await here.of_model("m")
        assert (tmp_path / "alone" / FILE).stat().st_mode & 0o777 == 0o600
        await redis.flushdb()  # one that started anew gets it back
        assert await there.of_model("m") == await FleetSecret(tmp_path / "new", RedisCalls(redis, 5.0)).of_model("m")
    finally:
        await close(redis)
