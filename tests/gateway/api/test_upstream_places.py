"""Online requests in front of an upstream that takes so many at a time, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.config import AuthSettings, QueueSettings, TenantSettings
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.upstream import CHAT, CONTENT, MESSAGE, SSE, StubUpstream, Told, chunk, events, upstream
from tests.fakes.waiting import until

NORTH, SOUTH, ADMIN = ({"Authorization": f"Bearer sk-{name}-key"} for name in ("north", "south", "admin"))
TENANTS = [
    TenantSettings(name="north", keys=("sk-north-key",), priority=True),
    TenantSettings(name="south", keys=("sk-south-key",)),
]
KEYS: dict[str, Any] = {"tenants": TENANTS, "auth": AuthSettings(admin_keys=("sk-admin-key",))}
STREAM = Told(events(chunk("Hel")), media=SSE, then="stall")
CHATS = "/v1/chat/completions"


def body(text: str = "Hello.", **more: Any) -> dict[str, Any]:
    return {"model": "up-1", "messages": [{"role": "user", "content": text}], **more}


async def ask(
    gateway: Gateway, text: str = "Hello.", who: dict[str, str] = NORTH, path: str = CHATS, **more: Any
) -> tuple[int, str, str]:
    """Status, which upstream answered, and Retry-After."""
    async with gateway.session.post(gateway.url + path, json=body(text, **more), headers=who) as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-kvasir-engine", ""), answer.headers.get("Retry-After", "")


async def figures(gateway: Gateway, name: str = "up") -> dict[str, Any]:
    async with gateway.session.get(f"{gateway.url}/admin/stats", headers=ADMIN) as answer:
        found: dict[str, Any] = (await answer.json())["upstreams"][name]
        return found


async def until_waiting(gateway: Gateway, count: int) -> None:
    async def is_so() -> bool:
        return bool((await figures(gateway))["waiting"] == count)

    await until(is_so)


@asynccontextmanager
async def streams(gateway: Gateway, stub: StubUpstream, count: int = 1) -> AsyncIterator[AsyncExitStack]:
    """So many of north's take all places, until the stack is closed: then north hangs up."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(
                gateway.session.post(gateway.url + CHATS, json=body("a stream", stream=True), headers=NORTH)
            )
        await until(lambda: stub.open == count)
        yield stack


def asked(stub: StubUpstream) -> list[str]:
    return [got.json["messages"][0]["content"] for got in stub.got]


async def test_one_request_is_answered_among_the_first_though_another_tenant_sent_a_hundred_before() -> None:
    async with (
        upstream(STREAM, STREAM, CHAT) as stub,
        running(upstreams=[stub.settings(max_in_flight=2)], **KEYS) as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as burst,
    ):
        async with streams(gateway, stub, 2):

            async def send(number: int) -> int:
                async with burst.post(gateway.url + CHATS, json=body(f"burst {number}"), headers=NORTH) as answer:
                    await answer.read()
                    return answer.status

            hundred = [asyncio.ensure_future(send(number)) for number in range(100)]
            await until_waiting(gateway, 100)
            one = asyncio.ensure_future(ask(gateway, "only one", SOUTH))
            await until_waiting(gateway, 101)
            assert (await figures(gateway))["waiting_by_tenant"] == {"north": 100, "south": 1}
            assert 'kvasir_upstream_waiting{upstream="up"} 101.0' in (await gateway.get("/metrics", "sk-admin-key"))[1]
            assert len(stub.got) == 2
        assert (await one)[0] == 200
        assert "only one" in asked(stub)[2:5]
        assert await asyncio.gather(*hundred) == [200] * 100
        assert (await figures(gateway))["in_flight"] == 0


async def test_without_a_limit_all_are_passed_on_at_once() -> None:
    async with (
        upstream(STREAM) as stub,
        running(upstreams=[stub.settings()], **KEYS) as gateway,
        streams(gateway, stub, 40),
    ):
        found = await figures(gateway)
        assert (found["in_flight"], found["waiting"], found["waiting_by_tenant"]) == (40, 0, {})


async def test_a_stream_holds_its_place_until_its_last_byte() -> None:
    stream = Told(events(*(chunk("x" * 65536) for _ in range(200))), media=SSE)
    async with (
        upstream(stream, CHAT) as stub,
        running(upstreams=[stub.settings(max_in_flight=1)], **KEYS) as gateway,
    ):
        async with gateway.session.post(gateway.url + CHATS, json=body(stream=True), headers=NORTH) as answer:
            await answer.content.readany()
            waiter = asyncio.ensure_future(ask(gateway, "next", SOUTH))
            await until_waiting(gateway, 1)
            assert (stub.open, len(stub.got)) == (1, 1)
            await answer.read()
        assert (await waiter)[0] == 200


