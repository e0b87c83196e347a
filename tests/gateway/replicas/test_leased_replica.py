"""Leases on a replica through all of the gateway, over a fake server with a prefix cache of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from gateway.replicas import joining, warming
from tests.fakes.cached_answers import CachedAnswers
from tests.fakes.kv_publisher import KvPublisher
from tests.fakes.lru_cache import LruCache
from tests.fakes.replica_server import ReplicaServer, replica_server
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

PAGE, PAGES = 16, 96
TEXT = "The traveller reaches the next town and asks for the old road. " * 12


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LOOK_S", 0.05)
    monkeypatch.setattr(joining, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(warming, "LOOK_S", 0.01)


def system(text: str, *, kept: bool = False) -> list[Any]:
    part: dict[str, Any] = {"type": "text", "text": text}
    if kept:
        part["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "1h"}
    return [{"role": "system", "content": [part]}, {"role": "user", "content": "Well?"}]


async def ask(running: Whole, text: str, *, kept: bool = False) -> tuple[int, int, int]:
    """Cached and written tokens of the usage, and those that were physically reused."""
    usage, headers = await running.ask(*system(text, kept=kept))
    details: Any = usage.prompt_tokens_details
    return details.cached_tokens, details.cache_write_tokens, int(headers["x-kvasir-cached-tokens"])


LEASES: dict[str, Any] = {"response_cache": {"mode": "off"}, "engine": {"lease_tenant_share": 0.5}}


def sections(server: ReplicaServer, **more: Any) -> dict[str, Any]:
    return {"replicas": [server.settings("r", **more).model_dump()], **LEASES}


async def joined(running: Whole) -> Any:
    running.gateway.attach_replicas()
    await running.gateway.registry.wait_joined()
    (engine,) = running.gateway.registry.engines
    return engine


@pytest.mark.parametrize("events", [True, False], ids=["events", "fallback"])
async def test_a_lease_outlives_a_flood_and_an_equal_prefix_without_one_does_not(events: bool) -> None:
    async with KvPublisher() as publisher:
        answers = CachedAnswers(LruCache(PAGES, PAGE), publisher if events else None)
        more: dict[str, Any] = {"block_size": PAGE, "num_blocks": PAGES, "completions": answers, "topic": "kv"}
        more |= dict(zip(("events_port", "replay_port"), publisher.ports if events else (None, None), strict=True))
        async with replica_server(**more) as server, whole(engines=0, sections=sections(server)) as running:
            engine = await joined(running)
            await until(lambda: engine.trust == ("exact" if events else "fallback"))
            answers.touches.clear()  # the prompts that were compared when it joined
            cached, wrote, _ = await ask(running, TEXT, kept=True)
            assert (cached, wrote > 100) == (0, True)
            await ask(running, "Other. " + TEXT)
            for number in range(20):
                await ask(running, f"{number} " + TEXT)
            cached, again, reused = await ask(running, TEXT, kept=True)
            assert (cached, again, reused) == (wrote, 0, wrote // PAGE * PAGE)
            assert (await ask(running, "Other. " + TEXT))[2] == 0
            assert len(answers.touches) > 2
            figures = (await engine.fetch_stats())["leases"]
            assert figures["touches"] == len(answers.touches)
            assert figures["recomputed_tokens"] < 0.02 * answers.prefilled
            assert (figures["kept"], figures["lost"], figures["touch_failures"]) == (1, 0, 0)
            async with aiohttp.ClientSession() as session, session.get(f"{running.url}/metrics") as page:
                assert f'kvasir_engine_lease_touches_total{{engine="r",model="demo"}} {figures["touches"]}' in (
                    await page.text()
                )


async def test_a_restart_loses_nothing_but_time() -> None:
    answers = CachedAnswers(LruCache(PAGES, PAGE))
    more: dict[str, Any] = {"block_size": PAGE, "num_blocks": PAGES, "completions": answers}
    async with (
        replica_server(**more) as server,
        whole(engines=0, sections=sections(server, kv_events="off")) as running,
    ):
        engine = await joined(running)
        _, wrote, _ = await ask(running, TEXT, kept=True)
        first = engine.hello.incarnation
        (body,) = (body for _, body in server.got if body.get("stream"))
        touched = (body["prompt"], body["cache_salt"])
        answers.cache.clear()
        server.started_s += 60
        await engine.stop()
        engine.start()
        await engine.wait_joined()
        assert engine.hello.incarnation != first
        await until(lambda: answers.cache.cached_tokens(*touched) >= wrote // PAGE * PAGE)
        cached, again, reused = await ask(running, TEXT, kept=True)
        assert (cached, again, reused) == (wrote, 0, wrote // PAGE * PAGE)


@pytest.mark.parametrize("goes", ["drained", "removed"])
async def test_a_lease_of_a_replica_that_goes_is_computed_at_another_one(goes: str) -> None:
    caches = {name: CachedAnswers(LruCache(PAGES, PAGE)) for name in ("one", "two")}
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(whole(engines=0, sections=LEASES))
        fleet = running.gateway.fleet
        for name, answers in caches.items():
            more: dict[str, Any] = {"block_size": PAGE, "num_blocks": PAGES, "completions": answers}
            server = await stack.enter_async_context(replica_server(**more))
            await fleet.add({"name": name, "kind": "vllm", "url": server.url, "kv_events": "off"})
        await until(lambda: all(replica.joined for replica in fleet.replicas))
        running.gateway.warmer.start()
        stack.push_async_callback(running.gateway.warmer.stop)
        _, wrote, _ = await ask(running, TEXT, kept=True)
        assert wrote > 100
        [old] = [replica for replica in fleet.replicas if replica.leases.leased_blocks]
        [new] = [replica for replica in fleet.replicas if replica is not old]
        if goes == "drained":
            await fleet.drain(old.name)
        else:
            await fleet.remove(old.name, force=True)
            assert fleet.replicas == [new]
        await until(lambda: new.leases.figures()["recomputed_tokens"] > wrote // 2)
        touches = len(caches[old.name].touches)
        for number in range(20):
            await ask(running, f"{number} " + TEXT)
        cached, again, reused = await ask(running, TEXT, kept=True)
        assert (cached, again, reused) == (wrote, 0, wrote // PAGE * PAGE)
        assert (old.leases.leased_blocks, len(caches[old.name].touches)) == (0, touches)
        assert new.leases.figures()["kept"] == 1
