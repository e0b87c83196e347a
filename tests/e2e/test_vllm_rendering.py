"""A real vLLM with another chat template than its model's. Slow, and skipped where vLLM is not installed. What is asked
through the gateway is what vLLM itself answers in a chat, shape by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes import vllm_server
from tests.fakes.ports import free_ports
from tests.fakes.replica_server import DEMO
from tests.fakes.vllm_server import EAGER, HOW, installed, wait_ready
from tests.fakes.whole import Whole, whole

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not installed(), reason=HOW)]

NAME = "demo-vllm"
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}]
BOOK = " ".join(f"In chapter {number} the traveller reaches the next town." for number in range(40))
ASK: Any = {"role": "user", "content": "Where is the traveller now?"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"place":"Rome"}'}}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASK]},
    "system": {"messages": [{"role": "system", "content": BOOK}, ASK]},
    "turns": {
        "messages": [ASK, {"role": "assistant", "content": "In Rome."}, {"role": "user", "content": "And then?"}]
    },
    "tools": {"messages": [ASK], "tools": TOOLS},
    "calls": {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "It rains."},
        ],
        "tools": TOOLS,
    },
    "unicode": {"messages": [{"role": "system", "content": BOOK}, {"role": "user", "content": "Où est-il ? 你好"}]},
}


async def test_a_vllm_with_another_template_answers_as_it_does_itself(tmp_path: Path) -> None:
    template = (DEMO / "chat_template.jinja").read_text()
    for old, new in (
        ("{%- if tools -%}", "{%- if tools -%}{{- 'Tools: ' -}}"),
        ("{%- if tools", "{%- if messages[0].role == 'system' -%}{{- 'Be good. ' -}}{%- endif -%}{%- if tools"),
    ):
        assert old in template
        template = template.replace(old, new, 1)
    file = tmp_path / "other.jinja"
    file.write_text(template)
    arguments = (*EAGER, "--chat-template", str(file), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    events, replay = free_ports(2)
    with vllm_server.vllm(
        tmp_path / "vllm.log", NAME, dtype="float32", events=(events, replay), arguments=arguments
    ) as url:
        await wait_ready(url)
        replica = {"name": "real", "kind": "vllm", "url": url, "model": f"demo = {NAME}"}
        sections = {"replicas": [replica], "response_cache": {"mode": "off"}}
        async with whole(engines=0, sections=sections) as running:
            running.gateway.attach_replicas()
            await running.gateway.registry.wait_joined()
            running.client = running.client.with_options(timeout=120)
            await check(running, url)


async def check(running: Whole, url: str) -> None:
    create = running.client.chat.completions.with_raw_response.create
    for shape, body in SHAPES.items():
        own = await directly(url, body)
        for _ in range(2):
            raw = await create(model="demo", max_tokens=16, temperature=0, **body)
            answer = raw.parse()
            assert answer.usage is not None
            assert answer.choices[0].message.content == own["choices"][0]["message"]["content"], shape
            assert answer.usage.prompt_tokens == own["usage"]["prompt_tokens"], shape
        if shape == "system":  # what is routed by, and predicted, is of vLLM's own tokens
            assert raw.headers["x-kvasir-predicted-tokens"] == raw.headers["x-kvasir-cached-tokens"] != "0"
    replica: Any = running.gateway.registry.engines[0]
    found = replica.figures()["rendering"]
    assert found["different"].keys() == {"system", "tools", "bare_tools", "calls", "parallel_calls", "unicode"}
    assert found["unchecked"] == {}
    assert (found["rendered"], found["miscounted"]) == (8, 0)


async def directly(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own answer, under a salt that nothing else has."""
    whole = {"model": NAME, "temperature": 0, "max_tokens": 16, "cache_salt": "apart", **body}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=whole) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found
