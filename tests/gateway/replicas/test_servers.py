"""What a server says of itself when it joins, and the one line when it cannot be used."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from gateway.config import ReplicaKind, ReplicaSettings
from gateway.replicas import calls, servers
from gateway.replicas.base import EventSource, ServerFacts
from gateway.replicas.calls import ServerError, open_session
from gateway.replicas.servers import ask_tokens, find_facts
from tests.fakes.replica_server import DEMO, SCHEMAS, ReplicaServer, load_tokenizer, replica_server


async def facts_of(settings: ReplicaSettings, key: str | None = None) -> ServerFacts:
    async with open_session(settings, key) as session:
        return await find_facts(session, settings)


async def refusal(settings: ReplicaSettings, key: str | None = None) -> str:
    with pytest.raises(ServerError) as raised:
        await facts_of(settings, key)
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith(f"replica r ({settings.url}): ")
    return line.removeprefix(f"replica r ({settings.url}): ")


async def test_a_vllm_says_its_cache_and_where_it_publishes() -> None:
    async with replica_server("vllm", ranks=[{}, {}], events_port=6000, replay_port=7000) as server:
        facts = await facts_of(server.settings())
    assert (facts.kind, facts.version, facts.models, facts.root) == ("vllm", "0.32.0", ("demo",), server.root)
    assert (facts.context_tokens, facts.block_size, facts.num_blocks) == (2048, 128, 1638)
    assert facts.lifetime == f"{server.started_s:.6f}"
    assert facts.ranks == 2
    assert facts.sources == (
        EventSource("tcp://127.0.0.1:6000", "tcp://127.0.0.1:7000", "kv"),
        EventSource("tcp://127.0.0.1:6001", "tcp://127.0.0.1:7001", "kv"),
    )
    assert facts.features == {
        *("completion_ids", "return_token_ids", "cache_salt", "priority", "min_p", "structured_outputs"),
        *("response_format", "prompt_logprobs", "report_mode", "cached_tokens", "rank_header"),
        *("tokenize", "tokenize_chat"),
    }


async def test_a_sglang_says_its_pages_and_its_tokeniser() -> None:
    async with replica_server("sglang", block_size=16, num_blocks=100, ranks=[{}, {}], topic="") as server:
        facts = await facts_of(server.settings())
    assert (facts.version, facts.root, facts.tokenizer) == ("0.5.23", server.root, str(server.tokenizer))
    assert (facts.block_size, facts.num_blocks, facts.max_sequences) == (16, 100, 48)
    assert (facts.weight_version, facts.lifetime) == ("default", f"{server.started_s:.6f}")
    assert facts.sources[1] == EventSource("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5559", "")
    assert {"chat_ids", "chat_cache_salt", "cached_tokens", "rank_header", "tokenize"} <= facts.features
    assert not {"report_mode", "prompt_logprobs"} & facts.features


async def test_a_tensorrt_llm_says_little() -> None:
    async with replica_server("tensorrt-llm", block_size=32, num_blocks=10) as server:
        facts = await facts_of(server.settings(kv_events="tcp://10.0.0.1:5557"))
    assert (facts.root, facts.context_tokens, facts.block_size, facts.num_blocks) == ("", 0, 32, 10)
    assert facts.sources == (EventSource("tcp://10.0.0.1:5557"),)
    assert {"chat_ids", "completion_ids", "cached_tokens", "chat_cache_salt", "tokenize"} <= facts.features
    assert not {"cache_salt", "tokenize_chat", "return_token_ids"} & facts.features


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"kv_events": "off"}, [None, None]),
        ({"kv_replay": "off"}, [EventSource(f"tcp://127.0.0.1:{5557 + rank}", None, "kv") for rank in (0, 1)]),
        (
            {"kv_events": "tcp://[::1]:900", "kv_replay": "tcp://h:950"},
            [EventSource(f"tcp://[::1]:{900 + rank}", f"tcp://h:{950 + rank}", "kv") for rank in (0, 1)],
        ),
    ],
)
async def test_settings_come_before_what_the_server_says(more: dict[str, Any], expected: list[Any]) -> None:
    async with replica_server("vllm", ranks=[{}, {}]) as server:
        assert list((await facts_of(server.settings(**more))).sources) == expected


NO_EVENTS = "the server publishes none (kv_events sets an endpoint)"


async def test_a_server_without_events_is_said() -> None:
    async with replica_server("vllm", events_port=None) as server:
        facts = await facts_of(server.settings())
        assert (facts.sources, facts.no_events) == ((None,), NO_EVENTS)
        for answer, why in (({}, NO_EVENTS), (404, "the server does not say where (kv_events sets an endpoint)")):
            server.answers["/kv_event_sources"] = answer
            facts = await facts_of(server.settings())
            assert (facts.sources, facts.no_events) == ((None,), why)
        assert (await facts_of(server.settings(kv_events="off"))).no_events == ""


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://h:5557"),
        ("tcp://0.0.0.0:5557", "tcp://h:5557"),
        ("tcp://[::]:5557", "tcp://h:5557"),
        ("tcp://10.1.2.3:5557", "tcp://10.1.2.3:5557"),
        ("ipc:///tmp/x", None),
        ("tcp://*:70000", None),
        (None, None),
    ],
)
def test_a_wildcard_is_the_host_that_the_server_is_reached_at(endpoint: str | None, expected: str | None) -> None:
    assert servers._reachable(endpoint, "h") == expected
    assert servers._reachable("tcp://*:1", "::1") == "tcp://[::1]:1"


@pytest.mark.parametrize(
    ("kind", "version", "expected"),
    [
        ("vllm", "0.9.2", {"completion_ids", "priority", "min_p", "response_format", "prompt_logprobs"}),
        ("vllm", "0.26.1.dev3+gabc", {"return_token_ids", "cache_salt", "report_mode", "structured_outputs"}),
        ("vllm", "unknown", set()),
        ("sglang", "0.5.14", {"chat_ids", "cache_salt", "tokenize", "tokenize_chat"}),
        ("tensorrt-llm", "1.2.0rc4", {"completion_ids", "min_p", "response_format"}),
    ],
)
async def test_without_the_page_of_its_api_features_are_those_of_the_version(
    kind: ReplicaKind, version: str, expected: set[str]
) -> None:
    async with replica_server(kind) as server:
        server.answers["/openapi.json"] = 404
        if kind == "sglang":
            server.answers["/server_info"] = {**server.server_info(), "version": version}
        else:
            server.answers["/version"] = {"version": version}
        features = (await facts_of(server.settings())).features
    assert expected <= features
    assert "return_token_ids" not in features or version.startswith("0.26")


async def test_a_field_that_a_build_does_not_have_is_no_feature() -> None:
    schemas = {**SCHEMAS["vllm"], "CompletionRequest": ("prompt", "max_tokens")}
    async with replica_server("vllm", schemas=schemas) as server:
        features = (await facts_of(server.settings())).features
        assert not {"cache_salt", "return_token_ids", "priority"} & features
        assert all("cache_salt" not in body for path, body in server.got)


async def test_cached_tokens_that_are_not_reported_are_found_out_with_two_tokens() -> None:
    async with replica_server("vllm", reports_cached=False) as server:
        assert "cached_tokens" not in (await facts_of(server.settings())).features
        (first, second) = [body for path, body in server.got if path == "/v1/completions"]
    assert first == second
    assert len(first["prompt"]) == 256  # two blocks; or what the context has room for
    async with replica_server("vllm", context_tokens=100) as server:
        await facts_of(server.settings())
        assert [len(body["prompt"]) for path, body in server.got] == [98]
    async with replica_server("sglang", reports_cached=False) as server:
        assert "cached_tokens" not in (await facts_of(server.settings())).features


# -- what cannot be used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_", "said", "words"),
    [
        ("sglang", "vllm", 'it is no vLLM; it is a SGLang: write kind = "sglang"'),
        ("vllm", "sglang", 'it is no SGLang; it is a vLLM: write kind = "vllm"'),
        ("tensorrt-llm", "vllm", 'it is no vLLM; it is a TensorRT-LLM: write kind = "tensorrt-llm"'),
    ],
)
async def test_a_wrong_kind_is_named(is_: ReplicaKind, said: ReplicaKind, words: str) -> None:
    async with replica_server(is_) as server:
        assert await refusal(server.settings(kind=said)) == words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (404, "GET /v1/models answered HTTP 404; is this the URL of a vLLM?"),
        (302, "GET /v1/models answered HTTP 302; is this the URL of a vLLM?"),
        (503, "GET /v1/models answered HTTP 503; it says no more"),
        ("<html>", "/v1/models is no JSON; is this the URL of a vLLM?"),
        ({"data": []}, "/v1/models lists no model; is this the URL of a vLLM?"),
        (["a"], "/v1/models lists no model; is this the URL of a vLLM?"),
        ({"data": [{"id": "gpt", "owned_by": "openai"}]}, "it is no vLLM; its models are owned by 'openai'"),
    ],
)
async def test_what_is_no_such_server_is_said(answer: Any, words: str) -> None:
    async with replica_server("vllm", answers={"/v1/models": answer}) as server:
        assert await refusal(server.settings()) == words


async def test_a_closed_port_and_an_unknown_host_are_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    settings = ReplicaServer(url=url).settings()
    assert "nothing can be reached there: Connect" in await refusal(settings)
    settings = ReplicaServer(url="http://no-such-host.invalid").settings()
    assert await refusal(settings) == "its host name no-such-host.invalid is not known"


async def test_a_key_that_is_wrong_or_missing_is_said_without_it() -> None:
    async with replica_server("vllm", key="right") as server:
        settings = server.settings()
        assert await refusal(settings) == ("it refuses requests without an API key (HTTP 401); set key or api_key_env")
        assert await refusal(settings, "sk-wrong") == "it refuses its API key (HTTP 401); set key or api_key_env"
        assert (await facts_of(settings, "right")).models == ("demo",)


async def test_a_server_may_be_below_a_path() -> None:
    async with replica_server("vllm", answers={"/gpu/1/v1/models": {"data": []}}) as server:
        assert "/v1/models lists no model" in await refusal(server.settings(url=f"{server.url}/gpu/1/v1"))


async def test_a_model_that_it_does_not_have_is_said() -> None:
    async with replica_server("vllm") as server:
        assert await refusal(server.settings(model="llama")) == (
            "it has no model 'llama', only demo; model = \"llama = demo\" serves one under another name"
        )
        assert (await facts_of(server.settings(model="llama = demo"))).models == ("demo",)


async def test_adapters_come_behind_the_base_model() -> None:
    cards = [{"id": "lora", "owned_by": "vllm", "parent": "base"}, {"id": "base", "owned_by": "vllm", "parent": None}]
    async with replica_server("vllm", answers={"/v1/models": {"data": cards}}) as server:
        assert (await facts_of(server.settings())).models == ("base", "lora")
        assert (await facts_of(server.settings(model="lora"))).models == ("lora", "base")


async def test_an_answer_that_is_too_long_or_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 1 << 20)
    async with replica_server("vllm", answers={"/v1/models": "x" * (2 << 20)}) as server:
        assert await refusal(server.settings()) == "GET /v1/models answered more than 1 MiB"

    monkeypatch.setattr(servers, "JOIN_TIMEOUT_S", 0.05)
    async with replica_server("vllm", stalled={"/v1/models"}) as server:
        assert await refusal(server.settings()) == "no answer to GET /v1/models within 0.05 s"


async def test_pages_of_others_shapes_are_read_as_if_they_said_nothing() -> None:
    odd: dict[str, Any] = {
        "/server_info": [1],
        "/kv_event_sources": {"0": 5, "x": None},
        "/metrics": "vllm:cache_config_info{block_size= 1\n",
        "/openapi.json": {"components": {"schemas": {"CompletionRequest": 1}}},
        "/version": "x",
        "/v1/completions": 400,
    }
    async with replica_server("vllm", answers=odd) as server:
        server.answers["/version"] = {"version": None}
        facts = await facts_of(server.settings())
    assert (facts.version, facts.block_size, facts.lifetime, facts.features) == ("", 0, "", frozenset())
    assert facts.sources == (None, None)


# -- its own tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tensorrt-llm"])
async def test_a_server_says_its_tokens_of_a_text(kind: ReplicaKind) -> None:
    load_tokenizer(DEMO)  # takes longer than a server may
    async with replica_server(kind) as server, open_session(server.settings(), None) as session:
        ids = await ask_tokens(session, server.settings(), {"prompt": "Hello there", "add_special_tokens": False})
        assert ids == load_tokenizer(server.tokenizer).encode("Hello there", add_special_tokens=False)
        server.answers["/tokenize"] = server.answers["/v1/tokenize"] = server.answers["/_internal/tokenize"] = {
            "tokens": ["a"]
        }
        with pytest.raises(ServerError, match="answered without token ids"):
            await ask_tokens(session, server.settings(), {"prompt": "Hello"})
