"""What a tenant may still send, in the headers of each API."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.config import QueueSettings, RoutingSettings
from gateway.queues.places import PlaceQueue
from gateway.routing.router import Router
from gateway.types import Ask
from tests.fakes.gateway import LIMIT_S, running
from tests.fakes.street import FakeEngine, hello

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {**CHAT, "max_tokens": 5}


def small_queue() -> PlaceQueue[Any]:
    settings = QueueSettings(max_waiting=5, max_waiting_per_tenant=3, places_per_engine=1)
    return PlaceQueue(settings, Router(RoutingSettings()))


def ask(tenant: str) -> Ask:
    return Ask(tenant=tenant, prompt_tokens=8, deadline_s=1e12, cached_tokens={}, avoid=frozenset())


async def hold(queue: PlaceQueue[Any], stack: AsyncExitStack, tenant: str) -> None:
    await stack.enter_async_context(queue.place([FakeEngine(hello())], ask(tenant)))


async def test_every_request_that_waits_is_one_less() -> None:
    queue = small_queue()
    assert (queue.allowance("a").limit, queue.allowance("a").remaining, queue.allowance("a").reset_s) == (3, 3, 0.0)
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        await hold(queue, stack, "a")  # has a place, and does not wait
        assert queue.allowance("a").remaining == 3
        waiting = [asyncio.ensure_future(hold(queue, stack, tenant)) for tenant in ("a", "a", "b", "b")]
        for _ in range(10):  # turns of the loop; each of them needs one to get into the queue
            await asyncio.sleep(0)
        assert queue.waiting == 4
        assert queue.allowance("a").remaining == 1
        assert queue.allowance("c").remaining == 1  # all together may be five
        assert queue.allowance("a").reset_s > 0
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert queue.allowance("a").remaining == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_clients_are_told_in_every_answer(stream: bool) -> None:
    async with (
        running(queue=small_queue()) as gateway,
        gateway.session.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": stream}) as answer,
    ):
        told = {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit")}
    assert told == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "0ms",
    }


async def test_a_refusal_tells_it_too_and_who_is_unknown_is_told_nothing() -> None:
    async with running(queue=small_queue()) as gateway:
        status, _, headers = await gateway.post("/v1/chat/completions", {**CHAT, "model": "nobody"})
        assert (status, headers["x-ratelimit-limit-requests"]) == (404, "3")
        _, _, headers = await gateway.get("/health")
    assert "x-ratelimit-limit-requests" not in headers


async def test_anthropic_clients_are_told_with_the_time_of_the_reset() -> None:
    async with running(queue=small_queue()) as gateway:
        asked = {"anthropic-version": "2023-06-01"}
        _, _, headers = await gateway.post("/v1/messages", MESSAGE, headers=asked)
    assert headers["anthropic-ratelimit-requests-limit"] == "3"
    assert headers["anthropic-ratelimit-requests-remaining"] == "3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", headers["anthropic-ratelimit-requests-reset"])
