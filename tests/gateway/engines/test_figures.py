"""The engines' own counters: asked for when somebody looks, for a bounded time, and not by everybody at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.engines.bundled import BundledEngine
from gateway.engines.registry import FRESH_S, EngineFigures
from tests.fakes.clock import Clock
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.waiting import until

LIMIT_S = 30.0


@dataclass
class Told:
    """An engine that answers when the test lets it."""

    url: str
    stats: dict[str, Any] | None
    asked: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def fetch_stats(self) -> dict[str, Any] | None:
        self.asked += 1
        await self.go.wait()
        return self.stats


async def test_everybody_who_looks_at_once_waits_for_the_same_answer() -> None:
    told, clock = Told("a", {"n": 1}), Clock()
    figures = EngineFigures(lambda: [told], clock=clock)
    looking = [asyncio.create_task(figures.refresh()) for _ in range(5)]
    await until(lambda: told.asked > 0)
    looking[0].cancel()  # who leaves takes nothing away from the others
    assert figures.of("a") == {}
    told.go.set()
    await asyncio.wait(looking, timeout=LIMIT_S)
    assert looking[0].cancelled()
    assert (told.asked, figures.of("a"), figures.of("b")) == (1, {"n": 1}, {})


async def test_figures_are_new_for_a_moment_and_then_asked_for_again() -> None:
    told, gone, clock = Told("a", {"n": 1}), Told("b", {"n": 2}), Clock()
    clients = [told, gone]
    figures = EngineFigures(lambda: clients, clock=clock)
    for client in clients:
        client.go.set()
    await figures.refresh()
    clock.now_s += FRESH_S - 0.01
    await figures.refresh()
    assert told.asked == 1
    told.stats, clock.now_s = None, clock.now_s + 0.01
    clients.remove(gone)
    await figures.refresh()
    assert (told.asked, figures.of("a"), figures.of("b")) == (2, {}, {})


async def test_at_the_end_nobody_is_asked_any_more() -> None:
    told = Told("a", {})
    figures = EngineFigures(lambda: [told])
    looking = asyncio.create_task(figures.refresh())
    await until(lambda: told.asked > 0)
    await figures.close()
    await asyncio.wait([looking], timeout=LIMIT_S)
    assert looking.cancelled()
    await EngineFigures(list).close()


async def nobody(*_: Any) -> None:
    """Loads no tokeniser."""


def client_of(fake: FakeEngine, timeout_s: float, secret: str | None = None) -> BundledEngine:
    ignored: Any = lambda *_: 0  # noqa: E731
    return BundledEngine(
        "e",
        fake.url,
        stats_timeout_s=timeout_s,
        secret=secret,
        on_tokenizer=nobody,
        on_blocks=ignored,
        on_lost=ignored,
        on_load=ignored,
        prefix=ignored,
    )


async def test_an_engine_tells_its_counters_to_those_it_knows() -> None:
    async with FakeEngine(stats={"evictions": 3}, secret="s") as fake:
        client = client_of(fake, 5.0, "s")
        assert await client.fetch_stats() is None
        client.start()
        try:
            await asyncio.wait_for(client.wait_joined(), LIMIT_S)
            stats = await client.fetch_stats()
            assert stats is not None
            assert stats["evictions"] == 3
            await fake.die()
            await until(lambda: not client.joined)
            assert await client.fetch_stats() is None
        finally:
            await client.stop()


@pytest.mark.parametrize("stats_s", [600.0, 0.0])
async def test_an_engine_that_does_not_answer_in_time_or_with_nonsense_is_shown_without(stats_s: float) -> None:
    async with FakeEngine(stats_s=stats_s) as fake:
        if not stats_s:
            fake.behaviour.stats = {"text": "x" * (2 << 20)}  # more than anybody reads
        client = client_of(fake, 0.05 if stats_s else 5.0)
        client.start()
        try:
            await asyncio.wait_for(client.wait_joined(), LIMIT_S)
            assert await client.fetch_stats() is None
            assert fake.stats_requests == 1
            assert client.joined
        finally:
            await client.stop()