async def test_a_client_that_hangs_up_while_it_waits_frees_its_place_in_the_line() -> None:
    async with (
        upstream(STREAM, CHAT) as stub,
        running(upstreams=[stub.settings(max_in_flight=1)], **KEYS, waits=QueueSettings(max_waiting=1)) as gateway,
    ):
        async with streams(gateway, stub):
            gone = asyncio.ensure_future(ask(gateway, "gone"))
            await until_waiting(gateway, 1)
            gone.cancel()
            await until_waiting(gateway, 0)
            stays = asyncio.ensure_future(ask(gateway, "stays"))
            await until_waiting(gateway, 1)
        assert (await stays)[0] == 200
        assert asked(stub)[1:] == ["stays"]


@pytest.mark.parametrize("waits", [{"max_waiting": 0}, {"max_wait_s": 0.05}], ids=["full", "late"])
async def test_who_gets_no_place_is_answered_by_the_next_upstream(waits: dict[str, Any]) -> None:
    async with (
        upstream(STREAM) as first,
        upstream() as second,
        running(
            upstreams=[first.settings(name="up", max_in_flight=1), second.settings(name="second")],
            **KEYS,
            waits=QueueSettings(**waits),
        ) as gateway,
        streams(gateway, first),
    ):
        assert (await ask(gateway))[:2] == (200, "second")
        assert sum((await figures(gateway))["errors"].values()) == 1
        assert len(first.got) == 1


@pytest.mark.parametrize(
    ("dialect", "path", "whole"),
    [
        ("openai", CHATS, CHAT),
        ("anthropic", "/v1/messages", MESSAGE),
        ("gemini", "/v1beta/models/up-1:generateContent", CONTENT),
    ],
)
async def test_without_a_next_one_it_is_the_apis_429_or_503_with_a_time_to_retry(
    dialect: str, path: str, whole: Told
) -> None:
    for waits, status, kind in (({"max_waiting": 0}, 429, "full"), ({"max_wait_s": 0.05}, 503, "late")):
        async with (
            upstream(Told(then="stall"), whole) as stub,
            running(
                upstreams=[stub.settings(dialect=dialect, max_in_flight=1)],
                **KEYS,
                waits=QueueSettings(**waits),
            ) as gateway,
        ):
            first = asyncio.ensure_future(ask(gateway, path=path))
            await stub.reached.wait()
            told = await ask(gateway, path=path)
            expected = 504 if (dialect, status) == ("anthropic", 503) else status
            assert (told[0], told[2]) == (expected, "1")
            assert (await figures(gateway))["errors"] == {kind: 1}
            first.cancel()
            await until(lambda stub=stub: stub.open == 0)
            assert (await ask(gateway, path=path))[0] == 200


async def test_a_remembered_answer_takes_no_place() -> None:
    cache = response_cache(mode="on", requests="all")
    async with (
        upstream(CHAT, STREAM) as stub,
        running(
            upstreams=[stub.settings(max_in_flight=1)],
            **KEYS,
            response_cache=cache,
            waits=QueueSettings(max_waiting=0),
        ) as gateway,
    ):
        assert (await ask(gateway, "again"))[0] == 200
        async with streams(gateway, stub):
            assert (await ask(gateway, "again"))[0] == 200
            assert (await ask(gateway, "anew"))[0] == 429
        assert len(stub.got) == 2


async def test_service_tiers_and_priorities_hold_in_front_of_an_upstream() -> None:
    async with (
        upstream(STREAM, CHAT) as stub,
        running(upstreams=[stub.settings(max_in_flight=1)], **KEYS) as gateway,
    ):
        sent: list[asyncio.Future[Any]] = []
        async with streams(gateway, stub):
            for text, more in (
                ("flex", {"service_tier": "flex"}),
                ("odd", {"service_tier": ["?"], "priority": "?"}),
                ("priority", {"service_tier": "priority"}),
                ("last", {"priority": 1}),
                ("first", {"priority": -1}),
            ):
                sent.append(asyncio.ensure_future(ask(gateway, text, **more)))
                await until_waiting(gateway, len(sent))
        assert [one[0] for one in await asyncio.gather(*sent)] == [200] * 5
        assert asked(stub)[1:] == ["first", "priority", "odd", "flex", "last"]
