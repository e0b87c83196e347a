"""Memory of bodies in flight."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from gateway.api.bodies import BODIES, Bodies, Claim
from gateway.config import ServerSettings, TenantSettings
from gateway.errors import OverloadedError, QueueFullError
from tests.fakes.gateway import Gateway, running
from tests.fakes.waiting import until

NORTH, SOUTH, EAST = ("north-key", "south-key", "east-key-")
TENANTS = [TenantSettings(name=key[:5].strip("-"), keys=(key,)) for key in (NORTH, SOUTH, EAST)]
SERVER = ServerSettings(max_body_bytes=60_000, max_bodies_bytes=120_000)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def test_a_tenant_has_half_and_all_have_the_whole() -> None:
    bodies = Bodies(100, 10)
    first, second, third = Claim(bodies, "a"), Claim(bodies, "a"), Claim(bodies, "b")
    first.grow_to(30)
    first.grow_to(20)  # it has more
    second.grow_to(20)
    with pytest.raises(QueueFullError):
        second.grow_to(21)
    third.grow_to(50)
    with pytest.raises(OverloadedError):
        Claim(bodies, "c").grow_to(1)
    for claim in (first, first, second, third):
        claim.release()
    assert bodies.num_bytes == 0
    second.grow_to(50)


def test_a_body_of_the_largest_size_fits_whatever_the_share() -> None:
    bodies = Bodies(100, 90)
    Claim(bodies, "a").grow_to(90)
    assert Bodies(10, 90).max_bytes == 90


async def begin(gateway: Gateway, key: str, num_bytes: int) -> asyncio.StreamWriter:
    """A chat whose body does not come."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    before = gateway.app[BODIES].num_bytes
    writer.write(f"{head}Content-Length: {num_bytes}\r\n\r\n".encode())
    await until(lambda: gateway.app[BODIES].num_bytes == before + num_bytes)
    return writer


async def chat(gateway: Gateway, key: str) -> int:
    status, _, _ = await gateway.post("/v1/chat/completions", CHAT, headers={"Authorization": f"Bearer {key}"})
    return status


async def test_announced_bodies_of_one_tenant_are_refused_to_it_alone_and_given_back_when_it_leaves() -> None:
    async with running(server=SERVER, tenants=TENANTS) as gateway:
        held = await begin(gateway, NORTH, 60_000)
        assert [await chat(gateway, key) for key in (NORTH, SOUTH)] == [429, 200]
        other = await begin(gateway, SOUTH, 60_000)
        assert [await chat(gateway, key) for key in (NORTH, EAST)] == [429, 503]
        for writer in (held, other):
            writer.close()
            await writer.wait_closed()
        await until(lambda: gateway.app[BODIES].num_bytes == 0)
        assert [await chat(gateway, key) for key in (NORTH, EAST)] == [200, 200]


async def test_what_a_compressed_body_becomes_is_what_counts() -> None:
    async with running(server=SERVER, tenants=TENANTS) as gateway:
        held = await begin(gateway, NORTH, 30_000)
        body = gzip.compress(json.dumps({**CHAT, "user": "a" * 40_000}).encode())
        statuses = [
            (await gateway.send(body, **{"Content-Encoding": "gzip", "Authorization": f"Bearer {key}"}))[0]
            for key in (NORTH, SOUTH)
        ]
        assert statuses == [429, 200]
        assert gateway.app[BODIES].num_bytes == 30_000
        held.close()
        await held.wait_closed()


async def test_small_objects_count_for_what_they_take_once_they_are_parsed() -> None:
    async with running(server=SERVER, tenants=TENANTS) as gateway:
        body = b'{"model":"demo","messages":[' + b"{}," * 10_000 + b"{}]}"
        assert (await gateway.send(body, Authorization=f"Bearer {NORTH}"))[0] == 429
        assert gateway.app[BODIES].num_bytes == 0


async def test_a_text_with_an_emoji_counts_four_times_and_fits_alone() -> None:
    server = ServerSettings(max_body_bytes=60_000, max_bodies_bytes=800_000)
    async with running(server=server, tenants=TENANTS) as gateway:
        bodies, most = gateway.app[BODIES], [0]
        added = bodies.add

        def add(tenant: str, num_bytes: int) -> None:
            added(tenant, num_bytes)
            most.append(bodies.num_bytes)

        bodies.add = add  # type: ignore[method-assign]
        for text, times in (("a" * 50_000, 2), ("a" * 50_000 + "\U0001f600", 4)):
            most.clear()
            body = json.dumps({**CHAT, "user": text}, ensure_ascii=False).encode()
            assert (await gateway.send(body, Authorization=f"Bearer {NORTH}"))[0] == 200
            assert times * 50_000 < max(most) <= bodies.max_tenant_bytes
        assert bodies.num_bytes == 0
