"""Upstreams of other settings take the place of those that are there, while requests are on their way."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.config import UpstreamSettings
from gateway.errors import ModelNotFoundError
from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.stage import Upstreams
from tests.fakes.upstream import upstream
from tests.fakes.waiting import until

VALUES: dict[str, Any] = {"model": "up-1", "messages": []}


def asking() -> UpstreamRequest:
    now, body = time.monotonic(), orjson.dumps(VALUES)
    path = "/v1/chat/completions"
    return UpstreamRequest("r", Tenant("a"), "openai", "up-1", path, "", (), body, VALUES, now, now + 10)


def replace(upstreams: Upstreams, *settings: UpstreamSettings, **keys: str) -> None:
    upstreams.use(upstreams.plan(settings, keys, {}, 1))


def session_of(upstreams: Upstreams, name: str) -> aiohttp.ClientSession:
    return upstreams._now.by_name[name].connections._sessions["online"]


async def whole(upstreams: Upstreams) -> int:
    async with upstreams.answer(asking()) as answer:
        async for _ in answer.chunks:
            pass
        return answer.status


async def test_a_request_in_flight_keeps_its_upstream_and_the_next_one_gets_the_new_one() -> None:
    async with upstream() as before, upstream() as after:
        upstreams = Upstreams([before.settings()], {})
        async with upstreams.answer(asking()) as answer:
            session = session_of(upstreams, "up")
            replace(upstreams, after.settings())
            assert await whole(upstreams) == 200
            assert (len(before.got), len(after.got)) == (1, 1)
            assert not session.closed
            assert [chunk async for chunk in answer.chunks]
        await until(lambda: session.closed)
        assert await whole(upstreams) == 200
        assert upstreams.figures()["up"]["requests"] == 3, "it counts on"
        await upstreams.close()


async def test_an_upstream_that_is_removed_and_comes_back_is_asked_again() -> None:
    async with upstream() as stub:
        upstreams = Upstreams([stub.settings()], {})
        assert await whole(upstreams) == 200
        session = session_of(upstreams, "up")
        replace(upstreams)
        await until(lambda: session.closed)
        with pytest.raises(ModelNotFoundError):
            await whole(upstreams)
        replace(upstreams, stub.settings())
        assert await whole(upstreams) == 200
        await upstreams.close()


async def test_an_upstream_that_stays_as_it_is_keeps_its_connections_and_one_with_another_key_does_not() -> None:
    async with upstream() as stub, upstream() as other:
        settings = stub.settings()
        upstreams = Upstreams([settings], {"up": "one"})
        assert await whole(upstreams) == 200
        session = session_of(upstreams, "up")
        replace(upstreams, settings, other.settings(name="other"), up="one")
        assert session_of(upstreams, "up") is session
        assert not session.closed
        replace(upstreams, settings, up="two")
        await until(lambda: session.closed)
        assert await whole(upstreams) == 200
        assert [one.headers["Authorization"] for one in stub.got] == ["Bearer one", "Bearer two"]
        await upstreams.close()


async def test_what_never_was_used_is_forgotten_and_all_is_closed_at_the_end() -> None:
    async with upstream() as before, upstream() as after:
        upstreams = Upstreams([before.settings()], {})
        async with upstreams.answer(asking()):
            replace(upstreams, after.settings())
            replace(upstreams)
            assert len(upstreams._old) == 1
            await upstreams.close()
