"""Answers of upstreams, below HTTP on our side."""

from __future__ import annotations

import time

import orjson

from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.stage import Upstreams
from tests.fakes.upstream import upstream

VALUES = {"model": "up-1", "messages": []}


async def test_an_answer_that_nobody_begins_to_read_gives_its_connection_back() -> None:
    async with upstream() as stub:
        upstreams, now = Upstreams([stub.settings()], {}), time.monotonic()
        path = "/v1/chat/completions"
        body = orjson.dumps(VALUES)
        request = UpstreamRequest("r", Tenant("a"), "openai", "up-1", path, "", (), body, VALUES, now, now + 10)
        async with upstreams.answer(request) as answer:
            assert answer.status == 200
            assert upstreams.figures()["up"]["in_flight"] == 1
        assert upstreams.figures()["up"]["in_flight"] == 0
        await upstreams.close()
