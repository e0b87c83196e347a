"""A real vLLM as an upstream: bytes, figures, hang-ups. Slow, and skipped where vLLM is not installed."""

from __future__ import annotations

import re
from typing import Any

import aiohttp

from gateway.config import UpstreamSettings
from tests.fakes import vllm_fleet
from tests.fakes.gateway import Gateway, running
from tests.fakes.vllm_server import tap
from tests.fakes.waiting import until

pytestmark = vllm_fleet.MARKS

NAME = "demo"
BOOK = " ".join(f"In chapter {number} the traveller reaches the next town." for number in range(40))


def chat(text: str = "Hello.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": BOOK}, {"role": "user", "content": text}]
    return {"model": "book", "messages": messages, "max_tokens": 16, "temperature": 0, **more}


def upstreams(url: str) -> list[UpstreamSettings]:
    openai = UpstreamSettings(name="vllm", url=f"{url}/v1", models=(f"book = {NAME}",), meter=("*",))
    anthropic = UpstreamSettings(name="vllm-messages", url=url, models=(f"book = {NAME}",), dialect="anthropic")
    return [openai, anthropic]


async def post(gateway: Gateway, body: Any, path: str = "/v1/chat/completions") -> bytes:
    async with gateway.session.post(gateway.url + path, json=body, timeout=aiohttp.ClientTimeout(120)) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def figure(gateway: Gateway, name: str) -> float:
    page = (await gateway.get("/metrics"))[1]
    found = re.search(rf'^kvasir_{name}_tokens_total{{model="book",tenant="anonymous"}} (\S+)$', page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_a_vllm_behind_the_gateway(vllms: vllm_fleet.Replicas) -> None:
    direct = vllms.urls[0]
    async with tap(direct) as (url, told), running(upstreams=upstreams(url)) as gateway:
        # 1. Bytes: whole, streamed with its usage, and in the other API.
        asked: list[tuple[Any, str]] = [
            (chat(), "/v1/chat/completions"),
            (chat(stream=True, stream_options={"include_usage": True}), "/v1/chat/completions"),
            ({"model": "book", "prompt": BOOK, "max_tokens": 8, "stream": True}, "/v1/completions"),
            ({**chat(), "messages": chat()["messages"][1:], "system": BOOK, "stream": True}, "/v1/messages"),
        ]
        for number, (body, path) in enumerate(asked):
            got = await post(gateway, body, path)
            assert len(told) == number + 1
            if path != "/v1/completions":
                assert got == told[number]
            else:  # its usage was asked for by the gateway, and taken out again
                assert b'"prompt_tokens"' not in got
                assert b'"prompt_tokens"' in told[number]

        # 2. Figures: those of vLLM, cached tokens among them.
        before = [await figure(gateway, name) for name in ("prompt", "cached", "completion")]
        sdk = gateway.sdk()
        answer = await sdk.with_options(timeout=120).chat.completions.create(**chat("Another question."))
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        assert cached > 100
        after = [await figure(gateway, name) for name in ("prompt", "cached", "completion")]
        gone_up = [now - then for now, then in zip(after, before, strict=True)]
        assert gone_up == [usage.prompt_tokens, cached, usage.completion_tokens]
        async with gateway.session.get(f"{gateway.url}/admin/stats") as page:
            figures = (await page.json())["upstreams"]
        assert figures["vllm"]["unmetered"] == figures["vllm-messages"]["unmetered"] == 0

        # 3. A client that hangs up ends the request in vLLM.
        long = chat(stream=True, max_tokens=1000, ignore_eos=True)
        async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=long) as stream:
            await stream.content.readany()
            await until(lambda: in_vllm(direct, gateway, 1))
        await until(lambda: in_vllm(direct, gateway, 0))


async def in_vllm(direct: str, gateway: Gateway, requests: int) -> bool:
    """Whether vLLM runs so many."""
    async with gateway.session.get(f"{direct}/metrics") as answer:
        found = re.search(r"^vllm:num_requests_running{.*} (\S+)$", await answer.text(), re.MULTILINE)
    return found is not None and float(found[1]) == requests
