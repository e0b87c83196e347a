"""The exact cache beside a Redis that fails."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.responses.entries import About, EntriesDownError, Entry
from gateway.responses.exact import ExactCache
from gateway.responses.memory_entries import MemoryEntries
from tests.fakes.waiting import until

OWNER = "tenant:a"


class Shelf:
    """Answers nothing until it may; then each call as it was told."""

    evicted = 0

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Entry | None]] = []

    async def find(self, owner: str, name: str) -> Entry | None:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]

    async def put(self, entry: Entry) -> bool:
        raise NotImplementedError

    async def remove(self, owner: str, name: str) -> bool:
        raise NotImplementedError

    async def owners(self) -> list[str]:
        raise NotImplementedError

    async def all_of(self, owner: str) -> list[About]:
        raise NotImplementedError


async def test_what_was_asked_before_a_failure_does_not_say_that_redis_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.responses.exact")
    shelf, clock = Shelf(), [0.0]
    cache = ExactCache(MemoryEntries(1 << 20, lambda: 0.0), shelf, retry_s=5.0, clock=lambda: clock[0])
    asked = [asyncio.create_task(cache.find(OWNER, bytes(32))) for _ in range(4)]
    await until(lambda: len(shelf.calls) == 4)
    for number, call in enumerate(shelf.calls):
        if number % 2:
            call.set_result(None)
        else:
            call.set_exception(EntriesDownError("away"))
    assert await asyncio.gather(*asked) == [None] * 4
    assert len(caplog.records) == 1
    assert await cache.find(OWNER, bytes(32)) is None
    assert len(shelf.calls) == 4
    clock[0] = 5.0
    again = asyncio.create_task(cache.find(OWNER, bytes(32)))
    await until(lambda: len(shelf.calls) == 5)
    shelf.calls[-1].set_result(None)
    await again
    assert caplog.records[-1].getMessage() == "Redis answers again, the response cache is shared"
