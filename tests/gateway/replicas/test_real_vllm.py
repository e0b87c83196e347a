"""A real vLLM is asked what it is, how busy it is, and for its tokens."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config import ReplicaSettings
from gateway.replicas import parity
from gateway.replicas.base import EventSource, ServerFacts
from gateway.replicas.calls import ServerError, open_session
from gateway.replicas.load import LoadMeter, RankLoad, is_alive
from gateway.replicas.parity import wire_body
from gateway.replicas.servers import find_facts
from gateway.types import Prompt
from tests.fakes import tool_templates, vllm_server
from tests.fakes.ports import free_ports
from tests.fakes.replica_server import DEMO
from tests.fakes.waiting import until
from tests.gateway.replicas.test_parity import parity_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_server.installed(), reason=vllm_server.HOW),
]


def settings(url: str, **more: str) -> ReplicaSettings:
    return ReplicaSettings.model_validate({"name": "r", "kind": "vllm", "url": url, **more})


DIFFERENT: dict[str, set[str]] = {
    "QWEN": set(),
    "THINKING": set(),
    "HERMES": {"bare_tools"},
    "LLAMA3": set(),
    "MISTRAL": {"calls", "parallel_calls"},
}
"""What a vLLM renders in another way, by template. The template of Hermes cannot do without a description:
ours gets an empty one. That of Mistral writes whole calls, and vLLM puts their arguments in front of their names."""


async def test_a_real_vllm_joins_with_events_features_parity_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, replay = free_ports(2)
    more = {
        "dtype": "float32",
        "events": (events, replay),
        "arguments": [*vllm_server.EAGER, "--trust-request-chat-template"],
    }
    with vllm_server.vllm(tmp_path / "vllm.log", "demo", **more) as url:
        own = settings(url)
        async with open_session(own, None) as session:
            assert not await is_alive(session, own)
            with pytest.raises(ServerError, match="nothing can be reached there"):
                await find_facts(session, own)
            await vllm_server.wait_ready(url)
            assert await is_alive(session, own)

            facts = await find_facts(session, own)
            assert (facts.models, facts.root, facts.context_tokens) == (("demo",), str(DEMO), 2048)
            assert facts.sources == (EventSource(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", "kv"),)
            assert facts.block_size % 16 == 0
            assert facts.num_blocks > 100
            assert float(facts.lifetime) > 1e9
            assert facts.features == {
                *("completion_ids", "return_token_ids", "cache_salt", "chat_cache_salt", "priority", "min_p"),
                *("response_format", "prompt_logprobs", "structured_outputs", "report_mode", "cached_tokens"),
                *("tokenize", "tokenize_chat"),
            }
            with pytest.raises(ServerError, match='it is no SGLang; it is a vLLM: write kind = "vllm"'):
                await find_facts(session, settings(url, kind="sglang"))
            with pytest.raises(ServerError, match="it has no model 'other', only demo"):
                await find_facts(session, settings(url, model="other"))

            found = await parity_of(own)
            assert found.unchecked == {}
            assert found.different == {}
            for name, shapes in DIFFERENT.items():
                template = getattr(tool_templates, name)
                monkeypatch.setattr(parity, "wire_body", partial(_with_template, template))
                found = await parity_of(own, template)
                assert (name, set(found.different), found.unchecked) == (name, shapes, {})

            meter = LoadMeter(own)
            assert await meter.read(session) == (RankLoad(0, 0, 0.0),)
            await asyncio.gather(*(_complete(session, number) for number in range(4)))
            loads: list[RankLoad] = []

            async def measured() -> bool:
                loads.extend(await meter.read(session))
                return loads[-1].prefill_tokens_per_s > 0 and loads[-1].decode_tokens_per_s > 0

            await until(measured)
            assert loads[-1].running == loads[-1].waiting == 0


def _with_template(template: str, facts: ServerFacts, prompt: Prompt) -> dict[str, Any]:
    body = wire_body(facts, prompt)
    return body | {"chat_template": template} if "messages" in body else body


async def _complete(session: aiohttp.ClientSession, number: int) -> None:
    body = {"model": "demo", "prompt": [number + 10] * 300, "max_tokens": 50, "ignore_eos": True}
    async with session.post("v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()
